"""Reads the ledgers of all processes and sessions of a run, merged to one row per key, and its other records."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe.determinism import flags
from segpipe.errors import CheckpointError
from segpipe.files import read_json
from segpipe.ledger.rows import (
    FOLDER,
    SHARD,
    STEP,
    LedgerSession,
    Rows,
    SessionHeader,
    ledger_files,
    read_file,
    recorded,
    row_keys,
    unequal,
)

NO_STEP = np.iinfo(np.int64).max
MOST_CHANGES = 3  # changed environments that are listed


@dataclass(frozen=True)
class RunLedger:
    """What a run recorded, for any number of processes."""

    folder: Path
    headers: tuple[SessionHeader, ...]  # by session and rank
    rows: Rows  # of all kinds, one per key, in key order
    # Contradictions and gaps that neither a crash nor another machine explains.
    faults: tuple[str, ...]
    notes: tuple[str, ...]  # torn tails and changed environments
    partial: NDArray[np.int64]  # steps of which shards are in no file

    @property
    def first(self) -> SessionHeader:
        """The header that represents the run: all sessions share its seed and layout."""
        return self.headers[0]

    @property
    def num_updates(self) -> int:
        """Number of updates from the start of the run to the last one recorded."""
        return int(steps_of(self.rows).max(initial=-1)) + 1

    @property
    def sample_names(self) -> list[str]:
        """Names of the samples by index; empty when no header has them."""
        return next(filter(None, (each.sample_names for each in self.headers)), [])

    def part_names(self, name: str) -> list[str]:
        """Names of the tensors of a field's part rows; empty when no session has them."""
        return next(filter(None, (each.parts.get(name) for each in self.headers)), [])


def read_run(run_folder: Path) -> RunLedger:
    """The merged ledger of a run folder.

    After a resume, rows of earlier sessions from its first step on are void; if the recomputed steps gave different
    digests, that is a fault. Raises CheckpointError when there is no ledger, or a file is foreign or altered.
    """
    paths = ledger_files(run_folder)
    if not paths:
        missing = "holds no ledger" if run_folder.is_dir() else "does not exist"
        raise CheckpointError(
            f"{run_folder} {missing}. Give the folder of a run that wrote {FOLDER}/rank00.bin."
        )
    sessions, notes = _load(paths)
    headers = tuple(found.header for found in sessions)

    valid, void = [], []
    for session in sessions:
        # A later session repeated all steps from its first one on.
        number = session.header.session
        later = [each.first_step for each in headers if each.session > number]
        counts = session.rows["step"] < min(later, default=NO_STEP)
        valid.append(session.rows[counts])
        void.append(session.rows[~counts])

    rows = _first_of_each(np.concatenate(valid))
    steps, found = np.unique(steps_of(rows, SHARD), return_counts=True)
    partial = steps[found < headers[0].shards]
    faults = [
        *_missing_ranks(sessions),
        *_resume_faults(rows, _first_of_each(np.concatenate(void))),
        *_rank_faults(headers, valid, rows),
        *_gaps(run_folder, rows, partial),
    ]
    environments = []
    for header in headers:
        changed = flags.differences(headers[0].fingerprint, header.fingerprint)
        pairs = [f"{name} {here} -> {there}" for name, (here, there) in changed.items()]
        if pairs:
            environments.append(
                f"session {header.session} on rank {header.rank} had another environment: {', '.join(pairs)}"
            )
    notes += environments[:MOST_CHANGES]
    return RunLedger(run_folder, headers, rows, tuple(faults), tuple(notes), partial)


def _first_of_each(rows: Rows) -> Rows:
    """The first row of each key, in key order."""
    _, first = np.unique(row_keys(rows), return_index=True)
    return rows[first]


def steps_of(rows: Rows, kind: int = STEP) -> NDArray[np.int64]:
    """Updates with a step row, int64 (n,), or with rows of shards: after a crash, one may have only those."""
    steps: NDArray[np.int64] = rows["step"][rows["kind"] == kind]
    return steps[steps >= 0]


def _load(paths: Sequence[Path]) -> tuple[list[LedgerSession], list[str]]:
    """Sessions of all files by (session, rank), and notes on torn tails. Raises CheckpointError for several runs."""
    sessions: list[LedgerSession] = []
    notes = []
    for path in paths:
        file = read_file(path)
        sessions += file.sessions
        if torn := file.size - file.sound:
            notes.append(f"{path.name}: ignored {torn} bytes of a torn tail")
    if not sessions:
        raise CheckpointError(
            f"{paths[0].parent} holds no complete header: the run ended before its first step."
        )
    for name in ("seed", "compute.shards", "compute.samples_per_shard"):
        values = {found.header.recipe[name] for found in sessions}
        if len(values) > 1:
            listed = " and ".join(map(str, sorted(values)))
            raise CheckpointError(
                f"{paths[0].parent} mixes runs: {name} is {listed}. Keep only the files of one run there."
            )
    sessions.sort(key=lambda found: (found.header.session, found.header.rank))
    return sessions, notes


