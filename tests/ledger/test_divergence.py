"""Two runs that differ in one planted place: the verdict names it, whatever followed from it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ledgers
from segpipe.cli.main import main as segpipe
from segpipe.ledger import divergence
from segpipe.ledger.divergence import (
    FIELDS,
    SAMPLE_STAGES,
    STAGES,
    Comparison,
    Field,
    compare,
)
from segpipe.ledger.reader import read_run
from segpipe.ledger.rows import SAMPLE_FIELDS, SHARD, STEP_FIELDS, ledger_path, row_type

ROOT = Path(__file__).resolve().parents[2]
STEPS = range(4)
AUDIT = {"level": 1, "parts": ledgers.AUDITED}
SHARD_COUNT, SAMPLES = 4, 2


def verdict(
    folder: Path, *, ranks: tuple[int, int] = (1, 2), **runs: Any
) -> Comparison:
    """Comparison of two made-up runs; `a` and `b` are what is changed in them, the rest is their header."""
    changed = [runs.pop(name, {}) for name in ("a", "b")]
    first = ledgers.header(**runs)
    folders = [
        ledgers.write_session(
            folder / name, first, STEPS, ranks=num, changed=change, start=True
        )
        for name, num, change in zip("ab", ranks, changed, strict=True)
    ]
    return compare(*map(read_run, folders))


def planted(
    entry: Field, *, step: int = 2, shard: int = 3, place: int = 1
) -> dict[ledgers.Place, int]:
    """One changed number; the second sample where a field has one for each."""
    by_sample = entry.stage in SAMPLE_STAGES
    return {
        (
            step,
            shard if entry.kind == SHARD else None,
            entry.name,
            place if by_sample else 0,
        ): 1
    }


def consequences(entry: Field) -> dict[ledgers.Place, int]:
    """Everything that is computed after a field, in all shards from there on and in all later steps."""
    later = FIELDS[FIELDS.index(entry) + 1 :]
    found = {}
    for step in (2, 3):
        for field in (
            f for f in (FIELDS[1:] if step == 3 else later) if f.stage != "decode"
        ):
            for shard in (
                range(3 if step == 2 else 0, SHARD_COUNT)
                if field.kind == SHARD
                else (None,)
            ):
                for place in range(SAMPLES if field.name in SAMPLE_FIELDS else 1):
                    found[step, shard, field.name, place] = 2
    return found


@pytest.mark.parametrize("ranks", [(1, 1), (1, 4), (4, 2)])
def test_equal_runs_are_identical_for_any_number_of_processes(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    found = verdict(tmp_path, ranks=ranks, **AUDIT)
    assert (found.verdict, found.exit_code, found.steps, found.processes) == (
        "identical",
        0,
        4,
        ranks,
    )
    assert found.sentence == "identical in all 4 common steps"
    assert {cell["state"] for cell in found.fields} == {"equal"}
    assert (found.notes, found.fingerprint, found.recipe) == ((), {}, {})


def test_sixteen_ranks_and_four_hold_the_same_run(tmp_path: Path) -> None:
    assert (
        verdict(tmp_path / "same", ranks=(16, 4), compute__shards=16).verdict
        == "identical"
    )
    found = verdict(
        tmp_path / "other",
        ranks=(16, 4),
        compute__shards=16,
        b={(1, 13, "logits", 0): 1},
    )
    assert (found.step, found.shard, found.stage) == (1, 13, "forward")


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with consequences"])
@pytest.mark.parametrize(
    "entry", FIELDS, ids=lambda entry: f"{entry.stage}-{entry.name}"
)
def test_a_planted_difference_is_named(
    tmp_path: Path, entry: Field, alone: bool
) -> None:
    change = {**({} if alone else consequences(entry)), **planted(entry)}
    found = verdict(tmp_path, b=change, **(AUDIT if entry.stage == "decode" else {}))
    assert (found.verdict, found.exit_code, found.step, found.stage) == (
        "diverged",
        5,
        2,
        entry.stage,
    )
    by_sample = entry.stage in SAMPLE_STAGES
    sample = ledgers.order(2, 3, SHARD_COUNT, SAMPLES)[1][1] if by_sample else None
    assert found.shard == (3 if entry.kind == SHARD else None)
    assert found.sample == sample
    assert found.file == (ledgers.NAMES[sample] if sample is not None else None)
    states = {(cell["stage"], cell["field"]): cell["state"] for cell in found.fields}
    assert states[entry.stage, entry.noun] == "differs"
    before = [
        states[other.stage, other.noun] for other in FIELDS[: FIELDS.index(entry)]
    ]
    assert "differs" not in before
    assert f"{entry.noun} {entry.verb}" in found.sentence
    assert found.sentence.startswith(
        f"step 2{', shard 3' if entry.kind == SHARD else ''}"
    )


def test_sentences(tmp_path: Path) -> None:
    cases: list[tuple[dict[ledgers.Place, int], str]] = [
        ({(2, 3, "image", 1): 1}, "step 2, shard 3, sample 23 (scene_023): augmented image differs"),
        ({(2, 3, "target", 0): 1}, "step 2, shard 3, sample 22 (scene_022): mask differs"),
        (
            {(1, 0, "order", 1): 4},
            "step 1, shard 0, sample 9 (scene_009): samples differ "
            "(sample 9 of epoch 0 in A, sample 13 of epoch 0 in B)",
        ),
        (
            {(1, 0, "epoch", 1): 3},
            "step 1, shard 0, sample 9 (scene_009): samples differ "
            "(sample 9 of epoch 0 in A, sample 9 of epoch 3 in B)",
        ),
        (
            {(3, None, "lr", 0): 1},
            "step 3: learning rate differs (3.5 in A, 4.5 in B)",
        ),
        ({(0, None, "valid", 0): 7}, "step 0: number of valid pixels differs (0 in A, 7 in B)"),
        (
            {(0, shard, "loss", 0): shard for shard in (1, 2, 3)},
            "step 0, shard 1: loss differs (0.5 in A, 1.5 in B); also in shards 2, 3",
        ),
        (
            {(0, shard, "batch", 0): 1 for shard in (0, 2)},
            "step 0, shard 0: preprocessed batch differs; also in shards 2",
        ),
        ({(-1, None, "weights", 0): 1}, "before step 0: weights differ"),
    ]  # fmt: skip
    for number, (change, sentence) in enumerate(cases):
        assert verdict(tmp_path / str(number), b=change).sentence == sentence


def test_the_first_step_stage_and_shard_win(tmp_path: Path) -> None:
    change: dict[ledgers.Place, int] = {
        (3, 0, "image", 0): 1,  # earlier stage, later step
        (1, None, "weights", 0): 1,  # same step, later stage
        (1, 3, "batch", 0): 1,
        (1, 2, "batch", 0): 1,
        (1, 0, "logits", 0): 1,  # lower shard, later stage
    }
    found = verdict(tmp_path, b=change)
    assert (found.step, found.stage, found.shard, found.shards) == (
        1,
        "preprocess",
        2,
        [2, 3],
    )
    assert found.sample is None


@pytest.mark.parametrize(
    ("change", "stage", "layer"),
    [
        (
            {(2, 1, "gradient", 3): 1, (2, 1, "gradient", 17): 1},
            "backward",
            17,
        ),  # the backward pass runs backwards
        (
            {
                (2, 1, "logits", 0): 1,
                (2, 1, "statistics", 6): 1,
                (2, 1, "statistics", 20): 1,
            },
            "forward",
            6,
        ),
        ({(2, None, "weights", 25): 1, (2, None, "weights", 28): 1}, "weights", 25),
        ({(2, 1, "loss", 0): 1}, "loss", None),
    ],
)
def test_an_audit_names_the_layer(
    tmp_path: Path, change: Any, stage: str, layer: int | None
) -> None:
    found = verdict(tmp_path, b=change, **AUDIT)
    assert (found.step, found.stage) == (2, stage)
    assert found.layer == (None if layer is None else f"block{layer}.weight")
    assert ("compute.mode=audit" in found.advice) == (layer is None)
    if layer is not None:
        assert found.sentence.endswith(f", first seen in block{layer}.weight")


def test_without_an_audit_the_layer_is_unknown_and_the_advice_says_how(
    tmp_path: Path,
) -> None:
    found = verdict(tmp_path, b={(2, 1, "gradient", 0): 1})
    assert found.layer is None
    assert "compute.mode=audit" in found.advice
    assert verdict(tmp_path / "early", b={(2, 1, "image", 0): 1}).advice == ""


def test_environment_and_settings_that_differ_are_listed_and_do_not_decide(
    tmp_path: Path,
) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), STEPS)
    other = {
        "fingerprint": {"torch": "2.14", "threads": 1, "cuda": "13"},
        "optim__lr": 2,
        "compute__threads": 4,
    }
    b = ledgers.write_session(tmp_path / "b", ledgers.header(**other), STEPS)
    found = compare(read_run(a), read_run(b))
    assert found.verdict == "identical"
    assert found.fingerprint == {"torch": ("2.11", "2.14"), "cuda": (None, "13")}
    assert found.recipe == {"optim.lr": (1, 2), "compute.threads": (2, 4)}
    c = ledgers.write_session(
        tmp_path / "c", ledgers.header(**other), STEPS, changed={(0, 0, "logits", 0): 1}
    )
    found = compare(read_run(a), read_run(c))
    assert "The settings differ" in found.advice
    assert "The environments differ" in found.advice


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 1}, "seed is 0 in A and 1 in B"),
        ({"compute__shards": 8}, "compute.shards is 4 in A and 8 in B"),
        (
            {"compute__samples_per_shard": 4},
            "compute.samples_per_shard is 2 in A and 4 in B",
        ),
        ({"data__name": "camvid"}, "data.name is synthetic in A and camvid in B"),
        (
            {"sample_names": [*ledgers.NAMES[:7], "other"]},
            "sample 7 is scene_007 in A and other in B",
        ),
        ({"sample_names": ledgers.NAMES[:7]}, "A has 50 samples and B has 7"),
    ],
)
def test_runs_of_different_work_cannot_be_compared(
    tmp_path: Path, changes: Any, reason: str
) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), STEPS)
    b = ledgers.write_session(tmp_path / "b", ledgers.header(**changes), STEPS)
    found = compare(read_run(a), read_run(b))
    assert (found.verdict, found.exit_code) == ("not_comparable", 2)
    assert f"not comparable: {reason}" in found.sentence


def test_runs_without_a_common_step_cannot_be_compared(tmp_path: Path) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), range(2))
    b = ledgers.write_session(tmp_path / "b", ledgers.header(first_step=5), range(5, 8))
    found = compare(read_run(a), read_run(b))
    assert found.verdict == "not_comparable"
    assert (
        "no step is in both ledgers: A has steps 0 to 1, B has steps 5 to 7"
        in found.sentence
    )
    empty = ledgers.write_session(tmp_path / "c", ledgers.header(), [])
    assert "B has no step" in compare(read_run(a), read_run(empty)).sentence


def test_only_what_both_have_is_compared_and_that_is_said(tmp_path: Path) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), range(9))
    b = ledgers.write_session(tmp_path / "b", ledgers.header(), range(5))
    found = compare(read_run(a), read_run(b))
    assert (found.verdict, found.exit_code, found.steps) == ("identical_up_to", 2, 5)
    assert found.no_difference
    assert found.notes == ("A has steps 0 to 8, B has steps 0 to 4",)
    limits = "A has steps 0 to 8, B has steps 0 to 4"
    assert (
        found.sentence
        == f"identical in all 5 common steps, but not everything could be compared: {limits}"
    )


def test_a_step_whose_last_row_was_lost_is_not_called_identical(tmp_path: Path) -> None:
    """B was killed between the shards of its last step and its weights, which nobody has compared then."""
    a, b = (
        ledgers.write_session(tmp_path / name, ledgers.header(), STEPS, start=True)
        for name in "ab"
    )
    path = ledger_path(b, 0)
    path.write_bytes(path.read_bytes()[: -row_type(SAMPLES).itemsize])
    found = compare(read_run(a), read_run(b))
    assert (found.verdict, found.steps) == ("identical_up_to", 3)
    assert found.notes == ("A has steps 0 to 3, B has steps 0 to 2",)
    assert {
        cell["state"] for cell in found.fields if cell["field"] in ("weights", "loss")
    } == {"equal"}
    change: dict[ledgers.Place, int] = {(3, 1, "logits", 0): 1}
    other = ledgers.write_session(
        tmp_path / "c", ledgers.header(), STEPS, start=True, changed=change
    )
    found = compare(read_run(other), read_run(b))
    assert (found.step, found.stage) == (3, "forward"), (
        "what both have of it is compared"
    )


@pytest.mark.parametrize("shards", [4, 1])
def test_the_file_of_a_rank_that_is_missing_is_named_and_not_identical(
    tmp_path: Path, shards: int
) -> None:
    """With one shard, rank 2 holds none: its rows are missing nowhere."""
    first = ledgers.header(compute__shards=shards)
    a = ledgers.write_session(tmp_path / "a", first, STEPS, ranks=2)
    b = ledgers.write_session(tmp_path / "b", first, STEPS, ranks=4)
    ledger_path(b, 2).unlink()
    found = compare(read_run(a), read_run(b))
    assert (found.verdict, found.exit_code) == ("identical_up_to", 2)
    assert "rank 2 of 4 lacks session 0" in found.sentence


def test_fields_that_one_run_lacks_are_not_compared(tmp_path: Path) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), STEPS)
    b = ledgers.write_session(
        tmp_path / "b", ledgers.header(), STEPS, without=("logits", "ema", "target")
    )
    for here, there in ((a, b), (b, a)):
        found = compare(read_run(here), read_run(there))
        assert found.verdict == "identical"
        missing = [
            cell["field"] for cell in found.fields if cell["state"] == "not recorded"
        ]
        assert missing == [
            "decoded image",
            "decoded mask",
            "mask",
            "logits",
            "averaged weights",
        ]
    change: dict[ledgers.Place, int] = {(1, 0, "image", 0): 1, (1, 0, "logits", 0): 1}
    c = ledgers.write_session(tmp_path / "c", ledgers.header(), STEPS, changed=change)
    assert (
        compare(read_run(c), read_run(b)).sentence
        == "step 1, shard 0, sample 8 (scene_008): augmented image differs"
    )


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = ledgers.write_session(
        tmp_path / "whole", ledgers.header(), range(6), ranks=2
    )
    for name, again in (("same", {}), ("other", {(3, 1, "gradient", 0): 1})):
        folder = tmp_path / name
        lost = {
            (step, None, "weights", 0): 5 for step in (2, 3)
        }  # the steps that the resume made void
        ledgers.write_session(
            folder,
            ledgers.header(),
            range(4),
            ranks=4,
            changed=lost if name == "other" else {},
        )
        later = ledgers.header(session=1, first_step=2)
        ledgers.write_session(folder, later, range(2, 6), changed=again)
        found = compare(read_run(whole), read_run(folder))
        assert found.verdict == ("identical" if name == "same" else "diverged")
        if name == "other":
            assert (found.step, found.shard, found.stage) == (3, 1, "backward")
            assert any("changed when recomputed" in note for note in found.notes)


def test_every_stage_and_every_field_of_a_step_has_a_place_in_the_causal_order() -> (
    None
):
    assert STAGES == (
        "order", "decode", "augment", "preprocess", "forward", "loss", "backward", "reduction", "optimizer", "weights",
        "bn_ema",
    )  # fmt: skip
    assert {entry.name for entry in FIELDS if entry.kind != SHARD} == set(STEP_FIELDS)


@pytest.mark.slow
def test_the_command_speaks_json_and_ends_with_the_verdict(tmp_path: Path) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), STEPS, ranks=2)
    b = ledgers.write_session(
        tmp_path / "b", ledgers.header(), STEPS, changed={(2, 3, "image", 1): 1}
    )
    code = (
        "import sys; from segpipe.cli.main import main; code = main(['compare', *sys.argv[1:]]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(a), str(b), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 5, ended.stderr
    found = json.loads(ended.stdout)
    assert {name: found[name] for name in ("step", "shard", "sample", "stage", "layer", "file")} == {
        "step": 2, "shard": 3, "sample": 23, "stage": "augment", "layer": None, "file": "scene_023",
    }  # fmt: skip
    assert found["processes"] == [2, 1]


def test_the_command_says_it_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), STEPS)
    b = ledgers.write_session(
        tmp_path / "b",
        ledgers.header(fingerprint={"torch": "[bold]"}),
        STEPS,
        changed={(2, 3, "logits", 0): 1},
    )
    assert segpipe(["compare", str(a), str(a)]) == 0
    assert "identical in all 4 common steps" in capsys.readouterr().out
    assert segpipe(["compare", str(a), str(b)]) == 5
    out = capsys.readouterr().out
    assert "step 2, shard 3: logits differ" in out
    assert "environment torch: 2.11 in A, [bold] in B" in out
    assert "reduced gradient" in out
    assert "compute.mode=audit" in out


@pytest.mark.parametrize("damage", ["absent", "empty", "foreign", "altered"])
def test_the_command_refuses_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), STEPS)
    b = tmp_path / "b"
    if damage != "absent":
        (b / "ledger").mkdir(parents=True)
    if damage == "foreign":
        (b / "ledger" / "rank00.bin").write_bytes(b"something else")
    if damage == "altered":
        raw = bytearray((a / "ledger" / "rank00.bin").read_bytes())
        raw[-500] ^= 1
        (b / "ledger" / "rank00.bin").write_bytes(raw)
    told = {
        "absent": "does not exist. Give the folder of a run",
        "empty": "holds no ledger. Give the folder of a run",
        "foreign": "is not a ledger",
        "altered": "was altered after it was written",
    }[damage]
    assert segpipe(["compare", str(a), str(b)]) == 2
    assert told in capsys.readouterr().out
    assert segpipe(["compare", str(a), str(b), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not_comparable"
    assert told in found["sentence"]


@pytest.mark.parametrize("field", ["gradient", "optimizer", "weights", "ema"])
@pytest.mark.parametrize(("ranks", "odd"), [(16, 11), (4, 0)])
def test_a_run_whose_ranks_differ_is_never_identical(
    tmp_path: Path, field: str, ranks: int, odd: int
) -> None:
    """In B only rank `odd` holds something else in step 1."""
    first = ledgers.header(compute__shards=16, level=1, parts=ledgers.AUDITED)
    a = ledgers.write_session(tmp_path / "a", first, STEPS, ranks=4)
    b = ledgers.write_session(tmp_path / "b", first, STEPS, ranks=ranks)
    change: dict[ledgers.Place, int] = {(1, None, field, 0): 1}
    other = ledgers.write_session(
        tmp_path / "c", first, STEPS, ranks=ranks, changed=change
    )
    assert compare(read_run(a), read_run(b)).verdict == "identical"
    ledger_path(b, odd).write_bytes(ledger_path(other, odd).read_bytes())
    for found in (compare(read_run(a), read_run(b)), compare(read_run(b), read_run(b))):
        assert found.exit_code != 0
        assert found.step == 1 or "B: step 1: rank" in found.sentence


def test_ranks_that_diverge_later_do_not_hide_an_earlier_difference(
    tmp_path: Path,
) -> None:
    a = ledgers.write_session(tmp_path / "a", ledgers.header(), STEPS, ranks=4)
    early: dict[ledgers.Place, int] = {(1, 2, "batch", 0): 1}
    b = ledgers.write_session(
        tmp_path / "b", ledgers.header(), STEPS, ranks=4, changed=early
    )
    late: dict[ledgers.Place, int] = {**early, (3, None, "weights", 0): 1}
    other = ledgers.write_session(
        tmp_path / "c", ledgers.header(), STEPS, ranks=4, changed=late
    )
    ledger_path(b, 3).write_bytes(ledger_path(other, 3).read_bytes())
    found = compare(read_run(a), read_run(b))
    assert (found.step, found.stage) == (1, "preprocess")


def test_a_run_that_was_continued_with_other_processes_says_so() -> None:
    def processes(*sessions: int) -> int | str:
        headers = [
            SimpleNamespace(session=number, world_size=size)
            for number, size in enumerate(sessions)
            for _ in range(size)
        ]
        return divergence._processes(SimpleNamespace(headers=headers))  # type: ignore[arg-type]

    assert processes(2) == processes(2, 2) == 2
    assert processes(2, 1) == "2, then 1"
