"""G5: a file segments labelled images as well as the trained network. And the calibration of its confidence.

Temperature scaling makes the confidence, softmax of logits / temperature, match the accuracy.
Source: Guo et al., On Calibration of Modern Neural Networks, arXiv:1706.04599.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import softmax

from segpipe import IGNORE_INDEX
from segpipe.errors import DataError
from segpipe.export.gates.comparison import FP32, GateResult, Limits
from segpipe.export.graph.network import Answer, Image, Run
from segpipe.keys import generator, sample_key
from segpipe.runtime.frames import enlarged, nearest
from segpipe.train.metrics import confusion, iou_per_class, miou

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

PIXELS = 2048  # per image, so that a large data set fits into memory
BINS = 15
TIED = 3  # pixels between two classes, which G3 allows on either side
LOWEST, HIGHEST = 0.02, 50.0  # temperature
_EXACT = 1e-9  # relative error of the fit

Logits = NDArray[np.float32]
Target = NDArray[np.uint8]  # class ids (H, W)


def calibration_entry(
    trained: TrainedNetwork, labelled: Iterable[tuple[Image, Target]] | None
) -> dict[str, Any]:
    """Entry `calibration` of the manifest; without labels, temperature 1. Call inside `one_thread`."""
    if labelled is None:
        return {"method": "none", "temperature": 1.0}
    return fit_temperature(_logits(trained, labelled))


def fit_temperature(
    logits_and_targets: Iterable[tuple[Logits, Target]],
) -> dict[str, Any]:
    """Temperature in 0.02..50 that minimises the negative log-likelihood of the targets, as a manifest entry.

    The entry also has the expected calibration error (0 to 1) at temperature 1 and at the fitted one.

    Shapes: logits float32 (C, h, w) at the output stride, where the exported file computes its confidence; target
    uint8 (h, w), or of another size and read at the center pixel of each cell. Uses at most 2048 labelled pixels per
    image; the draw depends only on the image's index. Raises DataError when no pixel is labelled, a target is not a
    class id, or logits are not finite.
    """
    found = [
        _pixels(index, logits, target)
        for index, (logits, target) in enumerate(logits_and_targets)
    ]
    if not any(len(label) for _, label in found):
        raise DataError(
            f"{len(found)} images have no labelled pixel, but the confidence is calibrated on labels. Choose a "
            "data.split with labels."
        )
    score, label = (np.concatenate(parts) for parts in zip(*found, strict=True))
    temperature = _most_likely(score, label)
    return {
        "method": "temperature",
        "temperature": temperature,
        "ece_before": calibration_error(score, label),
        "ece_after": calibration_error(score / temperature, label),
        "images": len(found),
    }


def calibration_error(score: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Expected calibration error of the largest softmax probability, in 15 equal bins.

    Shapes: logits float64 (n, C), label (n,).
    """
    confidence = softmax(score, axis=1).max(1)
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    is_right = score.argmax(1) == label
    gaps = np.bincount(bins, confidence - is_right, BINS)
    return float(np.abs(gaps).sum() / len(label))


def _logits(
    trained: TrainedNetwork, labelled: Iterable[tuple[Image, Target]]
) -> Iterator[tuple[Logits, Target]]:
    """Yields the trained network's fp32 logits on the CPU with the target, image by image.

    With align_corners, the target at the place of each logit.
    """
    for image, target in labelled:
        batch = torch.from_numpy(image.copy())[None]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            logits = trained.model(trained.preprocess(batch))
        if trained.model.align_corners:
            places = map(nearest, logits.shape[2:], target.shape)
            target = target[np.ix_(*places)]
        yield logits[0].numpy(), target


