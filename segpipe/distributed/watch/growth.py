"""Does a figure grow without end? Told apart from noise, and from caches that fill and stop."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

WINDOWS = 5  # consecutive windows that must all rise
STEADY = 0.5  # the smallest rise must be at least this part of the largest: what fills up slows down


class Growth(NamedTuple):
    """A figure that grew in every one of the last windows."""

    since: int  # step
    before: float
    now: float
    per_step: float


class GrowthWatch:
    """Compares the minima of consecutive windows of samples.

    The minimum of a window is what is never given back; a peak does not raise it. Growth is reported once, when the
    minima rose four times in a row, by about as much per step, and by `least` in all. The first window is left out:
    workers start, kernels are chosen and buffers are made in it.
    """

    def __init__(self, *, least: float, window: int = 5) -> None:
        """`least`: the growth over the windows below which it is not worth a word, in the figure's unit; `window`:
        samples in a window."""
        self._least, self._window = least, window
        self._samples: list[tuple[float, int]] = []
        self._minima: deque[tuple[float, int]] = deque(maxlen=WINDOWS)
        self._warm = self._told = False

    def add(self, step: int, value: float) -> Growth | None:
        """Take a sample; the growth, when it is certain and was not told before."""
        self._samples.append((value, step))
        if self._told or len(self._samples) < self._window:
            return None
        lowest = min(self._samples)
        self._samples.clear()
        if self._warm:
            self._minima.append(lowest)
        self._warm = True
        return self._judge()

    def _judge(self) -> Growth | None:
        if len(self._minima) < WINDOWS:
            return None
        rises = [(after - before) / (end - start) for (before, start), (after, end) in pairwise(self._minima)]
        if min(rises) <= 0 or min(rises) < STEADY * max(rises):
            return None
        (before, since), (now, step) = self._minima[0], self._minima[-1]
        if now - before < self._least:
            return None
        self._told = True
        return Growth(since, before, now, (now - before) / (step - since))
