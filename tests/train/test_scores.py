"""Intervals against a slow loop, sequences, and rates by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from segpipe.keys import generator, sample_key
from segpipe.train import metrics
from segpipe.train.metrics import (
    by_sequence,
    flattering,
    interval,
)


def draw(num: int, num_classes: int = 3) -> dict[int, Tensor]:
    found = torch.randint(
        0,
        1000,
        (num, num_classes, num_classes),
        generator=torch.Generator().manual_seed(num),
    )
    found[: num // 2, 0] = 0  # class 0 occurs in some images only
    return dict(enumerate(found))


def test_rates_by_hand() -> None:
    counts = np.array([[6, 2, 0], [1, 1, 0], [0, 0, 0]])
    found = metrics.rates(counts, "abc")
    assert found["precision"] == {"a": 6 / 7, "b": 1 / 3, "c": None}
    assert found["recall"] == {"a": 6 / 8, "b": 1 / 2, "c": None}
    assert found["f1"]["a"] == pytest.approx(12 / 15)
    assert found["f1"]["b"] == pytest.approx(2 / 5)
    never = metrics.rates(np.array([[0, 3], [0, 5]]), "ab")
    assert (never["precision"]["a"], never["recall"]["a"], never["f1"]["a"]) == (
        None,
        0.0,
        0.0,
    )


def test_the_headline_says_of_how_many_classes_it_is_the_mean() -> None:
    half = np.array([[10, 0], [0, 0]])
    said = metrics.headline(metrics.summary(half, "ab"))
    assert said == "mIoU 100.00 % (mean over 1 of 2 classes)"
    both = metrics.headline(metrics.summary(np.diag([3, 1]), "ab"))
    assert both == "mIoU 100.00 %"


def test_interval_is_that_of_a_slow_loop() -> None:
    per_image, num = draw(12), 12
    random = generator(sample_key(0, 0, num, "bootstrap"))
    drawn = np.concatenate([random.integers(0, num, (100, num)) for _ in range(10)])
    slow = [
        metrics.miou(sum((per_image[index] for index in row[1:]), per_image[row[0]]))
        for row in drawn.tolist()
    ]
    found = interval(per_image, "abc")
    assert found["miou"] == pytest.approx(np.percentile(slow, (2.5, 97.5)).tolist())
    whole = metrics.iou_per_class(
        sum(per_image.values(), torch.zeros(3, 3, dtype=torch.int64))
    )
    for name, iou in zip("abc", whole, strict=True):
        low, high = found["iou"][name]
        assert iou is not None
        assert low < iou < high
    assert interval(dict(reversed(per_image.items())), "abc") == found


def test_a_resample_without_a_class_is_no_better_for_that() -> None:
    """Three of 20 images hold class b, with IoU 0.2 each: a resample without them must not score a alone."""
    with_b = torch.tensor([[90, 0], [8, 2]])
    per_image = {
        k: with_b if k < 3 else torch.tensor([[100, 0], [0, 0]]) for k in range(20)
    }
    low, high = interval(per_image, "ab")["miou"]
    assert (
        low
        < metrics.miou(sum(per_image.values(), torch.zeros(2, 2, dtype=torch.int64)))
        < high
    )
    assert high - low < 0.02


def test_interval_shrinks_with_more_images_and_is_exact_at_large_counts() -> None:
    def width(num: int) -> float:
        low, high = interval(draw(num), "abc")["miou"]
        return float(high - low)

    assert width(200) < width(20) / 2
    big = {
        index: counts * 2**28 for index, counts in draw(12).items()
    }  # sums of 2**42 pixels
    assert interval(big, "abc") == interval(draw(12), "abc")


def test_nothing_is_claimed_from_one_image_or_about_an_absent_class() -> None:
    assert interval({0: torch.eye(2, dtype=torch.int64)}, "ab") == {
        "miou": None,
        "iou": {"a": None, "b": None},
    }
    absent = {index: torch.tensor([[5, index], [0, 0]]) for index in range(4)}
    assert interval(absent, "ab")["iou"]["b"] is None
    unlabelled = dict.fromkeys(range(3), torch.zeros(2, 2, dtype=torch.int64))
    assert interval(unlabelled, "ab") == {"miou": None, "iou": {"a": None, "b": None}}


def test_sequences_are_scored_together_and_those_of_training_are_named() -> None:
    good, bad = torch.tensor([[9, 1], [0, 10]]), torch.tensor([[0, 5], [5, 0]])
    found = by_sequence(
        {0: good, 1: good, 2: bad}, ["day", "day", "night"], {"night", "rain"}
    )
    assert found["day"] == {
        "images": 2,
        "miou": metrics.miou(2 * good),
        "in_training": False,
    }
    assert found["night"] == {"images": 1, "miou": 0.0, "in_training": True}
    assert (
        "1 of 3 images are from sequences that are also in training (night)"
        in flattering(found)
    )
    assert flattering({"day": found["day"]}) == ""
    assert by_sequence({0: good}, ["day"], None) == {}
    unknown = by_sequence({0: good, 1: bad}, ["day", "day"], None)
    assert unknown["day"]["in_training"] is None
    assert flattering(unknown) == ""


def test_names_that_are_all_different_make_no_sequences() -> None:
    names = ["kitchen", "hall", "cellar"]
    assert by_sequence(draw(3), names, set(names)) == {}
    assert list(by_sequence(draw(3), ["kitchen", "hall", "hall"], set())) == [
        "hall",
        "kitchen",
    ]  # the control
