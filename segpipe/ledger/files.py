"""The ledger of a run: digests of what every step read, computed and left, one append-only file per process.

`ledger/rank00.bin` is a sequence of sessions, one for each time the run was started or resumed: a header (JSON: recipe,
fingerprint, process), then rows of one size. A row is keyed (step, shard), never by process, so runs with different
numbers of processes compare row by row. Rows of b samples take 64 + 24 b bytes (96 for b = 1), and a step makes V of
them and one more in each process: with V = 16 and b = 4, 100,000 steps take 272 MB from one process and 512 MB from 16
(32 MB each).

Digests are int64 tensors and stay on their device until `flush`; numbers (lr, loss) are kept as the bits of a float64.
`rank00.seal` beside it has running hashes of the file (seals.py), and a header the hash of what the run was made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import CheckpointError
from segpipe.ledger.rows import (
    PART,
    SHARD,
    STEP,
    Header,
    Rows,
    encode,
    fields_of,
    part_fields,
    read_file,
    row_type,
    seal,
    slots,
)
from segpipe.ledger.seals import RunningHash, Seal, read_seals
from segpipe.settings.config import Config, config_hash, recipe

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "ledger"
INPUTS = "inputs.json"  # of the run folder: files of the data set and sources, written before the first session


def describe(
    config: Config,
    fingerprint: dict[str, Any],
    *,
    session: int,
    first_step: int,
    rank: int,
    world_size: int,
    parts: Mapping[str, Sequence[str]] | None = None,
    sample_names: Sequence[str] = (),
) -> Header:
    """Header of a session; `parts` makes it one of level 1. One rank's `sample_names` are enough for the run."""
    named = {name: list(values) for name, values in (parts or {}).items()}
    return Header(
        session,
        first_step,
        rank,
        world_size,
        recipe(config),
        config_hash(config),
        fingerprint,
        level=int(parts is not None),
        parts=named,
        sample_names=list(sample_names),
        inputs=_inputs_hash(config.run_dir),
    )


def _inputs_hash(run_folder: Path) -> str:
    path = run_folder / INPUTS
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def ledger_path(run_folder: Path, rank: int) -> Path:
    """File of a rank."""
    return run_folder / FOLDER / f"rank{rank:02d}.bin"


def ledger_files(run_folder: Path) -> list[Path]:
    """Files of all ranks, by rank."""
    return sorted((run_folder / FOLDER).glob("rank*.bin"))


def last_seals(run_folder: Path) -> dict[str, Seal]:
    """SHA-256 and number of bytes of each rank's file, by its name, as of the last checkpoint."""
    found = {path.stem: read_seals(path) for path in ledger_files(run_folder)}
    return {name: seals[-1] for name, seals in found.items() if seals}


def next_session(run_folder: Path) -> int:
    """Number of the session that is about to start; one rank asks and tells the others, before any of them writes.

    Raises CheckpointError for a file that is no ledger, or was altered.
    """
    sessions = (found for path in ledger_files(run_folder) for found in read_file(path).sessions)
    return max((found.header.session + 1 for found in sessions), default=0)


