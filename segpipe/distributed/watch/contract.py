"""What ranks promise each other: the same collectives, with the same shapes, in the same order, from the same lines.

Backends do not check it. With shapes that differ, gloo reports success on some ranks and waits for ever on others; NCCL
waits. So every collective of segpipe is announced to a `Contract` just before it is called. That costs a few
microseconds: the call enters a ring, and one rolling 64-bit number that depends on all calls so far and their order.

Three ways find a difference, and all name both sides (op, dtype, shape, line):
- a watcher thread compares the rings of all ranks every 0.3 s through the store: also while a rank hangs;
- `ticket` and `settle` compare the rolling numbers within a collective that exists anyway: nothing is kept, and where
  the host looks at each step nothing is applied, on the word of a collective that went wrong;
- with `eager`, every call is compared before any data moves, for three round trips to the store per call.

Source: ranks that call different collectives are an error of the caller in MPI and NCCL alike; both leave it undefined.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from segpipe.distributed.watch.stacks import Stacks
from segpipe.errors import CollectiveError, SegpipeError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from segpipe.distributed.watch.watcher import Watcher

RING = 512  # calls that are remembered; the watcher looks every 0.3 s, and a step makes 4 to 40
MARGIN_S = 15.0  # by which the backend's own timeout is longer than ours, which names more
ANSWER_S = 10.0  # for the watchers to agree on what went wrong
TICKET_BITS = 48  # so that the sum of the tickets of 32768 ranks is exact in int64
_MULTIPLIER = 6364136223846793005  # odd, so that no call is ever forgotten; Knuth's MMIX generator
_WORD = 2**64 - 1
_HERE = Path(__file__).parents[1]  # as the interpreter writes it into code objects, links and all
_PREFIX = str(_HERE)


class Call(NamedTuple):
    """One collective, as a rank is about to make it."""

    op: str
    dtype: str  # empty for objects, whose sizes may differ
    shape: tuple[int, ...]
    level: int  # of the group's levels
    site: str

    def __str__(self) -> str:
        tensor = f" {self.dtype} {list(self.shape)}" if self.dtype else ""
        level = f" (level {self.level})" if self.level else ""
        return f"{self.op}{tensor}{level} at {self.site}"


class Entry(NamedTuple):
    """A call in its place in the order of all calls of a rank."""

    number: int  # from 1
    rolling: int  # of all calls up to this one
    call: Call


class CallLog:
    """The last calls of this rank."""

    def __init__(self) -> None:
        self.count = 0
        self.rolling = 0
        self._known: dict[tuple[object, ...], tuple[int, Call]] = {}
        self._ring: list[Entry | None] = [None] * RING

    def add(self, op: str, tensor: Tensor | None = None, level: int = 0) -> Call:
        """Append a call; its line is the nearest one outside segpipe/distributed. 2 to 4 us."""
        frame = _caller(sys._getframe(1))
        dtype, shape = (tensor.dtype, tensor.shape) if tensor is not None else (None, None)
        key = (op, dtype, shape, level, frame.f_code.co_filename, frame.f_lineno)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _known(op, tensor, level, frame)
        digest, call = known
        self.rolling = (self.rolling * _MULTIPLIER + digest) & _WORD
        number = self.count + 1
        self._ring[number % RING] = Entry(number, self.rolling, call)
        self.count = number  # last: the watcher may read at any time
        return call

    def last(self) -> list[Entry]:
        """What the ring holds, oldest first; may be called from another thread."""
        return sorted(entry for entry in self._ring[:] if entry is not None)


def _known(op: str, tensor: Tensor | None, level: int, frame: FrameType) -> tuple[int, Call]:
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
    call = Call(op, dtype, tuple(tensor.shape) if tensor is not None else (), level, site(frame))
    return int.from_bytes(hashlib.blake2b(repr(tuple(call)).encode(), digest_size=8).digest()), call


def _caller(frame: FrameType) -> FrameType:
    """The nearest frame of a file outside this folder; of torch's own threads there may be none."""
    while frame.f_code.co_filename.startswith(_PREFIX) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is of segpipe, but not of this folder."""
    path = frame.f_code.co_filename
    return path.startswith(f"{_HERE.parent}{os.sep}") and not path.startswith(_PREFIX)


def site(frame: FrameType) -> str:
    """`engine.py:276 _train_once`: the same on every machine, wherever segpipe lies."""
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(_HERE.parent) if path.is_relative_to(_HERE.parent) else path.name
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"


class Contract:
    """This rank's side of it. Without a watcher (one process, tests) calls are only recorded."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        watcher: Watcher | None = None,
        store: Store | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """With `store`, which no other thread may use, every call is compared before data moves."""
        self.log = watcher.log if watcher is not None else CallLog()
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._watcher, self._store = watcher, store
        self._stacks: Stacks | None = None
        self._ticket = 0

    def enter(self, op: str, tensor: Tensor | None = None, *, level: int = 0) -> None:
        """To be called just before each collective, on all of its ranks.

        Raises CollectiveError when a rank was found to break the contract; with a store, before data moves.
        """
        self.log.add(op, tensor, level)
        if self._watcher is not None:
            self._watcher.check()
            if self._store is not None:
                self._compare(self._store)

    def _compare(self, store: Store) -> None:
        """Wait until all ranks have announced their call of this number, and compare what led to it."""
        number, own = self.log.count, str(self.log.rolling)
        keys = [f"call/{number}/{rank}" for rank in range(self._world_size)]
        store.set(keys[self._rank], own)
        self._await(store, keys)
        if number > 2:  # all have announced number - 1, so all have read number - 2
            store.delete_key(f"call/{number - 2}/{self._rank}")
        if any(other.decode() != own for other in store.multi_get(keys)):
            self.stop("ranks are about to call different collectives")

    def _await(self, store: Store, keys: list[str]) -> None:
        assert self._watcher is not None
        end, pause = time.monotonic() + self._timeout_s + MARGIN_S, 1e-4
        # Asked again and again, because a wait of the store that times out prints two lines of torch's own.
        while not store.check(keys):
            self._watcher.check()
            if time.monotonic() > end:
                self.stop("a rank did not announce its call")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def ticket(self) -> int:
        """A number of 48 bits, to be summed over all ranks and handed to `settle`."""
        self._ticket = self.log.rolling >> (64 - TICKET_BITS)
        return self._ticket

    def settle(self, total: int) -> None:
        """Raises CollectiveError unless the tickets of all ranks, whose sum is `total`, are the same."""
        if total != self._ticket * self._world_size:
            self.stop("ranks have made different calls, or their sum is wrong")

    def stop(self, reason: str) -> None:
        """Have all ranks name what they called, and raise CollectiveError with the verdict."""
        if self._watcher is None:
            raise CollectiveError(f"{reason}. The last call of rank {self._rank}: {self._last()}.")
        raise self._watcher.ask(ANSWER_S) or CollectiveError(
            f"{reason}, and the ranks could not be asked. The last call of rank {self._rank}: {self._last()}."
        )

    def _last(self) -> str:
        entries = self.log.last()
        return f"number {entries[-1].number}, {entries[-1].call}" if entries else "none"

    def fail(self, error: Exception, *, lost: bool = False) -> None:
        """Tell the other ranks that this one ends with `error`, so that they end with the same exit code.

        Raises what was told before instead, if there is such; with `lost`, when `error` is only the echo of another
        rank's end, waits a moment for that, and then has all ranks asked: one that does not answer is named. An error
        that is not of segpipe comes with a traceback that may name no rank, so a line before it does.
        """
        if self._watcher is None or isinstance(error, CollectiveError):
            return
        verdict = self._watcher.wait(2.0 if lost else 0.0)
        if verdict is None and lost:
            verdict = self._watcher.ask(ANSWER_S)
        if verdict is not None:
            raise verdict from None
        if not lost:
            code, text = getattr(error, "exit_code", 1), f"rank {self._rank}: {type(error).__name__}: {error}"
            if not isinstance(error, SegpipeError):
                self._watcher.say(text)
            self._watcher.publish(text, code)

    def keep_stacks(self, folder: Path) -> None:
        """From now on `folder`/stacks/rankNN.txt receives the stacks of all threads: on SIGUSR1, and on a failure."""
        self._stacks = Stacks(folder / "stacks" / f"rank{self._rank:02d}.txt")
        if self._watcher is not None:
            self._watcher.keep(self._stacks)

    def close(self) -> None:
        """End the watcher; after the process group was taken down, which may hang, and which it ends then."""
        if self._watcher is not None:
            self._watcher.close()
        if self._stacks is not None:
            self._stacks.close()


