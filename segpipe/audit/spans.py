"""Which parts of a run are trained again: chosen when the audit starts, so that nobody can know them before."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from segpipe.keys import generator, sample_key


class Span(NamedTuple):
    """Updates `first` to `last - 1`, from the checkpoint at `first`, or from the seed."""

    start: Path | None
    first: int
    last: int

    def __str__(self) -> str:
        many = f"updates {self.first} to {self.last - 1}" if self.last - self.first > 1 else f"update {self.first}"
        return f"{many} from {self.start.name if self.start else 'the seed'}"


def choose_spans(starts: Mapping[int, Path | None], end: int, *, count: int, longest: int, seed: int) -> list[Span]:
    """`count` of the spans between neighbouring starts (updates done -> checkpoint), by step; all when there are fewer.

    A span ends at the next start, or at `end`, or after `longest` updates (0: no limit). The choice is a function of
    the arguments.
    """
    edges = sorted(step for step in starts if step < end)
    spans = [
        Span(starts[first], first, min(following, first + longest) if longest else following)
        for first, following in pairwise([*edges, end])
    ]
    draws = generator(sample_key(seed, 0, 0, "audit")).bit_generator.random_raw(len(spans)).tolist()
    chosen = sorted(range(len(spans)), key=lambda place: (draws[place], place))[:count]
    return [spans[place] for place in sorted(chosen)]
