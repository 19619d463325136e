"""What a run leaves while it trains: metrics.jsonl, failure.json, which says why it ended, and calls of callbacks."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from segpipe.errors import CollectiveError, SegpipeError
from segpipe.files import read_json, to_json, write_atomically
from segpipe.settings.config import Config

if TYPE_CHECKING:
    from segpipe.run.pictures import Picture

FILE_NAME = "metrics.jsonl"
FAILURE = "failure.json"
# Keys of every line, and the types of their values.
RESERVED = {"step": (int,), "kind": (str,), "time_s": (int, float)}


class Callback(Protocol):
    """Shows a run elsewhere. Methods may be missing and may raise; they are called in order, beside the training."""

    def on_start(self, config: Config, step: int) -> None:
        """Before the first update; `step` is above 0 when the run is resumed."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Figures of one step, by names such as `train/loss`."""

    def on_validation(
        self, step: int, scores: dict[str, Any], pictures: Sequence[Picture]
    ) -> None:
        """After each validation: miou, iou by class, `confusion` int64 (C, C), `names` and `palette` of the classes.

        The pictures are the first image of the split, the same each time, and then the worst ones.
        """

    def on_end(self, result: dict[str, Any]) -> None:
        """At the end: `exit_code`, and of a finished run also result.json and the list `files`."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Entries of a metrics.jsonl, oldest first; empty if there is no file. Lines damaged by a crash are skipped."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_bytes().split(b"\n")[:-1]:  # the last one may be torn
        # A block lost in a power failure is no JSON, and JSON nested 10,000 deep raises RecursionError.
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and _has_reserved(entry):
                entries.append(entry)
    return entries


def _has_reserved(entry: Mapping[str, Any]) -> bool:
    return all(type(entry.get(key)) in kinds for key, kinds in RESERVED.items())


def note_failure(config: Config, code: int, reason: str) -> None:
    """Write down why the run ended; a full disk does not hide the error itself: then nothing is written."""
    content = to_json({"exit_code": code, "reason": reason})
    with contextlib.suppress(SegpipeError, OSError):
        write_atomically(config.run_dir / FAILURE, content)


def failure(folder: Path) -> tuple[int, str]:
    """Exit code and reason, on one line, of the run's last session; (0, "") if it did not fail, or nobody knows."""
    try:
        noted = read_json(folder / FAILURE)
        return int(noted["exit_code"]), " ".join(str(noted["reason"]).split())
    except (OSError, ValueError, TypeError, LookupError):
        return 0, ""


def note_lost(config: Config, rank: int, number: int, before: tuple[int, str]) -> int:
    """Exit code for a rank that a signal ended; what another rank wrote about it in this session is kept."""
    reason = f"rank {rank} was ended by signal {number} ({signal.strsignal(number)})."
    if number == signal.SIGKILL:
        reason += " The machine's memory may have run out: see dmesg."
    print(reason, file=sys.stderr)
    noted = failure(config.run_dir)
    if noted != before:
        reason += f" {noted[1]}"
    note_failure(config, CollectiveError.exit_code, reason)
    return CollectiveError.exit_code
