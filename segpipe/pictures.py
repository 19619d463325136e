"""Arrays and numbers as pictures that a page can hold: blended masks as JPEG, curves as SVG.

The SVG is written by hand rather than by a plotting library: it takes its colours from the page's CSS, so one file
serves light and dark mode, and it holds no metadata, no fonts and no links.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

IGNORE_INDEX = 255
_WIDTH, _HEIGHT = 420, 240  # user units of a curve; it scales with the page
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 24, 12, 28  # margins around the plotted area
_BUCKETS = 240  # points a curve is thinned to; more than the screen shows would only cost bytes


def blend(
    image: NDArray[np.uint8], ids: NDArray[np.uint8], palette: Sequence[tuple[int, int, int]], opacity: float = 0.65
) -> NDArray[np.uint8]:
    """`image` under the colours of its classes; ignored pixels are dark with a diagonal hatch.

    Shapes: image uint8 (H, W, 3) RGB, ids uint8 (H, W) with 255 ignored -> uint8 (H, W, 3). An id beyond the palette
    is shown like an ignored one.
    """
    lut = np.zeros((256, 3), np.float32)
    lut[: len(palette)] = palette
    mixed = (1 - opacity) * image + opacity * lut[ids]
    row, column = np.indices(ids.shape)
    hatch = np.where((row + column) % 12 < 2, 96, 24)[..., None]
    return np.where((ids >= len(palette))[..., None], hatch, mixed).round().astype(np.uint8)


def jpeg_url(image: NDArray[np.uint8], quality: int = 85) -> str:
    """`data:` address of a uint8 (H, W, 3) RGB picture, so that a page needs no second file."""
    import cv2

    done, encoded = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done
    return "data:image/jpeg;base64," + base64.b64encode(encoded.tobytes()).decode()


def shrink(image: NDArray[np.uint8], width: int, *, smooth: bool) -> NDArray[np.uint8]:
    """`image` at most `width` pixels wide, aspect kept; class ids need smooth=False, or new ids would appear."""
    import cv2

    if image.shape[1] <= width:
        return image
    size = (width, max(1, round(image.shape[0] * width / image.shape[1])))  # cv2 counts width first
    shrunk = cv2.resize(image, size, interpolation=cv2.INTER_AREA if smooth else cv2.INTER_NEAREST)
    return np.asarray(shrunk, np.uint8)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most `count` + 1 round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def curve_svg(points: Sequence[tuple[float, float]], *, label: str, dots: bool = False, floor: float | None = 0) -> str:
    """SVG of y over x with round ticks; coloured by the page's `.curve` rules.

    More than 240 points are thinned to means, with a band from the smallest to the largest value that each stands for.
    `dots` marks every point and the largest one; `floor` is a value the y axis must reach down to. `label` is read by
    screen readers and must be escaped already.
    """
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_high = max(y for _, y in points)
    y_low = min(y for _, y in points) if floor is None else min(floor, min(y for _, y in points))
    pad = 0.05 * (y_high - y_low) or abs(y_high) * 0.1 or 1.0
    y_high += pad

    def px(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low or 1) * (_WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">']
    for y in ticks(y_low, y_high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for x in ticks(x_low, x_high):
        parts.append(f'<text x="{px(x):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{x:,.0f}</text>')
    thin = _thin(points)
    band = [(x, high) for x, _, _, high in thin] + [(x, low) for x, _, low, _ in reversed(thin)]
    if len(thin) < len(points):
        parts.append(f'<polygon class="band" points="{_path(band, px, py)}"/>')
    parts.append(f'<polyline class="line" points="{_path([(x, y) for x, y, _, _ in thin], px, py)}"/>')
    if dots or len(points) == 1:
        best = max(points, key=lambda point: point[1])
        for x, y in points:
            kind, radius = ("dot best", 5) if dots and (x, y) == best else ("dot", 3)
            parts.append(f'<circle class="{kind}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="{radius}"/>')
    return "".join([*parts, "</svg>"])


def _path(points: Sequence[tuple[float, float]], px: Callable[[float], float], py: Callable[[float], float]) -> str:
    return " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    """(mean x, mean y, smallest y, largest y) of at most _BUCKETS runs of neighbouring points."""
    size = math.ceil(len(points) / _BUCKETS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (
            math.fsum(x for x, _ in run) / len(run),
            math.fsum(y for _, y in run) / len(run),
            min(y for _, y in run),
            max(y for _, y in run),
        )
        for run in runs
    ]
