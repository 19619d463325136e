"""The collectives that a rank called, and the first difference between the calls of several ranks."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

from segpipe.files import sha256_of

if TYPE_CHECKING:
    from torch import Tensor

RING = 512  # calls that are remembered; the watcher looks every 0.3 s, and a step makes 4 to 40
_MULTIPLIER = 6364136223846793005  # odd, so that every earlier call keeps its effect; Knuth's MMIX generator
_WORD = 2**64 - 1
_HERE = Path(__file__).parents[1]  # as code objects have it, without resolved links
_PREFIX = str(_HERE)


class Call(NamedTuple):
    """One collective, as a rank is about to call it."""

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
    """A call in the sequence of all calls of a rank."""

    number: int  # from 1
    rolling: int  # hash of all calls up to this one
    call: Call


class CallLog:
    """The last RING calls of this rank, and a rolling 64-bit hash of all calls so far and their order."""

    def __init__(self) -> None:
        self.count = 0
        self.rolling = 0
        self._ring: list[Entry | None] = [None] * RING

    def add(self, op: str, tensor: Tensor | None = None, level: int = 0) -> None:
        """Append a call; its line is the nearest one outside segpipe/distributed. 2 to 4 us."""
        frame = sys._getframe(1)
        while _is_here(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        kind, shape = ("", ()) if tensor is None else (str(tensor.dtype), tensor.shape)
        call, digest = _known(op, kind, shape, level, frame.f_code, frame.f_lineno)
        self.rolling = (self.rolling * _MULTIPLIER + digest) & _WORD
        number = self.count + 1
        self._ring[number % RING] = Entry(number, self.rolling, call)
        self.count = number  # last: the watcher may read at any time

    def last(self) -> list[Entry]:
        """Entries in the ring, oldest first; may be called from another thread."""
        return sorted(entry for entry in self._ring[:] if entry is not None)


@lru_cache(maxsize=1024)
def _known(
    op: str, dtype: str, shape: tuple[int, ...], level: int, code: CodeType, line: int
) -> tuple[Call, int]:
    """A call, and 64 bits of its hash."""
    where = _site(code, line)
    call = Call(op, dtype.removeprefix("torch."), tuple(shape), level, where)
    return call, int(sha256_of(repr(tuple(call)).encode())[:16], 16)


def _is_here(code: CodeType) -> bool:
    return code.co_filename.startswith(_PREFIX)


def _site(code: CodeType, line: int) -> str:
    """`train/step.py:116 train_step`: the same on every machine, wherever segpipe is installed."""
    path = Path(code.co_filename)
    ours = path.is_relative_to(_HERE.parent)
    name = path.relative_to(_HERE.parent) if ours else path.name
    return f"{name}:{line} {code.co_name}"


def position(frame: FrameType | None) -> str:
    """Where a thread is: the innermost line of segpipe outside segpipe/distributed, and the innermost of all."""
    if frame is None:
        return ""
    innermost = _site(frame.f_code, frame.f_lineno)
    package = f"{_HERE.parent}{os.sep}"
    while frame is not None:
        if frame.f_code.co_filename.startswith(package) and not _is_here(frame.f_code):
            outer = _site(frame.f_code, frame.f_lineno)
            return outer if outer == innermost else f"{outer} (in {innermost})"
        frame = frame.f_back
    return innermost


class Ranks(NamedTuple):
    """What ranks reported; a rank that does not answer is only in `counts`, if anywhere."""

    calls: dict[int, dict[int, str]]  # of each rank, by number
    positions: dict[int, str]  # the lines where their main threads are
    counts: list[int]  # of calls, by rank

    def call(self, number: int) -> str:
        """A call as some rank remembers it."""
        known = (calls[number] for calls in self.calls.values() if number in calls)
        return next(known, "no longer remembered")


def diagnose(ranks: Ranks, waited_s: float | None) -> str:
    """One paragraph that names the first difference between the ranks' calls, with both sides.

    Without a difference, it names the ranks that the others waited for during `waited_s`, or those that do not answer.
    """
    silent = [rank for rank in range(len(ranks.counts)) if rank not in ranks.calls]
    verdict = _first_difference(ranks)
    if not verdict and waited_s is not None:
        verdict = _missing(ranks, waited_s)
    if not verdict:
        verdict = _lost(ranks, silent) if silent else _no_difference(ranks)
    if silent:
        verdict += f" No answer from {_listed(silent)}: ended, stopped, or inside a call that holds the interpreter."
    return verdict


def _first_difference(ranks: Ranks) -> str:
    numbers = {number for calls in ranks.calls.values() for number in calls}
    for number in sorted(numbers):
        sides: dict[str, list[int]] = {}
        for rank, calls in ranks.calls.items():
            if number in calls:
                sides.setdefault(calls[number], []).append(rank)
        if len(sides) > 1:
            both = [f"{_listed(members)}: {call}" for call, members in sides.items()]
            return (
                f"collective {number} is not the same on all ranks. {'; '.join(both)}. All ranks must make the same "
                f"calls in the same order: look for a branch that only some of them take, or a size that depends on "
                f"the rank."
            )
    return ""


def _missing(ranks: Ranks, waited_s: float) -> str:
    """The ranks that did not come to the collective in which the others wait; empty if all made as many calls."""
    least = min(ranks.counts)
    late = [rank for rank, count in enumerate(ranks.counts) if count == least]
    waiting = [rank for rank, count in enumerate(ranks.counts) if count > least]
    if not waiting:
        return ""
    last = f"{least}, {ranks.call(least)}" if least else "none"
    positions = [
        f" Rank {rank} is at {ranks.positions[rank]}."
        for rank in late[:4]
        if rank in ranks.positions
    ]
    return (
        f"collective {least + 1}, {ranks.call(least + 1)}, was not reached by {_listed(late)} (its last was {last}), "
        f"while {_listed(waiting)} waited {waited_s:g} s.{''.join(positions)} If it only needs longer, raise "
        f"compute.timeout_s."
    )


def _lost(ranks: Ranks, silent: list[int]) -> str:
    lost = [
        f"rank {rank} was lost after call {ranks.counts[rank]}, if not later, which on the others is "
        f"{ranks.call(ranks.counts[rank])}"
        for rank in silent[:4]
    ]
    return f"{'; '.join(lost)}. The last {RING} calls of the ranks that answered are the same."


def _no_difference(ranks: Ranks) -> str:
    last = max(ranks.counts)
    return (
        f"the last {RING} collectives are the same on all ranks, up to {last}, {ranks.call(last)}: they differ longer "
        f"ago, data changed on the way, or a connection broke."
    )


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
