"""Where a network errs: IoU by the size of objects and by the distance to borders, and examples of weak classes.

Measured on up to MOST images, spread over the split, which are predicted once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.run.pages import Picture

if TYPE_CHECKING:
    from segpipe.data.data_set import Samples
    from segpipe.train.metrics import Validation

Ids = NDArray[np.uint8]
Counts = NDArray[np.int64]
MOST = 32
EXAMPLES = 6
# Pixels of an object, connected, as in COCO.
SIZES = (32 * 32, 96 * 96)
SIZE_NAMES = ("below 32x32", "below 96x96", "larger")
# Pixels to the nearest pixel of another class.
DISTANCES = (3, 6, 12, 24)
DISTANCE_NAMES = ("up to 2", "3 to 5", "6 to 11", "12 to 23", "24 and more")


def detail(
    samples: Samples, num_classes: int, predict: Callable[[Ids], Ids]
) -> dict[str, Any]:
    """IoU of some images, NaN where there is no pixel.

    `images`: how many; `by_size` (C, 3): IoU of each class by SIZE_NAMES; `by_distance` (5): mIoU by DISTANCE_NAMES.
    """
    from segpipe.train.metrics import miou  # torch

    number = min(len(samples), MOST)
    places = np.linspace(0, len(samples) - 1, number).round().astype(int).tolist()
    sizes = np.zeros((2, num_classes, len(SIZE_NAMES)), np.int64)
    bands = np.zeros((len(DISTANCE_NAMES), num_classes, num_classes), np.int64)
    for place in places:
        image, target = samples.read(place)
        pred = predict(image)
        sizes += by_size(pred, target, num_classes)
        bands += by_distance(pred, target, num_classes)
    with np.errstate(invalid="ignore"):
        by_class = sizes[0] / sizes[1]
    return {
        "images": number,
        "by_size": by_class.tolist(),
        "by_distance": [miou(band) for band in bands],
    }


def by_size(pred: Ids, target: Ids, num_classes: int) -> Counts:
    """Pixels of intersection and union of each class by the size of its objects.

    A pixel that is wrongly predicted as a class counts for the size of the predicted object that it is part of.

    Shapes: uint8 (H, W) twice -> int64 (2, C, 3).
    """
    found = np.zeros((2, num_classes, len(SIZE_NAMES)), np.int64)
    labelled = target != IGNORE_INDEX
    for k in np.union1d(np.unique(target), np.unique(pred)).tolist():
        if k >= num_classes:
            continue
        is_target, is_pred = target == k, (pred == k) & labelled
        size = _sizes(is_target)
        found[0, k] = np.bincount(size[is_target & is_pred], minlength=3)
        found[1, k] = np.bincount(size[is_target], minlength=3)
        false = is_pred & ~is_target
        if false.any():
            found[1, k] += np.bincount(_sizes(is_pred)[false], minlength=3)
    return found


def _sizes(area: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each pixel, the place in SIZE_NAMES of the connected object that it is part of."""
    import cv2

    _, labels, stats, _ = cv2.connectedComponentsWithStats(area.astype(np.uint8))
    places: Counts = np.digitize(stats[:, cv2.CC_STAT_AREA], SIZES)
    return np.asarray(places[labels])


def by_distance(pred: Ids, target: Ids, num_classes: int) -> Counts:
    """Confusion in bands along the borders between classes. Contact with pixels without a label is no border.

    Shapes: uint8 (H, W) twice -> int64 (5, C, C).
    """
    inside = np.ones(target.shape, np.uint8)
    for here, there in (
        (np.s_[:, 1:], np.s_[:, :-1]),
        (np.s_[1:], np.s_[:-1]),
    ):
        a, b = target[here], target[there]
        border = (a != b) & (a != IGNORE_INDEX) & (b != IGNORE_INDEX)
        inside[here][border] = inside[there][border] = 0
    import cv2

    far = cv2.distanceTransform(inside, cv2.DIST_L2, cv2.DIST_MASK_5) + 1
    if inside.all():
        far[:] = np.inf
    band = np.digitize(far, DISTANCES)
    labelled = target != IGNORE_INDEX
    cells = (band * num_classes + target) * num_classes + pred
    size = len(DISTANCE_NAMES) * num_classes**2
    counts = np.bincount(cells[labelled], minlength=size)
    return counts.reshape(-1, num_classes, num_classes)


def examples(
    samples: Samples,
    found: Validation,
    weak: Sequence[str],
    predict: Callable[[Ids], Ids],
) -> list[Picture]:
    """For each weak class the part of an image where most of its pixels are wrong, with its IoU in the image."""
    pictures = []
    for name in weak[:EXAMPLES]:
        k = samples.classes.names.index(name)
        wrong = {
            index: int(counts[k].sum() + counts[:, k].sum() - 2 * counts[k, k])
            for index, counts in sorted(found.per_image.items())
        }
        index = max(wrong, key=lambda index: wrong[index])
        image, target = samples.read(index)
        pred = predict(image)
        counts = found.per_image[index]
        iou = int(counts[k, k]) / max(wrong[index] + int(counts[k, k]), 1)
        part = _densest(((target == k) != (pred == k)) & (target != IGNORE_INDEX))
        title = f"{name}: {samples.name(index)}"
        pictures.append(Picture(title, iou, image[part], target[part], pred[part]))
    return pictures


def _densest(wrong: NDArray[np.bool_]) -> tuple[slice, slice]:
    """The window of half the height and width of an image with the most true pixels."""
    import cv2

    height, width = (max(1, side // 2) for side in wrong.shape)
    sums = cv2.boxFilter(
        wrong.astype(np.float32), -1, (width, height), anchor=(0, 0), normalize=False
    )
    inside = sums[: wrong.shape[0] - height + 1, : wrong.shape[1] - width + 1]
    row, column = divmod(int(inside.argmax()), inside.shape[1])
    return np.s_[row : row + height, column : column + width]
