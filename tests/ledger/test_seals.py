"""Running hashes of ledger files: a crash never breaks them, an alteration always does."""

from contextlib import closing
from pathlib import Path

import pytest

import ledgers
from segpipe.ledger.reader import first_broken, last_seals, read_seals
from segpipe.ledger.rows import SEAL_SUFFIX, ledger_path, read_file, seal
from segpipe.ledger.writer import LedgerWriter, RunningHash


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a seal after each of three checkpoints, and the end."""
    file = ledger_path(tmp_path, 0)
    with closing(LedgerWriter(file, ledgers.header())) as writer:
        for step in range(8):
            writer.step_row(step, {"weights": step})
            writer.flush(sync=step % 2 == 1)
    return file


def test_every_checkpoint_leaves_a_seal_that_holds(path: Path) -> None:
    seals = read_seals(path)
    row = read_file(path).sessions[0].rows.itemsize
    assert [path.stat().st_size - each.size for each in seals] == [
        6 * row,
        4 * row,
        2 * row,
        0,
    ]
    assert first_broken(path, seals) is None
    assert last_seals(path.parents[1]) == {"rank00": seals[-1]}


def test_a_row_replaced_together_with_its_checksum_is_found_between_two_checkpoints(
    path: Path,
) -> None:
    (session,) = read_file(path).sessions
    rows = session.rows.copy()
    rows["digest"][3, 0] ^= 1
    raw = path.read_bytes()
    path.write_bytes(raw[: session.start] + seal(rows))
    assert len(read_file(path).sessions[0].rows) == 8, "the checksums alone see nothing"
    seals = read_seals(path)
    assert first_broken(path, seals) == (seals[0].size, seals[1].size)


def test_what_was_cut_off_at_the_end_is_found(path: Path) -> None:
    seals = read_seals(path)
    path.write_bytes(path.read_bytes()[: seals[2].size])
    assert first_broken(path, seals) == (seals[2].size, seals[3].size)
    with closing(LedgerWriter(path, ledgers.header(session=1, first_step=6))) as writer:
        for step in range(6, 12):
            writer.step_row(step, {"weights": step})
    assert first_broken(path, read_seals(path)) is not None, (
        "nor does a later session hide it"
    )


def test_what_a_crash_leaves_behind_the_last_seal_breaks_nothing(path: Path) -> None:
    row = read_file(path).sessions[0].rows.itemsize
    path.write_bytes(path.read_bytes() + bytes(row // 2))
    sealed = path.with_suffix(SEAL_SUFFIX)
    sealed.write_text(
        sealed.read_text() + "0123abc"
    )  # the process died while it wrote a line
    assert first_broken(path, read_seals(path)) is None
    with closing(LedgerWriter(path, ledgers.header(session=1, first_step=8))) as writer:
        writer.step_row(8, {"weights": 8})
    assert len(read_seals(path)) == 5
    assert first_broken(path, read_seals(path)) is None


def test_a_hash_goes_on_where_a_file_ended(path: Path) -> None:
    before = read_seals(path)[-1]
    RunningHash(path).seal()
    assert read_seals(path)[-1] == before
