"""Reads the ledgers of all processes and sessions of a run, merged into one row per key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.determinism import flags
from segpipe.errors import CheckpointError
from segpipe.ledger.rows import (
    FOLDER,
    PART,
    SHARD,
    STEP,
    LedgerSession,
    Rows,
    SessionHeader,
    differing,
    ledger_files,
    read_file,
    row_keys,
)

NO_STEP = np.iinfo(np.int64).max
MOST_CHANGES = 3  # environments listed


class _Merged(NamedTuple):
    """Rows of one kind from all files."""

    rows: Rows  # by key; of equal keys the earliest session and the lowest rank come first
    keys: NDArray[np.int64]
    origin: NDArray[np.int64]  # index of the session of each row

    def at(self, places: NDArray[Any]) -> _Merged:
        return _Merged(*(part[places] for part in self))


class RankDivergence(NamedTuple):
    """The first step at which two processes of one run recorded different rows."""

    step: int
    # Index in `RunLedger.headers` of a session that agrees with the majority.
    usual: int
    # Of one that does not; without a majority, that of the higher rank.
    odd: int
    # By kind: rows of that step that both have, of `usual` and of `odd`.
    pairs: dict[int, tuple[Rows, Rows]]


@dataclass(frozen=True)
class RunLedger:
    """What a run recorded, whatever its number of processes."""

    folder: Path
    headers: tuple[SessionHeader, ...]  # by session and rank
    rows: dict[int, Rows]  # by kind, one row per key, in key order
    # Contradictions and gaps, which neither a crash nor another machine explains.
    faults: tuple[str, ...]
    notes: tuple[str, ...]  # torn tails and changed environments
    divergence: RankDivergence | None = None

    @property
    def first(self) -> SessionHeader:
        """Header that stands for the run: all sessions share its recipe, seed and layout."""
        return self.headers[0]

    @property
    def num_updates(self) -> int:
        """Updates from the start of the run to the last one recorded."""
        steps = self.rows[STEP]["step"]
        return int(steps.max()) + 1 if len(steps) else 0

    @property
    def sample_names(self) -> list[str]:
        """Names of the samples by index; empty when no header has them."""
        return next(
            (header.sample_names for header in self.headers if header.sample_names), []
        )

    def sample_name(self, index: int) -> str | None:
        """File stem of a sample; None when unknown."""
        return self.sample_names[index] if index < len(self.sample_names) else None

    def part_names(self, name: str) -> list[str]:
        """Names of the tensors of a field's part rows; empty when no session has them."""
        return next(
            (header.parts[name] for header in self.headers if name in header.parts), []
        )


def read_run(run_folder: Path) -> RunLedger:
    """The merged ledger of a run folder.

    Where a run was resumed, later rows of earlier sessions are void; it is a fault when the recomputed steps gave other
    digests. Raises CheckpointError when there is no ledger, or a file is foreign or altered.
    """
    paths = ledger_files(run_folder)
    if not paths:
        missing = "holds no ledger" if run_folder.is_dir() else "does not exist"
        raise CheckpointError(
            f"{run_folder} {missing}. Give the folder of a run that wrote {FOLDER}/rank00.bin."
        )
    sessions, notes = _load(paths)
    _check_one_run(run_folder, sessions)
    rows: dict[int, Rows] = {}
    valid: dict[int, _Merged] = {}
    faults = [*_missing_ranks(sessions)]
    for kind in (SHARD, STEP, PART):
        valid[kind], void = _split(sessions, kind)
        first = valid[kind].at(np.unique(valid[kind].keys, return_index=True)[1])
        rows[kind] = first.rows
        faults += _resume_faults(first, void, kind)
    headers = tuple(found.header for found in sessions)
    divergence = _first_divergence(valid)
    if divergence:
        odd, usual = (
            f"rank {headers[index].rank} in session {headers[index].session}"
            for index in (divergence.odd, divergence.usual)
        )
        faults.append(f"step {divergence.step}: {odd} differs from {usual}")
    faults += _gaps(rows, headers[0].shards)
    notes += _environment_changes(headers)
    return RunLedger(run_folder, headers, rows, tuple(faults), tuple(notes), divergence)


def _load(paths: Sequence[Path]) -> tuple[list[LedgerSession], list[str]]:
    """Sessions of all files by (session, rank), and notes on torn tails."""
    sessions: list[LedgerSession] = []
    notes = []
    for path in paths:
        file = read_file(path)
        sessions += file.sessions
        if torn := file.size - file.sound:
            notes.append(f"{path.name}: {torn} bytes of a torn tail were ignored")
    if not sessions:
        raise CheckpointError(
            f"{paths[0].parent} holds no complete header: the run ended before its first step."
        )
    sessions.sort(key=lambda found: (found.header.session, found.header.rank))
    return sessions, notes


def _check_one_run(run_folder: Path, sessions: Sequence[LedgerSession]) -> None:
    for name in ("seed", "compute.shards", "compute.samples_per_shard"):
        values = {found.header.recipe[name] for found in sessions}
        if len(values) > 1:
            listed = " and ".join(map(str, sorted(values)))
            raise CheckpointError(
                f"{run_folder / FOLDER} mixes runs: {name} is {listed}. Keep only the files of one run there."
            )


