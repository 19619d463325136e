"""What surrounds a score: how it depends on the images that were scored, their sequences, and contours."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.errors import listed
from segpipe.keys import generator, sample_key
from segpipe.train.metrics import mean, miou, rates, summary

if TYPE_CHECKING:
    from segpipe.train.validate import Validation

RATIO = 0.02  # radius of a band as a fraction of the image diagonal, as in the paper
LEVEL = 0.95
RESAMPLES = 1000


def scores(
    found: Validation,
    names: Sequence[str],
    sequence_of: Sequence[str],
    seen: Collection[str] | None,
) -> dict[str, Any]:
    """All figures of a validation: those of `metrics.summary` and `metrics.rates`, means, interval and sequences.

    `names` are those of the classes; `sequence_of` and `seen` as for `by_sequence`.
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

    1,000 times, as many images as there are are drawn with replacement and scored together; the interval holds the
    middle 95 % of these scores. A class that no resample has is None, and so is everything with a single image. The
    draws depend on the number of images alone: equal matrices give equal intervals.

    per_image: confusion matrices int64 (C, C).
    """
    if len(per_image) < 2:
        return {"miou": None, "iou": dict.fromkeys(names)}

    counts = np.stack([per_image[index].numpy() for index in sorted(per_image)])
    num = len(counts)
    both = np.diagonal(counts, axis1=1, axis2=2)
    pixels = np.concatenate([both, counts.sum(2), counts.sum(1)], axis=1)

    random = generator(sample_key(0, 0, num, "bootstrap"))
    times = np.empty((RESAMPLES, num))
    for row in times:
        row[:] = np.bincount(random.integers(0, num, num), minlength=num)

    # In float64, which BLAS multiplies: whole numbers below 2**53, so the order of its sums does not matter.
    hits, target, pred = np.split(times @ pixels.astype(np.float64), 3, axis=1)
    union = np.where(target > 0, target + pred - hits, np.nan)
    scores = hits / union

    known = np.isfinite(scores)
    means = np.where(known, scores, 0).sum(1) / np.maximum(known.sum(1), 1)

    iou = {name: _middle(scores[known[:, k], k]) for k, name in enumerate(names)}
    return {"miou": _middle(means[known.any(1)]), "iou": iou}


def _middle(scores: NDArray[np.float64]) -> list[float] | None:
    if not len(scores):
        return None
    edge = 50 * (1 - LEVEL)
    return [float(value) for value in np.percentile(scores, (edge, 100 - edge))]


def by_sequence(
    per_image: Mapping[int, Tensor],
    sequence_of: Sequence[str],
    seen: Collection[str] | None,
) -> dict[str, dict[str, Any]]:
    """Score of each sequence, sorted: {"0016E5": {"images": 101, "miou": 0.62, "in_training": true}}.

    Empty when each image is a sequence of its own: then names tell nothing. `sequence_of` has the sequence of each
    image by index; `seen` holds those of the training images, and is None if they are not known, as is `in_training`.
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
    """A sentence when sequences of `by_sequence` are in training too; empty otherwise."""
    both = [name for name, found in sequences.items() if found["in_training"]]
    if not both:
        return ""

    images = sum(sequences[name]["images"] for name in both)
    total = sum(found["images"] for found in sequences.values())

    return (
        f"{images} of {total} images are from sequences that training has seen too ({listed(both, 4)}): these scores "
        f"flatter. Neighboring frames look alike; expect less in new places."
    )


def boundary_counts(
    pred: NDArray[np.uint8], target: NDArray[np.uint8], num_classes: int
) -> NDArray[np.int64]:
    """Pixels of each class in both bands, in the prediction's band and in the target's; for `boundary_iou`.

    Boundary IoU shows how well contours are found, which IoU hardly shows for large classes. Source: arXiv:2103.16562.
    For a class, the band is what lies in its mask within a radius of the mask's contour; the image border is a contour,
    as in the authors' code. Two rules are ours: pixels without a label are in no band, and contact with them is no
    contour. The classes are disjoint, so one pass finds the bands of all of them.

    Shapes: pred and target uint8 (H, W) -> int64 (3, C). Counts of images add up.
    """
    radius = max(1, round(RATIO * math.hypot(*target.shape)))

    ignored = target == IGNORE_INDEX
    nothing = np.uint8(IGNORE_INDEX)
    band = _band(np.where(ignored, nothing, pred), radius)
    wanted = _band(target, radius)

    counts = []
    for ids in (np.where(band == wanted, band, nothing), band, wanted):
        counts.append(np.bincount(ids.ravel(), minlength=256)[:num_classes])

    return np.stack(counts).astype(np.int64)


def boundary_iou(counts: NDArray[np.int64]) -> list[float | None]:
    """Boundary IoU of each class, 0 to 1; None for a class without a target pixel.

    Shapes: counts int64 (3, C), as from `boundary_counts`.
    """
    rows: list[list[int]] = counts.tolist()
    return [
        both / (pred + target - both) if target else None
        for both, pred, target in zip(*rows, strict=True)
    ]


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
