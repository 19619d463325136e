"""Processes of this machine: identity, liveness and memory; and threads that watch.

/proc is read only here, except by the runtime on a robot, which is standalone.
"""

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

PERIOD_S = 0.3  # between looks of a Watcher
HURRY_S = 0.03  # the same while a look is in a hurry
REMOVAL_S = (
    1.5  # time for a running look to end; a store or a disk may block it forever
)


def proc_lines(name: str) -> list[str]:
    """Lines of /proc/`name`, stripped; empty if it does not exist."""
    try:
        return [line.strip() for line in Path("/proc", name).read_text().splitlines()]
    except OSError:
        return []


@cache
def this_host() -> str:
    """This machine's name, boot id and pid namespace, within which a pid identifies one process.

    It differs for machines with the same name, and for containers that share a host's name.
    """
    boot = "".join(proc_lines("sys/kernel/random/boot_id"))[:8]
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")[5:-1]  # of pid:[4026531836]
    return f"{platform.node()}-{boot}{namespace}"


def process_start(pid: int) -> str | None:
    """Start time of a process of this host, in ticks since boot; None if it has ended, "" if not known."""
    fields = " ".join(proc_lines(f"{pid}/stat")).rpartition(")")[2].split()
    if fields:
        # Z: ended, but not yet reaped by its parent.
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # a hidden process of another user
        pass
    return ""


def memory_mib(name: str, pid: int | str | None = "self") -> float:
    """A memory figure of /proc/PID/status in MiB, such as VmRSS; 0 if it is missing."""
    for line in proc_lines(f"{pid}/status"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Watcher(threading.Thread):
    """A daemon thread that calls `look` every `period_s` until it is stopped.

    `look` must not raise; it returns whether it is in a hurry. Each look has its own thread, because one may be
    blocked by a store or a disk.
    """

    def __init__(self, look: Callable[[], bool], period_s: float = PERIOD_S) -> None:
        super().__init__(name="watch", daemon=True)
        self._look, self._period_s = look, period_s
        self._wake = threading.Event()
        self._ended = False

    def run(self) -> None:
        """Look again and again."""
        while not self._ended:
            hurried = self._look()
            self._wake.wait(HURRY_S if hurried else self._period_s)
            self._wake.clear()

    def hurry(self) -> None:
        """Make it look now."""
        self._wake.set()

    def stop(self) -> None:
        """Stop looking; waits at most REMOVAL_S for a running look."""
        self._ended = True
        self._wake.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join(REMOVAL_S)


# Cleanup actions of `end_process`.
before_end: list[Callable[[], None]] = []


def end_process(exit_code: int) -> None:
    """End this process at once, even if its main thread hangs.

    Each action of `before_end` gets at most REMOVAL_S, since a disk may hang, too.
    """
    for action in tuple(before_end):
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        thread.join(REMOVAL_S)
    sys.stderr.flush()
    os._exit(exit_code)
