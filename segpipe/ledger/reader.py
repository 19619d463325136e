"""Reads the ledgers of all processes and sessions of a run, merged into one row per key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.determinism import flags
from segpipe.errors import CheckpointError
from segpipe.ledger.rows import (
    FOLDER,
    SHARD,
    STEP,
    LedgerSession,
    Rows,
    SessionHeader,
    differing,
    ledger_files,
    read_file,
    row_keys,
    unequal,
)

NO_STEP = np.iinfo(np.int64).max
MOST_CHANGES = 3  # environments listed


class _Merged(NamedTuple):
    """Rows from all files."""

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
    # Rows of that step that both have, of `usual` and of `odd`.
    pair: tuple[Rows, Rows]


@dataclass(frozen=True)
class RunLedger:
    """What a run recorded, whatever its number of processes."""

    folder: Path
    headers: tuple[SessionHeader, ...]  # by session and rank
    rows: Rows  # of all kinds, one per key, in key order
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
        return int(steps_of(self.rows).max(initial=-1)) + 1

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
    valid, void = _split(sessions)
    merged = valid.at(np.unique(valid.keys, return_index=True)[1])
    faults = [*_missing_ranks(sessions), *_resume_faults(merged, void)]
    headers = tuple(found.header for found in sessions)
    diverged = _first_divergence(valid)
    if diverged:
        odd, usual = headers[diverged.odd], headers[diverged.usual]
        faults.append(
            f"step {diverged.step}: rank {odd.rank} in session {odd.session} differs from rank {usual.rank} in "
            f"session {usual.session}"
        )
    faults += _gaps(merged.rows, headers[0].shards)
    notes += _environment_changes(headers)
    return RunLedger(
        run_folder, headers, merged.rows, tuple(faults), tuple(notes), diverged
    )


def steps_of(rows: Rows) -> NDArray[np.int64]:
    """Updates that the rows finish, int64 (n,): a crash may leave shards of one without its last row."""
    steps: NDArray[np.int64] = rows["step"][rows["kind"] == STEP]
    return steps[steps >= 0]


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


def _split(sessions: Sequence[LedgerSession]) -> tuple[_Merged, _Merged]:
    """Valid rows, and those that a later session made void."""
    headers = [found.header for found in sessions]
    # Of each session, the first step that a later one trained again.
    limits = []
    for header in headers:
        later = [each.first_step for each in headers if each.session > header.session]
        limits.append(min(later, default=NO_STEP))
    lengths = [len(found.rows) for found in sessions]
    rows = np.concatenate([found.rows for found in sessions])
    keys = row_keys(rows)
    order = np.argsort(keys, kind="stable")
    merged = _Merged(rows, keys, np.repeat(np.arange(len(sessions)), lengths)).at(order)
    valid = merged.rows["step"] < np.repeat(limits, lengths)[order]
    return merged.at(valid), merged.at(~valid)


def _resume_faults(valid: _Merged, void: _Merged) -> list[str]:
    """Fault for steps that were computed twice with different outcomes."""
    _, now, before = np.intersect1d(valid.keys, void.keys, return_indices=True)
    wrong = np.flatnonzero(unequal(valid.rows[now], void.rows[before]))
    if not len(wrong):
        return []
    one, two = valid.rows[now[wrong[:1]]], void.rows[before[wrong[:1]]]
    shard = f", shard {one['shard'][0]}" if one["shard"][0] >= 0 else ""
    names = [name for name, differs in differing(one, two).items() if differs[0]]
    return [
        f"step {one['step'][0]}{shard}: {', '.join(names)} changed when recomputed after a resume "
        f"({len(wrong)} of {len(now)} rows)"
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


def _gaps(rows: Rows, shards: int) -> list[str]:
    """Faults for steps between the first and the last, and shards of them, that no file has."""
    of_shards = rows["step"][rows["kind"] == SHARD]
    steps, counts = np.unique(of_shards, return_counts=True)
    found = []
    if len(partial := steps[counts < shards]):
        found.append(
            f"shards are missing in step {partial[0]} ({len(partial)} such steps)"
        )
    for what, present in (("shard", steps), ("step", steps_of(rows))):
        holes = np.flatnonzero(np.diff(present) > 1)
        if len(holes):
            before, after = present[holes[0]], present[holes[0] + 1]
            found.append(f"no {what} rows between step {before} and step {after}")
    return found


def _first_divergence(merged: _Merged) -> RankDivergence | None:
    """The first step at which a row differs from the first row of its key."""
    leaders = np.searchsorted(merged.keys, merged.keys)
    wrong = np.flatnonzero(unequal(merged.rows, merged.rows[leaders]))
    if not len(wrong):
        return None
    step = int(merged.rows["step"][wrong[0]])
    usual, odd = _sides(merged.at(merged.keys == merged.keys[wrong[0]]))
    there = merged.at(merged.rows["step"] == step)
    one, two = (there.rows[there.origin == origin] for origin in (usual, odd))
    return RankDivergence(step, usual, odd, common_rows(one, two))


def _sides(found: _Merged) -> tuple[int, int]:
    """Of rows of one key, sessions (usual, odd): one that has the majority's row, and the first that does not."""
    differs = unequal(found.rows, np.repeat(found.rows[:1], len(found.rows)))
    leader, other = int(found.origin[0]), int(found.origin[np.argmax(differs)])
    return (other, leader) if 2 * differs.sum() > len(differs) else (leader, other)


def common_rows(a: Rows, b: Rows) -> tuple[Rows, Rows]:
    """Rows whose keys both have, in key order."""
    keys = row_keys(a), row_keys(b)
    if np.array_equal(*keys):
        return a, b
    _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return a[here], b[there]
