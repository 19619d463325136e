"""The one writer of HTML pages: the report of a run, the doctor's page, the comparison of runs.

Everything is inside the file: pictures as data: URLs, curves as SVG, styles as CSS. A content security policy in its
head forbids the browser to load anything else, so a page can be mailed or archived as it is.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from segpipe.files import write_atomically
from segpipe.run.console import percent, percent_range
from segpipe.settings.setting import shown

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
POINTS = 240  # of a long curve; the screen shows no more

Points = Sequence[tuple[float, float]]


def write_page(template: str, path: Path, **facts: Any) -> Path:
    """`path`, at which the page is then. Raises CheckpointError when the disk is full."""
    write_atomically(path, render_page(template, **facts).encode())
    return path


def render_page(template: str, **facts: Any) -> str:
    """A page of this folder. The template escapes all text; the same facts give the same bytes."""
    return _environment().get_template(template).render(facts)


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


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "n/a"
    return "none" if value in ("", None) else str(value)


def _csp_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def duration(seconds: float) -> str:
    """`95 s`, `12 min` or `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def jpeg_url(image: NDArray[np.uint8], quality: int = 85) -> str:
    """`data:` URL of a uint8 (H, W, 3) RGB picture."""
    import cv2

    settings = [cv2.IMWRITE_JPEG_QUALITY, quality]
    done, encoded = cv2.imencode(".jpg", image[..., ::-1], settings)
    assert done
    return "data:image/jpeg;base64," + base64.b64encode(encoded.tobytes()).decode()


@dataclass(frozen=True)
class PlotAxis:
    """Values from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value is drawn."""
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, *, whole: bool = False) -> list[tuple[float, str]]:
        """Place and text of about four round values, of `whole` numbers only if asked."""
        rough = (self.high - self.low) / 4 or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = min((1, 2, 5, 10), key=lambda n: abs(n * power - rough)) * power
        step = max(step, 1.0) if whole else step
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self.at(n * step), f"{n * step:.6g}") for n in numbers]


@dataclass(frozen=True)
class Curve:
    """A curve of a chart."""

    points: Points
    color: str = COLORS[0]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves of y over x, at least down to 0; `chart` of macros.html.j2 draws it."""

    label: str
    lines: Sequence[Curve]
    dots: bool = False  # at every point
    marks: Sequence[float] = ()  # at the x axis
    width: int = 440
    height: int = 230

    @cached_property
    def x(self) -> PlotAxis:
        """The horizontal axis."""
        values = [x for line in self.lines for x, _ in line.points]
        return PlotAxis(min(values), max(values), 56, self.width - 10)

    @cached_property
    def y(self) -> PlotAxis:
        """The vertical axis."""
        values = [y for line in self.lines for _, y in line.points]
        return PlotAxis(min(0.0, *values), max(0.0, *values), self.height - 24, 8)

    def drawn(self, line: Curve) -> list[tuple[float, float]]:
        """Places of the points of a curve."""
        x, y = self.x, self.y
        return [(x.at(step), y.at(value)) for step, value in thin(line.points, POINTS)]


def thin(points: Points, most: int) -> list[tuple[float, float]]:
    """The lowest and the highest of each group of consecutive points, so that at most about `most` are left."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    thinned = []
    for start in range(0, len(points), size):
        by_value = sorted(points[start : start + size], key=lambda point: point[1])
        thinned += sorted({by_value[0], by_value[-1]})
    return thinned


def points_of(history: Sequence[Mapping[str, Any]], kind: str, key: str) -> Points:
    """(step, value) of the lines of a kind in metrics.jsonl that have a finite value; scores in per cent."""
    scale = 100 if key == "miou" else 1
    return [
        (line["step"], scale * line[key])
        for line in history
        if line.get("kind") == kind and _is_finite(line.get(key))
    ]
