"""A thread on every rank that ends the run when ranks call different collectives, or one does not come.

Every 0.3 s each rank writes the hashes of its last calls to the store, and rank 0 compares them (another rank when
rank 0 is silent). On a difference, or when some wait longer than `compute.timeout_s` for others, it asks all for their
calls and stacks, prints the diagnosis, and writes it to the store as the verdict. Every rank raises the verdict at its
next collective. A rank that hangs inside one cannot, so its process is ended.

The training thread never waits for this one, which takes about 0.4 ms of a core every 0.3 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from segpipe.distributed.watch.calls import CallLog, Ranks, diagnose, is_ours, site
from segpipe.errors import CollectiveError
from segpipe.files import this_host

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from segpipe.distributed.watch.stacks import Stacks

PERIOD_S = 0.3  # between looks at the other ranks
HURRY_S = 0.03  # the same once something is wrong
ANSWERS_S = 0.6  # for ranks to report their calls
ABSENT_S = 3.0  # after which another rank compares in place of a silent rank 0
GRACE_S = 3.0  # for the training thread to notice a verdict
CLOSING_S = 60.0  # for the training thread to end after that
PARTING_S = 10.0  # for the others to close before rank 0
LOST_S = 1.0  # the same after a verdict, when some may never close


class State(NamedTuple):
    """What a rank writes to the store every 0.3 s."""

    calls: int  # number of the last one
    rolling: array[int]  # hashes at its last calls, oldest first

    def pack(self) -> str:
        """As text, about 8 KB."""
        return f"{self.calls} {self.rolling.tobytes().hex()}"

    @classmethod
    def unpack(cls, text: bytes) -> State:
        """The reverse."""
        calls, _, rolling = text.decode().partition(" ")
        return cls(int(calls), array("Q", bytes.fromhex(rolling)))

    def at(self, number: int) -> int | None:
        """The hash of all calls up to `number`, if it is still known."""
        place = number - self.calls + len(self.rolling) - 1
        return self.rolling[place] if 0 <= place < len(self.rolling) else None


def differ(states: list[State]) -> bool:
    """Whether two ranks made different calls, as far as both have come; False when that is too long ago to tell.

    Every pair counts: a third rank may be behind, because it died of what the two sent.
    """
    return any(
        len({state.at(count) for state in states if state.calls >= count} - {None}) > 1
        for count in {state.calls for state in states if state.calls > 0}
    )


def end_process(error: CollectiveError) -> None:
    """End this process at once: its training thread hangs."""
    sys.stderr.flush()
    os._exit(error.exit_code)


def print_error(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


class Watcher:
    """The thread of one rank. Only it uses `store`; the training thread sets flags and waits for events."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        end: Callable[[CollectiveError], None] = end_process,
        say: Callable[[str], None] = print_error,
    ) -> None:
        self.log = CallLog()
        self.stacks: Stacks | None = None
        self._store, self._rank, self._world_size, self._timeout_s = (
            store,
            rank,
            world_size,
            timeout_s,
        )
        self._end, self.say = end, say
        self._states = [f"state/{other}" for other in range(world_size)]
        self._verdict: CollectiveError | None = None
        self._own: str | None = None  # verdict that this rank publishes
        self._asked = self._answered = self._placed = False
        self._beat, self._beat_seen = -1, time.monotonic()  # of rank 0
        self._least, self._since = -1, 0.0
        self._alarm_seen = 0.0
        self._wake, self._decided, self._heard, self._closed = (
            threading.Event() for _ in range(4)
        )
        self._thread = threading.Thread(
            target=self._run, name="collective-watcher", daemon=True
        )

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    # The training thread's side.

    def keep(self, stacks: Stacks) -> None:
        """Write stacks there from now on."""
        self.stacks = stacks
        self._wake.set()

    def check(self) -> None:
        """Raises the verdict, if there is one."""
        if self._verdict is not None:
            self._heard.set()
            raise self._verdict

    def wait(self, seconds: float) -> CollectiveError | None:
        """The verdict, if there is one or comes within `seconds`."""
        self._decided.wait(seconds)
        if self._verdict is not None:
            self._heard.set()
        return self._verdict

    def ask(self, seconds: float) -> CollectiveError | None:
        """Have all ranks report their calls; the verdict, if there is one within `seconds`."""
        self._asked = True
        self._wake.set()
        return self.wait(seconds)

    def publish(self, text: str, exit_code: int) -> None:
        """Make `text`, which this rank prints itself, the verdict with which all ranks end."""
        self._own = json.dumps({"text": text, "exit_code": exit_code})
        self._wake.set()
        self.wait(2.0)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._heard.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD_S + 1.0)
            self._see_off()

    def _see_off(self) -> None:
        """Rank 0, whose process may hold the store, closes last: a thread that loses the store prints a stack."""
        with contextlib.suppress(RuntimeError):
            patience = PARTING_S if self._verdict is None else LOST_S
            gone, end = self._store.add("closed", 1), time.monotonic() + patience
            while (
                self._rank == 0 and gone < self._world_size and time.monotonic() < end
            ):
                time.sleep(0.02)
                gone = self._store.add("closed", 0)

    # The thread's side.

    def _run(self) -> None:
        try:
            while self._verdict is None and not self._closed.is_set():
                self.tick()
                self._wake.wait(
                    HURRY_S if self._answered or self._verdict else PERIOD_S
                )
                self._wake.clear()
        except (
            RuntimeError
        ):  # the process that held the store ended: the backend reports the rest
            self._decided.set()  # there will be no verdict
            return
        if self._answered and self.stacks is not None:
            self.stacks.dump_recorder()
        if self._verdict is not None and not (
            self._heard.wait(GRACE_S) and self._closed.wait(CLOSING_S)
        ):
            self._end(self._verdict)

    def tick(self) -> None:
        """One look at the others. Raises RuntimeError when the store is gone."""
        store = self._store
        store.set(self._states[self._rank], self._state().pack())
        if self.stacks is not None and not self._placed:
            self._placed = True
            store.set(
                f"process/{self._rank}",
                json.dumps({"pid": os.getpid(), "host": this_host()}),
            )
        if self._own is not None:
            store.compare_set("verdict", "", self._own)
        if store.check(["verdict"]):
            self._accept(store.get("verdict"))
            return
        if self._asked:
            store.compare_set("alarm", "", "asked")
        compares = self._compares()
        if store.check(["alarm"]):
            self._answer()
            if compares:
                self._decide(late=store.get("alarm") == b"late")
        elif compares and store.check(self._states):
            states = [State.unpack(text) for text in store.multi_get(self._states)]
            if (late := self._late(states)) or differ(states):
                store.compare_set("alarm", "", "late" if late else "differ")
                self._wake.set()

    def _state(self) -> State:
        entries = self.log.last()
        return State(
            entries[-1].number if entries else 0,
            array("Q", [entry.rolling for entry in entries]),
        )

    def _compares(self) -> bool:
        """Whether this rank compares: rank 0, and after a silence of rank 0 the others, one after another."""
        if self._rank == 0:
            self._store.add("beat", 1)
            return True
        beat, now = self._store.add("beat", 0), time.monotonic()
        if beat != self._beat:
            self._beat, self._beat_seen = beat, now
        return now - self._beat_seen > ABSENT_S * self._rank

    def _late(self, states: list[State]) -> bool:
        """Whether some have waited longer than the timeout for others."""
        counts, now = [state.calls for state in states], time.monotonic()
        if min(counts) == max(counts):
            self._least = -1
        elif min(counts) != self._least:
            self._least, self._since = min(counts), now
        return self._least >= 0 and now - self._since > self._timeout_s

    def _answer(self) -> None:
        """Report what this rank has called and where it is; once."""
        if self._answered:
            return
        self._answered, self._alarm_seen = True, time.monotonic()
        calls = [(entry.number, str(entry.call)) for entry in self.log.last()]
        self._store.set(
            f"calls/{self._rank}", json.dumps({"calls": calls, "position": _position()})
        )
        if self.stacks is not None:
            self.stacks.dump("ranks called different collectives, or one does not come")

    def _decide(self, *, late: bool) -> None:
        """Write the verdict once all have answered or ANSWERS_S are over."""
        answered = [
            rank
            for rank in range(self._world_size)
            if self._store.check([f"calls/{rank}"])
        ]
        if (
            len(answered) < self._world_size
            and time.monotonic() - self._alarm_seen < ANSWERS_S
        ):
            return
        self._signal([rank for rank in range(self._world_size) if rank not in answered])
        answers = {
            rank: json.loads(self._store.get(f"calls/{rank}")) for rank in answered
        }
        rings = {
            rank: [(number, call) for number, call in answer["calls"]]
            for rank, answer in answers.items()
        }
        positions = {rank: answer["position"] for rank, answer in answers.items()}
        counts = [
            State.unpack(self._store.get(key)).calls if self._store.check([key]) else 0
            for key in self._states
        ]
        text = diagnose(
            Ranks(rings, positions, counts), self._timeout_s if late else None
        )
        if self.stacks is not None:
            text += f" The stacks of all ranks are in {self.stacks.path.parent}."
        self.say(text)
        self._store.compare_set(
            "verdict",
            "",
            json.dumps({"text": text, "exit_code": CollectiveError.exit_code}),
        )

    def _signal(self, silent: list[int]) -> None:
        """Have silent ranks of this machine write their stacks; a call may hold their interpreter."""
        for rank in silent:
            if self._store.check([f"process/{rank}"]):
                process = json.loads(self._store.get(f"process/{rank}"))
                if process["host"] == this_host():  # with its process numbers
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process["pid"], signal.SIGUSR1)

    def _accept(self, verdict: bytes) -> None:
        content = json.loads(verdict)
        error = CollectiveError(content["text"])
        error.exit_code, error.told = content["exit_code"], True
        self._verdict = error
        self._decided.set()


def _position() -> str:
    """Where the main thread is: the innermost line of segpipe outside segpipe/distributed, and the innermost of all."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not is_ours(frame):
        frame = frame.f_back
    if innermost is None:
        return ""
    within = f" (in {site(innermost)})" if frame is not innermost else ""
    return site(frame or innermost) + (within if frame is not None else "")
