"""The one writer of HTML pages: the report of a run, the doctor's page, the comparison of runs.

Everything is inside the file: pictures as data: URLs, curves as SVG, styles as CSS, no scripts. A content security
policy in its head forbids the browser to load anything else, so a page can be mailed or archived as it is.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from segpipe.files import write_atomically
from segpipe.run.console import percent, percent_range
from segpipe.run.pictures import jpeg_url
from segpipe.settings.setting import shown


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
