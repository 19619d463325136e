"""A restored state continues with the same bits; a checkpoint of another recipe is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import CAMVID

from segpipe.data.catalog import ClassTable
from segpipe.errors import CheckpointError
from segpipe.keys import torch_seed
from segpipe.ledger.digest import state_digest
from segpipe.models import build_model
from segpipe.settings.config import Config, from_mapping, to_mapping
from segpipe.train.checkpoint import Found, load, restore, save, snapshot
from segpipe.train.state import TrainState, build_state

pytestmark = pytest.mark.usefixtures("strict_torch")
CPU = torch.device("cpu")
HERE = {"torch": "2.14.1", "device": "A"}


def config(**groups: dict[str, Any]) -> Config:
    model = {"name": "fast_scnn", **groups.pop("model", {})}
    return from_mapping({"model": model, **groups})


def update(state: TrainState, number: int) -> None:
    """Any update that moves weights, statistics, momentum, scale and average, and depends on `number` only."""
    torch.manual_seed(torch_seed(5, number, 0, "test"))
    logits = state.model.logits(torch.randn(2, 3, 64, 64), aux=True)
    state.scaler.scale(
        sum(value.square().mean() for value in logits.values())
    ).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    state.ema.update(state.step)
    state.step += 1


def digests(state: TrainState) -> list[str]:
    return [
        state_digest(model.state_dict()) for model in (state.model, state.ema.model)
    ]


def restored(path: Path, *given: Any) -> None:
    restore(Found(path, load(path)), *given)


@pytest.mark.parametrize(("name", "precision"), [("sgd", "fp32"), ("adamw", "fp16")])
def test_a_restored_state_goes_on_with_the_same_bits(
    tmp_path: Path, name: str, precision: str
) -> None:
    settings = config(optim={"name": name, "lr": 0.01}, train={"precision": precision})
    state = build_state(settings, CAMVID, CPU)
    for number in range(2):
        update(state, number)
    state.best_miou, state.stale = 0.375, 2
    kept = snapshot(state, settings, CAMVID, HERE)
    update(state, 2)  # while the file is written, which must not change it
    save(tmp_path / "last.pt", kept)
    torch.rand(3)  # what else the process did must not matter
    other = build_state(settings, CAMVID, CPU)
    assert digests(other) != digests(state)
    restored(tmp_path / "last.pt", other, settings, CAMVID, HERE)
    assert (other.step, other.best_miou, other.stale) == (2, 0.375, 2)
    update(other, 2)
    assert digests(other) == digests(state)
    assert other.scaler.state_dict() == state.scaler.state_dict()
    # The control: without the optimizer's state the bits differ.
    forgetful = build_state(settings, CAMVID, CPU)
    empty = forgetful.optimizer.state_dict()
    restored(tmp_path / "last.pt", forgetful, settings, CAMVID, HERE)
    forgetful.optimizer.load_state_dict(empty)
    update(forgetful, 2)
    assert digests(forgetful) != digests(state)


def test_fresh_weights_are_a_function_of_the_seed() -> None:
    first = digests(build_state(config(), CAMVID, CPU))
    torch.rand(17)
    assert digests(build_state(config(), CAMVID, CPU)) == first
    assert digests(build_state(from_mapping({"seed": 1}), CAMVID, CPU)) != first


def test_fresh_weights_are_those_of_the_key_of_the_weights() -> None:
    """Changing how the seed becomes weights would change every run; a first validation is the best so far."""
    torch.manual_seed(torch_seed(3, 0, 0, "weights"))
    expected = build_model("fast_scnn", CAMVID.num_classes).state_dict()
    state = build_state(config(seed=3), CAMVID, CPU)
    assert state_digest(state.model.state_dict()) == state_digest(expected)
    assert state.best_miou < 0


def test_a_network_that_its_code_returns_in_eval_mode_is_trained(
    project: Callable[[str, str], None],
) -> None:
    """Its BatchNorm would keep the statistics it was built with, and its dropout would do nothing."""
    project(
        "net.py",
        """
        from torch import nn

        class Net(nn.Module):
            def __init__(self, num_classes):
                super().__init__()
                self.body = nn.Sequential(nn.Conv2d(3, num_classes, 3), nn.BatchNorm2d(num_classes))
                self.kept = nn.BatchNorm2d(num_classes)
                self.eval()

            def forward(self, image):
                return self.kept(self.body(image))

            def train(self, mode=True):
                super().train(mode)
                self.kept.eval()
        """,
    )
    state = build_state(config(model={"name": "net:Net"}), CAMVID, CPU)
    kept = state.model.get_submodule("net.kept")
    assert [each for each in state.model.modules() if not each.training] == [kept]


def test_memory_format_is_the_configured_one() -> None:
    for wanted in (True, False):
        state = build_state(config(train={"channels_last": wanted}), CAMVID, CPU)
        weight = next(
            p for p in state.model.parameters() if p.ndim == 4 and min(p.shape) > 1
        )
        assert weight.is_contiguous(memory_format=torch.channels_last) is wanted


def test_frozen_layers_are_in_no_optimizer() -> None:
    state = build_state(config(model={"freeze": ["detail.*"]}), CAMVID, CPU)
    trained = {
        id(each) for group in state.optimizer.param_groups for each in group["params"]
    }
    for name, parameter in state.model.named_parameters():
        learns = not name.startswith("detail.")
        assert parameter.requires_grad is (id(parameter) in trained) is learns


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "last.pt"
    fresh = build_state(config(), CAMVID, CPU)
    save(path, snapshot(fresh, config(), CAMVID, HERE))
    return path


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"optim": {"lr": 0.01}}, "optim.lr: 0.05 -> 0.01"),
        ({"seed": 4}, "seed: 0 -> 4"),
        ({"compute": {"shards": 8}}, "compute.shards: 4 -> 8"),
        ({"compute": {"threads": 1}}, "compute.threads: 2 -> 1"),
        ({"augment": {"crop_size": [64, 64]}}, "augment.crop_size"),
    ],
)
def test_another_recipe_is_refused_by_name(
    saved: Path, changed: dict[str, Any], named: str
) -> None:
    other = from_mapping(changed)
    with pytest.raises(
        CheckpointError, match=r"last\.pt was trained with a different recipe"
    ) as caught:
        restored(saved, build_state(config(), CAMVID, CPU), other, CAMVID, HERE)
    assert named in str(caught.value)


def test_settings_that_reach_no_number_may_change(saved: Path) -> None:
    free = {
        "data": {"workers": 0, "root": "elsewhere"},
        "compute": {"nproc": "2"},
        "export": {"dir": "out"},
    }
    restored(
        saved, build_state(config(), CAMVID, CPU), from_mapping(free), CAMVID, HERE
    )


def test_a_finished_run_is_restored_and_one_that_went_further_is_refused(
    tmp_path: Path,
) -> None:
    settings, path = config(train={"steps": 3}), tmp_path / "last.pt"
    state = build_state(settings, CAMVID, CPU)
    for state.step in (3, 4):
        save(path, snapshot(state, settings, CAMVID, HERE))
        other = build_state(settings, CAMVID, CPU)
        if state.step == 3:
            restored(path, other, settings, CAMVID, HERE)
            assert other.step == 3
    with pytest.raises(CheckpointError, match=r"is of step 4, but train\.steps = 3"):
        restored(path, other, settings, CAMVID, HERE)


def test_other_classes_are_refused(saved: Path) -> None:
    renamed = ClassTable(
        "camvid", ("x", *CAMVID.names[1:]), CAMVID.palette, CAMVID.train_ids
    )
    swapped = CAMVID.train_ids | {0: CAMVID.train_ids[1], 1: CAMVID.train_ids[0]}
    for table, part in (
        (renamed, "names"),
        (ClassTable("camvid", CAMVID.names, CAMVID.palette, swapped), "train_ids"),
    ):
        with pytest.raises(CheckpointError, match=f"class {part}"):
            restored(saved, build_state(config(), CAMVID, CPU), config(), table, HERE)


def test_another_variable_is_refused_by_name(tmp_path: Path) -> None:
    narrow = HERE | {"variables": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}
    path = tmp_path / "plain.pt"
    fresh = build_state(config(), CAMVID, CPU)
    save(path, snapshot(fresh, config(), CAMVID, HERE | {"variables": {}}))
    with pytest.raises(CheckpointError, match=r"\(ONEDNN_MAX_CPU_ISA: None -> AVX2\)"):
        restored(path, build_state(config(), CAMVID, CPU), config(), CAMVID, narrow)


def test_another_environment_is_refused_by_name_unless_it_is_allowed(
    saved: Path,
) -> None:
    other = {"torch": "2.15.0", "device": "A", "cudnn": 9}
    with pytest.raises(
        CheckpointError, match=r"torch: 2\.14\.1 -> 2\.15\.0; cudnn: None -> 9\)"
    ) as caught:
        restored(saved, build_state(config(), CAMVID, CPU), config(), CAMVID, other)
    assert "run.allow_fingerprint_change=true" in str(caught.value)
    allowed = config(run={"allow_fingerprint_change": True})
    restored(saved, build_state(config(), CAMVID, CPU), allowed, CAMVID, other)
    off = config(compute={"mode": "off"})  # which promises no bits
    save(saved, snapshot(build_state(off, CAMVID, CPU), off, CAMVID, HERE))
    restored(saved, build_state(off, CAMVID, CPU), off, CAMVID, other)


def test_the_whole_configuration_is_kept(saved: Path) -> None:
    assert load(saved)["config"] == to_mapping(config())
