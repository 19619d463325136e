"""Exact integer metrics, all derived from one confusion matrix.

Counts are int64, so adding the matrices of shards, images or ranks in any order gives the same bits.
Rows are the target, columns the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.errors import DataError


class Counts(Protocol):
    """A confusion matrix of any array library."""

    def tolist(self) -> Any: ...


def confusion(pred: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Number of pixels per (target class, predicted class), on the device of `pred`.

    Pixels with target 255 are ignored. A target id from `num_classes` to 254 raises DataError, a predicted id outside
    the classes raises ValueError. Both are counted in the same pass, which costs no extra wait for a GPU: bincount
    waits anyway.

    Shapes: pred uint8 or int64, target uint8, both (...) alike -> int64 (C, C). No gradient, same bits on every device:
    deterministic mode allows bincount without weights only.
    """
    if pred.shape != target.shape:
        raise ValueError(
            f"pred has shape {tuple(pred.shape)}, but target has {tuple(target.shape)}."
        )
    if not 1 <= num_classes <= IGNORE_INDEX:
        raise ValueError(
            f"num_classes = {num_classes}, but 1 to {IGNORE_INDEX} was needed."
        )
    row, column = target.to(torch.int64), pred.to(torch.int64)
    num_cells = num_classes * num_classes
    ignored, invalid_target, invalid_pred = num_cells, num_cells + 1, num_cells + 2
    # `where` instead of a boolean index: fixed shapes, so the host does not wait for the number of valid pixels.
    cell = torch.where(
        (column < 0) | (column >= num_classes), invalid_pred, row * num_classes + column
    )
    cell = torch.where(row >= num_classes, invalid_target, cell)
    cell = torch.where(row == IGNORE_INDEX, ignored, cell)
    counts = torch.bincount(cell.flatten(), minlength=num_cells + 3)
    invalid_counts = counts[invalid_target:].tolist()
    if invalid_counts[0]:
        values = sorted(set(row.flatten().tolist()))
        _refuse(
            [value for value in values if num_classes <= value < IGNORE_INDEX],
            invalid_counts[0],
            num_classes,
        )
    if invalid_counts[1]:
        raise ValueError(
            f"pred holds {invalid_counts[1]} pixels outside the classes 0 to {num_classes - 1}."
        )
    return counts[:num_cells].reshape(num_classes, num_classes)


def confusion_of(counts: Tensor) -> Tensor:
    """`confusion` from counts of pixels by target id, 0 to 255, and class.

    Shapes: int64 (256, C) -> int64 (C, C). Raises DataError for targets that are no classes.
    """
    num_classes = counts.shape[1]
    invalid = counts[num_classes:IGNORE_INDEX].sum(1)
    if invalid.any():
        _refuse(
            (invalid.nonzero().flatten() + num_classes).tolist(),
            int(invalid.sum()),
            num_classes,
        )
    return counts[:num_classes]


def _refuse(ids: list[int], num: int, num_classes: int) -> NoReturn:
    raise DataError(
        f"target holds class {', '.join(map(str, ids))} in {num} pixels, but ids 0 to {num_classes - 1} or "
        f"{IGNORE_INDEX} (ignored) were needed. Map them in the class table."
    )


def iou_per_class(confusion: Counts) -> list[float | None]:
    """Intersection over union of each class; None for a class without a single target pixel.

    For such a class 0 and 1 would be equally arbitrary. If it was predicted, those pixels already count as misses of
    the classes they belong to, and `summary` names the class under `false_positives_only`.
    """
    return [
        both / (target + predicted - both) if target else None
        for both, target, predicted in _pixels(confusion)
    ]


def _pixels(confusion: Counts) -> list[tuple[int, int, int]]:
    """Of each class the pixels that are right, those of the target and those of the prediction."""
    rows: list[list[int]] = confusion.tolist()
    found = []
    for k, column in enumerate(zip(*rows, strict=True)):
        found.append((rows[k][k], sum(rows[k]), sum(column)))
    return found


def mean(values: Iterable[float | None]) -> float:
    """Mean of the values that are not None; NaN when all are."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def miou(confusion: Counts) -> float:
    """Mean IoU over the classes that occur in the target, 0 to 1; NaN when none does."""
    return mean(iou_per_class(confusion))


def pixel_accuracy(confusion: Counts) -> float:
    """Fraction of labelled pixels that were predicted correctly, 0 to 1; NaN when no pixel is labelled."""
    pixels = _pixels(confusion)
    total = sum(target for _, target, _ in pixels)
    return sum(both for both, _, _ in pixels) / total if total else math.nan


def summary(confusion: Counts, names: Sequence[str]) -> dict[str, Any]:
    """Figures of a validation as a plain dictionary, ready for JSON except for NaN.

    Keys: miou, pixel_accuracy, iou ({name: 0 to 1, or None}), absent (names without a target pixel: left out of the
    mean), false_positives_only (those of `absent` that were predicted somewhere), pixels (labelled ones).
    """
    pixels = dict(zip(names, _pixels(confusion), strict=True))
    absent = [name for name, (_, target, _) in pixels.items() if not target]
    return {
        "miou": miou(confusion),
        "pixel_accuracy": pixel_accuracy(confusion),
        "iou": dict(zip(names, iou_per_class(confusion), strict=True)),
        "absent": absent,
        "false_positives_only": [name for name in absent if pixels[name][2]],
        "pixels": sum(target for _, target, _ in pixels.values()),
    }


def rates(
    confusion: Counts, names: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Precision, recall and F1 ("precision", "recall", "f1") of each class by name, 0 to 1.

    None for a class without a target pixel, and the precision also where nothing was predicted as the class.
    """
    found: dict[str, dict[str, float | None]] = {
        "precision": {},
        "recall": {},
        "f1": {},
    }
    for name, (both, target, predicted) in zip(names, _pixels(confusion), strict=True):
        known = target > 0
        found["precision"][name] = both / predicted if known and predicted else None
        found["recall"][name] = both / target if known else None
        found["f1"][name] = 2 * both / (target + predicted) if known else None
    return found
