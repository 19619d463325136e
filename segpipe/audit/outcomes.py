"""What a run ended with, computed again: its scores, its best score, and the gates of its exported folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.audit.verdict import FAILED, NOTED, PASSED, UNCHECKED, Line, shortened
from segpipe.errors import SegpipeError

if TYPE_CHECKING:
    from segpipe.audit.evidence import CheckedCheckpoint
    from segpipe.ledger.reader import RunLedger
    from segpipe.settings.config import Config

# Figures of "last" or "best" at a precision, with these settings.
Evaluate = Callable[["Config", str, str], Mapping[str, Any]]
# The sentence on an exported folder whose gates all passed; raises SegpipeError.
Verify = Callable[["Config", Path], str]


def read_result(run: Path) -> tuple[dict[str, Any], Line | None]:
    """Content of result.json; where there is none, the line that says why."""
    path = run / "result.json"
    try:
        return dict(json.loads(path.read_bytes())), None
    except FileNotFoundError:
        text = f"{path} does not exist: the run did not finish"
        return {}, Line("result", UNCHECKED, text)
    except (OSError, ValueError, TypeError) as error:
        return {}, Line("result", FAILED, f"{path} cannot be read: {error}")


def check_result(
    result: Mapping[str, Any], last: CheckedCheckpoint | None, ledger: RunLedger
) -> Line:
    """result.json against last.pt and the ledger."""
    expected: dict[str, Any] = {"steps": ledger.num_updates}
    if last:
        expected |= {
            "weights_digest": last.digests["model"],
            "ema_digest": last.digests["ema"],
            "best_miou": last.best_miou,
        }
    faults = [
        f"{name} is {result.get(name)!r}, but the other files have {value!r}"
        for name, value in expected.items()
        if result.get(name) != value
    ]
    if last and last.step != ledger.num_updates:
        updates = f"the ledger has {ledger.num_updates} updates"
        faults.append(f"last.pt is of step {last.step}, but {updates}")
    if result.get("config_hash") not in {each.config_hash for each in ledger.headers}:
        faults.append("config_hash belongs to no session of the ledger")
    if faults:
        return Line("result", FAILED, f"result.json: {shortened(faults)}")
    if last is None:
        return Line(
            "result",
            UNCHECKED,
            "result.json matches the ledger; last.pt was not checked",
        )
    return Line("result", PASSED, "result.json matches last.pt and the ledger")


def check_scores(config: Config, result: Mapping[str, Any], evaluate: Evaluate) -> Line:
    """The scores of result.json against those measured again with last.pt."""
    try:
        again = dict(evaluate(config, "last", "fp32"))
    except SegpipeError as error:
        return Line("scores", FAILED, f"cannot be measured again: {error}")
    # The training does not measure boundaries.
    again["mean"] = {
        name: value for name, value in again["mean"].items() if name != "boundary_iou"
    }
    note = f". {again['note']}" if again.get("note") else ""
    faults = [
        f"{name} is {result[name]!r} in result.json and {again[name]!r} measured again"
        for name in again
        if name in result and result[name] != again[name]
    ]
    if faults:
        return Line("scores", FAILED, shortened(faults) + note)
    text = (
        f"mIoU {100 * again['miou']:.2f} % on {again['pixels']} pixels, measured again"
    )
    return Line("scores", PASSED, text + note)


def check_best(
    config: Config,
    result: Mapping[str, Any],
    last: CheckedCheckpoint,
    best: CheckedCheckpoint,
    evaluate: Evaluate,
) -> Line:
    """best_miou of result.json against best.pt measured again."""
    # The validation at the end of a run, or of a session before it was made longer, is in fp32.
    at_end = best.step in (last.step, best.settings.train.steps)
    precision = "fp32" if at_end else config.train.precision
    try:
        again = evaluate(config, "best", precision)["miou"]
    except SegpipeError as error:
        return Line("best", FAILED, f"cannot be measured again: {error}")
    if again != result.get("best_miou"):
        text = f"best_miou is {result.get('best_miou')!r} in result.json and {again!r} measured again ({precision})"
        return Line("best", FAILED, text)
    text = f"mIoU {100 * again:.2f} % ({precision}) of best.pt, after {best.step} updates, measured again"
    return Line("best", PASSED, text)


def check_export(run: Path, config: Config, verify: Verify | None) -> Line:
    """The gates of the exported folder, run again."""
    folder = Path(config.export.dir) if config.export.dir else run / "export"
    if not folder.is_dir() or not any(folder.iterdir()):
        status = UNCHECKED if config.export.enabled else NOTED
        return Line("export", status, f"{folder} holds no exported network")
    if verify is None:
        return Line("export", UNCHECKED, f"{folder} was not verified again")
    try:
        return Line("export", PASSED, verify(config, folder))
    except SegpipeError as error:
        return Line("export", FAILED, str(error))