class Ranks(NamedTuple):
    """What ranks have said of themselves; a rank that does not answer is only in `counts`, if anywhere."""

    rings: dict[int, list[tuple[int, str]]]  # (number, call), oldest first
    stands: dict[int, str]  # where their main threads are
    counts: list[int]  # of calls, by rank


def diagnose(ranks: Ranks, waited_s: float | None) -> str:
    """One paragraph that names the first difference between the ranks' calls, of both sides.

    When there is none, it names those that were waited for in vain during `waited_s`, or those that do not answer.
    """
    silent = [rank for rank in range(len(ranks.counts)) if rank not in ranks.rings]
    missing = _missing(ranks, waited_s) if waited_s is not None else ""
    found = _first_difference(ranks.rings) or missing or _no_difference(ranks, silent)
    if silent:
        found += f" No answer from {_those(silent)}: ended, stopped, or inside a call that holds the interpreter."
    return found


def _first_difference(rings: dict[int, list[tuple[int, str]]]) -> str:
    by_rank = {rank: dict(ring) for rank, ring in rings.items()}
    for number in sorted({number for ring in by_rank.values() for number in ring}):
        sides: dict[str, list[int]] = {}
        for rank, calls in by_rank.items():
            if number in calls:
                sides.setdefault(calls[number], []).append(rank)
        if len(sides) > 1:
            return (
                f"collective {number} is not the same on all ranks. "
                + "; ".join(f"{_those(members)}: {call}" for call, members in sides.items())
                + ". All ranks must make the same calls in the same order: look for a branch that only some of them "
                "take, or a size that depends on the rank."
            )
    return ""


