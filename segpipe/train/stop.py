"""Ctrl-C and the signals of schedulers, deferred to the end of the step.

SIGUSR1 is not among them: it writes the stacks of a rank (`segpipe.distributed.contract.Stacks`) and ends nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker


def stopping() -> list[signal.Signals]:
    """Signals that save and stop a run. A terminal that closes does not, where nohup has SIGHUP ignored."""
    hangup = (
        [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    )
    return [signal.SIGTERM, *hangup, signal.SIGUSR2]


def asking() -> list[signal.Signals]:
    """Signals by which terminals and schedulers ask for something; SIGUSR1 is one, which asks for no end."""
    return [signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, *stopping()]


class Stopped(KeyboardInterrupt):
    """A signal asks a process that waits for its children to stop them; its argument is the signal."""


@contextlib.contextmanager
def stops_raised() -> Iterator[None]:
    """SIGINT, SIGQUIT and the signals of `stopping` raise Stopped inside the block; a second Ctrl-C does so again.

    SIGUSR1, which a scheduler may send to all processes of a job, does nothing meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def stop(number: int, frame: object) -> None:
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    handlers = dict.fromkeys([signal.SIGINT, signal.SIGQUIT, *stopping()], stop)
    handlers[signal.SIGUSR1] = lambda number, frame: None
    before = {n: signal.signal(n, handler) for n, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed from Python
                signal.signal(number, handler)


@contextlib.contextmanager
def signals_deferred_by_children() -> Iterator[None]:
    """Children that the block starts have the signals of `asking` blocked until they unblock them.

    A terminal and a scheduler send them to all processes. One that imports torch would print a traceback, and the
    server that forks the ranks would end, and they with it. Children inherit what the thread blocks that starts them.
    Another thread receives the signals for this process; Python runs its handlers in the main one.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    resource_tracker.ensure_running()  # the start of the first process would start it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asking())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


class StopRequest:
    """Defers SIGINT and the signals of `stopping` to the end of the step; a second Ctrl-C interrupts at once.

    A terminal sends Ctrl-C to every process, and launchers forward it to their children, which then see it twice: what
    follows within ECHO_S is the same Ctrl-C.
    """

    ECHO_S = 3.0

    def __init__(self, *, outlive_error: bool = False) -> None:
        """With `outlive_error`, all but SIGINT are ignored once an exception has ended the steps.

        A launcher sends SIGTERM to all processes as soon as one has ended, and the others need a moment to report the
        cause.
        """
        self.asked = False
        self._outlive_error = outlive_error
        self._first = 0.0

    def __enter__(self) -> StopRequest:
        is_main = threading.current_thread() is threading.main_thread()
        # Other threads may not set handlers, and are not interrupted by signals.
        numbers = (signal.SIGINT, *stopping()) if is_main else ()
        self._before = {
            number: signal.signal(number, self._remember) for number in numbers
        }
        return self

    def _remember(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._first = True, now
        elif number == signal.SIGINT and now - self._first > self.ECHO_S:
            raise KeyboardInterrupt

    def __exit__(self, kind: object, *error: object) -> None:
        for number, handler in self._before.items():
            ignored = (
                self._outlive_error and kind is not None and number != signal.SIGINT
            )
            signal.signal(number, signal.SIG_IGN if ignored else handler)
