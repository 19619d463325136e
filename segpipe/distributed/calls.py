"""The collectives that a rank called, and the first difference between the calls of several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from sys import _getframe
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

from segpipe.errors import listed
from segpipe.files import sha256_of

if TYPE_CHECKING:
    from torch import Tensor

RING = 512  # calls that are remembered; the watcher looks every 0.3 s, and a step makes 4 to 40
_MULTIPLIER = 6364136223846793005  # odd, so that every earlier call keeps its effect; Knuth's MMIX generator
_WORD = 2**64 - 1
# As code objects have them, without resolved links.
_HERE = str(Path(__file__).parent)
_PACKAGE = Path(__file__).parents[1]


class Call(NamedTuple):
    """One collective in the sequence of all calls of a rank."""

    number: int  # from 1
    rolling: int  # hash of all calls up to this one
    text: str  # operation, dtype, shape, level of the group, line


class CallLog:
    """The last RING calls of this rank, and a rolling 64-bit hash of all calls so far and their order."""

    def __init__(self) -> None:
        self.count = 0
        self.rolling = 0
        self._ring: list[Call | None] = [None] * RING

    def add(self, op: str, tensor: Tensor | None = None, level: int = 0) -> None:
        """Append a call; its line is the nearest one outside segpipe/distributed. 2 to 4 us."""
        frame = _getframe(1)
        while _is_here(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        kind, shape = ("", ()) if tensor is None else (str(tensor.dtype), tensor.shape)

        text, digest = _known(op, kind, shape, level, frame.f_code, frame.f_lineno)
        self.rolling = (self.rolling * _MULTIPLIER + digest) & _WORD
        self.count += 1
        # The watcher may read at any time.
        self._ring[self.count % RING] = Call(self.count, self.rolling, text)

    def last(self) -> list[Call]:
        """Calls in the ring, oldest first; may be called from another thread."""
        return sorted(call for call in self._ring[:] if call is not None)


@lru_cache(maxsize=1024)
def _known(
    op: str, dtype: str, shape: tuple[int, ...], level: int, code: CodeType, line: int
) -> tuple[str, int]:
    """A call as text, and 64 bits of its hash; the line is the same on every machine, wherever segpipe is installed."""
    path = Path(code.co_filename)
    ours = path.is_relative_to(_PACKAGE)
    path = path.relative_to(_PACKAGE) if ours else Path(path.name)
    # Objects have no dtype, and sizes that may differ.
    tensor = f" {dtype.removeprefix('torch.')} {list(shape)}" if dtype else ""
    within = f" (level {level})" if level else ""
    text = f"{op}{tensor}{within} at {path}:{line} {code.co_name}"
    return text, int(sha256_of(text.encode())[:16], 16)


def _is_here(code: CodeType) -> bool:
    return code.co_filename.startswith(_HERE)


def diagnose(
    calls: Mapping[int, Mapping[int, str]], counts: Sequence[int], *, differ: bool
) -> str:
    """One paragraph that names the first difference between the ranks' calls, with both sides.

    Without a difference, it names the ranks that are behind. `calls`: of each rank that answered, by number; `counts`:
    how many every rank has made, as far as is known; `differ`: some were seen to differ, maybe longer ago.
    """
    verdict = _first_difference(calls) or ("" if differ else _behind(calls, counts))
    if not verdict:
        verdict = (
            f"the last {RING} collectives are the same on all ranks, up to {_named(max(counts), calls)}: they differ "
            f"longer ago, data changed on the way, or a connection broke."
        )

    silent = [rank for rank in range(len(counts)) if rank not in calls]
    if silent:
        verdict += f" No answer from {_listed(silent)}: ended, stopped, or inside a call that holds the interpreter."
    return verdict


def _first_difference(calls: Mapping[int, Mapping[int, str]]) -> str:
    for number in sorted({number for own in calls.values() for number in own}):
        sides: dict[str, list[int]] = {}
        for rank, own in calls.items():
            if number in own:
                sides.setdefault(own[number], []).append(rank)
        if len(sides) > 1:
            both = [f"{_listed(members)}: {call}" for call, members in sides.items()]
            return (
                f"collective {number} is not the same on all ranks. {'; '.join(both)}. All ranks must make the same "
                f"calls in the same order: look for a branch that only some of them take, or a size that depends on "
                f"the rank."
            )
    return ""


def _behind(calls: Mapping[int, Mapping[int, str]], counts: Sequence[int]) -> str:
    """The ranks that did not come to the collective in which the others wait; empty if all made as many calls."""
    least = min(counts)
    behind = [rank for rank, count in enumerate(counts) if count == least]
    waiting = [rank for rank, count in enumerate(counts) if count > least]
    if not waiting:
        return ""
    return (
        f"collective {_named(least + 1, calls)}, was not reached by {_listed(behind)}, last seen after "
        f"{_named(least, calls)}; {_listed(waiting)} waited. Where it only needs longer, raise compute.timeout_s."
    )


def _named(number: int, calls: Mapping[int, Mapping[int, str]]) -> str:
    """A call as some rank remembers it."""
    known = [own[number] for own in calls.values() if number in own]
    return f"{number}, {known[0] if known else 'which no rank remembers'}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks], 8)}"