def _missing(ranks: Ranks, waited_s: float) -> str:
    """Who has not come to the collective in which the others wait; empty when all are equally far."""
    least = min(ranks.counts)
    late = [rank for rank, count in enumerate(ranks.counts) if count == least]
    waiting = [rank for rank, count in enumerate(ranks.counts) if count > least]
    if not waiting:
        return ""
    known = {number: call for ring in ranks.rings.values() for number, call in ring}
    awaited = known.get(least + 1, "a call that is no longer remembered")
    last = f"its last was {least}, {known.get(least, 'no longer remembered')}" if least else "it made none before"
    stands = [f" Rank {rank} stands in {ranks.stands[rank]}." for rank in late[:4] if rank in ranks.stands]
    return (
        f"collective {least + 1}, {awaited}, was not reached by {_those(late)} ({last}), while {_those(waiting)} "
        f"waited {waited_s:g} s.{''.join(stands)} If it only needs longer, raise compute.timeout_s."
    )


def _no_difference(ranks: Ranks, silent: list[int]) -> str:
    known = {number: call for ring in ranks.rings.values() for number, call in ring}
    if silent:
        lost = "; ".join(
            f"rank {rank} was lost after call {ranks.counts[rank]}, as far as is known, which on the others is "
            f"{known.get(ranks.counts[rank], 'not remembered')}"
            for rank in silent[:4]
        )
        return f"{lost}. The last {RING} calls of the ranks that answered are the same."
    last = f"{max(known)}, {known[max(known)]}" if known else "none"
    return (
        f"the last {RING} collectives are the same on all ranks, up to {last}: they part longer ago, data changed on "
        f"their way, or a connection broke."
    )


def _those(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}{' ...' if len(ranks) > 8 else ''}"
