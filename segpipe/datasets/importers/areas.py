"""Areas from outlines and run lengths: polygons, rectangles, ellipses, and the RLE of COCO and CVAT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi, sin

import numpy as np
from numpy.typing import ArrayLike, NDArray

Area = NDArray[np.bool_]
Size = tuple[int, int]  # (height, width)
Shape = Callable[[Size], Area]  # its pixels in an image; raises ValueError
CIRCLE_POINTS = 128


def wrong(message: str) -> Shape:
    """A shape that has no pixels, because of what `message` says."""

    def shape(size: Size) -> Area:
        raise ValueError(message)

    return shape


def polygon(points: ArrayLike) -> Shape:
    """The pixels whose center lies inside a polygon of (x, y) points.

    The pixel in row r and column c covers [c, c + 1) x [r, r + 1), as in COCO: neighbors that share an edge neither
    overlap nor leave a gap, which cannot be said of cv2.fillPoly, since it draws the edge into both.
    """

    def shape(size: Size) -> Area:
        corners = np.asarray(points, np.float64)
        if corners.size < 6 or corners.size % 2:
            raise ValueError(
                f"has a polygon of {corners.size} numbers, but x and y of three points were needed"
            )
        if not np.isfinite(corners).all():
            raise ValueError("has a corner that is no finite number")
        corners = corners.reshape(-1, 2)
        height, width = size
        (x, y), (next_x, next_y) = corners.T, np.roll(corners, -1, axis=0).T
        first = int(np.clip(np.floor(y.min() - 0.5), 0, height))
        last = int(np.clip(np.ceil(y.max() + 0.5), first, height))
        centers = np.arange(first, last)[:, None] + 0.5
        rows, edges = np.nonzero((y <= centers) != (next_y <= centers))
        slope = (next_x - x)[edges] / (next_y - y)[edges]
        at = x[edges] + (centers[rows, 0] - y[edges]) * slope
        columns = np.clip(np.ceil(at - 0.5), 0, width).astype(np.int64)
        flips = np.zeros((height, width + 1), np.uint8)
        np.bitwise_xor.at(flips, (rows + first, columns), 1)
        return np.bitwise_xor.accumulate(flips[:, :width], axis=1).astype(np.bool_)

    return shape


def rectangle(left: float, top: float, right: float, bottom: float) -> Shape:
    """The pixels whose center lies inside a rectangle."""
    return polygon([(left, top), (right, top), (right, bottom), (left, bottom)])


def ellipse(x: float, y: float, radius_x: float, radius_y: float) -> Shape:
    """The pixels whose center lies inside an ellipse, as a polygon of CIRCLE_POINTS corners."""
    angles = [2 * pi * place / CIRCLE_POINTS for place in range(CIRCLE_POINTS)]
    return polygon(
        [(x + radius_x * cos(angle), y + radius_y * sin(angle)) for angle in angles]
    )


def runs(counts: Sequence[int], size: Size) -> Area:
    """Area whose pixels, row by row, are `counts` alternating runs, outside first.

    Raises ValueError if they do not fill the area.
    """
    if sum(counts) != size[0] * size[1] or min(counts) < 0:
        raise ValueError(
            f"has run lengths for {sum(counts)} pixels, but {size[0]}x{size[1]} were needed"
        )
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(size)


def pasted(part: Area, left: int, top: int, size: Size) -> Area:
    """A mask of part of the image, in an area of the whole size. Raises ValueError where it lies outside."""
    height, width = part.shape
    check_inside((height, width), left, top, size)
    area = np.zeros(size, np.bool_)
    area[top : top + height, left : left + width] = part
    return area


def check_inside(part: Size, left: int, top: int, size: Size) -> None:
    """Raise ValueError for a part of an image that lies outside of it."""
    height, width = part
    if min(left, top) < 0 or top + height > size[0] or left + width > size[1]:
        raise ValueError(
            f"has a mask of {height}x{width} at row {top}, column {left}, outside the image"
        )


def coco_counts(text: str) -> list[int]:
    """Run lengths in the compressed text of COCO: numbers of 5 bits per character, each from the third on a difference.

    Source: rleFrString in cocoapi/common/maskApi.c.
    """
    counts: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        number |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            number -= (1 << shift) if bits & 0x10 else 0
            counts.append(number + (counts[-2] if len(counts) > 2 else 0))
            number = shift = 0
    return counts
