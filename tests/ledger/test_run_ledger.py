"""Merging: files of any number of ranks and sessions become one row per key, and what contradicts is noted."""

from pathlib import Path

import numpy as np
import pytest

import ledgers
from segpipe.determinism.flags import mapping_differences
from segpipe.errors import CheckpointError
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.ledger.rows import (
    PART,
    SHARD,
    STEP,
    ledger_path,
    read_file,
    slots,
)

pytestmark = pytest.mark.slow


def keys(run: RunLedger, kind: int = SHARD) -> list[tuple[int, int]]:
    rows = run.rows[run.rows["kind"] == kind]
    return list(zip(rows["step"].tolist(), rows["shard"].tolist(), strict=True))


def test_ranks_become_one_row_per_key(tmp_path: Path) -> None:
    first = ledgers.header(compute__shards=16, level=1, parts=ledgers.AUDITED)
    merged = [
        read_run(
            ledgers.write_session(tmp_path / str(ranks), first, range(3), ranks=ranks)
        )
        for ranks in (1, 4, 16)
    ]
    for run in merged:
        assert keys(run) == [(step, shard) for step in range(3) for shard in range(16)]
        assert keys(run, STEP) == [(step, -1) for step in range(3)]
        assert (run.notes, run.faults) == ((), ())
        assert set(run.rows["kind"].tolist()) == {SHARD, STEP, PART}
        assert run.rows.tobytes() == merged[0].rows.tobytes()
    assert [len(run.headers) for run in merged] == [1, 4, 16]
    assert merged[0].sample_names[3] == "scene_003"
    assert merged[1].part_names("gradient") == ledgers.LAYERS
    assert merged[1].part_names("logits") == []


def resumed(
    folder: Path,
    *,
    again: dict[ledgers.Place, int] | None = None,
    ranks: tuple[int, int] = (4, 2),
) -> RunLedger:
    """Steps 0 to 5 with one number of ranks, resumed at step 3 with another, up to step 7."""
    ledgers.write_session(folder, ledgers.header(), range(6), ranks=ranks[0])
    later = ledgers.header(session=1, first_step=3)
    ledgers.write_session(
        folder, later, range(3, 8), ranks=ranks[1], changed=again, start=True
    )
    return read_run(folder)


def test_a_later_session_replaces_what_it_trained_again(tmp_path: Path) -> None:
    whole = read_run(
        ledgers.write_session(tmp_path / "whole", ledgers.header(), range(8), ranks=2)
    )
    for ranks in ((4, 2), (1, 4), (2, 2)):
        run = resumed(tmp_path / str(ranks), ranks=ranks)
        assert (run.notes, run.faults) == ((), ())
        assert [(each.session, each.rank) for each in run.headers] == [
            (session, rank) for session in (0, 1) for rank in range(ranks[session])
        ]
        assert run.rows.tobytes() == whole.rows.tobytes()


def test_rows_beyond_a_later_start_are_void_even_where_nothing_replaced_them(
    tmp_path: Path,
) -> None:
    ledgers.write_session(tmp_path, ledgers.header(), range(6))
    ledgers.write_session(
        tmp_path, ledgers.header(session=1, first_step=2), range(2, 3)
    )
    ledgers.write_session(
        tmp_path, ledgers.header(session=2, first_step=3), range(3, 3)
    )
    assert keys(read_run(tmp_path), STEP) == [(0, -1), (1, -1), (2, -1)]


def test_another_outcome_of_the_same_step_is_a_fault(tmp_path: Path) -> None:
    run = resumed(
        tmp_path,
        again={(4, 2, "logits", 0): 1, (5, None, "lr", 0): 1, (6, 1, "loss", 0): 1},
    )
    assert run.faults == (
        "step 4, shard 2: logits changed when recomputed after a resume (2 of 15 rows)",
    )
    of_shards = run.rows[run.rows["kind"] == SHARD]
    row = of_shards[keys(run).index((4, 2))]
    digest = int(row["digest"][slots(SHARD, 2)["logits"]].view(np.int64)[0])
    assert digest == ledgers.number("", 4, 2, "logits", 0) ^ 1, (
        "the later outcome is the one that counts"
    )


def test_a_state_that_was_not_restored_exactly_is_a_fault(tmp_path: Path) -> None:
    run = resumed(tmp_path, again={(2, None, "weights", 0): 1})
    assert run.faults == (
        "step 2: rank 0 in session 1 differs from rank 0 in session 0",
    )


def test_ranks_that_diverged_are_a_fault(tmp_path: Path) -> None:
    ledgers.write_session(tmp_path, ledgers.header(), range(4), ranks=2)
    other = ledgers.write_session(
        tmp_path / "other",
        ledgers.header(),
        range(4),
        ranks=2,
        changed={(3, None, "ema", 0): 1},
    )
    ledger_path(tmp_path, 1).write_bytes(ledger_path(other, 1).read_bytes())
    assert read_run(tmp_path).faults == (
        "step 3: rank 1 in session 0 differs from rank 0 in session 0",
    )


