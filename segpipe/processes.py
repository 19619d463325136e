"""Processes of this machine: who they are, whether they live, what they hold; and the threads that watch.

What /proc says about processes is read here, but by the runtime on a robot, which stands alone.
"""

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 0.3  # between the rounds of a watching thread
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
    """The threads of this process that watch: each calls one look every PERIOD_S.

    A look must not raise. It returns whether it is in a hurry. One that a store or a disk holds keeps up no other.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start afresh, as in a forked child, which has no threads."""
        self._looks: dict[
            Callable[[], bool], tuple[threading.RLock, threading.Event]
        ] = {}

    def add(self, look: Callable[[], bool]) -> None:
        """Call `look` in every round from now on."""
        going, wake = self._looks[look] = threading.RLock(), threading.Event()
        threading.Thread(
            target=self._run, args=(look, going, wake), name="watch", daemon=True
        ).start()

    def remove(self, look: Callable[[], bool]) -> None:
        """Call it no more; waits REMOVAL_S at most for one that is under way."""
        if look in self._looks:
            going, wake = self._looks.pop(look)
            wake.set()
            if going.acquire(timeout=REMOVAL_S):
                going.release()

    def hurry(self) -> None:
        """Begin the next rounds now."""
        for _, wake in tuple(self._looks.values()):
            wake.set()

    def _run(
        self, look: Callable[[], bool], going: threading.RLock, wake: threading.Event
    ) -> None:
        while True:
            with going:
                if look not in self._looks:
                    return
                hurried = look()
            wake.wait(HURRY_S if hurried else PERIOD_S)
            wake.clear()


rounds = Rounds()
os.register_at_fork(after_in_child=rounds.forget)

# What `end_process` has to let go.
before_end: list[Callable[[], None]] = []


def end_process(exit_code: int) -> None:
    """End this process at once, also where its main thread hangs.

    Each action of `before_end` has REMOVAL_S, as a disk may hang too.
    """
    for action in tuple(before_end):
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        thread.join(REMOVAL_S)
    sys.stderr.flush()
    os._exit(exit_code)
