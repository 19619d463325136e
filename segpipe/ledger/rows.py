"""The ledger of a run: digests of every step's input, output and state, in one append-only file per process.

`ledger/rank00.bin` is a sequence of sessions, one for each start or resume of the run: a header (JSON: recipe,
fingerprint, process), then rows of one size with checksums. A row is keyed by (step, shard), never by process, so
runs with different numbers of processes compare row by row. Rows of b samples take 64 + 24 b bytes (96 for b = 1). A
step writes V of them, and one more per process: with V = 16 and b = 4, 100,000 steps take 272 MB from one process and
512 MB from 16 (32 MB each).

A header is a fixed head (magic, version, length, CRC-32 of these), JSON, and the CRC-32 of the JSON. A row ends with
the CRC-32 of its other bytes. Rows torn by a crash at the end of a file are dropped. A damaged row followed by a sound
one was altered after it was written, and is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import CheckpointError
from segpipe.files import append, not_written, open_to_append

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "ledger"  # in the run folder
INPUTS = "inputs.json"  # in the run folder: hashes of data and sources
MAGIC = b"SEGLEDGR"  # its first byte is not a kind of row
VERSION = 2  # 1 bound its rows by running hashes
# Kinds of rows: for a (step, shard); for a step; for single samples or tensors of one field.
SHARD, STEP, PART = 1, 2, 3

SAMPLE_FIELDS = ("image", "target")  # one digest per sample, after augmentation
SHARD_FIELDS = (*SAMPLE_FIELDS, "batch", "logits", "statistics", "loss", "gradient")
# One digest per sample, in part rows only.
AUDIT_FIELDS = ("decoded_image", "decoded_target")
STEP_FIELDS = (
    "valid",
    "gradient",
    "lr",
    "scale",
    "optimizer",
    "weights",
    "statistics",
    "ema",
)
# Number of values of each part of a key after the step: enough for 32,000 tensors and 2^27 steps.
KEY_PARTS = {"shard": 1 << 17, "kind": 1 << 2, "field": 1 << 5, "part": 1 << 12}

PARTS = "/parts"  # suffix of fields whose single samples or tensors were recorded
Rows = NDArray[Any]  # structured, of `row_type`
Key = tuple[int, str, int]  # kind, field, shard (-1: none)
Values = dict[Key, NDArray[Any]]
_HEAD, _CRC = Struct("<8sII"), Struct("<I")


def ledger_path(run_folder: Path, rank: int) -> Path:
    """Ledger file of a rank."""
    return run_folder / FOLDER / f"rank{rank:02d}.bin"


def ledger_files(run_folder: Path) -> list[Path]:
    """Ledger files of all ranks, by rank."""
    return sorted((run_folder / FOLDER).glob("rank*.bin"))


def row_type(samples: int) -> np.dtype[Any]:
    """Layout of a row for shards of `samples` samples, little-endian and packed."""
    return np.dtype(
        [
            ("kind", "u1"),
            # In part rows: index into `part_fields`.
            ("field", "u1"),
            # In shard and step rows: a bit for each field present. In part rows: number of digests.
            ("present", "<u2"),
            # -1 in rows without a shard.
            ("shard", "<i4"),
            # The step before a session's first one holds the state it starts from.
            ("step", "<i8"),
            # In part rows: index among the rows of the field.
            ("part", "<i4"),
            ("epoch", "<i4", (samples,)),
            ("sample", "<i4", (samples,)),
            ("digest", "<u8", (max(2 * samples + 5, len(STEP_FIELDS)),)),
            ("crc", "<u4"),
        ]
    )


def part_fields(shard: int) -> tuple[str, ...]:
    """Fields that may have part rows, for a shard or for a step (shard -1)."""
    return (*SHARD_FIELDS, *AUDIT_FIELDS) if shard >= 0 else STEP_FIELDS


def slots(kind: int, samples: int) -> dict[str, slice]:
    """Slice of a shard or step row's digests that belongs to each field."""
    found, place = {}, 0
    for name in SHARD_FIELDS if kind == SHARD else STEP_FIELDS:
        width = samples if kind == SHARD and name in SAMPLE_FIELDS else 1
        found[name] = slice(place, place + width)
        place += width
    return found


def row_keys(rows: Rows) -> NDArray[np.int64]:
    """Keys of rows, int64; they sort by step, shard, kind, field and part."""
    keys: NDArray[np.int64] = rows["step"] + 1
    for name, number in KEY_PARTS.items():
        keys = keys * number + rows[name]
        keys += name == "shard"  # shards start at -1
    return keys


def unequal(a: Rows, b: Rows) -> NDArray[np.bool_]:
    """Which rows of `a` and `b`, with equal keys, differ in samples, epochs or a digest that both have."""
    both = a["present"] & b["present"]
    differs = a["digest"] != b["digest"]
    samples = a["sample"].shape[1]
    for kind in (SHARD, STEP):
        chosen = np.flatnonzero(a["kind"] == kind)
        for number, slot in enumerate(slots(kind, samples).values()):
            given = (both[chosen] >> number & 1).astype(bool)
            differs[chosen, slot] &= given[:, None]

    found: NDArray[np.bool_] = differs.any(axis=1)
    for name in ("sample", "epoch"):
        found |= (a[name] != b[name]).any(axis=1)
    return found


