"""Disks that hesitate are waited for, disks that refuse are named, and what is written stays whole."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from ledgers import header
from segpipe import files, native
from segpipe.data.readers import read_header, read_image
from segpipe.errors import CheckpointError, DataError, SegpipeError
from segpipe.files import PAUSES_S, append, file_sha256, put, write_atomically
from segpipe.ledger.rows import LedgerWriter, read_file
from segpipe.run.tracking import Tracker, read_metrics

OLD, NEW = b"old content", b"new content, longer"
ALWAYS = 99


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; none is waited for."""
    made: list[float] = []
    monkeypatch.setattr(files.time, "sleep", made.append)
    return made


Fault = Callable[[str, int, int], None]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """`fault(call, errno, times)`: the first calls of a function fail; `os.write` after writing half of it."""

    def inject(call: str, number: int, times: int) -> None:
        owners = {"os": os, "Path": Path, "builtins": builtins}
        owner, name = owners[call.partition(".")[0]], call.partition(".")[2]
        right, left = getattr(owner, name), [times]

        def failing(*arguments: Any, **named: Any) -> Any:
            if not left[0]:
                return right(*arguments, **named)
            left[0] -= 1
            if call == "os.write":
                right(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(owner, name, failing)

    return inject


FAULTS = [  # call, errno, times; what is said in the end, if it fails
    ("os.fsync", errno.EIO, 2, ""),
    ("os.replace", errno.ESTALE, 5, ""),
    ("os.open", errno.EAGAIN, 1, ""),
    ("Path.mkdir", errno.ETIMEDOUT, 3, ""),
    (
        "os.fsync",
        errno.EIO,
        ALWAYS,
        "Input/output error.*6 attempts failed.*disk or the file server",
    ),
    ("os.replace", errno.ESTALE, ALWAYS, "Stale file handle.*6 attempts failed"),
    ("os.replace", errno.EROFS, ALWAYS, "Read-only file system.*mount it writable"),
    ("os.fsync", errno.ENOSPC, 1, "No space left on device.*Free some space"),
    ("os.fsync", errno.EDQUOT, 1, "Disk quota exceeded.*Free some space"),
    ("os.fsync", errno.EFBIG, 1, "File too large.*raise the limit .ulimit -f"),
    (
        "os.replace",
        errno.EISDIR,
        1,
        "Is a directory.*move it away, or .*out, or run.root",
    ),
]


@pytest.mark.parametrize(("call", "number", "times", "said"), FAULTS)
def test_a_file_is_whole_or_named(
    tmp_path: Path, fault: Fault, pauses: list[float], capsys: pytest.CaptureFixture[str],
    call: str, number: int, times: int, said: str,
) -> None:  # fmt: skip
    path = tmp_path / "last.pt"
    path.write_bytes(OLD)
    fault(call, number, times)
    if said:
        with pytest.raises(
            CheckpointError,
            match=rf"last\.pt could not be written: {said}.*run\.exists=resume",
        ) as caught:
            write_atomically(path, NEW)
        assert "unharmed" in str(caught.value)
        assert path.read_bytes() == OLD
    else:
        write_atomically(path, NEW)
        assert path.read_bytes() == NEW
    assert [each.name for each in tmp_path.iterdir()] == ["last.pt"]
    waits = number in files.PASSING
    assert pauses == list(PAUSES_S[: min(times, len(PAUSES_S))] if waits else ())
    assert pauses == sorted(pauses)
    assert capsys.readouterr().err.count("\n") == int(waits), (
        "one line, however many tries"
    )


@pytest.mark.parametrize(("times", "whole"), [(3, True), (ALWAYS, False)])
def test_a_torn_row_is_cut_off_before_the_next_try(
    tmp_path: Path, fault: Fault, pauses: list[float], times: int, whole: bool
) -> None:
    path = tmp_path / "ledger" / "rank00.bin"
    writer = LedgerWriter(path, header())
    writer.step_row(0, {"weights": torch.tensor(7)})
    writer.flush()
    before = path.read_bytes()
    writer.step_row(1, {"weights": torch.tensor(8)})
    fault("os.write", errno.EIO, times)
    if whole:
        writer.flush()
        assert [row["step"] for row in read_file(path).sessions[0].rows] == [0, 1]
    else:
        with pytest.raises(
            CheckpointError,
            match=r"rank00\.bin could not be written: Input/output error.*6 attempts",
        ):
            writer.flush()
        assert path.read_bytes() == before
    assert len(pauses) == min(times, len(PAUSES_S))


def test_a_failed_sync_of_the_ledger_is_not_tried_again(
    tmp_path: Path, fault: Fault, pauses: list[float]
) -> None:
    """The second sync would say that all is well, and the pages be lost."""
    writer = LedgerWriter(tmp_path / "rank00.bin", header())
    fault("os.fsync", errno.EIO, 1)
    with pytest.raises(CheckpointError, match="Input/output error"):
        writer.flush(sync=True)
    assert not pauses


def test_metrics_stay_whole(tmp_path: Path, fault: Fault, pauses: list[float]) -> None:
    tracker = Tracker(tmp_path / "metrics.jsonl", {})
    fault("os.write", errno.EIO, 2)
    tracker.log(1, "train", {"loss": 0.5})
    tracker.close()
    [entry] = read_metrics(tmp_path / "metrics.jsonl")
    assert (entry["step"], entry["loss"], len(pauses)) == (1, 0.5, 2)
    # A file server looks the file up for its size.
    tracker = Tracker(tmp_path / "metrics.jsonl", {})
    fault("os.lseek", errno.ESTALE, 1)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl could not be written"):
        tracker.log(2, "train", {"loss": 0.5})


def test_an_append_by_two_hands_is_no_place_to_cut(tmp_path: Path) -> None:
    """Without a fault, what was there stays: the control of the cut."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    append(path, descriptor, NEW)
    append(path, descriptor, NEW)
    os.close(descriptor)
    assert path.read_bytes() == OLD + NEW + NEW


READS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: read_image(str(path)), "builtins.open"),
    (lambda path: read_header(str(path)), "builtins.open"),
    (file_sha256, "builtins.open"),
]


@pytest.mark.parametrize(("read", "call"), READS, ids=["image", "header", "hash"])
@pytest.mark.parametrize(
    ("number", "times", "said"),
    [
        (errno.EIO, 3, ""),
        (errno.ESTALE, 1, ""),
        (errno.EIO, ALWAYS, "Input/output error, in six attempts"),
        (errno.EACCES, 1, "Permission denied"),
    ],
)
def test_reads_are_tried_again(
    tmp_path: Path,
    fault: Fault,
    pauses: list[float],
    read: Callable[[Path], object],
    call: str,
    number: int,
    times: int,
    said: str,
) -> None:
    path = tmp_path / "image.png"
    cv2.imwrite(str(path), np.zeros((4, 5, 3), np.uint8))
    expected = read(path)
    fault(call, number, times)
    if not said:
        assert np.all(read(path) == expected)
    else:
        with pytest.raises((DataError, OSError)) as caught:
            read(path)
        assert said in str(caught.value) or not isinstance(caught.value, SegpipeError)
    assert len(pauses) == (min(times, len(PAUSES_S)) if number in files.PASSING else 0)


def test_what_is_put_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "below" / "mask.png"
    put(path, OLD)

    def full(aside: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        put(path, NEW)
    assert path.read_bytes() == OLD
    assert [entry.name for entry in path.parent.iterdir()] == ["mask.png"]


def test_compiled_code_that_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    folder, source = tmp_path / "cache", tmp_path / "empty.c"
    source.write_text("int one(void) { return 1; }")
    command = [shutil.which("cc") or "gcc", "-shared", "-fPIC"]
    library = native._library(source, command, folder)
    for planted, mode in ((b"the control", 0o700), (b"planted", 0o775)):
        library.write_bytes(planted)
        library.chmod(mode)
        assert native._library(source, command, folder) == library
        assert (library.read_bytes() == planted) == (mode == 0o700)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        native._library(source, command, folder)


@pytest.mark.parametrize("durable", [False, True])
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path, durable: bool) -> None:
    """As root, out=/dev/null made a file of it, into which every other process wrote from then on."""
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    put(link, b"a report", durable=durable)
    assert link.is_symlink()
    assert not link.is_file()
    assert list(tmp_path.iterdir()) == [link]
