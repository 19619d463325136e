"""One training run in this process: its parts, and where it reports to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from segpipe.data.samples import CachedSamples

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.data.frequency import PixelCounts
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config
    from segpipe.train.recorder import Watch
    from segpipe.train.state import TrainState
    from segpipe.train.validate import Validation


class View(contextlib.AbstractContextManager[Any], Protocol):
    """Shows progress to a person."""

    def say(self, text: str) -> None: ...

    def advance(self, done: int, figures: dict[str, str] | None = None) -> None: ...

    def validating(self, done: int, total: int) -> None: ...


class Log(Protocol):
    """Keeps figures by step and kind; a line that an earlier session of the run has written is not written again."""

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None: ...

    def validated(self, run: Run, found: Validation) -> None: ...

    def close(self, exit_code: int = 0) -> None: ...


# Makes both when nothing but the training itself can fail any more; given the step from which a run is resumed, or
# None, which clears the folder of an earlier run.
OpenOutputs = Callable[[int | None], tuple[View, Log]]


class Clock:
    """Time spent on updates, without validations and checkpoints."""

    def __init__(self) -> None:
        self.seconds, self.updates = 0.0, 0
        self._mark = time.perf_counter()
        self._recent = (0.0, 0)

    def tick(self) -> None:
        """Count an update. The first is left out of the figures: it starts workers and picks kernels."""
        now = time.perf_counter()
        self.seconds += now - self._mark if self.updates else 0.0
        self.updates, self._mark = self.updates + 1, now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not counted."""
        before = time.perf_counter()
        yield
        self._mark += time.perf_counter() - before

    def rate(self) -> float:
        """Updates per second so far; 0 before the second."""
        return (self.updates - 1) / self.seconds if self.seconds > 0 else 0.0

    def recent_rate(self) -> float:
        """Updates per second since the last call."""
        seconds, updates = self._recent
        self._recent = (self.seconds, self.updates)
        return (
            (self.updates - updates) / (self.seconds - seconds)
            if self.seconds > seconds
            else 0.0
        )


@dataclass
class Run:
    """One training run in this process."""

    config: Config
    group: Group
    train_samples: DataSet
    val_samples: DataSet
    counts: PixelCounts | None  # pixels of each class in the training samples
    state: TrainState
    fingerprint: dict[str, Any]  # of rank 0
    watch: Watch
    view: View
    log: Log
    clock: Clock = field(default_factory=Clock)
    saved: int | None = None  # step of last.pt, if there is one

    @cached_property
    def val_cache(self) -> CachedSamples:
        """Images that stay in memory from one validation to the next."""
        return CachedSamples(
            self.val_samples,
            self.config.data.cache_mib if self.config.train.validate_every else 0,
        )

    @property
    def folder(self) -> Path:
        return self.config.run_dir
