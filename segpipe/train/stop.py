"""Ctrl-C and SIGTERM as a wish that the run grants at the end of its step."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Put back, at the end, how this process answers Ctrl-C and its like: torch's launcher leaves its own answers."""
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in heard}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may set one, and torch does not either
            for number, handler in before.items():
                if handler is not None:  # None: not one of Python's
                    signal.signal(number, handler)


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
