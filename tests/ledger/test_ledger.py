"""The writer: what reaches the disk and when, after a crash, on a full disk; and the size it documents."""

import errno
import os
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import ledgers
from ranks import PATIENCE_S, forked
from segpipe.errors import CheckpointError
from segpipe.ledger import rows as writer
from segpipe.ledger.rows import (
    PART,
    SHARD,
    SHARD_FIELDS,
    STEP,
    LedgerWriter,
    SessionHeader,
    encode,
    ledger_files,
    ledger_path,
    next_session,
    read_file,
    row_type,
    slots,
)


def test_rows_come_back_as_they_were_given(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, 3)
    assert path == tmp_path / "ledger" / "rank03.bin"
    with closing(LedgerWriter(path, ledgers.header())) as writer:
        image, loss = torch.tensor([-1, 2**62]), torch.tensor(-(2**63))
        writer.shard_row(
            7,
            2,
            torch.tensor([0, 1]),
            torch.tensor([48, 0]),
            {"image": image, "loss": loss, "gradient": torch.tensor(5)},
        )
        writer.step_row(7, {"ema": torch.tensor(9), "valid": torch.tensor(-4)})
        writer.part_rows(7, -1, "weights", torch.arange(20) - 1)
    shard, step, *parts = read_file(path).sessions[0].rows
    places = slots(SHARD, 2)
    assert (shard["kind"], shard["step"], shard["shard"]) == (SHARD, 7, 2)
    assert (shard["epoch"].tolist(), shard["sample"].tolist()) == ([0, 1], [48, 0])
    assert shard["digest"][places["image"]].view(np.int64).tolist() == [-1, 2**62]
    assert shard["digest"][places["loss"]].view(np.int64).tolist() == [-(2**63)]
    assert shard["digest"][places["target"]].tolist() == [0, 0]
    assert shard["present"] == sum(
        1 << SHARD_FIELDS.index(name) for name in ("image", "loss", "gradient")
    )
    assert (step["kind"], step["step"], step["shard"]) == (STEP, 7, -1)
    assert step["digest"][slots(STEP, 2)["ema"]] == 9
    assert step["digest"][slots(STEP, 2)["valid"]].view(np.int64) == -4
    assert [row["kind"] for row in parts] == [PART] * 3
    values = np.concatenate([row["digest"][: row["present"]] for row in parts]).view(
        np.int64
    )
    assert values.tolist() == list(range(-1, 19))


def test_size_of_a_hundred_thousand_steps_is_the_documented_one(tmp_path: Path) -> None:
    for samples in (1, 2, 4, 16):
        assert row_type(samples).itemsize == (64 + 24 * samples if samples > 1 else 96)
    for ranks in (1, 16):
        first = ledgers.header(compute__shards=16, compute__samples_per_shard=4)
        ledgers.write_session(tmp_path / str(ranks), first, range(3), ranks=ranks)
        paths = ledger_files(tmp_path / str(ranks))
        headers = sum(len(encode(read_file(path).sessions[0].header)) for path in paths)
        in_all = sum(path.stat().st_size for path in paths)
        size_mb = (in_all - headers) / 3 * 100_000 / 1e6
        assert (
            f"{size_mb:.0f} MB from {'one process' if ranks == 1 else ranks}"
            in " ".join(str(writer.__doc__).split())
        )


def test_nothing_is_written_before_a_flush_and_tensors_are_read_then(
    tmp_path: Path,
) -> None:
    path = ledger_path(tmp_path, 0)
    writer = LedgerWriter(path, ledgers.header())
    value = torch.tensor(1)
    writer.step_row(0, {"weights": value})
    assert len(read_file(path).sessions[0].rows) == 0
    value += 1  # a device tensor that is still being computed when it is handed over
    writer.flush(sync=True)
    assert read_file(path).sessions[0].rows["digest"][0, slots(STEP, 2)["weights"]] == 2
    writer.close()
    writer.close()


def _killed(path: Path) -> None:
    recipe = {"compute.shards": 4, "compute.samples_per_shard": 2}
    writer = LedgerWriter(path, SessionHeader(0, 0, 0, 1, recipe, "", {}))
    for step in range(5):
        writer.step_row(step, {"weights": torch.tensor(step)})
        if step == 2:
            writer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_process_leaves_what_it_flushed(tmp_path: Path) -> None:
    process = forked(_killed, ledger_path(tmp_path, 0))
    process.join(PATIENCE_S)
    assert process.exitcode == -9
    assert read_file(ledger_path(tmp_path, 0)).sessions[0].rows["step"].tolist() == [
        0,
        1,
        2,
    ]


def test_a_full_disk_is_said_and_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ledger_path(tmp_path, 0)
    writer = LedgerWriter(path, ledgers.header())
    writer.step_row(0, {"weights": torch.tensor(1)})
    writer.flush()
    write, sound = os.write, path.stat().st_size

    def half(file: int, content: bytes) -> int:
        if len(content) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[: len(content) - 60])

    monkeypatch.setattr(os, "write", half)
    writer.step_row(1, {"weights": torch.tensor(2)})
    with pytest.raises(
        CheckpointError,
        match=r"rank00.bin could not be written: No space left.*Free some space",
    ):
        writer.flush()
    monkeypatch.undo()
    assert path.stat().st_size == sound
    writer.step_row(2, {"weights": torch.tensor(3)})
    writer.close()
    assert read_file(path).sessions[0].rows["step"].tolist() == [0, 2]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file")
    with pytest.raises(CheckpointError, match="could not be written"):
        LedgerWriter(ledger_path(tmp_path, 0), ledgers.header())


def test_a_session_drops_what_a_crash_left_torn_before_it(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, 0)
    ledgers.write_session(tmp_path, ledgers.header(), range(2))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-50:])
    ledgers.write_session(
        tmp_path, ledgers.header(session=1, first_step=2), range(2, 3)
    )
    found = read_file(path)
    assert [each.header.session for each in found.sessions] == [0, 1]
    assert path.read_bytes().startswith(whole + encode(found.sessions[1].header))
    assert found.sound == found.size


def test_sessions_are_counted_over_all_ranks(tmp_path: Path) -> None:
    assert next_session(tmp_path) == 0
    ledgers.write_session(tmp_path, ledgers.header(), range(2), ranks=2)
    assert next_session(tmp_path) == 1
    ledgers.write_session(
        tmp_path, ledgers.header(session=1, first_step=2), range(2, 3)
    )
    assert next_session(tmp_path) == 2
    assert [
        found.header.session for found in read_file(ledger_path(tmp_path, 0)).sessions
    ] == [0, 1]
    assert [
        found.header.session for found in read_file(ledger_path(tmp_path, 1)).sessions
    ] == [0]
