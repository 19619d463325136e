"""Two runs that part are trained again up to there: the layer is named, or the run that does not come out again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runs import run, torch_restored
from segpipe.audit.replay import compare_again, last_common
from segpipe.cli.main import main as segpipe
from segpipe.ledger.divergence import Comparison
from segpipe.train import state
from segpipe.train.checkpoint import load, save
from segpipe.train.state import TrainState

RUN = (
    "compute.shards=2",
    "train.steps=4",
    "checkpoint.keep_every=2",
    "train.log_every=9",
    "data.num_val=1",
)
STEP = 3  # the last update: one after the checkpoint of step 2
LAYER = "ppm.out.0"
Plant = Callable[[TrainState], None]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """A replay sets the switches of the runs that it trains again."""
    with torch_restored():
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that all others are compared with."""
    folder = tmp_path_factory.mktemp("locate") / "a"
    assert run(folder, *RUN) == 0
    (folder / "best.pt").unlink()  # the same state as last.pt
    return folder


def again(a: Path, b: Path) -> Comparison:
    return compare_again(a, b, lambda done, total: None)


def planted(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    """From now on runs that are called b have a fault in one layer in update STEP, and only they."""
    build = state.build_state

    def faulty(config: Any, *arguments: Any) -> TrainState:
        current = build(config, *arguments)
        if config.run.name == "b":
            plant(current)
        return current

    monkeypatch.setattr(state, "build_state", faulty)


def nudged(tensor: Tensor) -> Tensor:
    """Every element is the next number; of a single one nothing may be left behind the next BatchNorm."""
    return torch.nextafter(tensor.detach(), tensor.new_tensor(9.0))


def in_forward(current: TrainState) -> None:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return (
            output + (nudged(output) - output.detach())
            if current.step == STEP
            else None
        )

    current.model.get_submodule(LAYER).register_forward_hook(hook)


def in_backward(current: TrainState) -> None:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if current.step == STEP:
            inputs[0].register_hook(nudged)

    current.model.get_submodule(LAYER).register_forward_pre_hook(hook)


@pytest.mark.parametrize(
    ("plant", "stage", "reached"),
    [
        (in_forward, "forward", "ppm.out.1.running_mean"),
        (in_backward, "backward", "ppm.branches.3.1.bias"),
    ],
)
def test_a_unit_in_the_last_place_of_a_layer_is_named_and_without_the_cause_the_odd_run(
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
    stage: str,
    reached: str,
) -> None:
    """Named is the first tensor that it reached: the statistics after the layer, the last bias before it."""
    planted(monkeypatch, plant)
    assert run(tmp_path / "b", *RUN) == 0
    found = again(alone, tmp_path / "b")
    assert (found.verdict, found.step, found.stage, found.layer) == (
        "diverged",
        STEP,
        stage,
        reached,
    ), found.replay
    assert found.odd is None
    assert f"replayed from step 2 to {STEP}" in found.replay
    assert "both came out again" in found.replay
    monkeypatch.undo()  # what made it differ is gone, as after a fault of the hardware
    pair, odd = (
        ((alone, tmp_path / "b"), "B")
        if stage == "forward"
        else ((tmp_path / "b", alone), "A")
    )
    found = again(*pair)
    assert (found.stage, found.odd, found.layer) == (stage, odd, None), found.replay
    assert f"{odd} did not come out again" in found.replay


def test_a_setting_that_reaches_the_first_layer(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "other", *RUN, "train.precision=bf16") == 0
    capsys.readouterr()
    assert (
        segpipe(["compare", str(alone), str(tmp_path / "other"), "--replay", "--json"])
        == 5
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["stage"], found["layer"]) == (
        0,
        "forward",
        "detail.0.1.running_mean",
    ), found["replay"]
    assert "replayed from step 0 to 0" in found["replay"]


def test_a_setting_of_the_optimizer_is_no_layer_of_the_network(
    alone: Path, tmp_path: Path
) -> None:
    assert (
        run(tmp_path / "other", *RUN, "optim.weight_decay=0.01", "train.steps=1") == 0
    )
    found = again(alone, tmp_path / "other")
    assert (found.step, found.stage) == (0, "optimizer"), found.sentence
    assert found.layer == "detail.0.0.weight", found.replay


def test_equal_runs_are_not_trained_again(alone: Path) -> None:
    found = again(alone, alone)
    assert (found.verdict, found.replay) == ("identical", "")


def test_the_last_common_checkpoint_has_equal_weights(
    alone: Path, tmp_path: Path
) -> None:
    assert [last_common(alone, alone, step)[0] for step in (1, 3)] == [0, 2]
    other = load(alone / "step_000002.pt")
    next(iter(other["model"].values()))[0, 0, 0, 0] += 1
    save(tmp_path / "step_000002.pt", other)
    assert last_common(alone, tmp_path, 4) == (0, (None, None))
