"""Processes of this machine: who they are, whether they live, what they hold; and the one thread that watches.

What /proc says about processes is read here, but by the runtime on a robot, which stands alone.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 0.3  # between the rounds of the watching thread
HURRY_S = 0.03  # the same while a look is in a hurry
REMOVAL_S = 1.5  # for a look that is under way; a store or a disk may hold it for ever


def proc_lines(name: str) -> list[str]:
    """Lines of /proc/`name`, stripped; empty where there is none."""
    try:
        return [line.strip() for line in Path("/proc", name).read_text().splitlines()]
    except OSError:
        return []


def this_host() -> str:
    """This machine's name, its boot and process namespace: inside it, a pid means one process.

    Machines of one name, and containers that share a host's name, differ.
    """
    boot = "".join(proc_lines("sys/kernel/random/boot_id"))[:8]
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")[5:-1]  # of pid:[4026531836]
    return f"{platform.node()}-{boot}{namespace}"


def process_start(pid: int) -> str | None:
    """When a process of this host started, in ticks since the boot; None if it has ended, "" if it is not known."""
    fields = " ".join(proc_lines(f"{pid}/stat")).rpartition(")")[2].split()
    if fields:
        # Z: ended, but its parent has not noticed yet.
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # of another user, who hides it
        pass
    return ""


def memory_mib(name: str, pid: int | str | None = "self") -> float:
    """A figure of /proc/PID/status, such as VmRSS; 0 if there is none."""
    for line in proc_lines(f"{pid}/status"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Rounds:
    """The one thread of this process that watches: it calls all looks in turn, every PERIOD_S.

    A look must not raise. It returns whether it is in a hurry, and should be short: the others wait for it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start afresh, as in a forked child, which has no threads."""
        self._looks: list[Callable[[], bool]] = []
        self._thread: threading.Thread | None = None
        self._going = threading.RLock()  # held during a round
        self._wake = threading.Event()

    def add(self, look: Callable[[], bool]) -> None:
        """Call `look` in every round from now on."""
        with self._going:
            self._looks.append(look)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="watch", daemon=True
                )
                self._thread.start()
        self.hurry()

    def remove(self, look: Callable[[], bool]) -> None:
        """Call it no more; waits REMOVAL_S at most for one that is under way."""
        free = self._going.acquire(timeout=REMOVAL_S)
        if look in self._looks:
            self._looks.remove(look)
        if free:
            self._going.release()

    def hurry(self) -> None:
        """Begin the next round now."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            with self._going:
                hurried = [look() for look in tuple(self._looks)]
            self._wake.wait(HURRY_S if any(hurried) else PERIOD_S)
            self._wake.clear()


rounds = Rounds()
os.register_at_fork(after_in_child=rounds.forget)
