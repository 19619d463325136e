"""How fast the updates are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


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
        return (self.updates - updates) / (self.seconds - seconds) if self.seconds > seconds else 0.0
