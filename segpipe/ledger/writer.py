"""Writes the ledger of a run: digests of every step's input, output and state, one append-only file per process.

`ledger/rank00.bin` is a sequence of sessions, one for each time the run was started or resumed: a header (JSON: recipe,
fingerprint, process), then rows of one size. A row is keyed (step, shard), never by process, so runs with different
numbers of processes compare row by row. Rows of b samples take 64 + 24 b bytes (96 for b = 1). A step writes V of them
and one more in each process: with V = 16 and b = 4, 100,000 steps take 272 MB from one process and 512 MB from 16
(32 MB each).

Digests are int64 tensors and stay on their device until `flush`. Numbers (lr, loss) are stored as float64 bits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from segpipe.disk import append, patiently
from segpipe.files import not_written
from segpipe.ledger.rows import (
    PART,
    SHARD,
    STEP,
    Rows,
    SessionHeader,
    encode,
    encode_rows,
    ledger_files,
    part_fields,
    read_file,
    row_type,
    slots,
)

if TYPE_CHECKING:
    from torch import Tensor


def next_session(run_folder: Path) -> int:
    """Number of the session about to start; rank 0 broadcasts it before any rank writes.

    Raises CheckpointError for a file that is no ledger, or was altered.
    """
    files = [read_file(path) for path in ledger_files(run_folder)]
    earlier = [each.header.session for file in files for each in file.sessions]
    return max(earlier, default=-1) + 1


class LedgerWriter:
    """Appends the rows of this process to its file. Nothing waits for a device before `flush`."""

    def __init__(self, path: Path, header: SessionHeader) -> None:
        """Start a session at the end of the file, after dropping a torn tail. Raises CheckpointError."""
        self.path = path
        self._samples = header.samples_per_shard
        self._type = row_type(self._samples)
        self._width: int = self._type["digest"].shape[0]
        self._rows: list[Rows] = []
        self._num_rows = 0
        # By their index among the digests of all pending rows.
        self._values: list[tuple[int, Tensor]] = []
        sound = read_file(path).sound if path.exists() else 0
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a forked loader process would write a buffer's content a second time.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = patiently(path, lambda: os.open(path, flags, 0o644))
            os.ftruncate(self._file, sound)
        self._append(encode(header))

    def shard_row(
        self,
        step: int,
        shard: int,
        epochs: Tensor,
        samples: Tensor,
        digests: Mapping[str, Tensor],
    ) -> None:
        """Row of a shard: epochs and indices of its samples (on the host), and digests by SHARD_FIELDS.

        Digests are int64, 0-d, or (b,) for SAMPLE_FIELDS; they must not change before the next flush.
        """
        row = self._new(SHARD, 1, step, shard)
        row["epoch"] = epochs.numpy()
        row["sample"] = samples.numpy()
        self._fill(row, SHARD, digests)

    def step_row(self, step: int, digests: Mapping[str, Tensor]) -> None:
        """Row of a step by STEP_FIELDS: its reduction, and the state after it; step `first - 1` is the state before.

        Every rank writes its own, so that ranks that diverged are found.
        """
        self._fill(self._new(STEP, 1, step, -1), STEP, digests)

    def part_rows(
        self, step: int, shard: int | None, name: str, digests: Tensor
    ) -> None:
        """Digests int64 (n,) of the samples or tensors of one field of a shard, or of a step (shard None)."""
        shard = -1 if shard is None else shard
        start = self._num_rows * self._width
        count = digests.numel()
        rows = self._new(PART, -(-count // self._width), step, shard)
        rows["field"] = part_fields(shard).index(name)
        rows["part"] = np.arange(len(rows))
        left = count - self._width * rows["part"]
        rows["present"] = np.minimum(self._width, left)
        self._values.append((start, digests))

    def flush(self, *, sync: bool = False) -> None:
        """Write the pending rows, after one copy from the device; with `sync` they also survive a power cut.

        Raises CheckpointError when the disk rejects them; the file then ends with the last sound row.
        """
        if self._rows:
            rows = np.concatenate(self._rows)
            digests = np.zeros(len(rows) * self._width, np.uint64)
            for start, values in _on_host(self._values):
                digests[start : start + len(values)] = values
            rows["digest"] = digests.reshape(len(rows), self._width)

            self._rows = []
            self._values = []
            self._num_rows = 0
            self._append(encode_rows(rows))
        if sync:
            # Not tried again: after a failed sync, Linux forgets which pages are not written.
            with _disk(self.path):
                os.fsync(self._file)

    def close(self) -> None:
        """Write pending rows and close the file; closing twice does nothing."""
        if self._file < 0:
            return
        try:
            self.flush(sync=True)
        finally:
            os.close(self._file)
            self._file = -1

    def _new(self, kind: int, count: int, step: int, shard: int) -> Rows:
        rows = np.zeros(count, self._type)
        rows["kind"] = kind
        rows["step"] = step
        rows["shard"] = shard
        self._rows.append(rows)
        self._num_rows += count
        return rows

    def _fill(self, row: Rows, kind: int, digests: Mapping[str, Tensor]) -> None:
        start = (self._num_rows - 1) * self._width
        for number, (name, slot) in enumerate(slots(kind, self._samples).items()):
            if name in digests:
                row["present"] |= np.uint16(1 << number)
                self._values.append((start + slot.start, digests[name]))

    def _append(self, content: bytes) -> None:
        with _disk(self.path):
            append(self.path, self._file, content)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def _on_host(
    values: Sequence[tuple[int, Tensor]],
) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """The values as arrays, with one copy for each device."""
    import torch  # here, so that reading a ledger does not load it

    devices: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for start, value in values:
        flat = value.detach().reshape(-1)
        devices.setdefault(value.device, []).append((start, flat))

    for members in devices.values():
        joined = torch.cat([value for _, value in members])
        assert joined.dtype == torch.int64, "digests are int64"
        host = joined.cpu().numpy().view(np.uint64)
        lengths = [len(value) for _, value in members]
        pieces = np.split(host, np.cumsum(lengths)[:-1])
        for (start, _), piece in zip(members, pieces, strict=True):
            yield start, piece