def _missing_ranks(sessions: Sequence[LedgerSession]) -> Iterator[str]:
    """Faults for processes of a session without a file; a session that ended before its first update needs none."""
    for number in {found.header.session for found in sessions}:
        members = [found for found in sessions if found.header.session == number]
        first = members[0].header
        if not any((each.rows["step"] >= first.first_step).any() for each in members):
            continue
        present = {found.header.rank for found in members}
        for rank in sorted(set(range(first.world_size)) - present):
            yield f"the file of rank {rank} of {first.world_size} lacks session {number}"


def _split(sessions: Sequence[LedgerSession], kind: int) -> tuple[_Merged, _Merged]:
    """Valid rows of a kind, and those that a later session made void."""
    headers = [found.header for found in sessions]
    # Of each session, the first step that a later one trained again.
    limits = []
    for header in headers:
        later = [each.first_step for each in headers if each.session > header.session]
        limits.append(min(later, default=NO_STEP))
    parts = [found.rows[found.rows["kind"] == kind] for found in sessions]
    lengths = [len(part) for part in parts]
    rows = np.concatenate(parts)
    keys = row_keys(rows)
    order = np.argsort(keys, kind="stable")
    merged = _Merged(rows, keys, np.repeat(np.arange(len(parts)), lengths)).at(order)
    valid = merged.rows["step"] < np.repeat(limits, lengths)[order]
    return merged.at(valid), merged.at(~valid)


def _unequal(a: Rows, b: Rows, kind: int) -> NDArray[np.bool_]:
    """Which rows of `a` and `b`, of equal keys, differ in any field."""
    found: NDArray[np.bool_] = np.any([*differing(a, b, kind).values()], axis=0)
    return found


def _resume_faults(valid: _Merged, void: _Merged, kind: int) -> list[str]:
    """Fault for steps that were computed twice with different outcomes."""
    _, now, before = np.intersect1d(valid.keys, void.keys, return_indices=True)
    fields = differing(valid.rows[now], void.rows[before], kind)
    wrong = np.flatnonzero(np.any([*fields.values()], axis=0))
    if not len(wrong):
        return []
    row = valid.rows[now[wrong[0]]]
    shard = f", shard {row['shard']}" if row["shard"] >= 0 else ""
    names = ", ".join(name for name, unequal in fields.items() if unequal[wrong[0]])
    many = f"{len(wrong)} of {len(now)} rows"
    return [
        f"step {row['step']}{shard}: {names} changed when recomputed after a resume ({many})"
    ]


def _environment_changes(headers: Sequence[SessionHeader]) -> list[str]:
    """Notes on sessions whose environment differs from the first one."""
    found = []
    for header in headers:
        changed = flags.differences(headers[0].fingerprint, header.fingerprint)
        if changed:
            text = ", ".join(
                f"{name} {before} -> {now}" for name, (before, now) in changed.items()
            )
            found.append(
                f"session {header.session} on rank {header.rank} had another environment: {text}"
            )
    return found[:MOST_CHANGES]


def _gaps(rows: dict[int, Rows], shards: int) -> list[str]:
    """Faults for steps between the first and the last, and shards of them, that no file has."""
    steps, counts = np.unique(rows[SHARD]["step"], return_counts=True)
    found = []
    if len(partial := steps[counts < shards]):
        found.append(
            f"shards are missing in step {partial[0]} ({len(partial)} such steps)"
        )
    for what, present in (("shard", steps), ("step", np.unique(rows[STEP]["step"]))):
        if len(holes := np.flatnonzero(np.diff(present) > 1)):
            before, after = present[holes[0]], present[holes[0] + 1]
            found.append(f"no {what} rows between step {before} and step {after}")
    return found


def _first_divergence(by_kind: Mapping[int, _Merged]) -> RankDivergence | None:
    """The first step at which a row differs from the first row of its key."""
    found = []
    for kind, merged in by_kind.items():
        leaders = np.searchsorted(merged.keys, merged.keys)
        wrong = np.flatnonzero(_unequal(merged.rows, merged.rows[leaders], kind))
        if len(wrong):
            step, key = merged.rows["step"][wrong[0]], merged.keys[wrong[0]]
            found.append((int(step), kind, int(key)))
    if not found:
        return None
    step, kind, key = min(found)
    usual, odd = _sides(by_kind[kind], kind, key)
    pairs = {}
    for each, merged in by_kind.items():
        rows = merged.at(merged.rows["step"] == step)
        one, two = (rows.rows[rows.origin == origin] for origin in (usual, odd))
        pairs[each] = common_rows(one, two)
    return RankDivergence(step, usual, odd, pairs)


def _sides(merged: _Merged, kind: int, key: int) -> tuple[int, int]:
    """Sessions (usual, odd): one that has the majority's row of a key, and the first that does not."""
    found = merged.at(merged.keys == key)
    unequal = _unequal(found.rows, np.repeat(found.rows[:1], len(found.rows)), kind)
    leader, other = int(found.origin[0]), int(found.origin[np.argmax(unequal)])
    return (other, leader) if 2 * unequal.sum() > len(unequal) else (leader, other)


def common_rows(a: Rows, b: Rows) -> tuple[Rows, Rows]:
    """Rows of one kind whose keys both have, in key order."""
    keys = row_keys(a), row_keys(b)
    if np.array_equal(*keys):
        return a, b
    _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return a[here], b[there]