def recorded(rows: Rows) -> Values:
    """What one run recorded for a step, from its rows: one number per sample or tensor."""
    found: Values = {}
    for row in rows:
        kind = int(row["kind"])
        shard = int(row["shard"])
        if kind == PART:
            name = part_fields(shard)[row["field"]] + PARTS
            key = (SHARD if shard >= 0 else STEP, name, shard)
            before = found.get(key, np.zeros(0, np.uint64))
            found[key] = np.append(before, row["digest"][: row["present"]])
            continue

        if kind == SHARD:
            # One number for epoch and sample: equal only if both are.
            order = row["epoch"].astype(np.int64) << 32 | row["sample"]
            found[kind, "order", shard] = order
        places = slots(kind, len(row["sample"]))
        for number, (name, slot) in enumerate(places.items()):
            if row["present"] >> number & 1:
                found[kind, name, shard] = row["digest"][slot]
    return found


@dataclass(frozen=True)
class SessionHeader:
    """Header of a session: what is trained, where, and from which step."""

    session: int  # the same on all ranks, from 0
    first_step: int  # rows of earlier sessions from this step on are void
    rank: int
    world_size: int
    recipe: dict[str, Any]
    config_hash: str
    fingerprint: dict[str, Any]
    level: int = 0  # 1: with part rows
    # Field -> names of the tensors of its part rows.
    parts: dict[str, list[str]] = field(default_factory=dict)
    # By sample index; empty where unknown.
    sample_names: list[str] = field(default_factory=list)

    @property
    def samples_per_shard(self) -> int:
        """The b of the row layout."""
        return int(self.recipe["compute.samples_per_shard"])

    @property
    def shards(self) -> int:
        """Number of logical shards, V."""
        return int(self.recipe["compute.shards"])


def encode_rows(rows: Rows) -> bytes:
    """The rows as bytes, with their checksums, which are also stored in `rows`."""
    rows["crc"] = _checksums(rows.tobytes(), 0, len(rows), rows.itemsize)
    return rows.tobytes()


def _checksums(raw: bytes, start: int, count: int, size: int) -> list[int]:
    """CRC-32 of `count` rows, each without its last four bytes."""
    view = memoryview(raw)
    return [
        zlib.crc32(view[place : place + size - 4])
        for place in range(start, start + count * size, size)
    ]


def encode(header: SessionHeader) -> bytes:
    """The header as bytes."""
    text = json.dumps(asdict(header)).encode()
    return _sealed(_HEAD.pack(MAGIC, VERSION, len(text))) + _sealed(text)


def _sealed(content: bytes) -> bytes:
    """The content and its CRC-32."""
    return content + _CRC.pack(zlib.crc32(content))


class LedgerSession(NamedTuple):
    """A header and its rows, which start at byte `start` of the file."""

    header: SessionHeader
    rows: Rows
    start: int


class LedgerFile(NamedTuple):
    """Content of a file; bytes from `sound` to `size` are a torn tail."""

    sessions: list[LedgerSession]
    sound: int
    size: int


