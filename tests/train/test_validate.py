"""Class ids and confusion without logits at full resolution are those of interpolate, argmax and bincount."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from segpipe.errors import DataError
from segpipe.models import resize
from segpipe.train.metrics import confusion
from segpipe.train.validate import SPARSE, classes_and_confusion, confidences

pytestmark = pytest.mark.usefixtures("strict_torch")
CASES = (
    ((1, 19, 16, 33), (128, 264)),
    ((2, 3, 5, 7), (33, 49)),
    ((1, 40, 9, 4), (5, 3)),
    ((1, 1, 1, 1), (3, 70)),
)


def pair(
    shape: tuple[int, ...], size: tuple[int, int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    target = torch.randint(0, shape[1], (shape[0], *size), dtype=torch.uint8)
    return torch.randn(shape) * 3, target.masked_fill(
        torch.rand(target.shape) < 0.2, 255
    )


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_integers_are_those_of_interpolate_and_argmax(
    backend: str, align_corners: bool
) -> None:
    for shape, size in CASES:
        logits, target = pair(shape, size)
        expected = F.interpolate(
            logits, size, mode="bilinear", align_corners=align_corners
        ).argmax(1)
        for given in (logits, logits.contiguous(memory_format=torch.channels_last)):
            pred, counts = classes_and_confusion(
                given, target, align_corners=align_corners, backend=backend
            )
            assert pred.dtype == torch.uint8
            assert torch.equal(pred.long(), expected)
            assert torch.equal(counts, confusion(expected, target, shape[1]))


@pytest.mark.parametrize("number", [1.0, math.nan], ids=["ties", "nan"])
def test_ties_and_nan_are_decided_as_by_argmax(number: float) -> None:
    """The first of equal classes, and a NaN before all numbers."""
    logits = torch.zeros(1, 4, 2, 6)
    logits[0, 1, 0, 1:] = 1.0
    logits[0, 2:, 0, 2:] = number
    target = torch.zeros(1, 4, 12, dtype=torch.uint8)
    pred, _ = classes_and_confusion(
        logits, target, align_corners=False, backend="native"
    )
    expected = F.interpolate(logits, (4, 12), mode="bilinear").argmax(1)
    assert torch.equal(pred.long(), expected)
    assert set(expected.flatten().tolist()) == ({0, 1} if number == 1.0 else {0, 1, 2})


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_target_that_is_no_class_is_refused_by_its_id(backend: str) -> None:
    logits, target = pair((1, 3, 2, 2), (8, 8))
    target[0, 0, :2], target[0, 1, 0] = 3, 200
    with pytest.raises(
        DataError,
        match=r"target has class 3, 200 in 3 pixels, but ids 0 to 2 or 255 \(ignored\)",
    ):
        classes_and_confusion(logits, target, align_corners=False, backend=backend)


def test_images_of_many_sizes_leave_no_matrices_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiled pass reads taps; a matrix of 1024 x 128 takes longer to make than to use, and was kept for good."""
    made: list[object] = []
    monkeypatch.setattr(resize, "_matrix", lambda *shape: made.append(shape))
    for size in ((41, 67), (43, 69)):
        logits, target = pair((1, 3, 6, 9), size)
        classes_and_confusion(logits, target, align_corners=False, backend="native")
    assert not made


def test_threads_do_not_enter() -> None:
    logits, target = pair((3, 5, 6, 20), (48, 160))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(
            classes_and_confusion(logits, target, align_corners=False, backend="native")
        )
    assert all(
        torch.equal(a, b)
        for other in found[1:]
        for a, b in zip(found[0], other, strict=True)
    )
    assert int(found[0][1].sum()) == int(np.count_nonzero(target.numpy() != 255))


@pytest.mark.parametrize("align_corners", [False, True])
def test_loss_and_confidences_are_those_of_every_16th_pixel(
    align_corners: bool,
) -> None:
    logits, target = pair((2, 5, 16, 33), (128, 264))
    full = F.interpolate(
        logits, (128, 264), mode="bilinear", align_corners=align_corners
    )
    first = slice(SPARSE // 2, None, SPARSE)
    some, wanted = full[..., first, first], target[:, first, first].long()
    bins = confidences(logits, target, align_corners=align_corners)
    expected = F.cross_entropy(some, wanted, ignore_index=255)
    pixels, share, right, loss = bins.sum(0).tolist()
    assert pixels == (wanted != 255).sum()
    assert loss / pixels == pytest.approx(float(expected), rel=1e-5)
    assert right == (some.argmax(1) == wanted).sum()
    most = some.softmax(1).max(1).values[wanted != 255]
    assert share == pytest.approx(float(most.sum()), rel=1e-5)
    assert bins[7, 0] == ((most >= 0.7) & (most < 0.8)).sum()
    assert confidences(logits, target.fill_(255), align_corners=False).sum() == 0


@pytest.mark.parametrize("size", [(7, 7), (33, 4), (4, 40)])
def test_an_image_without_a_16th_pixel_counts_nothing(size: tuple[int, int]) -> None:
    logits, target = pair((1, 3, 1, 2), size)
    assert confidences(logits, target, align_corners=False).sum() == 0
