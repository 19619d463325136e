"""G5: a file segments the labelled validation images as well as the trained network does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.export.gates.limits import FP32, GateResult, Limits
from segpipe.export.gates.temperature import BINS, at_centers, error_of, in_bins
from segpipe.export.graph.profiles import Answer, Image, Run
from segpipe.train.metrics import confusion, iou_per_class, miou


@dataclass
class Score:
    """Confusion over the labelled images, int64 (C, C), and the number of pixels with an id outside 0..C-1."""

    counts: torch.Tensor
    images: int = 0
    invalid_pixels: int = 0
    bins: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((3, BINS))
    )  # of pixels in the centers of cells

    @property
    def calibration_error(self) -> float:
        """Expected calibration error, 0 to 1; 0 without confidence."""
        return error_of(self.bins)

    def add(self, answer: Answer, target: NDArray[np.uint8]) -> None:
        """Adds one image; a pixel with an invalid id counts as class 0."""
        mask = answer.mask
        num_classes = len(self.counts)
        invalid = (mask < 0) | (mask >= num_classes)
        self.invalid_pixels += int(np.count_nonzero(invalid))
        pred = np.where(invalid, 0, mask).astype(np.uint8)
        self.counts += confusion(
            torch.from_numpy(pred), torch.from_numpy(target.copy()), num_classes
        )
        self.images += 1
        if answer.confidence is not None:
            found, label = (
                at_centers(each, answer.confidence.shape) for each in (mask, target)
            )
            kept = label != IGNORE_INDEX
            self.bins += in_bins(
                answer.confidence[kept] / 255.0, (found == label)[kept]
            )


def scores(
    runs: Mapping[str, Run],
    labelled: Iterable[tuple[Image, NDArray[np.uint8]]],
    num_classes: int,
) -> dict[str, Score]:
    """Score of each run, all on the same images."""
    found = {
        name: Score(torch.zeros(num_classes, num_classes, dtype=torch.int64))
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
    """G5: mIoU and the IoU of each class against the reference's on the same labels, in points of 100.

    fp32 may move by the limits in either direction; fp16 and int8 may only not fall by more.
    """
    pairs = zip(
        names, iou_per_class(reference.counts), iou_per_class(found.counts), strict=True
    )
    moves = {
        name: 100 * (now - before)
        for name, before, now in pairs
        if before is not None and now is not None
    }
    if not moves:
        message = f"G5 quality: no labelled pixel in {reference.images} images; choose another data.split"
        return GateResult("G5", False, {"images": reference.images}, message)
    before, now = 100 * miou(reference.counts), 100 * miou(found.counts)

    def size(move: float) -> float:
        return abs(move) if limits.both_ways else -move

    worst = max(moves, key=lambda name: size(moves[name]))
    figures = {
        "miou_reference": before,
        "miou": now,
        "points": now - before,
        "worst_class": worst,
        "class_points": moves[worst],
        "calibration_error_reference": reference.calibration_error,
        "calibration_error": found.calibration_error,
        "images": reference.images,
    }
    failures = []
    if found.invalid_pixels:
        failures.append(f"{found.invalid_pixels} pixels have an id that is no class")
    if not size(now - before) <= limits.miou_points:
        failures.append(
            f"mIoU {before:.3f} -> {now:.3f} % moves by {now - before:+.3f} points, limit {limits.miou_points:g}"
        )
    if (
        limits.class_points is not None
        and not size(moves[worst]) <= limits.class_points
    ):
        failures.append(
            f"IoU of {worst} moves by {moves[worst]:+.3f} points, limit {limits.class_points}"
        )
    growth = 100 * (found.calibration_error - reference.calibration_error)
    if (
        limits.calibration_points is not None
        and not growth <= limits.calibration_points
    ):
        failures.append(
            f"calibration error grows by {growth:.1f} points, limit {limits.calibration_points:g}"
        )
    if limits.critical_points is not None:
        falling = [
            name
            for name in critical
            if name in moves and not size(moves[name]) <= limits.critical_points
        ]
        failures += _critical_failures(
            critical, falling, moves, reference.images, limits
        )
    message = f"mIoU {before:.2f} % moves by {now - before:+.4f} points on {reference.images} images"
    return GateResult(
        "G5",
        not failures,
        figures,
        f"G5 quality: {failures[0]}" if failures else message,
    )


def _critical_failures(
    critical: Sequence[str],
    falling: Sequence[str],
    moves: Mapping[str, float],
    images: int,
    limits: Limits,
) -> Iterator[str]:
    if falling:
        yield f"IoU of critical class {', '.join(falling)} falls by more than {limits.critical_points} points"
    if unlabelled := [name for name in critical if name not in moves]:
        yield (
            f"critical class {unlabelled[0]} has no pixel in the {images} labelled images; raise "
            "export.quality_images, or take it out of export.critical_classes"
        )
