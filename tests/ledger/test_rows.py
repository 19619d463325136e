"""The file format under damage: every tear is cut, every alteration is an error, and neither is taken for the other."""

from pathlib import Path

import numpy as np
import pytest

import ledgers
from segpipe.errors import CheckpointError
from segpipe.ledger.rows import (
    PART,
    SHARD,
    STEP,
    LedgerFile,
    LedgerWriter,
    SessionHeader,
    encode,
    ledger_path,
    read_file,
    row_keys,
    row_type,
    unequal,
)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """A file of two sessions: of steps 0 and 1 (6 rows), and of step 1 trained again (3 rows)."""
    ledgers.write_session(tmp_path, _header(0), range(2))
    ledgers.write_session(tmp_path, _header(1), range(1, 2))
    return ledger_path(tmp_path, 0).read_bytes()


def _header(session: int) -> SessionHeader:
    return ledgers.header(
        session=session, first_step=session, sample_names=[], compute__shards=2
    )


def parse(raw: bytes, path: Path) -> LedgerFile:
    """What is read of a file with these bytes at `path`, or in this folder."""
    path = path / "some.bin" if path.is_dir() else path
    path.write_bytes(raw)
    return read_file(path)


def _sizes() -> tuple[int, int, int]:
    """Bytes of the first header, of a row and of the second header."""
    return len(encode(_header(0))), row_type(2).itemsize, len(encode(_header(1)))


def test_a_file_torn_at_any_byte_keeps_its_whole_rows(
    tmp_path: Path, whole: bytes
) -> None:
    first, row, second = _sizes()
    path = tmp_path / "torn.bin"
    later = first + 6 * row + second
    assert len(whole) == later + 3 * row
    for length in range(len(whole) + 1):
        found = parse(whole[:length], path)
        expected = [min(6, (length - first) // row)] if length >= first else []
        expected += [(length - later) // row] if length >= later else []
        assert [len(session.rows) for session in found.sessions] == expected, length
        assert found.size == length
        if length % 37 == 0:  # a session that follows starts behind the last whole row
            path.write_bytes(whole[:length])
            LedgerWriter(path, _header(2)).close()
            assert [len(session.rows) for session in read_file(path).sessions] == [
                *expected,
                0,
            ], length


def test_tails_that_a_power_cut_leaves_are_cut(tmp_path: Path, whole: bytes) -> None:
    first, row, _ = _sizes()
    for tail in (
        bytes(1),
        bytes(row),
        bytes(5 * row + 3),
        b"\x01" * 40,
        whole[first : first + row - 1],
    ):
        found = parse(whole[: first + 4 * row] + tail, tmp_path)
        assert (len(found.sessions[0].rows), found.sound, found.size) == (
            4,
            first + 4 * row,
            first + 4 * row + len(tail),
        )
    assert parse(bytes(300), tmp_path).sessions == []


def test_any_changed_byte_is_found(tmp_path: Path, whole: bytes) -> None:
    first, row, second = _sizes()
    path = tmp_path / "altered.bin"
    for place in range(len(whole)):
        raw = (
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        if (
            place >= len(whole) - row
        ):  # a damaged last row cannot be told from a torn one
            assert [len(session.rows) for session in parse(raw, path).sessions] == [
                6,
                2,
            ]
            continue
        with pytest.raises(CheckpointError, match=r"altered\.bin") as raised:
            parse(raw, path)
        if place % 37 == 0:
            path.write_bytes(raw)
            with pytest.raises(CheckpointError):  # nor does a new session cut it away
                LedgerWriter(path, _header(2))
        if first <= place < first + 6 * row:
            assert f"row {(place - first) // row} of session 0" in str(raised.value)
        elif place >= first + 6 * row + second:
            assert (
                f"row {(place - first - 6 * row - second) // row} of session 1"
                in str(raised.value)
            )
    with pytest.raises(
        CheckpointError,
        match=r"row 2 of session 0 \(after step 0, shard 1\) was altered.*Restore",
    ):
        parse(whole[: first + 2 * row] + bytes(row) + whole[first + 3 * row :], path)


def test_a_row_that_lost_a_byte_is_no_torn_tail(tmp_path: Path, whole: bytes) -> None:
    first, row, _ = _sizes()
    with pytest.raises(CheckpointError, match="row 1 of session 0"):
        parse(
            whole[: first + row + 5] + whole[first + row + 6 : first + 6 * row],
            tmp_path,
        )


def test_a_damaged_row_before_a_session_without_rows_is_no_torn_tail(
    tmp_path: Path, whole: bytes
) -> None:
    first, row, second = _sizes()
    raw = whole[: first + 6 * row + second]
    assert [len(session.rows) for session in parse(raw, tmp_path).sessions] == [6, 0]
    with pytest.raises(CheckpointError, match="row 5 of session 0"):
        parse(raw[: first + 6 * row - 9] + b"?" + raw[first + 6 * row - 8 :], tmp_path)


def test_foreign_files_and_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank00.bin"
    for content in (b"PK\x03\x04 a zip", b"\n", bytes(30) + b"x"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"rank00.bin is not a ledger"):
            read_file(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_file(tmp_path / "absent.bin")
    monkeypatch.setattr("segpipe.ledger.rows.VERSION", 1)
    path.write_bytes(encode(_header(0)))
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError,
        match=r"has version 1, but version 2 was needed",
    ):
        read_file(path)


def test_keys_sort_by_step_shard_field_and_part() -> None:
    random = np.random.default_rng(0)
    rows = np.zeros(3000, row_type(2))
    for name, low, high in (
        ("step", -1, 2**27 - 1),
        ("shard", -1, 65536),
        ("field", 0, 9),
        ("part", 0, 2**12),
    ):
        rows[name] = random.integers(low, high, len(rows))
        rows[name][:2] = low, high - 1
    rows["step"][2:200], rows["shard"][2:100] = 5, 7
    rows["kind"] = random.choice([SHARD, STEP, PART], len(rows))
    names = ("part", "field", "kind", "shard", "step")
    expected = np.lexsort([rows[name] for name in names])
    assert (np.argsort(row_keys(rows), kind="stable") == expected).all()


def test_keys_have_the_documented_room() -> None:
    """The last key of a field, shard and step sorts before the first of the next one."""
    places = [
        (0, 2**17 - 2, 31, 2**12 - 1), (1, -1, 0, 0), (1, -1, 31, 2**12 - 1), (1, 0, 0, 0), (1, 0, 0, 2**12 - 1),
        (1, 0, 1, 0), (2**27 - 3, 2**17 - 2, 31, 2**12 - 1), (2**27 - 2, -1, 0, 0),
    ]  # fmt: skip
    rows = np.zeros(len(places), row_type(2))
    rows["kind"] = PART
    for name, values in zip(
        ("step", "shard", "field", "part"), zip(*places, strict=True), strict=True
    ):
        rows[name] = values
    assert (np.diff(row_keys(rows)) > 0).all()
    assert row_keys(rows).min() > 0


def test_order_differs_by_epoch_as_by_sample() -> None:
    a = np.zeros(3, row_type(2))
    a["kind"] = SHARD
    b = a.copy()
    b["epoch"][1, 0], b["sample"][2, 1] = 1, 1
    assert unequal(a, b).tolist() == [False, True, True]
