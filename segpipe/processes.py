"""Processes of this machine: identity, liveness and memory; and the watching threads.

/proc is read only here, except by the runtime on a robot, which is standalone.
"""

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 0.3  # between calls by a watching thread
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


class Rounds:
    """The watching threads of this process: each calls one look (a callback) every PERIOD_S.

    A look must not raise. It returns whether it is in a hurry. A look blocked by a store or a disk delays no other.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all looks, as needed in a forked child, which has no threads."""
        self._looks: dict[
            Callable[[], bool], tuple[threading.RLock, threading.Event]
        ] = {}

    def add(self, look: Callable[[], bool]) -> None:
        """Start a thread that calls `look` repeatedly."""
        going, wake = self._looks[look] = threading.RLock(), threading.Event()
        threading.Thread(
            target=self._run, args=(look, going, wake), name="watch", daemon=True
        ).start()

    def remove(self, look: Callable[[], bool]) -> None:
        """Stop calling `look`; waits at most REMOVAL_S for a running call."""
        if look in self._looks:
            going, wake = self._looks.pop(look)
            wake.set()
            if going.acquire(timeout=REMOVAL_S):
                going.release()

    def hurry(self) -> None:
        """Make all looks run now."""
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
