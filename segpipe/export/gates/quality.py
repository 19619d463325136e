"""G5: whether a file segments the validation images as well as the trained network does, by their labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from segpipe.export.gates.checks import Target
from segpipe.export.gates.limits import FP32, GateResult, Limits
from segpipe.export.graph.profiles import Image, Run
from segpipe.train.metrics import confusion, iou_per_class, miou

NAME = "G5 quality"


@dataclass
class Score:
    """Confusion of a file over the labelled images, int64 (C, C); `foreign` pixels hold an id that no class has."""

    counts: torch.Tensor
    images: int = 0
    foreign: int = 0

    def add(self, mask: np.ndarray, target: Target) -> None:
        """Takes one image in; a pixel with a foreign id counts as class 0."""
        num_classes = len(self.counts)
        outside = (mask < 0) | (mask >= num_classes)
        self.foreign += int(np.count_nonzero(outside))
        pred = np.where(outside, 0, mask).astype(np.uint8)
        self.counts += confusion(torch.from_numpy(pred), torch.from_numpy(target.copy()), num_classes)
        self.images += 1


def scores(runs: Mapping[str, Run], labelled: Iterable[tuple[Image, Target]], num_classes: int) -> dict[str, Score]:
    """Score of every run, all on the same images."""
    found = {name: Score(torch.zeros(num_classes, num_classes, dtype=torch.int64)) for name in runs}
    for image, target in labelled:
        for name, run in runs.items():
            found[name].add(run(image).mask, target)
    return found


def gate_quality(
    reference: Score, found: Score, names: Sequence[str], limits: Limits = FP32, critical: Sequence[str] = ()
) -> GateResult:
    """G5: mIoU and the IoU of each class against the reference's on the same labels, in points of 100.

    fp32 may move by the limits in either direction, fp16 and int8 may fall by them.
    """
    pairs = zip(names, iou_per_class(reference.counts), iou_per_class(found.counts), strict=True)
    moves = {name: 100 * (now - before) for name, before, now in pairs if before is not None and now is not None}
    if not moves:
        message = f"G5 quality: no labelled pixel in {reference.images} images; choose another data.split"
        return GateResult(NAME, False, {"images": reference.images}, message)
    before, now = 100 * miou(reference.counts), 100 * miou(found.counts)

    def size(move: float) -> float:
        return abs(move) if limits.both_ways else -move

    worst = max(moves, key=lambda name: size(moves[name]))
    falling = [name for name in critical if name in moves and size(moves[name]) > (limits.critical_points or 0.0)]
    figures = {
        "miou_reference": before,
        "miou": now,
        "points": now - before,
        "worst_class": worst,
        "class_points": moves[worst],
        "images": reference.images,
    }
    failures = [
        text
        for failed, text in (
            (found.foreign > 0, f"{found.foreign} pixels hold an id that no class has"),
            (
                size(now - before) > limits.miou_points,
                f"mIoU {before:.3f} -> {now:.3f} % moves by {now - before:+.3f} points, limit {limits.miou_points:g}",
            ),
            (
                limits.class_points is not None and size(moves[worst]) > limits.class_points,
                f"IoU of {worst} moves by {moves[worst]:+.3f} points, limit {limits.class_points}",
            ),
            (
                limits.critical_points is not None and bool(falling),
                f"IoU of critical class {', '.join(falling)} falls by more than {limits.critical_points} points",
            ),
        )
        if failed
    ]
    moved = f"mIoU {before:.2f} % moves by {now - before:+.4f} points on {reference.images} images"
    return GateResult(NAME, not failures, figures, f"G5 quality: {failures[0]}" if failures else moved)
