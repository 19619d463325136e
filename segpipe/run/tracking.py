"""Records of a run while it trains: metrics.jsonl, failure.json (why it ended), and calls of callbacks.

Other code reads metrics.jsonl; callbacks mirror it: the live page, trackers, and your own class. A callback that fails
costs one warning and never a training step. Only rank 0 writes; a class with `every_rank = True` is also called on the
other ranks, with their figures.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from segpipe.errors import CollectiveError, SegpipeError
from segpipe.files import (
    append,
    open_to_append,
    plain,
    read_json,
    to_json,
    write_atomically,
)
from segpipe.run.console import ERRORS
from segpipe.run.pages import Picture
from segpipe.run.report import (
    LATEST,
    PAGE,
    WORST,
    ReportData,
    live_pictures,
    write_report,
)
from segpipe.run.trackers import Figures, Tracked, tracker_classes
from segpipe.settings.config import Config
from segpipe.settings.setting import Values

if TYPE_CHECKING:
    from segpipe.train.engine import Run
    from segpipe.train.metrics import Validation

FILE_NAME = "metrics.jsonl"
FAILURE = "failure.json"
REWRITTEN_S = 60.0  # interval of the live page between validations
PATIENCE_S = 600.0  # for uploads at the end
# Keys of every line, and the types of their values.
RESERVED = {"step": (int,), "kind": (str,), "time_s": (int, float)}


def read_metrics(path: Path) -> list[Values]:
    """Entries of a metrics.jsonl, oldest first; empty if there is no file. Lines damaged by a crash are skipped."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_bytes().split(b"\n")[:-1]:  # the last one may be torn
        # A block lost in a power failure is not JSON, and JSON nested 10,000 deep raises RecursionError.
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and all(
                type(entry.get(key)) in kinds for key, kinds in RESERVED.items()
            ):
                entries.append(entry)
    return entries


class Tracker:
    """Appends to metrics.jsonl and forwards everything to callbacks; created by `open_tracker`."""

    def __init__(
        self,
        path: Path | None,
        callbacks: dict[str, _Called],
        kept: Sequence[Values] = (),
    ) -> None:
        self._path = path
        self._file = open_to_append(path) if path else None
        self._kept = {(entry["step"], entry["kind"]) for entry in kept}
        earlier_s = kept[-1]["time_s"] if kept else 0.0
        self._start = time.monotonic() - earlier_s
        self._callbacks = callbacks

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line {"step", "kind", "time_s", **values}; NaN and infinities become null.

        Skips a line that an earlier session of the run has written. time_s is `seconds`. The line is flushed to the
        operating system, so it survives a crash of the process.
        """
        assert not RESERVED.keys() & values.keys()
        if (step, kind) in self._kept:
            return
        figures = plain(values)
        if self._path is not None and self._file is not None:
            elapsed = round(self.seconds(), 3)
            entry = {"step": step, "kind": kind, "time_s": elapsed, **figures}
            append(self._path, self._file, _line(entry))
        self.call("on_metrics", step, dict(_scalars(figures, f"{kind}/")))

    def seconds(self) -> float:
        """Training time of all sessions, including validations and checkpoints, without pauses between sessions."""
        return time.monotonic() - self._start

    def validated(self, run: Run, found: Validation) -> None:
        """Forward a validation with pictures, which are predicted again here."""
        step = run.state.step
        shown = self._path is not None and (step, "validation") not in self._kept
        if self._callbacks and shown:
            from segpipe.train.metrics import summary

            classes = run.val_samples.classes
            scores = {
                **summary(found.total, classes.names),
                "confusion": found.total.numpy(),
                "names": classes.names,
                "palette": classes.palette,
            }
            self.call("on_validation", step, scores, live_pictures(run, found))

    def call(self, method: str, *given: Any) -> None:
        """Call this method of all callbacks, in their threads."""
        for called in self._callbacks.values():
            if called.is_alive():  # which did not raise
                # A copy: the callback may modify it in its own thread.
                called.calls.put((method, copy.deepcopy(given)))

    def close(self, exit_code: int = 0) -> None:
        """Close the file and end the live page; for a failed run, also the other callbacks."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        # Only rank 0 works on after this. The live page must not overwrite the final one.
        ends = self._callbacks if exit_code or self._path is None else [PAGE]
        self._end({"exit_code": exit_code}, ends)

    def end(self, config: Config, result: Values, exit_code: int = 0) -> None:
        """End the callbacks with results and files. A second call has no effect."""
        folder = config.run_dir
        files = [folder / name for name in ("report.html", "best.pt", "inputs.json")]
        if config.export.enabled:
            files.append(Path(config.export.dir or folder / "export"))
        existing = [path for path in files if path.exists()]
        self._end(
            {**result, "exit_code": exit_code, "files": existing}, self._callbacks
        )

    def _end(self, result: Values, names: Iterable[str]) -> None:
        ended = [self._callbacks.pop(each) for each in {*names} & {*self._callbacks}]
        for called in ended:
            called.calls.put(("on_end", (copy.deepcopy(result),)))
        for called in ended:
            called.join(PATIENCE_S)
            if called.is_alive():
                _warn(called.name, TimeoutError(f"no end within {PATIENCE_S:g} s"))


