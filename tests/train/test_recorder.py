"""The ledger of an audit does not depend on the processes, and names a fault planted between two runs."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import trained_by
from runs import metrics, outcome, run, script
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.data.order import Order
from segpipe.distributed.group import Group
from segpipe.ledger.digest import digest_groups
from segpipe.ledger.divergence import Comparison, compare
from segpipe.ledger.reader import read_run
from segpipe.models import build_model
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config
from segpipe.train import state as optim
from segpipe.train import step as gradients
from segpipe.train.recorder import PARTS, Recorder, _moments, _numbers
from segpipe.train.state import build_state
from segpipe.train.step import StepResult, TrainStep

AUDIT = (
    "compute.mode=audit", "compute.shards=2", "train.steps=3", "checkpoint.every=1", "loss.name=ohem",
    "optim.clip_norm=1", "optim.warmup_steps=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "alone"
    assert run(folder, *AUDIT) == 0
    return folder


def compared(a: Path, b: Path) -> Comparison:
    return compare(read_run(a), read_run(b))


def test_an_audit_computes_what_elastic_does(alone: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "elastic", *AUDIT, "compute.mode=elastic") == 0
    assert outcome(tmp_path / "elastic") == outcome(alone)
    found = compared(alone, tmp_path / "elastic")  # the rows that both write
    assert found.verdict == "identical", found.sentence
    assert (
        run(tmp_path / "bare", *AUDIT, "compute.mode=elastic", "compute.ledger=false")
        == 0
    )
    assert outcome(tmp_path / "bare") == outcome(alone)
    assert not (tmp_path / "bare" / "ledger").exists()


def test_the_parts_of_an_update_take_the_time_of_a_training(
    alone: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / "off", "compute.mode=off") == 0
    for folder, without in ((alone, set()), (tmp_path / "off", {"ledger"})):
        *_, last = (line for line in metrics(folder) if line["kind"] == "train")
        assert set(last["part_s"]) == set(PARTS) - without
        assert 0.3 * last["time_s"] < sum(last["part_s"].values()) < last["time_s"]


@pytest.mark.slow
def test_two_processes_write_the_ledger_of_one(alone: Path, tmp_path: Path) -> None:
    trained_by(2, tmp_path / "two", *AUDIT, "data.workers=1")
    assert sorted(
        path.name for path in (tmp_path / "two" / "ledger").glob("*.bin")
    ) == ["rank00.bin", "rank01.bin"]
    found = compared(alone, tmp_path / "two")
    assert found.verdict == "identical", found.sentence
    assert script("compare_runs.py", str(alone), str(tmp_path / "two")) == 0


def test_a_resumed_audit_is_the_same_audit(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, apply = tmp_path / "resumed", TrainStep.apply

    def interrupted(step: TrainStep) -> None:
        apply(step)
        if step.state.step == 2:  # one step after the checkpoint
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainStep, "apply", interrupted)
    assert run(folder, *AUDIT) == 130
    monkeypatch.undo()
    assert run(folder, *AUDIT, "run.exists=resume") == 0
    found = compared(alone, folder)
    assert found.verdict == "identical", found.sentence


def test_rows_are_written_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at checkpoints alone: what a killed run has computed can be compared, and rows do not fill the memory."""
    flushed: list[int] = []
    flush, create = Recorder.flush, Recorder.__init__

    def often(self: Recorder, *given: Any, **named: Any) -> None:
        create(self, *given, **named)
        self.steps_held = 2

    def noted(self: Recorder, *, sync: bool = False) -> None:
        flushed.append(self.state.step if not sync else -self.state.step)
        flush(self, sync=sync)

    monkeypatch.setattr(Recorder, "__init__", often)
    monkeypatch.setattr(Recorder, "flush", noted)
    changes = (
        "train.steps=5",
        "compute.shards=1",
        "checkpoint.every=0",
        "augment.crop_size=[32,32]",
    )
    assert run(tmp_path / "run", *changes) == 0
    assert [step for step in flushed if step > 0] == [2, 4]
    assert {step for step in flushed if step < 0} == {-5}, (
        "with the checkpoints of the end"
    )


LAYER = "ppm.out.0.weight"
STEP, SHARD, ROW = 1, 1, 1  # where the plants are
STAGES = {
    "image": "augment", "target": "augment", "seen": "preprocess", "gradient": "backward", "reduced": "reduction",
    "rate": "optimizer", "weight": "weights", "ema": "bn_ema",
}  # fmt: skip


