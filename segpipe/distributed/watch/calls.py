"""The collectives that a rank called, and the first difference between the calls of several ranks."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

RING = 512  # calls that are remembered; the watcher looks every 0.3 s, and a step makes 4 to 40
_MULTIPLIER = 6364136223846793005  # odd, so that every earlier call keeps its effect; Knuth's MMIX generator
_WORD = 2**64 - 1
_HERE = Path(__file__).parents[
    1
]  # as the interpreter writes it into code objects, without resolving links
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
        self._known: dict[tuple[object, ...], tuple[int, Call]] = {}
        self._ring: list[Entry | None] = [None] * RING

    def add(self, op: str, tensor: Tensor | None = None, level: int = 0) -> None:
        """Append a call; its line is the nearest one outside segpipe/distributed. 2 to 4 us."""
        frame = _caller(sys._getframe(1))
        dtype, shape = (
            (tensor.dtype, tensor.shape) if tensor is not None else (None, None)
        )
        key = (op, dtype, shape, level, frame.f_code.co_filename, frame.f_lineno)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _hashed(op, tensor, level, frame)
        digest, call = known
        self.rolling = (self.rolling * _MULTIPLIER + digest) & _WORD
        number = self.count + 1
        self._ring[number % RING] = Entry(number, self.rolling, call)
        self.count = number  # last: the watcher may read at any time

    def last(self) -> list[Entry]:
        """Entries in the ring, oldest first; may be called from another thread."""
        return sorted(entry for entry in self._ring[:] if entry is not None)


def _hashed(
    op: str, tensor: Tensor | None, level: int, frame: FrameType
) -> tuple[int, Call]:
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
    call = Call(
        op, dtype, tuple(tensor.shape) if tensor is not None else (), level, site(frame)
    )
    return int.from_bytes(
        hashlib.blake2b(repr(tuple(call)).encode(), digest_size=8).digest()
    ), call


def _caller(frame: FrameType) -> FrameType:
    """The nearest frame of a file outside segpipe/distributed; torch's own threads may have none."""
    while frame.f_code.co_filename.startswith(_PREFIX) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is of segpipe outside segpipe/distributed."""
    path = frame.f_code.co_filename
    return path.startswith(f"{_HERE.parent}{os.sep}") and not path.startswith(_PREFIX)


def site(frame: FrameType) -> str:
    """`train/step.py:116 train_step`: the same on every machine, wherever segpipe is installed."""
    path = Path(frame.f_code.co_filename)
    name = (
        path.relative_to(_HERE.parent)
        if path.is_relative_to(_HERE.parent)
        else path.name
    )
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"


class Ranks(NamedTuple):
    """What ranks reported; a rank that does not answer is only in `counts`, if anywhere."""

    rings: dict[int, list[tuple[int, str]]]  # (number, call), oldest first
    positions: dict[int, str]  # the lines where their main threads are
    counts: list[int]  # of calls, by rank


def diagnose(ranks: Ranks, waited_s: float | None) -> str:
    """One paragraph that names the first difference between the ranks' calls, with both sides.

    Without a difference, it names the ranks that the others waited for during `waited_s`, or those that do not answer.
    """
    silent = [rank for rank in range(len(ranks.counts)) if rank not in ranks.rings]
    missing = _missing(ranks, waited_s) if waited_s is not None else ""
    found = _first_difference(ranks.rings) or missing or _no_difference(ranks, silent)
    if silent:
        found += f" No answer from {_listed(silent)}: ended, stopped, or inside a call that holds the interpreter."
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
                + "; ".join(
                    f"{_listed(members)}: {call}" for call, members in sides.items()
                )
                + ". All ranks must make the same calls in the same order: look for a branch that only some of them "
                "take, or a size that depends on the rank."
            )
    return ""


def _missing(ranks: Ranks, waited_s: float) -> str:
    """The ranks that did not come to the collective in which the others wait; empty if all made as many calls."""
    least = min(ranks.counts)
    late = [rank for rank, count in enumerate(ranks.counts) if count == least]
    waiting = [rank for rank, count in enumerate(ranks.counts) if count > least]
    if not waiting:
        return ""
    known = {number: call for ring in ranks.rings.values() for number, call in ring}
    awaited = known.get(least + 1, "a call that is no longer remembered")
    last = (
        f"its last was {least}, {known.get(least, 'no longer remembered')}"
        if least
        else "it made none before"
    )
    positions = [
        f" Rank {rank} is at {ranks.positions[rank]}."
        for rank in late[:4]
        if rank in ranks.positions
    ]
    return (
        f"collective {least + 1}, {awaited}, was not reached by {_listed(late)} ({last}), while {_listed(waiting)} "
        f"waited {waited_s:g} s.{''.join(positions)} If it only needs longer, raise compute.timeout_s."
    )


def _no_difference(ranks: Ranks, silent: list[int]) -> str:
    known = {number: call for ring in ranks.rings.values() for number, call in ring}
    if silent:
        lost = "; ".join(
            f"rank {rank} was lost after call {ranks.counts[rank]}, if not later, which on the others is "
            f"{known.get(ranks.counts[rank], 'not remembered')}"
            for rank in silent[:4]
        )
        return f"{lost}. The last {RING} calls of the ranks that answered are the same."
    last = f"{max(known)}, {known[max(known)]}" if known else "none"
    return (
        f"the last {RING} collectives are the same on all ranks, up to {last}: they differ longer ago, data changed on "
        f"the way, or a connection broke."
    )


def _listed(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}{' ...' if len(ranks) > 8 else ''}"
