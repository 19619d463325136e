"""Reads the ledgers of all processes and sessions of a run, merged into one row per key, and their running hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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
    SEAL_SUFFIX,
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
CHUNK = 1 << 22


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
    usual: (
        int  # index in `RunLedger.headers` of a session that agrees with the majority
    )
    odd: int  # of one that does not; without a majority, that of the higher rank
    pairs: dict[
        int, tuple[Rows, Rows]
    ]  # by kind: rows of that step that both have, of `usual` and of `odd`


@dataclass(frozen=True)
class RunLedger:
    """What a run recorded, whatever its number of processes."""

    folder: Path
    headers: tuple[SessionHeader, ...]  # by session and rank
    rows: dict[int, Rows]  # by kind, one row per key, in key order
    faults: tuple[
        str, ...
    ]  # contradictions and gaps, which neither a crash nor another machine explains
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
    faults: list[str] = []
    for kind in (SHARD, STEP, PART):
        valid[kind], void = _split(sessions, kind)
        first = valid[kind].at(np.unique(valid[kind].keys, return_index=True)[1])
        rows[kind] = first.rows
        faults += _resume_faults(first, void, kind)
    headers, divergence = (
        tuple(found.header for found in sessions),
        _first_divergence(valid),
    )
    faults += [_rank_fault(divergence, headers)] if divergence else []
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
        if file.sound < file.size:
            notes.append(
                f"{path.name}: {file.size - file.sound} bytes of a torn tail were ignored"
            )
    if not sessions:
        raise CheckpointError(
            f"{paths[0].parent} holds no complete header: the run ended before its first step."
        )
    return sorted(
        sessions, key=lambda found: (found.header.session, found.header.rank)
    ), notes


def _check_one_run(run_folder: Path, sessions: Sequence[LedgerSession]) -> None:
    for name in ("seed", "compute.shards", "compute.samples_per_shard"):
        values = {found.header.recipe[name] for found in sessions}
        if len(values) > 1:
            raise CheckpointError(
                f"{run_folder / FOLDER} mixes runs: {name} is {' and '.join(map(str, sorted(values)))}. "
                f"Keep only the files of one run there."
            )


def _split(sessions: Sequence[LedgerSession], kind: int) -> tuple[_Merged, _Merged]:
    """Valid rows of a kind, and those that a later session made void."""
    starts = {found.header.session: found.header.first_step for found in sessions}
    limits = [
        min(
            (
                start
                for session, start in starts.items()
                if session > found.header.session
            ),
            default=NO_STEP,
        )
        for found in sessions
    ]
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
    where = f"step {row['step']}" + (
        f", shard {row['shard']}" if row["shard"] >= 0 else ""
    )
    names = ", ".join(name for name, unequal in fields.items() if unequal[wrong[0]])
    return [
        f"{where}: {names} changed when recomputed after a resume ({len(wrong)} of {len(now)} rows)"
    ]


def _rank_fault(found: RankDivergence, headers: Sequence[SessionHeader]) -> str:
    odd, usual = (
        f"rank {headers[n].rank} in session {headers[n].session}"
        for n in (found.odd, found.usual)
    )
    pairs = {
        kind: differing(*pair, kind)
        for kind, pair in found.pairs.items()
        if kind != PART
    }
    names = [
        name
        for fields in pairs.values()
        for name, unequal in fields.items()
        if unequal.any()
    ]
    return f"step {found.step}: {', '.join(names)} of {odd} differ from {usual}"


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
            before = int(present[holes[0]])
            found.append(
                f"no {what} rows between step {before} and step {int(present[holes[0] + 1])}"
            )
    return found


def _first_divergence(by_kind: Mapping[int, _Merged]) -> RankDivergence | None:
    """The first step at which a row differs from the first row of its key."""
    found = []
    for kind, merged in by_kind.items():
        leaders = np.searchsorted(merged.keys, merged.keys)
        wrong = np.flatnonzero(_unequal(merged.rows, merged.rows[leaders], kind))
        found += [
            (int(merged.rows["step"][place]), kind, int(merged.keys[place]))
            for place in wrong[:1]
        ]
    if not found:
        return None
    step, kind, key = min(found)
    usual, odd = _sides(by_kind[kind], kind, key)
    pairs = {
        kind: _rows_of_both(merged, step, usual, odd)
        for kind, merged in by_kind.items()
    }
    return RankDivergence(step, usual, odd, pairs)


def _sides(merged: _Merged, kind: int, key: int) -> tuple[int, int]:
    """Sessions (usual, odd): one that has the majority's row of a key, and the first that does not."""
    found = merged.at(merged.keys == key)
    unequal = _unequal(found.rows, np.repeat(found.rows[:1], len(found.rows)), kind)
    leader, other = int(found.origin[0]), int(found.origin[np.argmax(unequal)])
    return (other, leader) if 2 * unequal.sum() > len(unequal) else (leader, other)


def _rows_of_both(
    merged: _Merged, step: int, usual: int, odd: int
) -> tuple[Rows, Rows]:
    at_step = merged.rows["step"] == step
    one, two = (
        merged.at(at_step & (merged.origin == origin)) for origin in (usual, odd)
    )
    _, here, there = np.intersect1d(
        one.keys, two.keys, assume_unique=True, return_indices=True
    )
    return one.rows[here], two.rows[there]


class Seal(NamedTuple):
    """SHA-256 of the first `size` bytes of a file."""

    sha256: str
    size: int


def read_seals(path: Path) -> list[Seal]:
    """Seals of the ledger file `path`, oldest first; a line that a crash left torn is ignored."""
    seals = path.with_suffix(SEAL_SUFFIX)
    parts = (
        [line.split() for line in seals.read_text(errors="replace").splitlines()]
        if seals.is_file()
        else []
    )
    return [
        Seal(part[0], int(part[1]))
        for part in parts
        if len(part) == 2 and part[1].isdecimal()
    ]


def last_seals(run_folder: Path) -> dict[str, Seal]:
    """The last seal of each rank's file, by file stem."""
    found = {path.stem: read_seals(path) for path in ledger_files(run_folder)}
    return {name: seals[-1] for name, seals in found.items() if seals}


def first_broken(path: Path, seals: list[Seal]) -> tuple[int, int] | None:
    """Byte range of `path` that changed after it was sealed; None when nothing did.

    Bytes after the last seal are not covered: a crash may have ended the run there.
    """
    running, place = hashlib.sha256(), 0
    with path.open("rb") as file:
        for seal in seals:
            before = place
            while place < seal.size and (
                content := file.read(min(CHUNK, seal.size - place))
            ):
                running.update(content)
                place += len(content)
            if running.hexdigest() != seal.sha256:
                return before, seal.size
    return None