@pytest.mark.parametrize("plant", STAGES)
def test_a_planted_difference_is_named(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    """One bit, or one unit in the last place, in one place of one step."""
    globals()[f"_plant_{plant}"](monkeypatch)
    assert run(tmp_path / "other", *AUDIT) == 0
    found = compared(alone, tmp_path / "other")
    assert (found.verdict, found.step, found.stage) == (
        "diverged",
        STEP,
        STAGES[plant],
    ), found.sentence
    if plant in ("image", "target", "seen", "gradient"):
        assert found.shard == SHARD, found.sentence
    if plant in ("image", "target"):
        assert found.sample == Order(0, 16, 2, 2).shard(STEP, SHARD)[ROW][1], (
            found.sentence
        )
    if plant in ("gradient", "reduced", "weight", "ema"):
        assert found.layer == LAYER, found.sentence
    assert json.loads(json.dumps(found.to_json()))["stage"] == STAGES[plant]


def _nudge(tensor: Tensor) -> None:
    """The next number for one element."""
    first = tensor.detach()[(0,) * tensor.ndim]
    first.copy_(torch.nextafter(first, torch.tensor(9.0)))


def _plant_image(monkeypatch: pytest.MonkeyPatch, name: str = "image") -> None:
    call = TrainStep.__call__

    def planted(step: TrainStep, shards: list[ShardBatch], valid: Tensor) -> StepResult:
        if step.state.step == STEP:
            changed = getattr(shards[SHARD], name).clone()
            changed[ROW, 5, 6] = changed[ROW, 5, 6] ^ 1
            shards = [
                *shards[:SHARD],
                shards[SHARD]._replace(**{name: changed}),
                *shards[SHARD + 1 :],
            ]
        return call(step, shards, valid)

    monkeypatch.setattr(TrainStep, "__call__", planted)


def _plant_target(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant_image(monkeypatch, "target")


def _plant_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = Preprocess.forward, count()

    def planted(self: Preprocess, image: Tensor) -> Tensor:
        seen = forward(self, image)
        if next(calls) == 2 * STEP + SHARD:
            seen = seen.clone()
            seen[0, 0, 0, 0] += 1e-6
        return seen

    monkeypatch.setattr(Preprocess, "forward", planted)


def _plant_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    pack, calls = gradients._pack, count()

    def planted(views: list[Tensor], parameters: list[nn.Parameter]) -> None:
        pack(views, parameters)
        if next(calls) == 2 * STEP + SHARD:
            _nudge(views[_place()])

    monkeypatch.setattr(gradients, "_pack", planted)


def _plant_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = gradients.ElasticGradients._unpack

    def planted(self: gradients.ElasticGradients, *arguments: Any) -> gradients.Reduced:
        reduced = unpack(self, *arguments)
        grad = self.parameters[_place()].grad
        if self.state.step == STEP and grad is not None:
            _nudge(grad)
        return reduced

    monkeypatch.setattr(gradients.ElasticGradients, "_unpack", planted)


def _plant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = optim.learning_rate

    def planted(step: int, *arguments: Any) -> float:
        return rate(step, *arguments) * (1 + 1e-15 if step == STEP else 1)

    monkeypatch.setattr("segpipe.train.step.learning_rate", planted)


def _plant_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    update = optim.Ema.update

    def planted(self: optim.Ema, step: int) -> None:
        if step == STEP:
            _nudge(list(self._pairs)[_entry(self)])
        update(self, step)

    monkeypatch.setattr(optim.Ema, "update", planted)


def _plant_ema(monkeypatch: pytest.MonkeyPatch) -> None:
    update = optim.Ema.update

    def planted(self: optim.Ema, step: int) -> None:
        update(self, step)
        if step == STEP:
            _nudge(list(self._pairs.values())[_entry(self)])

    monkeypatch.setattr(optim.Ema, "update", planted)


def _place() -> int:
    return [name for name, _ in build_model("fast_scnn", 2).named_parameters()].index(
        LAYER
    )


def _entry(ema: optim.Ema) -> int:
    floats = [
        name
        for name, value in ema.model.state_dict().items()
        if value.is_floating_point()
    ]
    return floats.index(LAYER)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_every_moment_of_a_parameter_is_in_its_digest(name: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    before = digest_groups([_moments(optimizer, weight)]).tolist()
    optimizer.state[weight][name] += 1
    assert digest_groups([_moments(optimizer, weight)]).tolist() != before


class Frames:
    """As many samples of a training split as a header needs."""

    def __len__(self) -> int:
        return 2

    def name(self, index: int) -> str:
        return str(index)


def test_every_tensor_of_the_state_is_in_its_digest_and_in_no_other(
    tmp_path: Path,
) -> None:
    """A frozen weight is one of the weights."""
    config = Config()
    config.run.root, config.optim.name = str(tmp_path), "adamw"
    state = build_state(config, STREET, torch.device("cpu"))
    frozen = next(state.model.parameters()).requires_grad_(False)
    recorder = Recorder(config, Group(0, 1, torch.device("cpu")), state, Frames(), {})  # type: ignore[arg-type]
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    frozen.grad = None
    state.optimizer.step()
    kept = {
        name: state.optimizer.state[value]
        for name, value in state.model.named_parameters()
        if value is not frozen
    }
    moments = {
        name: [moment for _, moment in sorted(kept[name].items())] for name in kept
    }  # the order of the format
    floats = {
        name: value
        for name, value in state.model.named_buffers()
        if value.is_floating_point()
    }
    tensors = {
        "weights": {name: [value] for name, value in state.model.named_parameters()},
        "optimizer": moments,
        "statistics": {name: [value] for name, value in floats.items()},
        "ema": {
            name: [x]
            for name, x in state.ema.model.state_dict().items()
            if x.is_floating_point()
        },
    }
    row, parts = row_of(recorder), recorder.state_parts()
    assert row["optimizer"] == int(
        digest_groups([[x for each in moments.values() for x in each]])
    )
    assert {kind: list(names) for kind, names in tensors.items()} == {
        kind: list(digests) for kind, digests in parts.items()
    }
    for kind, places in tensors.items():
        for name in [*list(places)[::20], list(places)[-1]]:
            for tensor in places[name]:
                before = tensor.detach().clone()
                with torch.no_grad():
                    tensor[(-1,) * tensor.ndim] += 1
                changed, now = row_of(recorder), recorder.state_parts()
                assert [k for k in row if changed[k] != row[k]] == [kind], name
                assert [
                    (k, n)
                    for k, digests in parts.items()
                    for n, was in digests.items()
                    if was != now[k][n]
                ] == [(kind, name)]
                with torch.no_grad():
                    tensor.copy_(before)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_scale_of_a_loaded_state_is_in_its_row(
    tmp_path: Path, precision: str
) -> None:
    """It decides which updates overflow and are skipped; without fp16 an update has scale 1."""
    config = Config()
    config.run.root, config.train.precision = str(tmp_path), precision
    state = build_state(config, STREET, torch.device("cpu"))
    if precision == "fp16":
        state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 8.0})
    rows: list[dict[str, Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "segpipe.ledger.rows.LedgerWriter.step_row",
            lambda self, step, given: rows.append(given),
        )
        recorder = Recorder(
            config, Group(0, 1, torch.device("cpu")), state, Frames(), {}
        )  # type: ignore[arg-type]
        if precision == "fp16":
            state.scaler.scale(torch.ones(()))
            state.scaler.update(16.0)
        recorder.applied(0.1)
    expected = [8.0, 16.0] if precision == "fp16" else [None, 1.0]
    found = [
        row["scale"].view(torch.float64).item() if "scale" in row else None
        for row in rows
    ]
    assert found == expected


def row_of(recorder: Recorder) -> dict[str, int]:
    """The digests of the state that the next row of an update holds, by kind."""
    with pytest.MonkeyPatch.context() as patch:
        rows: list[dict[str, Tensor]] = []
        patch.setattr(
            recorder._writer, "step_row", lambda step, digests: rows.append(digests)
        )
        recorder._state_row(0)
    return {kind: int(rows[0][kind]) for kind in recorder.state_parts()}


def test_a_buffer_without_an_axis_is_part_of_the_state() -> None:
    net = nn.Module()
    net.register_buffer("scale", torch.tensor(2.0))
    net.register_buffer("order", torch.tensor(2))
    net.norm = nn.BatchNorm2d(1, affine=False)
    assert _numbers(net).keys() == {
        "scale",
        "order",
        "norm.running_mean",
        "norm.running_var",
    }
