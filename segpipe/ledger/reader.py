"""The ledgers of all processes and sessions of a run, merged into one row per key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import CheckpointError
from segpipe.ledger.drift import Drift, Merged, contradictions, first_drift
from segpipe.ledger.files import FOLDER, ledger_files
from segpipe.ledger.rows import PART, SHARD, STEP, Header, Rows, Session, differing, read_file, row_keys

NO_STEP = np.iinfo(np.int64).max


@dataclass(frozen=True)
class RunLedger:
    """What a run wrote down, whatever the number of its processes."""

    folder: Path
    headers: tuple[Header, ...]  # by session and rank
    rows: dict[int, Rows]  # by kind, one row per key, in the order of the keys
    notes: tuple[str, ...]  # what is missing or contradicts itself, in words
    faults: tuple[str, ...] = ()  # those of the notes that no crash and no change of machines explains
    drift: Drift | None = None  # where processes of the run part from each other; numbers are those of `headers`

    @property
    def first(self) -> Header:
        """Header that stands for the run: recipe, seed and layout are those of all sessions."""
        return self.headers[0]

    @property
    def sample_names(self) -> list[str]:
        """Names of the samples by index; empty where no header has them."""
        return next((header.sample_names for header in self.headers if header.sample_names), [])

    def sample_name(self, index: int) -> str | None:
        """File stem of a sample, where it is known."""
        return self.sample_names[index] if index < len(self.sample_names) else None

    def part_names(self, name: str) -> list[str]:
        """Names of the tensors behind the part rows of a field; empty where no session has them."""
        return next((header.parts[name] for header in self.headers if name in header.parts), [])


def read_run(run_folder: Path) -> RunLedger:
    """The merged ledger of a run folder.

    Where a run was resumed, rows of earlier sessions from there on are void; notes say whether training those steps
    again gave the same digests. Raises CheckpointError when there is no ledger, or a file is foreign or altered.
    """
    paths = ledger_files(run_folder)
    if not paths:
        missing = "holds no ledger" if run_folder.is_dir() else "does not exist"
        raise CheckpointError(f"{run_folder} {missing}. Give the folder of a run that wrote {FOLDER}/rank00.bin.")
    sessions, notes = _load(paths)
    _check_one_run(run_folder, sessions)
    merged: dict[int, Rows] = {}
    faults: list[str] = []
    alive: dict[int, Merged] = {}
    for kind in (SHARD, STEP, PART):
        alive[kind], void = _alive(sessions, kind)
        first = np.unique(alive[kind].keys, return_index=True)[1]
        merged[kind] = alive[kind].rows[first]
        faults += _contradictions(alive[kind], sessions, kind)
        faults += _trained_again(Merged(*(part[first] for part in alive[kind])), void, kind)
    headers = tuple(found.header for found in sessions)
    gaps = _gaps(merged, headers[0].shards)
    notes += [*faults, *_changes(headers), *gaps]
    return RunLedger(run_folder, headers, merged, tuple(notes), tuple(faults + gaps), first_drift(alive))


def _load(paths: Sequence[Path]) -> tuple[list[Session], list[str]]:
    """Sessions of all files by (session, rank), and notes on torn tails."""
    sessions: list[Session] = []
    notes = []
    for path in paths:
        file = read_file(path)
        sessions += file.sessions
        if file.sound < file.size:
            notes.append(f"{path.name}: {file.size - file.sound} bytes of a torn tail were left out")
    if not sessions:
        raise CheckpointError(f"{paths[0].parent} holds no whole header: the run ended before its first step.")
    return sorted(sessions, key=lambda found: (found.header.session, found.header.rank)), notes


def _check_one_run(run_folder: Path, sessions: Sequence[Session]) -> None:
    for name in ("seed", "compute.shards", "compute.samples_per_shard"):
        values = {found.header.recipe[name] for found in sessions}
        if len(values) > 1:
            raise CheckpointError(
                f"{run_folder / FOLDER} mixes runs: {name} is {' and '.join(map(str, sorted(values)))}. "
                f"Keep the files of one run there."
            )


def _alive(sessions: Sequence[Session], kind: int) -> tuple[Merged, Merged]:
    """Rows of a kind that stand, and those that a later session made void."""
    limits = {
        found.header.session: min(
            (other.header.first_step for other in sessions if other.header.session > found.header.session),
            default=NO_STEP,
        )
        for found in sessions
    }
    parts = [found.rows[found.rows["kind"] == kind] for found in sessions]
    rows = np.concatenate(parts)
    origin = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    limit = np.repeat([limits[found.header.session] for found in sessions], [len(part) for part in parts])
    stands = rows["step"] < limit
    return _sorted(rows[stands], origin[stands]), _sorted(rows[~stands], origin[~stands])


def _sorted(rows: Rows, origin: NDArray[np.int64]) -> Merged:
    keys = row_keys(rows)
    order = np.argsort(keys, kind="stable")
    return Merged(rows[order], keys[order], origin[order])


def _contradictions(merged: Merged, sessions: Sequence[Session], kind: int) -> list[str]:
    """Note on the first key that two files give different digests for: ranks that drifted apart, a bad restore."""
    found = contradictions(merged, kind)
    if not len(found.places):
        return []
    here, there = (sessions[int(merged.origin[places[0]])].header for places in (found.places, found.leaders))
    names = ", ".join(name for name, unequal in found.fields.items() if unequal[0])
    return [
        f"{_where(merged.rows[found.places[0]])}: rank {here.rank} of session {here.session} has other {names} than "
        f"rank {there.rank} of session {there.session} (rows like this: {len(found.places)})"
    ]


def _trained_again(alive: Merged, void: Merged, kind: int) -> list[str]:
    """Note on steps that were trained twice, where the two outcomes differ."""
    _, now, before = np.intersect1d(alive.keys, void.keys, return_indices=True)
    fields = differing(alive.rows[now], void.rows[before], kind)
    wrong = np.flatnonzero(np.any([*fields.values()], axis=0))
    if not len(wrong):
        return []
    row = alive.rows[now[wrong[0]]]
    names = ", ".join(name for name, unequal in fields.items() if unequal[wrong[0]])
    return [
        f"{_where(row)}: {names} came out otherwise when the step was trained again "
        f"after a resume ({len(wrong)} of {len(now)} rows)"
    ]


def _where(row: Any) -> str:
    return f"step {row['step']}" + (f", shard {row['shard']}" if row["shard"] >= 0 else "")


def _changes(headers: Sequence[Header]) -> list[str]:
    """Note on processes or sessions of the run that had another environment than the first."""
    found = []
    for header in headers:
        changed = mapping_differences(headers[0].fingerprint, header.fingerprint)
        if changed:
            text = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
            found.append(f"session {header.session} on rank {header.rank} had another environment: {text}")
    return found[:3]


def mapping_differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Entries that differ, as name -> (value in a, value in b); None stands for a missing one."""
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _gaps(rows: dict[int, Rows], shards: int) -> list[str]:
    """Notes on steps between the first and the last, and shards of them, that no file has."""
    steps, counts = np.unique(rows[SHARD]["step"], return_counts=True)
    found = []
    if len(partial := steps[counts < shards]):
        found.append(f"shards are missing in step {partial[0]} (steps like this: {len(partial)})")
    for what, present in (("shards", steps), ("steps", np.unique(rows[STEP]["step"]))):
        if len(holes := np.flatnonzero(np.diff(present) > 1)):
            before = int(present[holes[0]])
            found.append(f"no rows of {what} between step {before} and step {int(present[holes[0] + 1])}")
    return found
