"""The confusion matrix against a slow loop, and the numbers that follow from it against arithmetic by hand."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from segpipe.errors import DataError
from segpipe.train import metrics


def slow_confusion(
    pred: list[int], target: list[int], num_classes: int
) -> list[list[int]]:
    counts = [[0] * num_classes for _ in range(num_classes)]
    for predicted, wanted in zip(pred, target, strict=True):
        if wanted != 255:
            counts[wanted][predicted] += 1
    return counts


def slow_iou(
    pred: list[int], target: list[int], num_classes: int
) -> list[float | None]:
    pairs = [(p, t) for p, t in zip(pred, target, strict=True) if t != 255]
    found: list[float | None] = []
    for k in range(num_classes):
        both = sum(p == k and t == k for p, t in pairs)
        either = sum(p == k or t == k for p, t in pairs)
        found.append(both / either if any(t == k for _, t in pairs) else None)
    return found


def draw(seed: int) -> tuple[Tensor, Tensor, int]:
    """A random case; every fifth is all ignored, and small ones leave classes absent."""
    rng = random.Random(seed)
    num_classes = rng.choice([1, 2, 3, 11, 19, 255])
    size = rng.choice([1, 7, 200])
    labels = [255] if seed % 5 == 0 else [*range(num_classes), 255]
    target = torch.tensor([rng.choice(labels) for _ in range(size)], dtype=torch.uint8)
    pred = torch.tensor(
        [rng.randrange(num_classes) for _ in range(size)],
        dtype=rng.choice([torch.uint8, torch.int64]),
    )
    return pred, target, num_classes


@pytest.mark.parametrize("seed", range(60))
def test_matches_a_slow_loop(seed: int) -> None:
    pred, target, num_classes = draw(seed)
    counts = metrics.confusion(pred, target, num_classes)
    assert counts.dtype == torch.int64
    assert counts.tolist() == slow_confusion(
        pred.tolist(), target.tolist(), num_classes
    )
    assert metrics.iou_per_class(counts) == slow_iou(
        pred.tolist(), target.tolist(), num_classes
    )


def test_rows_are_the_target() -> None:
    counts = metrics.confusion(
        torch.tensor([1, 1, 0]), torch.tensor([0, 0, 0], dtype=torch.uint8), 2
    )
    assert counts.tolist() == [[1, 2], [0, 0]]


def test_shards_add_up_to_the_whole_in_any_order() -> None:
    generator = torch.Generator().manual_seed(3)
    pred = torch.randint(0, 11, (16, 24, 32), generator=generator)
    target = torch.randint(0, 12, (16, 24, 32), generator=generator).to(torch.uint8)
    target[target == 11] = 255
    shards = [metrics.confusion(pred[i], target[i], 11) for i in range(16)]
    whole = metrics.confusion(pred, target, 11)
    assert torch.equal(sum(shards, torch.zeros_like(whole)), whole)
    assert torch.equal(sum(reversed(shards), torch.zeros_like(whole)), whole)


def test_counts_are_exact_where_float32_and_int32_are_not() -> None:
    big = 2**53 + 1  # float64 cannot hold it, int32 neither
    counts = torch.tensor([[big, 2**40], [1, 2**33]])
    found = metrics.summary(counts, ["a", "b"])
    assert found["pixels"] == big + 2**40 + 1 + 2**33
    assert found["iou"] == {
        "a": big / (big + 2**40 + 1),
        "b": 2**33 / (2**40 + 1 + 2**33),
    }
    assert (counts + counts)[0, 0].item() == 2 * big


def test_absent_class_is_left_out_of_the_mean_and_named() -> None:
    target = torch.tensor([0, 0, 1, 1, 255], dtype=torch.uint8)
    pred = torch.tensor([0, 0, 1, 2, 3])
    counts = metrics.confusion(pred, target, 4)
    found = metrics.summary(counts, ["road", "car", "bus", "train"])
    assert found["iou"] == {"road": 1.0, "car": 0.5, "bus": None, "train": None}
    assert found["miou"] == 0.75
    assert found["pixel_accuracy"] == 0.75
    assert found["absent"] == ["bus", "train"]
    assert found["false_positives_only"] == [
        "bus"
    ]  # train was predicted on an ignored pixel only


def test_all_ignored_has_no_value() -> None:
    counts = metrics.confusion(
        torch.zeros(3, 4, dtype=torch.int64),
        torch.full((3, 4), 255, dtype=torch.uint8),
        3,
    )
    assert counts.sum() == 0
    assert math.isnan(metrics.miou(counts))
    assert math.isnan(metrics.summary(counts, "abc")["pixel_accuracy"])
    assert metrics.summary(counts, "abc")["absent"] == ["a", "b", "c"]


def test_takes_numpy_counts_too() -> None:
    assert (
        metrics.miou(np.array([[3, 1], [0, 4]], dtype=np.int64)) == (3 / 4 + 4 / 5) / 2
    )


@pytest.mark.parametrize("stranger", [3, 17, 254])
def test_unknown_target_id_is_an_error_not_an_ignored_pixel(stranger: int) -> None:
    target = torch.tensor([0, 1, stranger, 255], dtype=torch.uint8)
    with pytest.raises(DataError, match=f"target has class {stranger} in 1 pixels"):
        metrics.confusion(torch.zeros(4, dtype=torch.uint8), target, 3)


@pytest.mark.parametrize("stranger", [3, 254, -1])
def test_unknown_prediction_does_not_land_in_the_next_row(stranger: int) -> None:
    target = torch.tensor([0, 1], dtype=torch.uint8)
    with pytest.raises(ValueError, match="pred has class ids outside 0 to"):
        metrics.confusion(torch.tensor([stranger, 0]), target, 3)


def test_prediction_on_ignored_pixels_does_not_matter() -> None:
    target = torch.tensor([0, 255], dtype=torch.uint8)
    assert metrics.confusion(torch.tensor([0, 1]), target, 2).tolist() == [
        [1, 0],
        [0, 0],
    ]


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"pred has shape \(2, 3\)"):
        metrics.confusion(torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.uint8), 2)
