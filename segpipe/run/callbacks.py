"""Passes the figures of a run on: to metrics.jsonl always, and to callbacks that show them elsewhere.

metrics.jsonl is the record that other code reads; callbacks mirror it: the page of the living run, trackers, and a
class of your own. One that fails costs one warning and never a step of training. Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.disk import append, patiently
from segpipe.files import not_written, plain, write_atomically
from segpipe.run.console import ERRORS
from segpipe.run.report import LivePage, live_pictures
from segpipe.run.trackers import tracker_classes
from segpipe.run.tracking import FILE_NAME, RESERVED, read_metrics
from segpipe.settings.config import Config

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.train.metrics import Validation
    from segpipe.train.training import Run


class Tracker:
    """Appends to metrics.jsonl and passes everything on to callbacks; created by `open_tracker`."""

    def __init__(
        self,
        path: Path | None,
        callbacks: Mapping[str, Any] | None = None,
        kept: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._path, self._file = path, None
        if path:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = patiently(path, lambda: os.open(path, flags, 0o644))
        self._kept = {(entry["step"], entry["kind"]) for entry in kept}
        earlier_s = kept[-1]["time_s"] if kept else 0.0
        self._start = time.monotonic() - earlier_s
        self._callbacks = dict(callbacks or {})
        self._thread = ThreadPoolExecutor(1, "callbacks")

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line {"step", "kind", "time_s", **values}; NaN and infinities become null.

        A line that an earlier session of the run has written is not written again. time_s is the training time of all
        sessions, without the pauses between them. The line is flushed to the operating system, so it survives a crash
        of the process.
        """
        assert not RESERVED.keys() & values.keys()
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
        self.call("on_metrics", step, dict(_scalars(figures, f"{kind}/")))

    def validated(self, run: Run, found: Validation) -> None:
        """Pass a validation on with pictures, which are predicted here once more."""
        step = run.state.step
        if self._callbacks and (step, "validation") not in self._kept:
            scores = _scores(found, run.val_samples.classes)
            self.call("on_validation", step, scores, live_pictures(run, found))

    def call(self, method: str, *given: Any) -> None:
        """Call the method of all callbacks, in their thread."""
        if self._callbacks:
            self._thread.submit(self._call, method, given)

    def _call(self, method: str, given: Sequence[Any]) -> None:
        """The first exception of a callback prints a warning and ends it."""
        for name, callback in list(self._callbacks.items()):
            try:
                if hasattr(callback, method):
                    getattr(callback, method)(*given)
            except Exception as error:
                del self._callbacks[name]
                _warn(name, error)

    def close(self, exit_code: int = 0) -> None:
        """Close the file, and wait for the callbacks; those of a run that failed end, others with `end`."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        if exit_code:
            self._end({"exit_code": exit_code})
        elif self._callbacks:  # a page must not come after the final one
            self._thread.submit(int).result()

    def end(
        self, config: Config, result: Mapping[str, Any], exit_code: int = 0
    ) -> None:
        """End the callbacks with results and files. A second call does nothing."""
        folder = config.run_dir
        files = [folder / name for name in ("report.html", "best.pt", "inputs.json")]
        if config.export.enabled:
            files.append(Path(config.export.dir or folder / "export"))
        existing = [path for path in files if path.exists()]
        self._end({**result, "exit_code": exit_code, "files": existing})

    def _end(self, result: Mapping[str, Any]) -> None:
        self.call("on_end", result)
        self._thread.shutdown()
        self._callbacks.clear()


def open_tracker(
    config: Config, run_dir: Path, resume_step: int | None, *, rank: int
) -> Tracker:
    """Tracker of this process; on ranks above 0 it does nothing.

    resume_step=None starts an empty metrics.jsonl. A number keeps the lines up to that step; later ones will be written
    again.
    """
    if rank != 0:
        return Tracker(None)
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    kept: list[dict[str, Any]] = []
    if resume_step is not None:
        kept = [entry for entry in read_metrics(path) if entry["step"] <= resume_step]
    write_atomically(path, b"".join(map(_line, kept)))
    callbacks: dict[str, Any] = {}
    if config.train.validate_every:
        callbacks["report.html"] = LivePage()
    for name, kind in tracker_classes(config).items():
        try:
            callbacks[name] = kind()
        except Exception as error:
            _warn(name, error)
    tracker = Tracker(path, callbacks, kept)
    tracker.call("on_start", config, resume_step or 0)
    return tracker


def _warn(name: str, error: Exception) -> None:
    ERRORS.print(
        f"{name} stopped: {type(error).__name__}: {error}. Training "
        f"continues; {FILE_NAME} has every value.",
        style="yellow",
    )


def _scores(found: Validation, classes: ClassTable) -> dict[str, Any]:
    """Figures of a validation: those of `metrics.summary`, `confusion`, `names` and `palette`."""
    from segpipe.train.metrics import summary

    return {
        **summary(found.total, classes.names),
        "confusion": found.total.numpy(),
        "names": classes.names,
        "palette": classes.palette,
    }


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