def read_file(path: Path) -> LedgerFile:
    """Sessions of one file. Raises CheckpointError when it is not a ledger, of another version, or altered."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}. Check its permissions."
        raise CheckpointError(text) from error
    sessions: list[LedgerSession] = []
    place = 0
    while (found := _decode(path, raw, place)) is not None:
        header, start = found
        rows, place = _rows(path, raw, start, header)
        sessions.append(LedgerSession(header, rows, start))
        if not raw.startswith(MAGIC, place):
            break
    return LedgerFile(sessions, place, len(raw))


def _decode(path: Path, raw: bytes, place: int) -> tuple[SessionHeader, int] | None:
    """The header at `place` and where it ends; None when it is torn."""
    size = _HEAD.size + _CRC.size
    head = raw[place : place + size]
    if not any(head) and not raw[place:].strip(b"\0"):
        return None  # empty, or a power cut before the content reached the disk
    if not head.startswith(MAGIC[: len(head)]):
        text = f"{path} is not a ledger: it starts with {head[:8]!r}."
        raise CheckpointError(f"{text} Give the folder of a run.")
    if len(head) < size:
        return None
    _, version, length = _HEAD.unpack_from(head)
    text = f"{path}: the header at byte {place} was altered after it was written."
    altered = CheckpointError(f"{text} Restore the file.")
    if head != _sealed(head[: _HEAD.size]):
        raise altered
    if version != VERSION:
        raise CheckpointError(
            f"{path} has version {version}, but version {VERSION} was needed. Use the segpipe version that wrote it."
        )
    start = place + size
    content = raw[start : start + length]
    end = start + length + _CRC.size
    if raw[start:end] != _sealed(content):
        if end >= len(raw):
            return None
        raise altered
    return SessionHeader(**json.loads(content)), end


def _rows(
    path: Path, raw: bytes, start: int, header: SessionHeader
) -> tuple[Rows, int]:
    """The sound rows from `start` to the next header, and where they end."""
    layout = row_type(header.samples_per_shard)
    size = layout.itemsize
    following = raw.find(MAGIC, start)
    count = ((len(raw) if following < 0 else following) - start) // size
    rows = np.frombuffer(raw, layout, count, start)
    bad = np.flatnonzero(rows["crc"] != _checksums(raw, start, count, size))
    sound = int(bad[0]) if len(bad) else count
    end = start + sound * size
    # A new session drops any torn tail before it starts.
    if end != following and (following >= 0 or _holds_row(raw, end, size)):
        where = "the first"
        if sound:
            last = rows[sound - 1]
            where = f"after step {last['step']}, shard {last['shard']}"
        raise CheckpointError(
            f"{path}: row {sound} of session {header.session} ({where}) was altered after it was written: its checksum "
            f"is wrong. Restore the file; the files of other ranks are not affected."
        )
    return rows[:sound], end


def _holds_row(raw: bytes, start: int, size: int) -> bool:
    """Whether a sound row starts at any byte from `start` on, even if lost bytes have shifted it."""
    return any(
        _checksums(raw, place, 1, size) == [*_CRC.unpack_from(raw, place + size - 4)]
        for place in range(start, len(raw) - size + 1)
        if SHARD <= raw[place] <= PART
    )


def next_session(run_folder: Path) -> int:
    """Number of the session about to start; rank 0 broadcasts it before any rank writes.

    Raises CheckpointError for a file that is not a ledger, or was altered.
    """
    files = [read_file(path) for path in ledger_files(run_folder)]
    earlier = [each.header.session for file in files for each in file.sessions]
    return max(earlier, default=-1) + 1


class LedgerWriter:
    """Appends the rows of this process to its file.

    Digests are int64 tensors and stay on their device until `flush`; nothing synchronizes before that. Numbers (lr,
    loss) are stored as float64 bits.
    """

    def __init__(self, path: Path, header: SessionHeader) -> None:
        """Start a session at the end of the file, after dropping a torn tail. Raises CheckpointError on failure."""
        self.path = path
        self._samples = header.samples_per_shard
        self._type = row_type(self._samples)
        self._rows: list[Rows] = []
        # Pending digests: their rows, the position of the first digest in those rows, and the values.
        self._values: list[tuple[Rows, int, Tensor]] = []
        sound = read_file(path).sound if path.exists() else 0
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(path)
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
        """Add the row of a shard: epochs and indices of its samples (on the host), and digests by SHARD_FIELDS.

        Digests are int64, 0-d, or (b,) for SAMPLE_FIELDS; they must not change before the next flush.
        """
        row = self._row(SHARD, step, shard, digests)
        row["epoch"] = epochs.numpy()
        row["sample"] = samples.numpy()

    def step_row(self, step: int, digests: Mapping[str, Tensor]) -> None:
        """Add the row of a step, digests by STEP_FIELDS: its reduction, and the state after it.

        Step `first - 1` is the state before the first step. Every rank writes its own row, so that ranks that diverged
        are found.
        """
        self._row(STEP, step, -1, digests)

    def part_rows(self, step: int, shard: int, name: str, digests: Tensor) -> None:
        """Add digests, int64 (n,), of the samples or tensors of one field of a shard, or of a step (shard -1)."""
        count, (width,) = digests.numel(), self._type["digest"].shape
        rows = self._new(PART, -(-count // width), step, shard)
        rows["field"] = part_fields(shard).index(name)
        rows["part"] = np.arange(len(rows))
        rows["present"] = np.minimum(width, count - width * rows["part"])
        self._values.append((rows, 0, digests))

    def flush(self, *, sync: bool = False) -> None:
        """Write the pending rows, after one copy from the device; with `sync` they also survive a power cut.

        Raises CheckpointError if writing fails; the file then ends with the last sound row.
        """
        if self._rows:
            import torch  # here, so that reading a ledger does not import it

            for device in {value.device for *_, value in self._values}:
                members = [each for each in self._values if each[-1].device == device]
                joined = torch.cat([value.reshape(-1) for *_, value in members])
                assert joined.dtype == torch.int64, "digests are int64"
                host = joined.cpu().numpy().view(np.uint64)
                for own, start, value in members:
                    piece, host = np.split(host, [value.numel()])
                    own["digest"].flat[start : start + len(piece)] = piece
            rows = np.concatenate(self._rows)
            self._rows = []
            self._values = []
            self._append(encode_rows(rows))
        if sync:
            # No retry: after a failed fsync, Linux forgets which pages are not written.
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
        return rows

    def _row(
        self, kind: int, step: int, shard: int, digests: Mapping[str, Tensor]
    ) -> Rows:
        row = self._new(kind, 1, step, shard)
        for number, (name, slot) in enumerate(slots(kind, self._samples).items()):
            if name in digests:
                row["present"] |= np.uint16(1 << number)
                self._values.append((row, slot.start, digests[name]))
        return row

    def _append(self, content: bytes) -> None:
        append(self.path, self._file, content)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error
