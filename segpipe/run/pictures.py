"""Pictures for an HTML page: images with blended masks as JPEG, curves as SVG."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.predict.overlay import blend as blend

# Readable on white and on black; more lines than these repeat the colors with dashes.
COLORS = (
    "#3b82f6",
    "#f59e0b",
    "#10b981",
    "#ef4444",
    "#8b5cf6",
    "#ec4899",
    "#14b8a6",
    "#a3a3a3",
)
_WRONG = (225, 20, 30)
_POINTS = 240  # of a long curve; the screen shows no more
# Left out, so that equal data gives equal bytes.
_METADATA = ("Creator", "Date", "Format", "Type")

Points = Sequence[tuple[float, float]]
Line = tuple[str, str, Points]  # color, dashes, points


def errors(
    image: NDArray[np.uint8], target: NDArray[np.uint8], pred: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """`image` in pale gray, red where prediction and target differ. Pixels without a label get the hatch of `blend`.

    Shapes: image uint8 (H, W, 3) RGB, target and pred uint8 (H, W) -> uint8 (H, W, 3).
    """
    gray = (128 + image.mean(2, keepdims=True) / 2).round().astype(np.uint8)
    wrong = np.where(target == IGNORE_INDEX, target, target != pred).astype(np.uint8)
    red = blend(gray.repeat(3, axis=2), wrong, ((0, 0, 0), _WRONG), opacity=0.8)
    return np.where((wrong == 0)[..., None], gray, red)


def jpeg_url(image: NDArray[np.uint8], quality: int = 85) -> str:
    """`data:` URL of a uint8 (H, W, 3) RGB picture."""
    import cv2

    settings = [cv2.IMWRITE_JPEG_QUALITY, quality]
    done, encoded = cv2.imencode(".jpg", image[..., ::-1], settings)
    assert done
    return "data:image/jpeg;base64," + base64.b64encode(encoded.tobytes()).decode()


def shrink(image: NDArray[np.uint8], width: int, *, smooth: bool) -> NDArray[np.uint8]:
    """`image` at most `width` pixels wide, same aspect ratio. smooth=False for class ids, which must not be mixed."""
    import cv2

    if image.shape[1] <= width:
        return image
    height = max(1, round(image.shape[0] * width / image.shape[1]))
    interpolation = cv2.INTER_AREA if smooth else cv2.INTER_NEAREST
    shrunk = cv2.resize(image, (width, height), interpolation=interpolation)
    return np.asarray(shrunk, np.uint8)


def points_of(history: Sequence[Mapping[str, Any]], kind: str, key: str) -> Points:
    """(step, value) of the lines of a kind in metrics.jsonl that have a finite value; scores in per cent."""
    scale = 100 if key == "miou" else 1
    return [
        (line["step"], scale * line[key])
        for line in history
        if line.get("kind") == kind
        and isinstance(line.get(key), int | float)
        and math.isfinite(line[key])
    ]


def curve_svg(
    lines: Sequence[Line],
    *,
    label: str,
    dots: bool = False,
    ticks: Sequence[float] = (),
    size: tuple[float, float] = (4.4, 2.4),
) -> Markup:
    """SVG of y over x for light and dark pages, at least down to 0; text gets its color from the rule for `.curve`.

    More than 240 points become means; a line that is alone gets a band from the smallest to the largest value of each.
    `dots` marks every point, and the largest one of a line that is alone. `ticks` are marked at the x axis. `size` is
    in inches, `label` for screen readers.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style = {"svg.fonttype": "none", "svg.hashsalt": "segpipe", "font.size": 9}
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for color, dashes, points in lines:
            _draw(axes, color, dashes, points, dots=dots, alone=len(lines) == 1)
        if ticks:
            axes.vlines(
                ticks,
                0,
                0.05,
                colors=COLORS[1],
                transform=axes.get_xaxis_transform(),
                gid="ticks",
                clip_on=False,
            )
        lowest = min(y for *_, points in lines for _, y in points)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if lowest < 0 else 0.0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y", color="#888888", alpha=0.3, linewidth=0.6, clip_on=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        buffer = io.StringIO()
        metadata = dict.fromkeys(_METADATA)
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    # HTML needs neither the XML head nor the name spaces.
    drawn = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", buffer.getvalue())
    drawn = drawn[drawn.index("<svg ") + len("<svg ") :]
    return Markup(f'<svg class="curve" role="img" aria-label="{escape(label)}" {drawn}')


def _draw(
    axes: Any, color: str, dashes: str, points: Points, *, dots: bool, alone: bool
) -> None:
    x, y, low, high = zip(*thin(points, _POINTS), strict=True)
    if alone and len(x) < len(points):
        band = {"color": color, "alpha": 0.25, "linewidth": 0}
        axes.fill_between(x, low, high, gid="band", clip_on=False, **band)
    marker = "o" if dots or len(points) == 1 else None
    line = {"color": color, "linestyle": dashes, "marker": marker, "markersize": 4}
    axes.plot(x, y, clip_on=False, **line)
    if alone and dots:
        best = max(points, key=lambda point: point[1])
        axes.plot(*best, "o", color=COLORS[1], markersize=7, clip_on=False)


def thin(points: Points, most: int) -> list[tuple[float, float, float, float]]:
    """(mean x, mean y, smallest y, largest y) of at most `most` groups of consecutive points."""
    size = math.ceil(len(points) / most) or 1
    thinned = []
    for start in range(0, len(points), size):
        xs, ys = zip(*points[start : start + size], strict=True)
        means = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
        thinned.append((*means, min(ys), max(ys)))
    return thinned
