"""What a tracker is given: the id of a run, and at the end its results, pictures and files."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from segpipe.settings.config import Config, recipe

_PICTURE = re.compile(r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]*)"')  # of report.html.j2


@dataclass(frozen=True)
class RunEnd:
    """Results of a run that has ended."""

    step: int
    miou: float | None
    iou: Mapping[str, float | None]  # by class; None: not in the validation images
    pictures: list[tuple[str, NDArray[np.uint8]]]  # caption, uint8 (H, W, 3) RGB
    files: list[Path]  # report.html and the exported folder, as far as they exist


class Mirror(Protocol):
    """A tracker that shows a run elsewhere. Every method may raise; the caller warns and goes on without it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step, by names such as `train/loss`."""

    def finish(self, end: RunEnd) -> None:
        """Results of the whole run."""

    def close(self, exit_code: int) -> None:
        """Send what is left; the run has failed if `exit_code` is not 0."""


def run_id(config: Config, run_dir: Path) -> str:
    """Id of the run in a tracker, 16 hex digits: a function of the folder's name and the recipe only.

    Settings that may change on resume (`FREE_KEYS`) do not enter, so that a resumed run continues its curve.
    """
    text = json.dumps([run_dir.name, recipe(config)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def run_end(config: Config, result: Mapping[str, Any]) -> RunEnd:
    """Results for a tracker, from result.json and the files beside it."""
    report, export = config.run_dir / "report.html", Path(config.export.dir or config.run_dir / "export")
    pictures = _pictures(report.read_text()) if report.is_file() else []
    files = [report] * report.is_file() + [export] * (config.export.enabled and export.is_dir())
    return RunEnd(result["steps"], result["miou"], result["iou"], pictures, files)


def _pictures(page: str) -> list[tuple[str, NDArray[np.uint8]]]:
    import cv2

    found = []
    for encoded, caption in _PICTURE.findall(page):
        image = cv2.imdecode(np.frombuffer(base64.b64decode(encoded), np.uint8), cv2.IMREAD_COLOR)
        if image is not None:
            found.append((html.unescape(caption), np.ascontiguousarray(image[..., ::-1], dtype=np.uint8)))
    return found
