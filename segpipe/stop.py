"""Ctrl-C and SIGTERM as a wish that the run grants at the end of its step."""

from __future__ import annotations

import signal
import time


class StopRequest:
    """Remembers Ctrl-C and SIGTERM until the end of the step; a second Ctrl-C interrupts at once.

    The terminal sends Ctrl-C to every process, and launchers send it on to theirs: what follows at once is its echo.
    """

    ECHO_S = 3.0

    def __init__(self, *, last_words: bool = False) -> None:
        """With `last_words`, SIGTERM is not heard any more once an error has ended the steps: a launcher sends it to
        all processes as soon as one has ended, and the others need a moment to find out and say what was wrong."""
        self.asked = False
        self._last_words = last_words
        self._first = 0.0

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _remember(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._first = True, now
        elif number == signal.SIGINT and now - self._first > self.ECHO_S:
            raise KeyboardInterrupt

    def __exit__(self, kind: object, *error: object) -> None:
        for number, handler in self._before.items():
            ended = self._last_words and kind is not None and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ended else handler)