class _Called(Thread):
    """Calls a callback in a thread until it raises. A hang blocks no other callback, and exit at most PATIENCE_S."""

    def __init__(self, name: str, kind: Tracked) -> None:
        super().__init__(name=name, daemon=True)
        self._kind = kind
        self.calls: Any = SimpleQueue()
        self.start()

    def run(self) -> None:
        # Training has started, so torch is already imported.
        from segpipe.determinism.opgate import NoDraws

        method = ""
        try:
            with NoDraws():  # type: ignore[no-untyped-call]
                callback = self._kind()
                while method != "on_end":
                    method, given = self.calls.get()
                    if hasattr(callback, method):
                        getattr(callback, method)(*given)
        except BaseException as error:  # of the user's class, in its thread
            _warn(self.name, error)


def open_tracker(
    config: Config, run_dir: Path, resume_step: int | None, *, rank: int
) -> Tracker:
    """Tracker of this process; on ranks above 0 it writes no file.

    resume_step=None starts an empty metrics.jsonl. A number keeps the lines up to that step; later ones are written
    again.
    """
    classes = tracker_classes(config)
    path, kept = None, []
    if rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        if resume_step is not None:
            kept = [one for one in read_metrics(path) if one["step"] <= resume_step]
        write_atomically(path, b"".join(map(_line, kept)))
        if config.train.validate_every:
            classes = {PAGE: LivePage, **classes}
    callbacks = {
        name: _Called(name, kind)
        for name, kind in classes.items()
        if rank == 0 or getattr(kind, "every_rank", False)
    }
    tracker = Tracker(path, callbacks, kept)
    tracker.call("on_start", config, resume_step or 0)
    return tracker


def _warn(name: str, error: BaseException) -> None:
    ERRORS.print(
        f"{name} stopped: {type(error).__name__}: {str(error).rstrip('.')}. Training "
        f"continues; {FILE_NAME} has every value.",
        style="yellow",
    )


def _line(entry: Values) -> bytes:
    return (json.dumps(entry, allow_nan=False) + "\n").encode()


def _scalars(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Numbers of a line by name. A list becomes one curve for each index (rank), a mapping one for each name."""
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


class LivePage:
    """report.html of a running training, rewritten after each validation and every minute in between."""

    def on_start(self, config: Config, step: int) -> None:
        """Keep the configuration."""
        self._config = config
        self._shown: tuple[Values, Sequence[Picture]] | None = None

    def on_validation(
        self, step: int, scores: Values, pictures: Sequence[Picture]
    ) -> None:
        """Write the page."""
        self._shown = scores, pictures
        self._write()

    def on_metrics(self, step: int, metrics: Figures) -> None:
        """Rewrite the page if it is more than a minute old."""
        if self._shown and time.monotonic() - self._written > REWRITTEN_S:
            self._write()

    def on_end(self, result: Values) -> None:
        """Stop reloading the page of a failed run; other pages reload until the final report replaces them."""
        if self._shown and result.get("exit_code"):
            self._write(live=False)

    def _write(self, *, live: bool = True) -> None:
        assert self._shown
        scores, pictures = self._shown
        self._written = time.monotonic()
        folder = self._config.run_dir
        history = read_metrics(folder / FILE_NAME)
        data = ReportData(
            config=self._config,
            result={"steps": history[-1]["step"]},
            confusion=scores["confusion"],
            names=scores["names"],
            palette=scores["palette"],
            history=history,
            pictures={LATEST: pictures[:1], WORST: pictures[1:]},
            live=live,
        )
        write_report(folder / PAGE, data)


def note_failure(config: Config, error: SegpipeError) -> None:
    """Record why the run ended. On a full disk it writes nothing, so the error itself stays visible."""
    reason = " ".join(str(error).split())
    noted = Failure(
        error.exit_code, reason, time.time(), error.kind or type(error).__name__
    )
    with contextlib.suppress(SegpipeError, OSError):
        if config.run_dir.exists():  # not deleted or moved
            write_atomically(config.run_dir / FAILURE, to_json(noted._asdict()))


class Failure(NamedTuple):
    """Why the last session of a run ended; exit code 0 if it did not fail or the reason is unknown."""

    exit_code: int = 0
    reason: str = ""  # on one line
    time: float = 0.0  # as time.time(): the same failure may occur twice
    kind: str = ""  # class of the error: several share an exit code


def failure(folder: Path) -> Failure:
    """The failure that `note_failure` recorded."""
    try:
        return Failure(**read_json(folder / FAILURE))
    except (OSError, ValueError, TypeError):
        return Failure()


def note_lost(config: Config, rank: int, number: int, before: Failure) -> int:
    """Report a rank that a signal killed; returns the exit code. Keeps what another rank recorded in this session."""
    reason = f"rank {rank} was killed by signal {number} ({signal.strsignal(number)})."
    if number == signal.SIGKILL:
        reason += " The machine's memory may have run out: see dmesg."
    ERRORS.print(reason)
    noted = failure(config.run_dir)
    if noted != before:
        reason += f" {noted.reason}"
    note_failure(config, CollectiveError(reason))
    return CollectiveError.exit_code
