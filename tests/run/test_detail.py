"""IoU by the size of objects and by the distance to borders, and where a weak class is wrong."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from segpipe.run.report import by_distance, by_size, detail, examples
from segpipe.train.metrics import Validation


def test_a_pixel_counts_for_the_size_of_its_object() -> None:
    target = np.zeros((128, 256), np.uint8)
    target[:10, :10] = 1  # 100 pixels
    target[20:120, 20:220] = 1  # 20,000
    target[:, 255] = 255
    pred = target.copy()
    pred[:5, :10] = 0  # half of the small one is missed
    pred[:6, 100:110] = 1  # a false alarm of 60 pixels
    pred[60:128, 255] = 1  # where nothing is labelled
    both, union, labelled = by_size(pred, target, 2)[:, 1]
    assert both.tolist() == [50, 0, 20_000]
    assert union.tolist() == [160, 0, 20_000]
    assert labelled.tolist() == [100, 0, 20_000]


def test_a_false_alarm_has_its_whole_size() -> None:
    """Also the part of it where nothing is labelled, which counts no pixel."""
    target = np.zeros((64, 64), np.uint8)
    target[:, 20:] = 255
    union = by_size(np.ones_like(target), target, 2)[1, 1]
    assert union.tolist() == [0, 64 * 20, 0]
    target[:, 10:] = 255  # 640 pixels of 4,096
    assert by_size(np.ones_like(target), target, 2)[1, 1].tolist() == [0, 640, 0]


def test_bands_go_by_the_distance_to_another_class() -> None:
    target = np.zeros((40, 100), np.uint8)
    target[:, 50:] = 1
    target[:, 98:] = 255  # no border
    pred = target.copy()
    pred[:, 48:50] = 1
    counts = by_distance(pred, target, 3)
    assert counts.sum() == 40 * 98
    assert counts[:, 0, 1].tolist() == [80, 0, 0, 0, 0]
    assert counts[0].sum() == 40 * 4  # two columns on either side
    nothing = np.zeros_like(target)
    assert by_distance(nothing, nothing, 3)[:4].sum() == 0


TARGET = np.zeros((20, 40), np.uint8)
TARGET[12:18, 30:36] = 1


class Three:
    """A split of three equal images."""

    classes = SimpleNamespace(names=["road", "pole"])

    def __len__(self) -> int:
        return 3

    def read(self, index: int) -> tuple[Any, Any]:
        return np.zeros((20, 40, 3), np.uint8), TARGET

    def name(self, index: int) -> str:
        return f"image{index}"


def test_figures_and_examples_of_a_split() -> None:
    samples: Any = Three()
    counts = torch.tensor([[764, 0], [36, 0]])
    found = Validation(3 * counts, dict.fromkeys(range(3), counts))

    def nothing(image: Any) -> Any:
        return np.zeros((20, 40), np.uint8)

    measured = detail(samples, 2, nothing)
    assert measured["images"] == 3
    assert measured["by_size"][1][0] == 0.0
    (shown,) = examples(samples, found, ["pole"], nothing)
    assert (shown.name, shown.miou) == ("pole: image0", 0.0)
    assert shown.target.shape == (10, 20)
    assert (shown.target == 1).sum() == 36  # the window holds the object


def test_a_size_without_target_pixels_has_no_iou() -> None:
    """One false alarm of 4,060 pixels beside a pole of 36 would make it 0."""
    target = np.zeros((64, 64), np.uint8)
    target[:6, :6] = 1
    samples: Any = Three()
    samples.read = lambda index: (np.zeros((64, 64, 3), np.uint8), target)
    found = detail(samples, 2, lambda image: np.ones((64, 64), np.uint8))
    small, medium, large = found["by_size"][1]
    assert small == 1.0
    assert np.isnan([medium, large]).all()
