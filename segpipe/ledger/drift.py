"""Processes of one run that drifted apart: every rank writes the rows of the steps, and they must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.ledger.rows import Rows, differing


class Merged(NamedTuple):
    """Rows of one kind from all files."""

    rows: Rows  # sorted by key; the earliest session and the lowest rank first among equals
    keys: NDArray[np.int64]
    origin: NDArray[np.int64]  # number of the session each row comes from


class Contradiction(NamedTuple):
    """Rows that differ from the first of their key."""

    places: NDArray[np.int64]  # of these rows in `Merged`
    leaders: NDArray[np.int64]  # places of the first rows of their keys
    fields: dict[str, NDArray[np.bool_]]  # which of them differ in which field


class Drift(NamedTuple):
    """The first step at which two processes of a run do not hold the same."""

    step: int
    usual: int  # number of the session that agrees with most
    odd: int  # of the one that does not; where there is no majority, of the higher rank
    pairs: dict[int, tuple[Rows, Rows]]  # by kind: rows of that step that both have, of the usual and of the odd one


def contradictions(merged: Merged, kind: int) -> Contradiction:
    """All rows of a kind that say otherwise than the first row of the same key."""
    first = np.ones(len(merged.keys), bool)
    first[1:] = merged.keys[1:] != merged.keys[:-1]
    others = np.flatnonzero(~first)
    leaders = np.flatnonzero(first)[np.cumsum(first)[others] - 1]
    fields = differing(merged.rows[others], merged.rows[leaders], kind)
    wrong = np.any([*fields.values()], axis=0)
    return Contradiction(others[wrong], leaders[wrong], {name: unequal[wrong] for name, unequal in fields.items()})


def first_drift(by_kind: Mapping[int, Merged]) -> Drift | None:
    """The first step with rows that contradict each other; None when there is none."""
    found = []
    for kind, merged in by_kind.items():
        wrong = contradictions(merged, kind).places
        if len(wrong):
            place = int(wrong[np.argmin(merged.rows["step"][wrong])])
            found.append((int(merged.rows["step"][place]), kind, place))
    if not found:
        return None
    step, kind, place = min(found)
    usual, odd = _sides(by_kind[kind], kind, int(by_kind[kind].keys[place]))
    pairs = {kind: _of_both(merged, step, usual, odd) for kind, merged in by_kind.items()}
    return Drift(step, usual, odd, pairs)


def _sides(merged: Merged, kind: int, key: int) -> tuple[int, int]:
    """Who holds what most hold of a key, and the first who does not."""
    places = np.flatnonzero(merged.keys == key)
    rows = merged.rows[places]
    unequal = np.any([*differing(rows, np.repeat(rows[:1], len(rows)), kind).values()], axis=0)
    leader, other = int(merged.origin[places[0]]), int(merged.origin[places[np.argmax(unequal)]])
    return (other, leader) if 2 * unequal.sum() > len(rows) else (leader, other)


def _of_both(merged: Merged, step: int, usual: int, odd: int) -> tuple[Rows, Rows]:
    at_step = merged.rows["step"] == step
    one, two = (np.flatnonzero(at_step & (merged.origin == origin)) for origin in (usual, odd))
    _, here, there = np.intersect1d(merged.keys[one], merged.keys[two], assume_unique=True, return_indices=True)
    return merged.rows[one[here]], merged.rows[two[there]]
