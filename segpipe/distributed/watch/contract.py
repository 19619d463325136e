"""The contract between ranks: the same collectives, with the same shapes, in the same order, from the same lines.

Backends do not check it. With shapes that differ, gloo reports success on some ranks and hangs on others; NCCL hangs.
So every collective of segpipe is announced to a `Contract` just before it is called, which costs a few microseconds.

A difference is found in two ways, and each names both sides (op, dtype, shape, line):
- `ticket` and `settle` compare a hash of all calls inside a collective that an update needs anyway, so that no update
  is applied or saved after a collective that went wrong;
- the watching thread of every rank writes the hashes of its last calls to the store every 0.3 s, and rank 0 compares
  them (another rank when rank 0 is silent), also while a rank hangs. That takes about 0.4 ms of a core.

On a difference, or when some wait longer than `compute.timeout_s` for others, all ranks report their calls and stacks.
The rank that compares prints the diagnosis and writes it to the store as the verdict, which every rank raises at its
next collective. A rank that hangs inside one cannot, so its process is ended.
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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from segpipe.distributed.watch.calls import CallLog, Ranks, diagnose, position
from segpipe.distributed.watch.stacks import Stacks
from segpipe.errors import CollectiveError, SegpipeError
from segpipe.processes import rounds, this_host

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

MARGIN_S = 15.0  # by which the backend's own timeout is longer than ours, whose message says more
ANSWER_S = 10.0  # for the ranks to agree on what went wrong
ANSWERS_S = 0.6  # for ranks to report their calls
REPORT_S = 2.0  # for a rank that ended to say why
ABSENT_S = 3.0  # after which another rank compares in place of a silent rank 0
GRACE_S = 3.0  # for the training thread to notice a verdict
CLOSING_S = 60.0  # for the training thread to end after that
PARTING_S = 10.0  # for the others to close before rank 0
LOST_S = 1.0  # the same after a verdict, when some may never close
TICKET_BITS = 48  # so that the sum of the tickets of 32768 ranks is exact in int64


class State(NamedTuple):
    """What a rank writes to the store in every round."""

    calls: int = 0  # number of the last one
    process: str = ""  # HOST:PID, once it writes its stacks on SIGUSR1
    rolling: array[int] = array("Q")  # hashes at its last calls, oldest first

    def pack(self) -> str:
        """As text, about 8 KB."""
        return f"{self.calls} {self.process} {self.rolling.tobytes().hex()}"

    @classmethod
    def unpack(cls, text: bytes) -> State:
        """The reverse."""
        calls, process, rolling = text.decode().split(" ")
        return cls(int(calls), process, array("Q", bytes.fromhex(rolling)))

    def at(self, number: int) -> int | None:
        """The hash of all calls up to `number`, if it is still known."""
        place = number - self.calls + len(self.rolling) - 1
        return self.rolling[place] if 0 <= place < len(self.rolling) else None


def differ(states: list[State]) -> bool:
    """Whether two ranks made different calls, as far as both have come; False when that is too long ago to tell.

    Every pair counts: a third rank may be behind, because it died of what the two sent.
    """
    for count in {state.calls for state in states if state.calls > 0}:
        hashes = {state.at(count) for state in states if state.calls >= count}
        if len(hashes - {None}) > 1:
            return True
    return False


def end_process(error: CollectiveError) -> None:
    """End this process at once: its training thread hangs."""
    sys.stderr.flush()
    os._exit(error.exit_code)


def print_error(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


class Contract:
    """This rank's side of it. Without a store (one process, tests) calls are only recorded.

    Once `watch` was called, only the watching thread uses the store.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        *,
        timeout_s: float = 600.0,
        end: Callable[[CollectiveError], None] = end_process,
        say: Callable[[str], None] = print_error,
    ) -> None:
        self.log = CallLog()
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._timeout_s = timeout_s
        self._end = end
        self._say = say
        self._keys = [f"state/{other}" for other in range(world_size)]
        self._stacks: Stacks | None = None
        self._ticket = 0
        self._posts: dict[str, str] = {}  # what this rank asks for or tells, by key
        self._verdict: CollectiveError | None = None
        self._decided = threading.Event()  # a verdict came, or the store is gone
        self._limit = 0.0  # for the training thread, after a verdict
        self._answered_at: float | None = None
        # Of rank 0
        self._beat = -1
        self._beat_at = time.monotonic()
        # Calls of the rank that is behind
        self._least = -1
        self._least_at = 0.0

    # The training thread's side.

    def enter(self, op: str, tensor: Tensor | None = None, *, level: int = 0) -> None:
        """To be called just before each collective, on all of its ranks.

        Raises CollectiveError when a rank was found to break the contract.
        """
        self.log.add(op, tensor, level)
        if self._verdict is not None:
            raise self._heard(self._verdict)

    def ticket(self) -> int:
        """48 bits of the hash of all calls, to be summed over all ranks and passed to `settle`."""
        self._ticket = self.log.rolling >> (64 - TICKET_BITS)
        return self._ticket

    def settle(self, total: int) -> None:
        """Raises CollectiveError unless the tickets of all ranks, whose sum is `total`, are the same."""
        if total == self._ticket * self._world_size:
            return
        entries = self.log.last()
        last = f"number {entries[-1].number}, {entries[-1].call}" if entries else "none"
        raise self._ask() or CollectiveError(
            f"ranks have made different calls, or their sum is wrong. The last call of rank {self._rank}: {last}."
        )

    def fail(self, error: Exception, *, lost: bool = False) -> None:
        """Tell the other ranks that this one ends with `error`, so that they end with the same exit code.

        Raises the verdict of the ranks instead, if there is one. With `lost`, when `error` only reports that another
        rank is gone, waits a moment for that rank's own report, then asks all ranks, so that the silent one is named.
        """
        if self._store is None or isinstance(error, CollectiveError):
            return
        verdict = self._wait(REPORT_S if lost else 0.0)
        if verdict is None and lost:
            verdict = self._ask()
        if verdict is not None:
            raise verdict from None
        if not lost:
            text = f"rank {self._rank}: {type(error).__name__}: {error}"
            if not isinstance(error, SegpipeError):
                self._say(text)  # its traceback may not name the rank
            code = getattr(error, "exit_code", 1)
            self._post("verdict", json.dumps({"text": text, "exit_code": code}))
            self._wait(REPORT_S)

    def keep_stacks(self, folder: Path) -> None:
        """From now on `folder`/stacks/rankNN.txt receives the stacks of all threads: on SIGUSR1, and on a failure."""
        self._stacks = Stacks(folder / "stacks" / f"rank{self._rank:02d}.txt")

    def close(self) -> None:
        """Watch no more. Call it after the process group was destroyed: should that hang, the process is ended."""
        if self._store is not None:
            rounds.remove(self.look)
            self._part(self._store)
        if self._stacks is not None:
            self._stacks.close()

    def _part(self, store: Store) -> None:
        """Rank 0, whose process may hold the store, closes last: torch prints a stack when it loses the store."""
        self._store = None
        patience_s = PARTING_S if self._verdict is None else LOST_S
        end = time.monotonic() + patience_s
        with contextlib.suppress(RuntimeError):
            gone = store.add("closed", 1)
            if self._rank != 0:
                return
            while gone < self._world_size and time.monotonic() < end:
                time.sleep(0.02)
                gone = store.add("closed", 0)

    def _heard(self, verdict: CollectiveError) -> CollectiveError:
        self._limit = time.monotonic() + CLOSING_S
        return verdict

    def _wait(self, seconds: float) -> CollectiveError | None:
        """The verdict, if there is one or comes within `seconds`."""
        self._decided.wait(seconds)
        return self._heard(self._verdict) if self._verdict is not None else None

    def _ask(self) -> CollectiveError | None:
        """Have all ranks report their calls; the verdict, if they come to one."""
        if self._store is None:
            return None
        self._post("alarm", "asked")
        return self._wait(ANSWER_S)

    def _post(self, key: str, text: str) -> None:
        self._posts[key] = text
        rounds.hurry()

    # The watching thread's side.

    def look(self) -> bool:
        """One look at the other ranks; whether the next should be soon."""
        if self._verdict is not None:
            if time.monotonic() > self._limit:
                self._end(self._verdict)
        elif not self._decided.is_set() and self._store is not None:
            try:
                self.tick(self._store)
            except RuntimeError:  # the process that held the store ended
                self._decided.set()
        return self._answered_at is not None

    def tick(self, store: Store) -> None:
        """Write this rank's state, and judge the others or answer them. Raises RuntimeError when the store is gone."""
        store.set(self._keys[self._rank], self._state().pack())
        for key, text in tuple(self._posts.items()):
            store.compare_set(key, "", text)
        if store.check(["verdict"]):
            self._accept(json.loads(store.get("verdict")))
            return
        compares = self._compares(store)
        if store.check(["alarm"]):
            self._answer(store)
            if compares:
                self._decide(store, late=store.get("alarm") == b"late")
        elif compares and store.check(self._keys):
            states = [State.unpack(text) for text in store.multi_get(self._keys)]
            late = self._late(states)
            if late or differ(states):
                store.compare_set("alarm", "", "late" if late else "differ")
                rounds.hurry()

    def _state(self) -> State:
        entries = self.log.last()
        last = entries[-1].number if entries else 0
        process = ""
        if self._stacks is not None:
            process = f"{this_host()}:{os.getpid()}"
        hashes = array("Q", [entry.rolling for entry in entries])
        return State(last, process, hashes)

    def _compares(self, store: Store) -> bool:
        """Whether this rank compares: rank 0, and after a silence of rank 0 the others, one after another."""
        beat = store.add("beat", int(self._rank == 0))
        now = time.monotonic()
        if beat != self._beat:
            self._beat = beat
            self._beat_at = now
        silent_s = now - self._beat_at
        return self._rank == 0 or silent_s > ABSENT_S * self._rank

    def _late(self, states: list[State]) -> bool:
        """Whether some have waited longer than the timeout for others."""
        counts = [state.calls for state in states]
        now = time.monotonic()
        least = min(counts) if len(set(counts)) > 1 else -1
        if least != self._least:
            self._least = least
            self._least_at = now
        return least >= 0 and now - self._least_at > self._timeout_s

    def _answer(self, store: Store) -> None:
        """Report what this rank has called and where it is; once."""
        if self._answered_at is not None:
            return
        self._answered_at = time.monotonic()
        calls = [(entry.number, str(entry.call)) for entry in self.log.last()]
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        answer = {"calls": calls, "position": position(main)}
        store.set(f"calls/{self._rank}", json.dumps(answer))
        if self._stacks is not None:
            self._stacks.dump("ranks called different collectives, or one is missing")

    def _decide(self, store: Store, *, late: bool) -> None:
        """Write the verdict once all have answered or ANSWERS_S are over."""
        answers = {
            rank: json.loads(store.get(f"calls/{rank}"))
            for rank in range(self._world_size)
            if store.check([f"calls/{rank}"])
        }
        asked_s = time.monotonic() - (self._answered_at or 0.0)
        if len(answers) < self._world_size and asked_s < ANSWERS_S:
            return
        states = [
            State.unpack(store.get(key)) if store.check([key]) else State()
            for key in self._keys
        ]
        for rank, state in enumerate(states):
            if rank not in answers:
                _write_stacks(state.process)
        ranks = Ranks(
            calls={rank: dict(answer["calls"]) for rank, answer in answers.items()},
            positions={rank: answer["position"] for rank, answer in answers.items()},
            counts=[state.calls for state in states],
        )
        waited_s = self._timeout_s if late else None
        text = diagnose(ranks, waited_s)
        if self._stacks is not None:
            text += f" The stacks of all ranks are in {self._stacks.path.parent}."
        self._say(text)
        verdict = {"text": text, "exit_code": CollectiveError.exit_code}
        store.compare_set("verdict", "", json.dumps(verdict))

    def _accept(self, verdict: dict[str, str]) -> None:
        error = CollectiveError(verdict["text"])
        error.exit_code = int(verdict["exit_code"])
        error.told = True
        self._limit = time.monotonic() + GRACE_S
        self._verdict = error
        self._decided.set()


def _write_stacks(process: str) -> None:
    """Have a silent rank of this machine write its stacks; a call may hold its interpreter."""
    host, _, pid = process.rpartition(":")
    if host == this_host():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGUSR1)


def watch(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    say: Callable[[str], None] = print_error,
) -> Contract:
    """This rank's contract, watched from now on through a connection and keys of its own."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    own = PrefixStore("contract/watch", store.clone())
    contract = Contract(rank, world_size, own, timeout_s=timeout_s, say=say)
    rounds.add(contract.look)
    return contract
