"""The contract between ranks: the same collectives, with the same shapes, in the same order, from the same lines.

Backends do not check it. With shapes that differ, gloo reports success on some ranks and hangs on others; NCCL hangs.
So every collective of segpipe is announced to a `Contract` just before it is called, which costs a few microseconds.

A difference is found in two ways, and each names both sides (op, dtype, shape, line):
- `ticket` and `settle` compare a hash of all calls inside a collective that an update needs anyway, so that no update
  is applied or saved after a collective that went wrong;
- the watching thread of every rank writes the hashes of its last calls to the store every 0.3 s, and rank 0 compares
  them, also while a rank hangs. In case rank 0 is silent, the others take turns at comparing, too.

On a difference, or when some wait longer than `compute.timeout_s` for others, all ranks report their calls and stacks.
The lowest rank that answers prints the diagnosis and writes it to the store as the verdict, which every rank raises at
its next collective. A rank that hangs inside one cannot, so its process is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from segpipe.distributed.calls import CallLog, diagnose
from segpipe.errors import CollectiveError, SegpipeError
from segpipe.processes import rounds

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

MARGIN_S = 15.0  # by which the backend's own timeout is longer than ours, whose message says more
ANSWER_S = 10.0  # for the ranks to agree on what went wrong
ANSWERS_S = 0.6  # for ranks to report their calls
REPORT_S = 2.0  # for a rank that ended to say why
TURN_S = 3.0  # for which one of the other ranks compares, beside rank 0
GRACE_S = 3.0  # for the training thread to notice a verdict
CLOSING_S = 60.0  # for the training thread to end after that
PARTING_S = 10.0  # for the others to close before rank 0
LOST_S = 1.0  # the same after a verdict, when some may never close
TICKET_BITS = 48  # so that the sum of the tickets of 32768 ranks is exact in int64
POSTED = 64  # calls whose hashes are in the store: ranks that wait for each other are a few calls apart


def differ(states: Sequence[Mapping[int, int]]) -> bool:
    """Whether two ranks made different calls, as far as both have come; False when that is too long ago to tell.

    `states`: of each rank, the hash of all its calls up to a number, for its last numbers. Every pair counts: a third
    rank may be behind, because it died of what the two sent.
    """
    for number in {number for hashes in states for number in hashes}:
        known = {hashes[number] for hashes in states if number in hashes}
        if len(known) > 1:
            return True
    return False


def end_process(error: CollectiveError) -> None:
    """End this process at once: its training thread hangs."""
    sys.stderr.flush()
    os._exit(error.exit_code)


def say(text: str) -> None:
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
    ) -> None:
        self.log = CallLog()
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._timeout_s = timeout_s
        self._keys = [f"state/{other}" for other in range(world_size)]
        self._stacks: Stacks | None = None
        self._ticket = 0
        self._posts: dict[str, str] = {}  # what this rank asks for or tells, by key
        self._verdict: CollectiveError | None = None
        self._decided = threading.Event()  # a verdict came, or the store is gone
        self._limit = 0.0  # for the training thread, after a verdict
        self._answered_at: float | None = None
        # Calls of the rank that is behind, and since when.
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
        last = self.log.last()[-1:]
        raise self._ask() or CollectiveError(
            f"ranks have made different calls, or their sum is wrong. The last call of rank {self._rank}: "
            f"{last[0].text if last else 'none'}."
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
                say(text)  # its traceback may not name the rank
            self._post("verdict", _verdict(text, getattr(error, "exit_code", 1)))
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
        end = time.monotonic() + (PARTING_S if self._verdict is None else LOST_S)
        with contextlib.suppress(RuntimeError):
            gone = store.add("closed", 1)
            while (
                self._rank == 0 and gone < self._world_size and time.monotonic() < end
            ):
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
                end_process(self._verdict)
        elif not self._decided.is_set() and self._store is not None:
            try:
                self.tick(self._store)
            except RuntimeError:  # the process that held the store ended
                self._decided.set()
        return self._answered_at is not None

    def tick(self, store: Store) -> None:
        """Write this rank's state, and judge the others or answer them. Raises RuntimeError when the store is gone."""
        if self._stacks is not None:
            self._stacks.dump_unless_called_again(self._timeout_s / 2)
        hashes = [(call.number, call.rolling) for call in self.log.last()[-POSTED:]]
        store.set(self._keys[self._rank], json.dumps(hashes))

        for key, text in tuple(self._posts.items()):
            store.compare_set(key, "", text)

        turn = int(time.monotonic() / TURN_S) % self._world_size
        if store.check(["verdict"]):
            self._accept(**json.loads(store.get("verdict")))
        elif store.check(["alarm"]):
            self._answer(store)
        elif self._rank in (0, turn) and store.check(self._keys):
            states = [_state(text) for text in store.multi_get(self._keys)]
            late = self._late([max(hashes, default=0) for hashes in states])
            if late or differ(states):
                store.compare_set("alarm", "", "late" if late else "differ")
                rounds.hurry()

    def _late(self, counts: Sequence[int]) -> bool:
        """Whether some ranks have waited longer than the timeout for others, from the number of calls of each."""
        now = time.monotonic()
        least = min(counts) if len(set(counts)) > 1 else -1
        if least != self._least:
            self._least = least
            self._least_at = now
        return least >= 0 and now - self._least_at > self._timeout_s

    def _answer(self, store: Store) -> None:
        """Report once what this rank has called and where it is; then decide, as the lowest rank that answers."""
        now = time.monotonic()
        if self._answered_at is None:
            self._answered_at = now
            calls = [(call.number, call.text) for call in self.log.last()]
            store.set(f"calls/{self._rank}", json.dumps(calls))
            if self._stacks is not None:
                self._stacks.dump(
                    "ranks called different collectives, or one is missing"
                )

        answers = {}
        for rank in range(self._world_size):
            if store.check([f"calls/{rank}"]):
                answers[rank] = dict(json.loads(store.get(f"calls/{rank}")))

        complete = len(answers) == self._world_size
        over = now - self._answered_at > ANSWERS_S
        if (complete or over) and self._rank == min(answers):
            self._decide(store, answers)

    def _decide(self, store: Store, answers: Mapping[int, Mapping[int, str]]) -> None:
        """Print the verdict and write it to the store."""
        counts = []
        for key in self._keys:
            hashes = _state(store.get(key)) if store.check([key]) else {}
            counts.append(max(hashes, default=0))

        text = diagnose(answers, counts, differ=store.get("alarm") == b"differ")
        if self._stacks is not None:
            text += f" The stacks of all ranks are in {self._stacks.path.parent}."
        say(text)
        store.compare_set("verdict", "", _verdict(text, CollectiveError.exit_code))

    def _accept(self, text: str, exit_code: int) -> None:
        error = CollectiveError(text)
        error.exit_code = exit_code
        error.told = True

        self._limit = time.monotonic() + GRACE_S
        self._verdict = error
        self._decided.set()


