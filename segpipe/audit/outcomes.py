"""What a run ended with, computed again: its scores, and the gates of its exported folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from segpipe.audit.verdict import FAILED, PASSED, UNCHECKED, Line
from segpipe.errors import SegpipeError

Evaluate = Callable[[], Mapping[str, Any]]  # pixels, miou and iou of last.pt on the validation split
Verify = Callable[[Path], str]  # the sentence on an exported folder whose gates all passed; raises SegpipeError
SCORES = (
    "images", "pixels", "miou", "iou", "pixel_accuracy", "precision", "recall", "f1", "mean", "interval_95",
    "sequences", "absent", "false_positives_only",
)  # fmt: skip


def check_scores(run: Path, evaluate: Evaluate | None, obstacle: str) -> Line:
    """The scores of result.json against those measured again; `obstacle` is why that cannot be done."""
    path = run / "result.json"
    if not path.is_file() or evaluate is None or obstacle:
        reason = obstacle or ("the run did not finish" if evaluate else "evaluate=false")
        return Line("scores", UNCHECKED, f"not measured again: {reason}")
    try:
        recorded, again = dict(json.loads(path.read_bytes())), evaluate()
    except (ValueError, TypeError, SegpipeError) as error:
        return Line("scores", FAILED, f"cannot be measured again: {error}")
    faults = [
        f"{name} is {_short(recorded.get(name))} in result.json and {_short(again[name])} measured again"
        for name in SCORES
        if name in again and _without_boundary(recorded.get(name)) != _without_boundary(again[name])
    ]
    if faults:
        return Line("scores", FAILED, "; ".join(faults))
    return Line("scores", PASSED, f"mIoU {100 * again['miou']:.2f} % on {again['pixels']} pixels, measured again")


def _without_boundary(value: Any) -> Any:
    """`value` without the score that is measured by `segpipe evaluate` alone."""
    return {key: each for key, each in value.items() if key != "boundary_iou"} if isinstance(value, Mapping) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_gates(folder: Path, verify: Verify | None, obstacle: str) -> Line:
    """The gates of the exported folder, run again; `obstacle` is why that cannot be done."""
    if verify is None or obstacle:
        return Line("gates", UNCHECKED, f"the exported files were not compared again: {obstacle or 'verify=false'}")
    try:
        return Line("gates", PASSED, verify(folder))
    except SegpipeError as error:
        return Line("gates", FAILED, str(error))