def _missing_ranks(sessions: Sequence[LedgerSession]) -> Iterator[str]:
    """Faults for ranks whose file lacks a session; sessions that ended before their first update are exempt."""
    for number, group in groupby(sessions, lambda found: found.header.session):
        members = list(group)
        first = members[0].header
        if any((each.rows["step"] >= first.first_step).any() for each in members):
            present = {found.header.rank for found in members}
            for rank in sorted(set(range(first.world_size)) - present):
                yield f"the file of rank {rank} of {first.world_size} lacks session {number}"


def _resume_faults(rows: Rows, void: Rows) -> list[str]:
    """Fault for steps that were computed twice with different results."""
    now, before = common_rows(rows, void)
    wrong = np.flatnonzero(unequal(now, before))
    if not len(wrong):
        return []

    first = wrong[:1]
    step, shard = now["step"][wrong[0]], now["shard"][wrong[0]]
    place = f"step {step}" + (f", shard {shard}" if shard >= 0 else "")
    one, two = recorded(now[first]), recorded(before[first])
    names = [
        key[1] for key in one if key in two and not np.array_equal(one[key], two[key])
    ]
    return [
        f"{place}: {', '.join(names)} changed when recomputed after a resume ({len(wrong)} of {len(now)} rows)"
    ]


def _gaps(run_folder: Path, rows: Rows, partial: NDArray[np.int64]) -> list[str]:
    """Faults for steps between the first and the last that are in no file, and for `partial` ones before a whole one.

    Of a run that has not ended, a killed process did not write its shards of the last steps. Whether a checkpoint
    follows them, the audit sees.
    """
    result = run_folder / "result.json"
    ended = result.exists()
    # It may be of the updates before the run was extended.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        ended = bool(read_json(result)["steps"] > rows["step"].max(initial=0))
    steps = np.unique(steps_of(rows, SHARD))
    whole = np.setdiff1d(steps, partial)
    found = []
    last = NO_STEP if ended else whole.max(initial=0)
    if len(early := partial[partial < last]):
        found.append(f"shards are missing in step {early[0]} ({len(early)} such steps)")
    for what, present in (("shard", steps), ("step", steps_of(rows))):
        holes = np.flatnonzero(np.diff(present) > 1)
        if len(holes):
            before, after = present[holes[0]], present[holes[0] + 1]
            found.append(f"no {what} rows between step {before} and step {after}")
    return found


def _rank_faults(
    headers: Sequence[SessionHeader], valid: Sequence[Rows], rows: Rows
) -> list[str]:
    """Fault for the first row that two processes recorded differently; `valid`: the rows of each header.

    Training itself stops at such a row, unless it was resumed from another state than it had saved.
    """
    found, keys = [], row_keys(rows)
    for one, own in zip(headers, valid, strict=True):
        usual = rows[np.searchsorted(keys, row_keys(own))]
        wrong = own[unequal(own, usual)][:1]
        if len(wrong):
            sources = zip(headers, valid, strict=True)
            two = next(
                each for each, its in sources if row_keys(wrong) in row_keys(its)
            )
            found.append((wrong["step"][0], one, two))
    return [
        f"step {step}: rank {one.rank} in session {one.session} differs from rank {two.rank} in session {two.session}"
        for step, one, two in sorted(found, key=lambda fault: fault[0])[:1]
    ]


def common_rows(a: Rows, b: Rows) -> tuple[Rows, Rows]:
    """Rows whose keys are in both, in key order."""
    keys = row_keys(a), row_keys(b)
    if np.array_equal(*keys):
        return a, b
    _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return a[here], b[there]


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Phrases such as "a.png was altered": altered files first, then missing and added ones."""
    altered = [name for name in before if name in now and now[name] != before[name]]
    return [
        *(f"{name} was altered" for name in altered),
        *(f"{name} is missing" for name in before if name not in now),
        *(f"{name} was added" for name in now if name not in before),
    ]


def read_object(path: Path) -> dict[str, Any]:
    """Content of a JSON file. Raises CheckpointError when it is damaged."""
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}). Restore it."
        ) from error


def read_inputs(path: Path) -> dict[str, Any]:
    """Content of inputs.json. Raises CheckpointError when it is damaged."""
    content = read_object(path)
    try:
        for part in ("data", "code"):
            content[part]["files"].items()
        content["data"].setdefault("sizes", {})  # older releases recorded none
    except (KeyError, TypeError, AttributeError) as error:
        text = f"{path} does not describe the inputs of a run. Restore it."
        raise CheckpointError(text) from error
    return content