def test_a_row_that_is_twice_in_a_session_is_no_fault_if_it_is_the_same(
    tmp_path: Path,
) -> None:
    """Such as the first one, copied to the end."""
    path = ledger_path(ledgers.write_session(tmp_path, ledgers.header(), range(4)), 0)
    content, whole = path.read_bytes(), read_run(tmp_path)
    size = whole.rows.dtype.itemsize
    path.write_bytes(content + content[-len(whole.rows) * size :][:size])
    again = read_run(tmp_path)
    assert again.rows.tobytes() == whole.rows.tobytes()
    assert again.faults == ()


def test_what_is_missing_is_noted(tmp_path: Path) -> None:
    ledgers.write_session(tmp_path, ledgers.header(), range(5), ranks=2)
    path = ledger_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-150])
    ledgers.write_session(
        tmp_path, ledgers.header(session=1, first_step=8), range(8, 10), ranks=1
    )
    run = read_run(tmp_path)
    row = read_file(path).sessions[0].rows.itemsize
    assert run.notes == (f"rank01.bin: ignored {2 * row - 150} bytes of a torn tail",)
    assert run.faults == (
        "shards are missing in step 4 (1 such steps)",
        "no shard rows between step 4 and step 8",
        "no step rows between step 4 and step 8",
    )


def test_shards_that_a_killed_process_did_not_write_are_partial_steps_and_a_fault_before_a_whole_one(
    tmp_path: Path,
) -> None:
    ledgers.write_session(tmp_path, ledgers.header(), range(4), ranks=2)
    short = ledgers.write_session(
        tmp_path / "short", ledgers.header(), range(2), ranks=2
    )
    ledger_path(tmp_path, 1).write_bytes(ledger_path(short, 1).read_bytes())
    found = read_run(tmp_path)
    assert (found.faults, found.partial.tolist()) == ((), [2, 3])
    lost = ("shards are missing in step 2 (2 such steps)",)
    result = tmp_path / "result.json"
    for text, faults in (("", lost), ('{"steps": 4}', lost), ('{"steps": 3}', ())):
        result.write_text(text)
        assert read_run(tmp_path).faults == faults
    result.unlink()
    later = ledgers.header(session=1, first_step=4)
    ledgers.write_session(tmp_path, later, range(4, 5), ranks=2)
    assert read_run(tmp_path).faults == lost


def test_another_environment_of_a_later_session_is_noted(tmp_path: Path) -> None:
    ledgers.write_session(tmp_path, ledgers.header(), range(2))
    later = ledgers.header(
        session=1, first_step=2, fingerprint={"torch": "2.14", "threads": 1}
    )
    ledgers.write_session(tmp_path, later, range(2, 4))
    assert read_run(tmp_path).notes == (
        "session 1 on rank 0 had another environment: torch 2.11 -> 2.14",
    )


def test_what_is_no_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"absent does not exist. Give the folder of a run"
    ):
        read_run(tmp_path / "absent")
    with pytest.raises(
        CheckpointError, match=r"holds no ledger. Give the folder of a run"
    ):
        read_run(tmp_path)
    ledgers.write_session(tmp_path, ledgers.header(), range(2))
    path = ledger_path(tmp_path, 0)
    ledgers.write_session(tmp_path / "other", ledgers.header(seed=1), range(2))
    ledger_path(tmp_path, 1).write_bytes(
        ledger_path(tmp_path / "other", 0).read_bytes()
    )
    with pytest.raises(CheckpointError, match="mixes runs: seed is 0 and 1"):
        read_run(tmp_path)
    ledger_path(tmp_path, 1).unlink()
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="holds no complete header"):
        read_run(tmp_path)


def test_differences_of_mappings_name_what_is_missing() -> None:
    assert mapping_differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == {
        "b": (2, 3),
        "c": (None, 4),
    }


def test_ranks_that_agree_have_no_fault(tmp_path: Path) -> None:
    run = read_run(ledgers.write_session(tmp_path, ledgers.header(), range(4), ranks=4))
    assert run.faults == ()


def test_what_a_crash_leaves_is_a_note_and_what_is_missing_a_fault(
    tmp_path: Path,
) -> None:
    ledgers.write_session(tmp_path, ledgers.header(), range(4))
    path = ledger_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-50])
    run = read_run(tmp_path)
    assert (len(run.notes), run.faults) == (1, ())
    ledgers.write_session(
        tmp_path, ledgers.header(session=1, first_step=7), range(7, 9)
    )
    assert len(read_run(tmp_path).faults) == 2


def test_updates_are_counted_and_a_single_missing_step_is_a_fault(
    tmp_path: Path,
) -> None:
    ledgers.write_session(tmp_path, ledgers.header(), range(3), start=True)
    run = read_run(tmp_path)
    assert (run.num_updates, run.faults) == (3, ())
    ledgers.write_session(
        tmp_path, ledgers.header(session=1, first_step=4), range(4, 6)
    )
    run = read_run(tmp_path)
    assert run.num_updates == 6
    assert run.faults == (
        "no shard rows between step 2 and step 4",
        "no step rows between step 2 and step 4",
    )


def test_only_the_first_changes_of_environment_are_listed(tmp_path: Path) -> None:
    for session in range(6):
        changed = {"fingerprint": {"torch": f"2.{session}", "threads": 1}}
        ledgers.write_session(
            tmp_path,
            ledgers.header(session=session, first_step=session, **changed),
            [session],
        )
    notes = read_run(tmp_path).notes
    assert [note.partition(" had")[0] for note in notes] == [
        f"session {n} on rank 0" for n in (1, 2, 3)
    ]
