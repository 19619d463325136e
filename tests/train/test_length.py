"""How long a run trains: a number of epochs, and until validations stop improving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runs import metrics, outcome, result, run
from segpipe.audit.evidence import check_config
from segpipe.data.samples import open_splits
from segpipe.distributed.group import Group
from segpipe.ledger.divergence import compare
from segpipe.ledger.reader import read_run
from segpipe.run.launch import with_steps
from segpipe.settings.compose import compose
from segpipe.settings.config import from_mapping, saved_config
from segpipe.train import checkpoint, engine
from segpipe.train.metrics import Validation

SCORES = {
    2: 0.1,
    4: 0.3,
    6: 0.2,
    8: 0.3,
    10: 0.25,
    12: 0.9,
    14: 0.1,
}  # by step; 8 is not better than 4
PATIENT = (
    "train.steps=20",
    "train.validate_every=2",
    "train.patience=3",
    "compute.shards=1",
    "checkpoint.keep_every=7",
)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations have the mIoU of SCORES, the final one 0.5, the best of all."""
    validate, score = engine._validate, 0.0

    def scripted_validation(
        run: engine.Run, *, precision: str, log: bool = True
    ) -> Validation:
        nonlocal score
        final = engine._stopped_early(run)
        score = 0.5 if final else SCORES[run.state.step]
        return validate(run, precision=precision, log=log)

    monkeypatch.setattr(engine, "_validate", scripted_validation)
    monkeypatch.setattr(engine, "miou", lambda total: score)


@pytest.mark.usefixtures("scripted")
def test_training_stops_when_validations_do_not_improve_and_resumes_exactly(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    assert run(folder, *PATIENT) == 0
    found = result(folder)
    assert (found["steps"], found["stopped_early"], found["best_miou"]) == (
        10,
        True,
        0.5,
    )
    assert [
        line["step"] for line in metrics(folder) if line["kind"] == "validation"
    ] == [2, 4, 6, 8, 10]
    resumed = Path(shutil.copytree(folder, tmp_path / "resumed"))
    (resumed / "step_000007.pt").replace(
        resumed / "last.pt"
    )  # after one validation that was not better
    assert checkpoint.load(resumed / "last.pt")["stale"] == 1
    assert run(resumed, *PATIENT, "run.exists=resume") == 0
    assert result(resumed)["steps"] == 10
    assert outcome(resumed) == outcome(folder)
    assert (
        run(folder, *PATIENT, "run.exists=resume") == 0
    )  # of a run that has stopped: it does not go on
    assert result(folder)["steps"] == 10
    assert outcome(resumed) == outcome(folder)


def test_without_patience_a_run_goes_to_its_end(tmp_path: Path) -> None:
    assert run(tmp_path / "run", "train.validate_every=1", "compute.shards=1") == 0
    assert (
        result(tmp_path / "run")["steps"],
        result(tmp_path / "run")["stopped_early"],
    ) == (3, False)
    content = checkpoint.load(tmp_path / "run" / "last.pt")
    assert content["stale"] >= 0
    older = {
        key: value
        for key, value in content.items()
        if key not in ("stale", "digests", "format", "version")
    }
    checkpoint.save(tmp_path / "older.pt", older)
    assert "stale" not in torch.load(tmp_path / "older.pt", weights_only=True)
    assert checkpoint.load(tmp_path / "older.pt")["stale"] == 0


@pytest.mark.parametrize(
    ("images", "epochs", "steps"),
    [(16, 3, 6), (17, 3, 7), (1, 1, 1), (8, 1, 1), (9, 1, 2)],
)
def test_epochs_are_whole_passes(images: int, epochs: int, steps: int) -> None:
    values = {
        "train": {"epochs": epochs},
        "data": {"num_train": images},
        "compute": {"shards": 4, "samples_per_shard": 2},
    }
    found, _ = with_steps(from_mapping(values))
    assert (found.train.steps, found.train.epochs) == (steps, 0)
    assert with_steps(found)[0] is found


def test_a_run_that_ends_in_its_warm_up_says_so() -> None:
    """It trains, for a quick look, but never with the learning rate that it was given."""
    group = Group(0, 1, torch.device("cpu"))
    for steps, said in ((19, True), (20, False)):
        config = compose([f"train.steps={steps}", "data.num_train=4", "data.num_val=4"])
        text = engine.header(config, group, *open_splits(config), torch.nn.ReLU())
        assert ("steps, all below optim.lr (optim.warmup_steps = 20)" in text) is said


def test_a_run_stores_steps_and_resumes_with_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    length = ("train.steps=0", "train.epochs=1", "data.num_train=3", "compute.shards=1")
    assert run(folder, *length) == 0
    stored = json.loads((folder / "config.json").read_text())["train"]
    assert (stored["steps"], stored["epochs"], result(folder)["steps"]) == (2, 0, 2)
    assert run(folder, *length, "export.images=2", "run.exists=resume") == 0
    # By which a sweep sees that this export is made.
    assert saved_config(folder).export.images == 2
    assert run(folder, *length, "train.epochs=2", "run.exists=resume") == 2
    said = capsys.readouterr().err
    for part in (
        "train.steps: 2 -> 3",
        "train.steps=2",
        "model.weights=FOLDER",
        "optim.schedule_steps",
    ):
        assert part in said


def test_a_run_with_a_fixed_schedule_is_made_longer_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """And keeps the newest of its numbered checkpoints. The control is the refusal above, without a schedule."""
    fixed = ("optim.schedule_steps=8", "compute.shards=1", "checkpoint.keep_every=1")
    assert run(tmp_path / "whole", *fixed, "train.steps=5") == 0
    folder, kept = tmp_path / "run", (*fixed, "checkpoint.keep_last=2")
    assert run(folder, *kept, "train.steps=2") == 0
    assert run(folder, *kept, "train.steps=5", "run.exists=resume") == 0
    assert outcome(folder) == outcome(tmp_path / "whole")
    found = compare(read_run(tmp_path / "whole"), read_run(folder))
    assert (found.verdict, found.recipe) == ("identical", {})
    assert (
        json.loads((folder / "config.json").read_text())["train"]["steps"]
        == result(folder)["steps"]
        == 5
    )
    assert sorted(path.name for path in folder.glob("step_*.pt")) == [
        "step_000003.pt",
        "step_000004.pt",
    ]
    assert len([*(tmp_path / "whole").glob("step_*.pt")]) == 4
    line = check_config(saved_config(folder), read_run(folder))
    assert line.status == "passed", "an audit takes both sessions for one run"
    assert run(folder, *kept, "train.steps=3", "run.exists=resume") == 2, (
        "it has gone further than that"
    )


@pytest.mark.parametrize(
    ("free_mib", "fits", "every"),
    [(3, False, 1), (3, False, 0), (3000, True, 1)],
)
def test_a_disk_that_is_too_small_is_told_before_the_first_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free_mib: int,
    fits: bool,
    every: int,
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_mib * 2**20)
    )
    keep = f"checkpoint.keep_every={every}"
    code = run(tmp_path / "run", "compute.shards=1", "export.enabled=false", keep)
    said = capsys.readouterr().err
    assert code == (0 if fits else 2)
    if not fits:
        assert "run will need" in said
        files = 5 if every else 3
        assert f"({files} checkpoints of 13 MiB), but its disk has 3 MiB free" in said
        assert ("checkpoint.keep_last" in said) == bool(every), "where it helps"
        assert not [*(tmp_path / "run").glob("*.pt")]