class LedgerWriter:
    """Appends the rows of this process to its file. Nothing waits for a device before `flush`."""

    def __init__(self, path: Path, header: Header) -> None:
        """Open a session, after whatever the file holds; a torn tail is cut first. Raises CheckpointError."""
        self.path, self._samples = path, header.samples_per_shard
        self._type = row_type(self._samples)
        self._width: int = self._type["digest"].shape[0]
        self._rows: list[Rows] = []
        self._num_rows = 0
        self._values: list[tuple[int, Tensor | int]] = []  # place among the digests of all pending rows
        sound = read_file(path).sound if path.exists() else 0
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what waited in a buffer would be written a second time by a forked loader process.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, sound)
            self._hash = RunningHash(path)
        self._append(encode(header))

    def shard_row(
        self,
        step: int,
        shard: int,
        epochs: Tensor | Sequence[int],
        samples: Tensor | Sequence[int],
        digests: Mapping[str, Tensor | int],
    ) -> None:
        """Row of a shard: its samples (on the host), and digests by SHARD_FIELDS.

        Digests are int64, 0-d, or (b,) for SAMPLE_FIELDS; they must not change before the next flush.
        """
        row = self._new(SHARD, 1, step, shard)
        row["epoch"], row["sample"] = _integers(epochs), _integers(samples)
        self._fill(row, SHARD, digests)

    def step_row(self, step: int, digests: Mapping[str, Tensor | int]) -> None:
        """Row of a step, by STEP_FIELDS: its reduction, and the state after it; step `first - 1` is the state before.

        Every rank writes its own, so that ranks which drifted apart are found.
        """
        self._fill(self._new(STEP, 1, step, -1), STEP, digests)

    def part_rows(self, step: int, shard: int | None, name: str, digests: Tensor) -> None:
        """Digests int64 (n,) of the samples or tensors behind one field of a shard, or of a step (shard None)."""
        shard = -1 if shard is None else shard
        number, count = part_fields(shard).index(name), digests.numel()
        start = self._num_rows * self._width
        rows = self._new(PART, -(-count // self._width), step, shard)
        rows["field"], rows["part"] = number, np.arange(len(rows))
        rows["present"] = np.minimum(self._width, count - self._width * rows["part"])
        self._values.append((start, digests))

    def flush(self, *, sync: bool = False) -> None:
        """Write the pending rows, after one copy from the device; with `sync` they also survive a power cut.

        Raises CheckpointError when the disk does not take them; the file then ends with the last sound row.
        """
        if self._rows:
            rows = np.concatenate(self._rows)
            digests = np.zeros(len(rows) * self._width, np.uint64)
            for start, values in _on_host(self._values):
                digests[start : start + len(values)] = values
            rows["digest"] = digests.reshape(len(rows), self._width)
            self._rows, self._values, self._num_rows = [], [], 0
            self._append(seal(rows))
        if sync:
            with _disk(self.path):
                os.fsync(self._file)
                self._hash.seal()

    def close(self) -> None:
        """Write what is pending and end; closing twice does nothing."""
        if self._file < 0:
            return
        try:
            self.flush(sync=True)
        finally:
            os.close(self._file)
            self._file = -1

    def _new(self, kind: int, count: int, step: int, shard: int) -> Rows:
        rows = np.zeros(count, self._type)
        rows["kind"], rows["step"], rows["shard"] = kind, step, shard
        self._rows.append(rows)
        self._num_rows += count
        return rows

    def _fill(self, row: Rows, kind: int, digests: Mapping[str, Tensor | int]) -> None:
        places, names = slots(kind, self._samples), fields_of(kind)
        for name, value in digests.items():
            row["present"] |= np.uint16(1 << names.index(name))
            self._values.append(((self._num_rows - 1) * self._width + places[name].start, value))

    def _append(self, content: bytes) -> None:
        with _disk(self.path):
            before = os.lseek(self._file, 0, os.SEEK_END)
            left = memoryview(content)
            try:
                while left:
                    left = left[os.write(self._file, left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, before)  # part of a row would put all later ones out of step
                raise
        self._hash.add(content)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}. Free some space, or choose another run.root, "
            f"then continue with run.exists=resume."
        ) from error


def _integers(values: Tensor | Sequence[int]) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _on_host(values: list[tuple[int, Tensor | int]]) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """The values as arrays, with one copy for each device."""
    devices: dict[Any, list[tuple[int, Tensor]]] = {}
    for start, value in values:
        if isinstance(value, int):
            yield start, np.array([value & (1 << 64) - 1], np.uint64)
        else:
            devices.setdefault(value.device, []).append((start, value.detach().reshape(-1)))
    for members in devices.values():
        import torch  # here, so that reading a ledger does not load it

        flat = torch.cat([value for _, value in members])
        assert flat.dtype == torch.int64, "digests are int64"
        host, place = flat.cpu().numpy().view(np.uint64), 0
        for start, value in members:
            yield start, host[place : place + value.numel()]
            place += value.numel()
