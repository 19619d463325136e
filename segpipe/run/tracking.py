"""Metrics of a run: metrics.jsonl always, and one tracker on request that shows them elsewhere. Only rank 0 writes.

metrics.jsonl is the record that other code reads; a tracker mirrors it. If the tracker's service is unreachable or
crashes, that costs one warning and never a step of training. failure.json says why the last session ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from segpipe.disk import append, patiently
from segpipe.errors import CollectiveError, SegpipeError
from segpipe.files import not_written, plain, to_json, write_atomically
from segpipe.run.trackers import Mirror, Picture, check_ready, mirror_class, run_end
from segpipe.settings.config import Config

FILE_NAME = "metrics.jsonl"
FAILURE = "failure.json"
# Keys of every line, and the types of their values.
_RESERVED = {"step": (int,), "kind": (str,), "time_s": (int, float)}


def check_tracking(config: Config) -> None:
    """Raise ConfigError if the tracker's package is not installed, or wandb is online without a login."""
    check_ready(config)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Entries of a metrics.jsonl, oldest first; empty if there is no file. Lines damaged by a crash are skipped."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:  # the last one may be torn
        # A block lost in a power failure is no JSON, and JSON nested 10,000 deep raises RecursionError.
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and _has_reserved(entry):
                found.append(entry)
    return found


def _has_reserved(entry: Mapping[str, Any]) -> bool:
    return all(type(entry.get(key)) in kinds for key, kinds in _RESERVED.items())


def note_failure(config: Config, code: int, reason: str) -> None:
    """Write down why the run ended; a full disk does not hide the error itself: then nothing is written."""
    with contextlib.suppress(SegpipeError, OSError):
        write_atomically(
            config.run_dir / FAILURE, to_json({"exit_code": code, "reason": reason})
        )


def failure(folder: Path) -> tuple[int, str]:
    """Exit code and reason, on one line, of the run's last session; (0, "") if it did not fail, or nobody knows."""
    try:
        found = json.loads((folder / FAILURE).read_bytes())
        return int(found["exit_code"]), " ".join(str(found["reason"]).split())
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


class Tracker:
    """Appends to metrics.jsonl and mirrors to a tracker; created by `open_tracker`.

    pictures: what the report shows, for the end of the run.
    """

    def __init__(
        self,
        path: Path | None,
        mirror: _Guarded | None = None,
        *,
        kept: Sequence[Mapping[str, Any]] = (),
        ends_later: bool = False,
    ) -> None:
        self.pictures: list[Picture] = []
        self._path, self._file = path, None
        if path:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = patiently(path, lambda: os.open(path, flags, 0o644))
        self._kept = {(entry["step"], entry["kind"]) for entry in kept}
        earlier_s = kept[-1]["time_s"] if kept else 0.0
        self._mirror, self._ends_later = mirror, ends_later
        self._start = time.monotonic() - earlier_s

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line {"step", "kind", "time_s", **values}; NaN and infinities become null.

        A line that an earlier session of the run has written is not written again. time_s is the training time of all
        sessions, without the pauses between them. The line is flushed to the operating system, so it survives a crash
        of the process.
        """
        assert not _RESERVED.keys() & values.keys()
        if self._file is None or (step, kind) in self._kept:
            return
        assert self._path is not None
        figures = plain(values)
        elapsed = round(time.monotonic() - self._start, 3)
        entry = {"step": step, "kind": kind, "time_s": elapsed, **figures}
        try:
            append(self._path, self._file, _line(entry))
        except OSError as error:
            raise not_written(self._path, error) from error
        if self._mirror:
            scalars = dict(_scalars(figures, f"{kind}/"))
            self._mirror.attempt(lambda mirror: mirror.log(step, scalars))

    def close(self, exit_code: int = 0) -> None:
        """Close the file. The tracker ends too, failed if `exit_code` is not 0; after a success, `end` may follow."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        if exit_code or not self._ends_later:
            self._close_mirror(exit_code)

    def end(
        self, config: Config, result: Mapping[str, Any], exit_code: int = 0
    ) -> None:
        """Send results, pictures and files to the tracker, and end it. A second call does nothing."""
        if self._mirror:
            end = run_end(config, result, self.pictures)
            self._mirror.attempt(lambda mirror: mirror.finish(end))
        self._close_mirror(exit_code)

    def _close_mirror(self, exit_code: int) -> None:
        if self._mirror:
            self._mirror.attempt(lambda mirror: mirror.close(exit_code))
        self._mirror = None


def open_tracker(
    config: Config,
    run_dir: Path,
    resume_step: int | None,
    *,
    rank: int,
    ends_later: bool = False,
) -> Tracker:
    """Tracker of this process; on ranks above 0 it does nothing.

    resume_step=None starts an empty metrics.jsonl. A number keeps the lines up to that step; later ones will be written
    again. ends_later: `Tracker.end` will be called after the training.
    """
    if rank != 0:
        return Tracker(None)
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    kept: list[dict[str, Any]] = []
    if resume_step is not None:
        kept = [entry for entry in read_metrics(path) if entry["step"] <= resume_step]
    write_atomically(path, b"".join(map(_line, kept)))
    mirror = None
    if kind := mirror_class(config):
        mirror = _Guarded(
            config.track.name, partial(kind, config, run_dir, resume_step)
        )
    return Tracker(path, mirror, kept=kept, ends_later=ends_later)


def _line(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry, allow_nan=False) + "\n").encode()


def _scalars(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Finite numbers by name. A list becomes one curve for each index (rank), a mapping one for each name."""
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            yield f"{prefix}{name}", value


class _Guarded:
    """A mirror whose first exception, also that of its start, prints a warning and ends it."""

    def __init__(self, name: str, start: Callable[[], Mirror]) -> None:
        self._name = name
        self._mirror: Mirror | None = None
        self._or_warn(lambda: setattr(self, "_mirror", start()))

    def attempt(self, action: Callable[[Mirror], None]) -> None:
        """Do something with the mirror, if it still works."""
        if mirror := self._mirror:
            self._or_warn(lambda: action(mirror))

    def _or_warn(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._mirror = None
            Console(stderr=True, emoji=False).print(
                f"{self._name} stopped: {type(error).__name__}: {error}. Training "
                f"continues; {FILE_NAME} has every value.",
                style="yellow",
                markup=False,
                highlight=False,
            )
