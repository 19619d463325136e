"""failure.json in a run's folder: why its last session ended, for the tables of runs and sweeps."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from segpipe.errors import Interrupted, SegpipeError
from segpipe.files import to_json, write_atomically
from segpipe.settings.config import Config

FAILURE = "failure.json"


def note_failure(config: Config, code: int, reason: str) -> None:
    """Write down why the run ended; Ctrl-C is no failure.

    A full disk does not hide the error itself: then nothing is written.
    """
    if code != Interrupted.exit_code:
        with contextlib.suppress(SegpipeError, OSError):
            write_atomically(config.run_dir / FAILURE, to_json({"exit_code": code, "reason": reason}))


def failure(folder: Path) -> tuple[int, str]:
    """Exit code and reason, on one line, of the run's last session; (0, "") if it did not fail, or nobody knows."""
    try:
        found = json.loads((folder / FAILURE).read_bytes())
        return int(found["exit_code"]), " ".join(str(found["reason"]).split())
    except (OSError, ValueError, TypeError, LookupError):
        return 0, ""
