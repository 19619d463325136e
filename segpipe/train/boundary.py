"""Boundary IoU: how well contours are found, which IoU hardly shows for large classes.

Source: arXiv:2103.16562. For a class, the band is what lies in its mask within `radius` pixels of the mask's contour;
the image border is a contour, as in the authors' code. Boundary IoU is the IoU of the bands of prediction and target,
counted over all images of a split. Two rules are ours: pixels without a label are in no band, and contact with them is
no contour.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX

RATIO = 0.02  # radius of the band as a fraction of the image diagonal, as in the paper


def boundary_counts(pred: NDArray[np.uint8], target: NDArray[np.uint8], num_classes: int) -> NDArray[np.int64]:
    """Pixels of each class in both bands, in the prediction's band and in the target's.

    The classes are disjoint, so one pass finds the bands of all of them.

    Shapes: pred and target uint8 (H, W) -> int64 (3, C). Counts of images add up.
    """
    radius = max(1, round(RATIO * math.hypot(*target.shape)))
    ignored = target == IGNORE_INDEX
    bands = [_band(np.where(ignored, np.uint8(IGNORE_INDEX), ids), radius) for ids in (pred, target)]
    both = np.where(bands[0] == bands[1], bands[0], np.uint8(IGNORE_INDEX))
    counts = [np.bincount(ids.ravel(), minlength=IGNORE_INDEX + 1)[:num_classes] for ids in (both, *bands)]
    return np.stack(counts).astype(np.int64)


def boundary_iou(counts: NDArray[np.int64]) -> list[float | None]:
    """Boundary IoU of each class, 0 to 1; None for a class without a target pixel.

    Shapes: counts int64 (3, C), as from `boundary_counts`.
    """
    rows: list[list[int]] = counts.tolist()
    return [both / (pred + target - both) if target else None for both, pred, target in zip(*rows, strict=True)]


def _band(ids: NDArray[np.uint8], radius: int) -> NDArray[np.uint8]:
    """`ids` where another class or the image border lies within `radius` (a square window), 255 elsewhere.

    A window holds another class when its smallest or its largest id is another: no loop over the classes.
    """
    window = np.ones((2 * radius + 1, 2 * radius + 1), np.uint8)
    lowest = cv2.erode(ids, window)  # 255 is never the lowest beside a class
    highest = cv2.dilate(np.where(ids == IGNORE_INDEX, np.uint8(0), ids), window)
    near = (lowest != ids) | (highest != ids)
    near[:radius] = near[-radius:] = near[:, :radius] = near[:, -radius:] = True
    return np.where(near, ids, np.uint8(IGNORE_INDEX))