@pytest.mark.usefixtures("scripted")
def test_a_run_made_longer_stops_where_one_run_does(tmp_path: Path) -> None:
    """The final validation of the first part is neither counted nor the bar for those that follow."""
    longer = (*PATIENT[1:], "train.patience=2", "optim.schedule_steps=40")
    assert run(tmp_path / "whole", *longer, "train.steps=20") == 0
    folder = tmp_path / "run"
    assert run(folder, *longer, "train.steps=8") == 0
    assert run(folder, *longer, "train.steps=20", "run.exists=resume") == 0
    for key in ("steps", "stopped_early", "best_miou", "weights_digest"):
        assert result(folder)[key] == result(tmp_path / "whole")[key], key


@pytest.mark.usefixtures("scripted")
def test_a_run_made_longer_keeps_the_better_network_of_its_first_end(
    tmp_path: Path,
) -> None:
    """Its score of 0.9 is no bar for train.patience, but best.pt holds it."""
    changes = ("train.validate_every=10", "compute.shards=1", "optim.schedule_steps=40")
    folder = tmp_path / "run"
    assert run(folder, *changes, "train.steps=12") == 0
    assert run(folder, *changes, "train.steps=14", "run.exists=resume") == 0
    best, last = (checkpoint.load(folder / f"{name}.pt") for name in ("best", "last"))
    assert best["best_miou"] == result(folder)["best_miou"] == 0.9
    assert (best["step"], last["best_miou"]) == (12, 0.25)


def test_a_finished_run_that_is_resumed_keeps_its_hours(tmp_path: Path) -> None:
    assert run(tmp_path / "run", "compute.shards=1") == 0
    before = result(tmp_path / "run")["train_seconds"]
    assert run(tmp_path / "run", "compute.shards=1", "run.exists=resume") == 0
    found = result(tmp_path / "run")
    assert found["train_seconds"] >= metrics(tmp_path / "run")[-1]["time_s"] > 0
    assert found["train_seconds"] >= before - 1
    assert found["images_per_second"] is None, "of a session without an update"
