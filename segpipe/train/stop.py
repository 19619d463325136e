"""Ctrl-C and the signals of schedulers, deferred to the end of the step.

SIGUSR1 is not one of them: it writes the stacks of a rank (`segpipe.distributed.contract.Stacks`) and ends nothing.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker


def stopping() -> list[signal.Signals]:
    """Signals that save and stop a run. SIGHUP, from a closing terminal, is not one of them under nohup."""
    hangup = (
        [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    )
    return [signal.SIGTERM, *hangup, signal.SIGUSR2]


def asking() -> list[signal.Signals]:
    """Signals that terminals and schedulers send: those that stop a run, and SIGUSR1, which does not."""
    return [signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, *stopping()]


class Stopped(KeyboardInterrupt):
    """Raised by a signal in a process that waits for its children, to stop them; its argument is the signal."""


@contextlib.contextmanager
def stops_raised() -> Iterator[None]:
    """SIGINT, SIGQUIT and the signals of `stopping` raise Stopped inside the block; so does a second Ctrl-C.

    SIGUSR1, which a scheduler may send to all processes of a job, does nothing inside the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGUSR1:
            return
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in asking()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed from Python
                signal.signal(number, handler)


@contextlib.contextmanager
def signals_deferred_by_children() -> Iterator[None]:
    """Children started in the block have the signals of `asking` blocked until they unblock them.

    Terminals and schedulers signal all processes. A child that is importing torch would print a traceback, and the fork
    server would end, and the ranks with it. Children inherit the blocked signals of the thread that starts them.
    Another thread receives the signals for this process; Python runs its handlers in the main thread.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    resource_tracker.ensure_running()  # otherwise the first process start would do this, which unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asking())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


class StopRequest:
    """Defers SIGINT and the signals of `stopping` to the end of the step; a second Ctrl-C interrupts at once.

    A terminal sends Ctrl-C to every process, and launchers forward it to their children, which then get it twice: a
    signal within ECHO_S counts as the same Ctrl-C.
    """

    ECHO_S = 3.0

    def __init__(self, *, outlive_error: bool = False) -> None:
        """With `outlive_error`, all signals except SIGINT are ignored once an exception has ended the steps.

        A launcher sends SIGTERM to all processes as soon as one ends, and the others need a moment to report the cause.
        """
        self.asked = False
        self._outlive_error = outlive_error
        self._first = 0.0

    def __enter__(self) -> "StopRequest":
        is_main = threading.current_thread() is threading.main_thread()
        # Only the main thread may set handlers, and only it is interrupted by signals.
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
