"""Writes all HTML pages with their curves and pictures: report of a run, doctor's page, comparison of runs.

Each page is one file: pictures and curves are data: URLs, styles are inline CSS. A content security policy in its head
keeps the browser from loading anything else, so a page can be mailed or archived as it is.
"""

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from segpipe import IGNORE_INDEX
from segpipe.data import Uint8
from segpipe.files import write_atomically
from segpipe.predict.outputs import Palette, blend
from segpipe.run.console import percent, percent_range
from segpipe.settings.setting import Values, shown

# Curves: readable on white and on black.
COLORS = (
    "#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#a3a3a3",
)  # fmt: skip
# Text: a contrast of 4.5 to 1 needs one color per color scheme, which the SVG itself selects.
GREY = "#5d6675"
DARK = f"@media (prefers-color-scheme: dark) {{ [style*='fill: {GREY}'] {{ fill: #98a2b1 !important }} }}"
STYLE = {
    "svg.hashsalt": "segpipe",  # equal curves give equal bytes
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "font.size": 9,
    # Fixed margins: computing a tight layout takes as long as drawing the chart.
    "figure.subplot.left": 0.12,
    "figure.subplot.right": 0.97,
    "figure.subplot.bottom": 0.11,
    "figure.subplot.top": 0.89,
}

PANEL_WIDTH = 480  # pixels; 32 panels on a page stay below 2 MB

Points = Sequence[tuple[float, float]]


def write_page(template: str, path: Path, **facts: Any) -> Path:
    """Render a template of this folder, which escapes all text, to `path`; the same facts give the same bytes.

    Returns `path`. Raises CheckpointError when the disk is full.
    """
    page = _environment().get_template(template).render(facts)
    write_atomically(path, page.encode())
    return path


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "csp_hash": _csp_hash,
        "duration": duration,
        "jpeg": jpeg_url,
        "percent": percent,
        "percent_range": percent_range,
        "shown": shown,
        "text": _text,
    }
    environment.tests["finite"] = _is_finite
    return environment


def _csp_hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest())
    return f"'sha256-{digest.decode()}'"


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "n/a"
    return "none" if value in ("", None) else str(value)


def duration(seconds: float) -> str:
    """`95 s`, `12 min` or `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def jpeg_url(image: Uint8, quality: int = 85) -> str:
    """`data:` URL of a uint8 (H, W, 3) RGB picture."""
    import cv2

    settings = [cv2.IMWRITE_JPEG_QUALITY, quality]
    done, encoded = cv2.imencode(".jpg", image[..., ::-1], settings)
    assert done
    return _data_url("jpeg", encoded.tobytes())


def _data_url(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def chart(
    title: str,
    lines: Mapping[str, Points],
    *,
    marked: bool = False,
    colors: Sequence[str] = COLORS,
) -> str:
    """`data:` URL of a chart of curves by label; the y axis includes 0. Empty if there are no points.

    A single curve shows its last value in the title; several get a legend, without labels that begin with _.
    marked: draws a dot at each point.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colored = zip(lines.items(), colors, strict=False)
    drawn = [(*line, color) for line, color in colored if line[1]]
    if not drawn:
        return ""
    content = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(4.8, 2.6))
        axes = figure.subplots()
        for label, points, color in drawn:
            dot = "." if marked or len(points) == 1 else ""
            axes.plot(*zip(*points, strict=True), color=color, marker=dot, label=label)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(frameon=False)
        last = f": {points[-1][1]:.3g}" if len(drawn) == 1 else ""
        axes.set_title(f"{title}{last}")
        axes.update_datalim([(points[-1][0], 0.0)])
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.grid(alpha=0.3)
        # A date would make every file different.
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return _data_url(
        "svg+xml",
        content.getvalue().replace(b"</style>", f"{DARK}</style>".encode(), 1),
    )


def points_of(history: Sequence[Values], kind: str, key: str) -> Points:
    """(step, value) of the lines of this kind in metrics.jsonl with a finite value; mIoU in percent."""
    scale = 100 if key == "miou" else 1
    return [
        (line["step"], scale * line[key])
        for line in history
        if line.get("kind") == kind and _is_finite(line.get(key))
    ]


@dataclass(frozen=True)
class Picture:
    """One validation image with its target and prediction."""

    name: str
    miou: float
    image: Uint8  # (H, W, 3) RGB
    target: Uint8  # (H, W), 255 ignored
    pred: Uint8  # (H, W)

    def panels(self, palette: Palette) -> dict[str, Uint8]:
        """Image, target, prediction and errors as RGB, at most 480 pixels wide."""
        image, target = overlay(self.image, self.target, palette, PANEL_WIDTH)
        pred = shrink(self.pred, PANEL_WIDTH)
        small = shrink(self.target, PANEL_WIDTH)
        return {
            "image": image,
            "target": target,
            "prediction": blend(image, pred, palette),
            "errors": errors(image, small, pred, palette),
        }


def overlay(image: Uint8, target: Uint8, palette: Palette, width: int) -> list[Uint8]:
    """The image, and the image blended with its target, both at most `width` pixels wide."""
    small = shrink(image, width)
    return [small, blend(small, shrink(target, width), palette)]


def errors(image: Uint8, target: Uint8, pred: Uint8, palette: Palette) -> Uint8:
    """`image` in pale gray, with wrong pixels in the color of the prediction.

    Unlabelled pixels get the hatch of `blend`.

    Shapes: image uint8 (H, W, 3) RGB, target and pred uint8 (H, W) -> uint8 (H, W, 3).
    """
    gray = (127 + image.mean(2, keepdims=True) / 2).round().astype(np.uint8)
    shown = np.where(target == IGNORE_INDEX, target, pred)
    colored = blend(gray.repeat(3, axis=2), shown, palette, opacity=0.85)
    right = (shown == target) & (target != IGNORE_INDEX)
    return np.where(right[..., None], gray, colored)


def shrink(image: Uint8, width: int) -> Uint8:
    """`image` at most `width` pixels wide, same aspect ratio. Class ids (H, W) are not mixed, colors (H, W, 3) are."""
    import cv2

    if image.shape[1] <= width:
        return image
    height = max(1, round(image.shape[0] * width / image.shape[1]))
    interpolation = cv2.INTER_AREA if image.ndim == 3 else cv2.INTER_NEAREST
    shrunk = cv2.resize(image, (width, height), interpolation=interpolation)
    return np.asarray(shrunk, np.uint8)
