"""Exact integer metrics, all derived from one confusion matrix, and how they vary with the images scored.

Counts are int64, so adding the matrices of shards, images or ranks in any order gives the same bits.
Rows are the target, columns the prediction.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.data import PHOTOS, Float64, Int64
from segpipe.errors import DataError, listed
from segpipe.keys import generator, sample_key

LEVEL = 0.95
RESAMPLES = 1000
BINS = 10  # confidence bins of a reliability diagram


Counts = Tensor | Int64  # a confusion matrix


@dataclass(frozen=True)
class Validation:
    """Confusion matrices of a split, in total and by image index; int64 (C, C) on the CPU."""

    total: Tensor
    per_image: dict[int, Tensor]
    # Loss and confidence of a subset of the pixels, as `validate.confidences` returns them.
    calibration: Tensor = field(default_factory=lambda: torch.zeros(BINS, 4))

    @property
    def loss(self) -> float | None:
        """Mean cross-entropy of the labelled pixels; None if it was not computed."""
        pixels, _, _, loss = self.calibration.sum(0).tolist()
        return loss / pixels if pixels else None


def confusion(pred: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Number of pixels per (target class, predicted class), on the device of `pred`.

    Pixels with target 255 are ignored. A target id from `num_classes` to 254 raises DataError; a predicted id outside
    the classes raises ValueError.

    Shapes: pred uint8 or int64, target uint8, both of one shape (...) -> int64 (C, C). No gradient. The same bits on
    every device: deterministic mode only allows bincount without weights.
    """
    if pred.shape != target.shape:
        raise ValueError(
            f"pred has shape {tuple(pred.shape)}, but target has {tuple(target.shape)}."
        )
    if not ((pred >= 0) & (pred < num_classes)).all():
        raise ValueError(f"pred has class ids outside 0 to {num_classes - 1}.")
    cells = target.long() * num_classes + pred.long()
    counts = torch.bincount(cells.flatten(), minlength=256 * num_classes)
    return confusion_of(counts.reshape(256, num_classes))


def confusion_of(counts: Tensor) -> Tensor:
    """`confusion` from pixel counts by target id, 0 to 255, and predicted class.

    Shapes: int64 (256, C) -> int64 (C, C). Raises DataError for target ids that are not classes.
    """
    num_classes = counts.shape[1]
    invalid = counts[num_classes:IGNORE_INDEX].sum(1)
    if invalid.any():
        ids = (invalid.nonzero().flatten() + num_classes).tolist()
        raise DataError(
            f"target has class {', '.join(map(str, ids))} in {invalid.sum()} pixels, but ids 0 to {num_classes - 1} "
            f"or {IGNORE_INDEX} (ignored) were needed. Map them in the class table."
        )
    return counts[:num_classes]


def iou_per_class(confusion: Counts) -> list[float | None]:
    """Intersection over union of each class; None for a class without target pixels.

    For such a class, 0 and 1 would be equally arbitrary. If it was predicted, those pixels already count as misses of
    their true classes, and `summary` names the class under `false_positives_only`.
    """
    return [
        both / (target + predicted - both) if target else None
        for both, target, predicted in _pixels(confusion)
    ]


def _pixels(confusion: Counts) -> list[tuple[int, int, int]]:
    """Correct, target and predicted pixels of each class."""
    counts = (confusion.diagonal(), confusion.sum(1), confusion.sum(0))
    return list(zip(*(each.tolist() for each in counts), strict=True))


def mean(values: Iterable[float | None]) -> float:
    """Mean of the values that are not None; NaN when all are."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def miou(confusion: Counts) -> float:
    """Mean IoU over the classes that occur in the target, 0 to 1; NaN when none does."""
    return mean(iou_per_class(confusion))


def summary(confusion: Counts, names: Sequence[str]) -> dict[str, Any]:
    """Figures of a validation as a plain dictionary, ready for JSON except for NaN.

    Keys: miou, pixel_accuracy, iou ({name: 0 to 1, or None}), absent (names without a target pixel, left out of the
    mean), false_positives_only (names in `absent` that were predicted somewhere), pixels (number of labelled pixels).
    """
    pixels = dict(zip(names, _pixels(confusion), strict=True))
    absent = [name for name, (_, target, _) in pixels.items() if not target]
    iou = dict(zip(names, iou_per_class(confusion), strict=True))
    labelled = int(confusion.sum())
    return {
        "miou": mean(iou.values()),
        "pixel_accuracy": int(confusion.trace()) / labelled if labelled else math.nan,
        "iou": iou,
        "absent": absent,
        "false_positives_only": [name for name in absent if pixels[name][2]],
        "pixels": labelled,
    }


def headline(figures: Mapping[str, Any]) -> str:
    """mIoU of a `summary` in percent, and of how many classes it is the mean if some have no target pixel."""
    absent, classes = len(figures["absent"]), len(figures["iou"])
    mean_of = f" (mean over {classes - absent} of {classes} classes)" if absent else ""
    return f"mIoU {100 * figures['miou']:.2f} %{mean_of}"


def rates(
    confusion: Counts, names: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Precision, recall and F1 ("precision", "recall", "f1") of each class by name, 0 to 1.

    None for a class without target pixels; the precision is also None if the class was never predicted.
    """
    precision: dict[str, float | None] = dict.fromkeys(names)
    recall, f1 = precision.copy(), precision.copy()
    for name, (both, target, predicted) in zip(names, _pixels(confusion), strict=True):
        if target:
            precision[name] = both / predicted if predicted else None
            recall[name] = both / target
            f1[name] = 2 * both / (target + predicted)
    return {"precision": precision, "recall": recall, "f1": f1}