def _verdict(text: str, exit_code: int) -> str:
    return json.dumps({"text": text, "exit_code": exit_code})


def _state(text: bytes) -> dict[int, int]:
    return dict(json.loads(text))


class Stacks:
    """The file of this rank; removed at the end when nothing was written.

    `kill -USR1 PID` works without the interpreter, so also while a call blocks the main thread for good. A scheduler
    that sends SIGUSR1 as a warning does not end the run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)

    def dump_unless_called_again(self, seconds: float) -> None:
        """Have a thread of C write the stacks after a time in which some call holds the interpreter."""
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def dump(self, why: str) -> None:
        """Append a line with the time and `why`, then the stacks of all threads."""
        self._file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """Stop answering SIGUSR1."""
        if self._file.closed:
            return
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)
        self._file.close()
        with contextlib.suppress(OSError):  # deleted, or the folder has another file
            if self.path.stat().st_size == 0:
                self.path.unlink()
                self.path.parent.rmdir()


def watch(store: Store, rank: int, world_size: int, *, timeout_s: float) -> Contract:
    """This rank's contract, watched from now on through a connection and keys of its own."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    own = PrefixStore("contract/watch", store.clone())
    contract = Contract(rank, world_size, own, timeout_s=timeout_s)
    rounds.add(contract.look)
    return contract