def _pixels(
    index: int, logits: Logits, target: Target
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits (n, C) and classes (n,) of the labelled pixels of an image."""
    classes, height, width = logits.shape
    # The center pixel of each cell
    nearest = cv2.INTER_NEAREST_EXACT
    cells = cv2.resize(target, (width, height), interpolation=nearest)
    label = cells.astype(np.int64).ravel()

    # The draw depends only on the index, so that the same images give the same temperature
    place = np.flatnonzero(label != IGNORE_INDEX)
    if len(place) > PIXELS:
        random = generator(sample_key(0, 0, index, "calibration"))
        place = np.sort(random.choice(place, PIXELS, replace=False))
    label = label[place]
    score = logits.reshape(classes, -1)[:, place].T.astype(np.float64)

    if label.max(initial=0) >= classes or not np.isfinite(score).all():
        raise DataError(
            f"image {index}: logits are NaN or infinite, or its target has class {label.max(initial=0)} of {classes} "
            "classes, so no temperature can be fitted."
        )
    return score, label


def _most_likely(score: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Temperature with a zero slope of the loss, which is convex in 1 / temperature; else the nearest bound."""
    own = score[np.arange(len(label)), label].mean()

    def slope(temperature: float) -> float:
        share = softmax(score / temperature, axis=1)
        return float((share * score).sum(1).mean() - own)

    if slope(1.0) == 0:
        return 1.0
    if slope(LOWEST) <= 0:
        return LOWEST
    if slope(HIGHEST) >= 0:
        return HIGHEST
    return float(brentq(slope, LOWEST, HIGHEST, xtol=LOWEST * _EXACT, rtol=_EXACT))


@dataclass
class Score:
    """Confusion matrix over the labelled images, int64 (C, C), and number of pixels with an id outside 0..C-1."""

    counts: torch.Tensor
    images: int = 0
    invalid_pixels: int = 0
    align_corners: bool = False  # of masks that are smaller than the target

    def add(self, answer: Answer, target: Target) -> None:
        """Adds one image; a pixel with an invalid id counts as class 0."""
        num_classes = len(self.counts)
        mask = enlarged(answer.mask, *target.shape, align_corners=self.align_corners)
        invalid = (mask < 0) | (mask >= num_classes)
        self.invalid_pixels += int(invalid.sum())
        pred = torch.from_numpy(np.where(invalid, 0, mask).astype(np.uint8))
        self.counts += confusion(pred, torch.from_numpy(target.copy()), num_classes)
        self.images += 1


def scores(
    runs: Mapping[str, Run],
    labelled: Iterable[tuple[Image, Target]],
    num_classes: int,
    *,
    align_corners: bool = False,
) -> dict[str, Score]:
    """Score of each run, on the same images."""
    found = {
        name: Score(
            torch.zeros(num_classes, num_classes, dtype=torch.int64),
            align_corners=align_corners,
        )
        for name in runs
    }
    for image, target in labelled:
        for name, run in runs.items():
            found[name].add(run(image), target)
    return found


def gate_quality(
    reference: Score,
    found: Score,
    names: Sequence[str],
    limits: Limits = FP32,
    critical: Sequence[str] = (),
) -> GateResult:
    """G5: mIoU and the IoU of each class against the reference on the same labels, in percentage points.

    fp32 may change by the limits in either direction; fp16 and int8 may rise freely but only drop by the limits. A
    change that TIED pixels can cause does not count: with few labelled pixels, one of them can exceed the limits.
    """
    before, now = (iou_per_class(each.counts) for each in (reference, found))
    moves = {
        name: 100 * (new - old)
        for name, old, new in zip(names, before, now, strict=True)
        if old is not None and new is not None
    }
    images = reference.images
    if not moves:
        failure = (
            f"quality: no labelled pixel in {images} images; choose another data.split"
        )
        return GateResult("G5", failure, {"images": images}, "")

    old_miou, new_miou = (100 * miou(each.counts) for each in (reference, found))
    gain = new_miou - old_miou

    def size(move: float) -> float:
        return abs(move) if limits.both_ways else -move

    counts = reference.counts
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    # Points by which TIED pixels can change the IoU of each class.
    ties = dict(zip(names, (100 * TIED / union.clamp(min=1)).tolist(), strict=True))
    room = {name: max(limits.class_points, ties[name]) for name in moves}
    # The tolerance of a class with few pixels does not apply to others.
    beyond = gain - fmean(
        max(-ties[name], min(move, ties[name])) for name, move in moves.items()
    )
    over = [name for name in moves if size(moves[name]) > room[name]]
    worst = max(over or moves, key=lambda name: size(moves[name]))
    falling = [
        name for name in critical if size(moves.get(name, 0.0)) > limits.critical_points
    ]
    unlabelled = [name for name in critical if name not in moves]
    figures = {
        "miou_reference": old_miou,
        "miou": new_miou,
        "points": gain,
        "worst_class": worst,
        "class_points": moves[worst],
        "images": images,
    }

    failure = ""
    if found.invalid_pixels:
        failure = (
            f"quality: {found.invalid_pixels} pixels have an id that is not a class"
        )
    elif not min(size(gain), size(beyond)) <= limits.miou_points:
        failure = (
            f"quality: mIoU {old_miou:.3f} -> {new_miou:.3f} % changes by {gain:+.3f} points, limit "
            f"{limits.miou_points:g}"
        )
    elif over:
        failure = f"quality: IoU of {worst} changes by {moves[worst]:+.3f} points, limit {room[worst]:.3g}"
    elif falling:
        failure = (
            f"quality: IoU of critical class {', '.join(falling)} drops by more than {limits.critical_points} "
            "points"
        )
    elif unlabelled and math.isfinite(limits.critical_points):
        failure = (
            f"quality: critical class {unlabelled[0]} has no pixel in the {images} labelled images; raise "
            "export.quality_images, or remove it from export.critical_classes"
        )
    finding = f"mIoU {old_miou:.2f} % changes by {gain:+.4f} points on {images} images"
    return GateResult("G5", failure, figures, finding)