def scores(
    found: Validation,
    names: Sequence[str],
    sequence_of: Sequence[str],
    seen: Collection[str] | None,
) -> dict[str, Any]:
    """All figures of a validation: `summary`, `rates` and their means, `interval` and `by_sequence`.

    `names`: of the classes; `sequence_of` and `seen` as for `by_sequence`.
    """
    per_class = rates(found.total, names)

    return {
        **summary(found.total, names),
        **per_class,
        "mean": {key: mean(values.values()) for key, values in per_class.items()},
        "interval_95": interval(found.per_image, names),
        "sequences": by_sequence(found.per_image, sequence_of, seen),
    }


def interval(per_image: Mapping[int, Tensor], names: Sequence[str]) -> dict[str, Any]:
    """95 % bootstrap interval of mIoU ("miou": [low, high]) and of the IoU of each class ("iou": {name: [low, high]}).

    Draws 1,000 resamples of the images, of the same number, with replacement; the interval holds the middle 95 % of
    their scores. In a resample without a class, mIoU takes its IoU on all images. A class that occurs in no resample is
    None, and so is everything with a single image. The draws depend only on the number of images: equal matrices give
    equal intervals.

    per_image: confusion matrices int64 (C, C).
    """
    if len(per_image) < 2:
        return {"miou": None, "iou": dict.fromkeys(names)}

    counts = np.stack([per_image[index].numpy() for index in sorted(per_image)])
    num = len(counts)
    both = np.diagonal(counts, axis1=1, axis2=2)
    pixels = np.concatenate([both, counts.sum(2), counts.sum(1)], axis=1)

    random = generator(sample_key(0, 0, num, "bootstrap"))
    times = np.ones((RESAMPLES + 1, num))  # the last row: all images
    for row in times[:-1]:
        row[:] = np.bincount(random.integers(0, num, num), minlength=num)

    # In float64, because BLAS is fast there: whole numbers below 2**53, so the order of sums does not matter.
    hits, target, pred = np.split(times @ pixels.astype(np.float64), 3, axis=1)
    union = np.where(target > 0, target + pred - hits, np.nan)
    *scores, whole = hits / union

    known = np.isfinite(scores)
    filled = np.where(known, scores, whole)[:, np.isfinite(whole)]
    iou = {
        name: _middle(column[np.isfinite(column)])
        for name, column in zip(names, np.transpose(scores), strict=True)
    }
    return {"miou": _middle(filled.mean(1)) if filled.size else None, "iou": iou}


def _middle(scores: Float64) -> list[float] | None:
    if not len(scores):
        return None
    edge = 50 * (1 - LEVEL)
    return list(np.percentile(scores, (edge, 100 - edge)).tolist())


def by_sequence(
    per_image: Mapping[int, Tensor],
    sequence_of: Sequence[str],
    seen: Collection[str] | None,
) -> dict[str, dict[str, Any]]:
    """Score of each sequence, sorted by name: {"0016E5": {"images": 101, "miou": 0.62, "in_training": true}}.

    Empty if each image is its own sequence, since names say nothing then. `sequence_of`: sequence of each image by
    index. `seen`: sequences of the training images; None if unknown, and then `in_training` is None.
    """
    members: dict[str, list[Tensor]] = {}
    for index in sorted(per_image):
        members.setdefault(sequence_of[index], []).append(per_image[index])

    if len(members) == len(per_image):
        return {}

    return {
        name: {
            "images": len(found),
            "miou": miou(sum(found[1:], found[0])),
            "in_training": None if seen is None else name in seen,
        }
        for name, found in sorted(members.items())
    }


def flattering(sequences: Mapping[str, Mapping[str, Any]]) -> str:
    """A warning sentence if sequences of `by_sequence` are also in training; empty otherwise."""
    both = [name for name, found in sequences.items() if found["in_training"]]
    if not both:
        return ""

    images = sum(sequences[name]["images"] for name in both)
    total = sum(found["images"] for found in sequences.values())

    return (
        f"{images} of {total} images are from sequences that are also in training ({listed(both, 4)}). Neighboring "
        f"frames of a video look alike, so these scores are optimistic: expect less in new places. If they are "
        f"independent photos, set {PHOTOS} in the next run, or in segpipe evaluate."
    )
