"""Areas from outlines and run lengths: polygons, rectangles, ellipses, and the RLE of COCO and CVAT."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import numpy as np
from numpy.typing import NDArray

Area = NDArray[np.bool_]
Size = tuple[int, int]  # (height, width)
CIRCLE_POINTS = 128


def polygon(points: NDArray[np.float64], size: Size) -> Area:
    """Pixels whose centre lies inside a polygon of (x, y) points, bool (H, W).

    The pixel in row r and column c covers [c, c + 1) x [r, r + 1), as in COCO: neighbours that share an edge neither
    overlap nor leave a gap, which cannot be said of cv2.fillPoly, since it draws the edge into both.
    """
    if not np.isfinite(points).all():
        raise ValueError("has a corner that is no finite number")
    height, width = size
    flips = np.zeros((height, width + 1), np.uint8)
    x, y = points[:, 0], points[:, 1]
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    first = max(0, int(np.floor(y.min() - 0.5)))
    last = min(height, int(np.ceil(y.max() + 0.5)))
    if first >= last:
        return flips[:, :width].astype(np.bool_)
    centers = np.arange(first, last)[:, None] + 0.5
    crosses = (y <= centers) != (next_y <= centers)
    rows, edges = np.nonzero(crosses)
    slope = (next_x - x)[edges] / (next_y - y)[edges]
    at = x[edges] + (centers[rows, 0] - y[edges]) * slope
    columns = np.clip(np.ceil(at - 0.5), 0, width).astype(np.int64)
    np.bitwise_xor.at(flips, (rows + first, columns), 1)
    return np.bitwise_xor.accumulate(flips[:, :width], axis=1).astype(np.bool_)


def rectangle(left: float, top: float, right: float, bottom: float, size: Size) -> Area:
    """Pixels whose centre lies inside a rectangle."""
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return polygon(np.array(corners, np.float64), size)


def ellipse(x: float, y: float, radius_x: float, radius_y: float, size: Size) -> Area:
    """Pixels whose centre lies inside an ellipse, as a polygon of CIRCLE_POINTS corners."""
    angles = np.arange(CIRCLE_POINTS) * (2 * pi / CIRCLE_POINTS)
    return polygon(
        np.stack(
            [x + radius_x * np.cos(angles), y + radius_y * np.sin(angles)], axis=1
        ),
        size,
    )


def runs(counts: Sequence[int], size: Size, *, by_column: bool) -> Area:
    """Area whose pixels, row by row or column by column, are `counts` alternating runs, outside first.

    Raises ValueError if they do not fill the area.
    """
    if sum(counts) != size[0] * size[1] or any(count < 0 for count in counts):
        raise ValueError(
            f"has run lengths for {sum(counts)} pixels, but {size[0]}x{size[1]} were needed"
        )
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return (
        np.asfortranarray(flat.reshape(size, order="F"))
        if by_column
        else flat.reshape(size)
    )


def pasted(part: Area, left: int, top: int, size: Size) -> Area:
    """A mask of part of the image, in an area of its whole size. Raises ValueError where it lies outside."""
    height, width = part.shape
    check_inside((height, width), left, top, size)
    area = np.zeros(size, np.bool_)
    area[top : top + height, left : left + width] = part
    return area


def check_inside(part: Size, left: int, top: int, size: Size) -> None:
    """Raise ValueError for a part of an image that lies outside of it."""
    height, width = part
    if left < 0 or top < 0 or top + height > size[0] or left + width > size[1]:
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
