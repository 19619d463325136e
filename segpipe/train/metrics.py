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
    rows: list[list[int]] = confusion.tolist()
    target_pixels = [sum(row) for row in rows]
    predicted_pixels = [sum(column) for column in zip(*rows, strict=True)]
    return [
        rows[k][k] / (target_pixels[k] + predicted_pixels[k] - rows[k][k])
        if target_pixels[k]
        else None
        for k in range(len(rows))
    ]


def mean(values: Iterable[float | None]) -> float:
    """Mean of the values that are not None; NaN when all are."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def miou(confusion: Counts) -> float:
    """Mean IoU over the classes that occur in the target, 0 to 1; NaN when none does."""
    return mean(iou_per_class(confusion))


def pixel_accuracy(confusion: Counts) -> float:
    """Fraction of labelled pixels that were predicted correctly, 0 to 1; NaN when no pixel is labelled."""
    rows: list[list[int]] = confusion.tolist()
    total = sum(map(sum, rows))
    return sum(rows[k][k] for k in range(len(rows))) / total if total else math.nan


def summary(confusion: Counts, names: Sequence[str]) -> dict[str, Any]:
    """Figures of a validation as a plain dictionary, ready for JSON except for NaN.

    Keys: miou, pixel_accuracy, iou ({name: 0 to 1, or None}), absent (names without a target pixel: left out of the
    mean), false_positives_only (those of `absent` that were predicted somewhere), pixels (labelled ones).
    """
    rows: list[list[int]] = confusion.tolist()
    if len(names) != len(rows):
        raise ValueError(f"{len(names)} names were given for {len(rows)} classes.")
    iou = dict(zip(names, iou_per_class(confusion), strict=True))
    absent = [name for name in names if iou[name] is None]
    predicted = dict(zip(names, map(sum, zip(*rows, strict=True)), strict=True))
    return {
        "miou": miou(confusion),
        "pixel_accuracy": pixel_accuracy(confusion),
        "iou": iou,
        "absent": absent,
        "false_positives_only": [name for name in absent if predicted[name]],
        "pixels": sum(map(sum, rows)),
    }


def rates(
    confusion: Counts, names: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Precision, recall and F1 ("precision", "recall", "f1") of each class by name, 0 to 1.

    None for a class without a target pixel, and the precision also where nothing was predicted as the class.
    """
    rows: list[list[int]] = confusion.tolist()
    predicted = [sum(column) for column in zip(*rows, strict=True)]
    found: dict[str, list[float | None]] = {
        "precision": [
            rows[k][k] / predicted[k] if predicted[k] and any(row) else None
            for k, row in enumerate(rows)
        ],
        "recall": [
            row[k] / sum(row) if any(row) else None for k, row in enumerate(rows)
        ],
        "f1": [
            None if iou is None else 2 * iou / (1 + iou)
            for iou in iou_per_class(confusion)
        ],
    }
    return {key: dict(zip(names, values, strict=True)) for key, values in found.items()}
