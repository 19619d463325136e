"""Pictures for an HTML page: images with blended masks as JPEG, curves as SVG."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.predict.overlay import blend as blend

_LINE, _BEST = "#3b82f6", "#f59e0b"  # readable on white and on black
_WRONG = (225, 20, 30)
_METADATA = (
    "Creator",
    "Date",
    "Format",
    "Type",
)  # left out, so that equal data gives equal bytes
_BUCKETS = 240  # points of a long curve; the screen shows no more


def errors(
    image: NDArray[np.uint8], target: NDArray[np.uint8], pred: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """`image` in pale gray, red where prediction and target differ. Pixels without a label get the hatch of `blend`.

    Shapes: image uint8 (H, W, 3) RGB, target and pred uint8 (H, W) -> uint8 (H, W, 3).
    """
    gray = (128 + image.mean(2) / 2).round().astype(np.uint8)
    wrong = np.where(target == IGNORE_INDEX, target, target != pred).astype(np.uint8)
    shown = blend(
        np.repeat(gray[..., None], 3, axis=2), wrong, ((0, 0, 0), _WRONG), opacity=0.8
    )
    return np.where((wrong == 0)[..., None], gray[..., None], shown)


def jpeg_url(image: NDArray[np.uint8], quality: int = 85) -> str:
    """`data:` URL of a uint8 (H, W, 3) RGB picture."""
    import cv2

    done, encoded = cv2.imencode(
        ".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality]
    )
    assert done
    return "data:image/jpeg;base64," + base64.b64encode(encoded.tobytes()).decode()


def shrink(image: NDArray[np.uint8], width: int, *, smooth: bool) -> NDArray[np.uint8]:
    """`image` at most `width` pixels wide, same aspect ratio. smooth=False for class ids, which must not be mixed."""
    import cv2

    if image.shape[1] <= width:
        return image
    size = (
        width,
        max(1, round(image.shape[0] * width / image.shape[1])),
    )  # cv2 counts width first
    shrunk = cv2.resize(
        image, size, interpolation=cv2.INTER_AREA if smooth else cv2.INTER_NEAREST
    )
    return np.asarray(shrunk, np.uint8)


def curve_svg(
    points: Sequence[tuple[float, float]],
    *,
    label: str,
    dots: bool = False,
    ticks: Sequence[float] = (),
) -> str:
    """SVG of y over x, as `plot_svg` draws it; the y axis reaches down to 0.

    More than 240 points become means, with a band from the smallest to the largest value of each. `dots` marks every
    point, and the largest one in another color. `ticks` are marked at the x axis.
    """
    found = thin(points, _BUCKETS)
    x, y, low, high = (list(column) for column in zip(*found, strict=True))

    def draw(axes: Any) -> None:
        if len(found) < len(points):
            axes.fill_between(
                x,
                low,
                high,
                color=_LINE,
                alpha=0.25,
                linewidth=0,
                gid="band",
                clip_on=False,
            )
        marker = "o" if dots or len(points) == 1 else None
        axes.plot(
            x, y, color=_LINE, linewidth=1.6, marker=marker, markersize=4, clip_on=False
        )
        if dots:
            axes.plot(
                *max(points, key=lambda point: point[1]),
                "o",
                color=_BEST,
                markersize=7,
                clip_on=False,
            )
        if ticks:
            at_axis = axes.get_xaxis_transform()
            axes.vlines(
                ticks,
                0,
                0.05,
                colors=_BEST,
                transform=at_axis,
                linewidth=1.4,
                gid="ticks",
                clip_on=False,
            )
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if min(low) < 0 else 0.0)

    return plot_svg(draw, label=label, size=(4.4, 2.4))


def plot_svg(
    draw: Callable[[Any], None], *, label: str, size: tuple[float, float]
) -> str:
    """SVG of the axes that `draw` fills, for light and dark pages: text gets its color from the page's `.curve` rules.

    `size` in inches. `label`, for screen readers, must be escaped already.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "segpipe", "font.size": 9}
    ):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y", color="#888888", alpha=0.3, linewidth=0.6, clip_on=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA)
        )
    drawn = re.sub(
        r'\s+xmlns(:\w+)?="[^"]*"', "", buffer.getvalue()
    )  # not needed inside HTML
    opening = f'<svg class="curve" role="img" aria-label="{label}" '
    return (
        opening + drawn[drawn.index("<svg ") + len("<svg ") :]
    )  # without the XML head


def thin(
    points: Sequence[tuple[float, float]], most: int
) -> list[tuple[float, float, float, float]]:
    """(mean x, mean y, smallest y, largest y) of at most `most` groups of consecutive points."""
    size = math.ceil(len(points) / most) or 1
    thinned = []
    for start in range(0, len(points), size):
        xs, ys = zip(*points[start : start + size], strict=True)
        thinned.append(
            (math.fsum(xs) / len(xs), math.fsum(ys) / len(ys), min(ys), max(ys))
        )
    return thinned
