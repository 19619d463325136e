"""One update against a direct computation on the whole batch: gradients, statistics, counters, and hooks."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.errors import ConfigError
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models.layers import SegmentationNet
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config, from_mapping
from segpipe.train import step as gradients
from segpipe.train.batches import counted
from segpipe.train.forward import AllHeads, GraphedHeads, statistics, training_heads
from segpipe.train.recorder import Watch
from segpipe.train.state import (
    Ema,
    TrainState,
    build_optimizer,
    build_state,
    learning_rate,
)
from segpipe.train.step import (
    NEVER,
    BatchLoss,
    ElasticGradients,
    StepResult,
    TrainStep,
    train_step,
)

pytestmark = pytest.mark.usefixtures("strict_torch")
ALONE = Group(0, 1, torch.device("cpu"))
V, B, C, SIZE = 4, 2, 4, 16


class Tiny(SegmentationNet):
    """Two convolutions around a norm, an auxiliary head, dropout where it is asked for, and a weight nobody uses."""

    def __init__(
        self, dropout: float = 0.0, norm: bool = True, more_norms: int = 0
    ) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 6, 3, stride=4, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.dropout = nn.Sequential(
            *(nn.BatchNorm2d(6) for _ in range(more_norms)), nn.Dropout(dropout)
        )
        self.main, self.aux = nn.Conv2d(6, C, 1), nn.Conv2d(6, C, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        x = self.dropout(F.relu(self.norm(self.body(image))))
        return (
            {"main": self.main(x), "aux": self.aux(x)}
            if aux
            else {"main": self.main(x)}
        )


def config(**groups: dict[str, Any]) -> Config:
    optim = {"lr": 0.1, "warmup_steps": 0, **groups.pop("optim", {})}
    return from_mapping(
        {"compute": {"shards": V, "samples_per_shard": B}, "optim": optim, **groups}
    )


def fresh(settings: Config, **kind: Any) -> TrainState:
    torch.manual_seed(0)
    model = Tiny(**kind).train()
    if settings.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler("cpu", enabled=settings.train.precision == "fp16")
    return TrainState(
        model, Ema(model, settings.ema), build_optimizer(model, settings.optim), scaler
    )


def step_of(state: TrainState, settings: Config) -> TrainStep:
    return TrainStep(settings, Watch(ALONE, state))


def batches(step: int = 0, size: int = SIZE) -> list[ShardBatch]:
    draws = torch.Generator().manual_seed(step)
    image = torch.randint(0, 256, (V, B, size, size, 3), generator=draws).to(
        torch.uint8
    )
    target = torch.randint(0, C, (V, B, size, size), generator=draws).to(torch.uint8)
    for shard in range(
        V
    ):  # labels are spread unevenly over the shards; the last has none
        target[shard, :, : (0, 4, 8, size)[shard]] = 255
    ids = torch.zeros(B, dtype=torch.int64)
    return [
        ShardBatch(step, shard, image[shard], target[shard], ids, ids)
        for shard in range(V)
    ]


def valid(shards: list[ShardBatch]) -> Tensor:
    return torch.tensor(sum(valid_pixels(batch.target) for batch in shards))


def run(settings: Config, steps: int, **kind: Any) -> tuple[TrainState, list[Any]]:
    state = fresh(settings, **kind)
    step, results = step_of(state, settings), []
    for number in range(steps):
        shards = batches(number)
        results.append(step(shards, valid(shards)))
        step.apply()
    return state, results


def bits(state: TrainState) -> list[bytes]:
    values = [
        *state.model.state_dict().values(),
        *state.ema.model.state_dict().values(),
    ]
    return [value.contiguous().numpy().tobytes() for value in values]


def test_a_frozen_norm_keeps_its_statistics_whatever_mode_a_network_sets() -> None:
    state = fresh(config())
    for part in (state.model.body, state.model.norm):
        part.requires_grad_(False)
    state.optimizer = build_optimizer(state.model, config().optim)
    step, before = step_of(state, config()), state.model.norm.running_mean.clone()
    state.model.train()
    step(batches(), valid(batches()))
    step.apply()
    assert torch.equal(state.model.norm.running_mean, before)


def whole_batch(
    settings: Config, model: Tiny, shards: list[ShardBatch]
) -> dict[str, Tensor]:
    """The loss of all pixels of the step, normalised once; each shard is a batch of its own for BatchNorm."""
    total = {"main": torch.zeros(()), "aux": torch.zeros(())}
    for batch in shards:
        for name, logits in model.logits(Preprocess()(batch.image), aux=True).items():
            full = F.interpolate(logits, size=(SIZE, SIZE), mode="bilinear")
            total[name] = total[name] + F.cross_entropy(
                full, batch.target.long(), ignore_index=255, reduction="sum"
            )
    scale = {"main": 1.0, "aux": settings.loss.aux_weight}
    return {name: scale[name] * value / valid(shards) for name, value in total.items()}


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_and_figures_are_those_of_the_whole_batch(
    channels_last: bool,
) -> None:
    settings = config(train={"channels_last": channels_last})
    state, twin, shards = fresh(settings), fresh(settings).model, batches()
    assert isinstance(twin, Tiny)
    parts = whole_batch(settings, twin, shards)
    torch.stack(list(parts.values())).sum().backward()
    result = step_of(state, settings)(shards, valid(shards))
    expected = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in state.model.named_parameters():
        wanted = expected[name]  # None for the weight that nobody uses
        torch.testing.assert_close(
            p.grad,
            wanted,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert set(result.parts) == {"main", "aux"}
    for name, part in result.parts.items():
        assert float(part) == pytest.approx(float(parts[name].detach()), rel=1e-5)
    assert float(result.loss) == pytest.approx(
        sum(float(part) for part in result.parts.values()), rel=1e-5
    )
    assert float(sum(result.shard_losses.values())) == pytest.approx(
        float(result.loss), rel=1e-5
    )
    assert result.shard_losses[V - 1] == 0  # the shard without a label
    norm = torch.cat(
        [p.grad.flatten() for p in twin.parameters() if p.grad is not None]
    ).norm()
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)


def test_statistics_are_the_mean_over_the_shards() -> None:
    settings = config()
    state, shards = fresh(settings), batches()
    singles = []
    for batch in shards:
        twin = fresh(settings).model
        twin.logits(Preprocess()(batch.image), aux=True)
        singles.append([value.clone() for value in statistics(twin)])
    step = step_of(state, settings)
    step(shards, valid(shards))
    step.apply()
    for found, *parts in zip(statistics(state.model), *singles, strict=True):
        torch.testing.assert_close(
            found, torch.stack(parts).mean(0), rtol=1e-6, atol=1e-7
        )
    # The control: shard after shard, as plain accumulation does it, ends elsewhere.
    twin = fresh(settings).model
    for batch in shards:
        twin.logits(Preprocess()(batch.image), aux=True)
    assert not torch.allclose(
        statistics(twin)[0], statistics(state.model)[0], rtol=1e-3
    )


def test_batchnorm_counts_updates_not_shards() -> None:
    state, _ = run(config(), 3)
    assert isinstance(state.model, Tiny)
    assert isinstance(state.model.norm, nn.BatchNorm2d)
    assert state.model.norm.num_batches_tracked == 3
    assert state.step == 3


def test_every_shard_of_an_update_finds_the_same_counter() -> None:
    """BatchNorm without a momentum, and norms of the user, compute with it: its bits would depend on the processes."""
    settings, seen = config(), []
    state = fresh(settings)
    state.model.norm.momentum = None
    state.model.norm.register_forward_pre_hook(
        lambda module, _: seen.append(int(module.num_batches_tracked))
    )
    step = step_of(state, settings)
    for number in range(2):
        step(batches(number), valid(batches(number)))
        step.apply()
    assert seen == [0] * V + [1] * V


def test_same_shards_give_the_same_bits() -> None:
    settings = config()
    first, second = (bits(run(settings, 3, dropout=0.3)[0]) for _ in range(2))
    assert first == second


def test_dropout_is_keyed_by_step_and_shard_not_by_history() -> None:
    settings, shards = config(), batches()
    grads = []
    for disturb in (0, 5):
        state = fresh(settings, dropout=0.5)
        torch.rand(disturb)
        result = step_of(state, settings)(shards, valid(shards))
        grads.append(state.model.body.weight.grad)  # type: ignore[union-attr]
    assert torch.equal(*grads)  # type: ignore[arg-type]
    same = [ShardBatch(0, shard, *shards[0][2:]) for shard in range(V)]
    state = fresh(settings, dropout=0.5)
    result = step_of(state, settings)(same, valid(same))
    assert (
        len({float(loss) for loss in result.shard_losses.values()}) == V
    )  # one image, V different masks


def test_state_stays_as_it_was_until_apply() -> None:
    settings, shards = config(), batches()
    state = fresh(settings)
    before = bits(state)
    step = step_of(state, settings)
    step(shards, valid(shards))
    assert (
        bits(state) == before
    )  # what is kept of a diverged step is the state before it
    step.apply()
    assert bits(state) != before
    assert all(p.grad is None for p in state.model.parameters())


MINE = {"model": {"name": "net:Net"}}
FAULTS: dict[str, Callable[[nn.Module], object]] = {
    "changes main.bias": lambda model: model.main.bias.detach().add_(1),  # type: ignore[operator,union-attr]
    "changes seen": lambda model: model.seen.add_(1),  # type: ignore[operator,union-attr]
    "draws from the global generator of numpy.random": lambda model: np.random.rand(),
    "draws from the global generator of random": lambda model: random.random(),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["forward", "backward", "forward of mode ddp"])
def test_what_a_network_of_the_user_leaves_to_the_next_shard_is_named(
    fault: str, place: str
) -> None:
    """From the sixth shard on, as in a warm-up by calls, which no check at the start sees. A network of ours has no
    such code and is not watched: with its name, the control, the run goes on."""

    def hook(*_: object) -> None:
        if next(calls) >= first:
            FAULTS[fault](state.model)

    mode, first, shard = ("ddp", 1, 0) if "ddp" in place else ("elastic", V + 1, 1)
    compute = {"mode": mode, "shards": V, "samples_per_shard": B}
    for settings in (config(compute=compute, **MINE), config(compute=compute)):
        state, calls = fresh(settings), count()
        state.model.register_buffer("seen", torch.zeros(()))
        if place != "backward":
            state.model.main.register_forward_hook(hook)  # type: ignore[operator,union-attr]
        else:
            state.model.main.weight.register_hook(hook)  # type: ignore[operator,union-attr]
        step = step_of(state, settings)
        step(batches(), valid(batches()))
        step.apply()
        if settings.model.name == "net:Net":
            with pytest.raises(
                ConfigError,
                match=f"^model.name = net:Net: in step 1, shard {shard}, .* {fault}: shards",
            ):
                step(batches(1), valid(batches(1)))
        else:
            step(batches(1), valid(batches(1)))


def test_each_shard_begins_with_the_threads_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward, of the user's network or of a teacher, sets others: two shards of a process would have other bits."""

    def hook(*_: object) -> None:
        seen.append(torch.get_num_threads())
        torch.set_num_threads(2)

    monkeypatch.setattr(
        flags, "apply", lambda threads, _: torch.set_num_threads(threads)
    )
    settings = config(compute={"shards": V, "samples_per_shard": B, "threads": 1})
    state, seen = fresh(settings), list[int]()
    state.model.main.register_forward_pre_hook(hook)  # type: ignore[operator,union-attr]
    step = step_of(state, settings)
    monkeypatch.setattr(step, "apply", lambda: seen.append(torch.get_num_threads()))
    train_step(step, batches())
    assert seen == [1] * (V + 1), "the last is the optimizer's"


@pytest.mark.parametrize(
    "groups", [{}, {"train": {"precision": "fp16"}}, {"compute": {"mode": "ddp"}}]
)
def test_a_sound_network_of_the_user_trains_with_the_bits_of_ours(
    groups: dict[str, Any],
) -> None:
    """Statistics, optimizer, average and loss scale are no fault of it; mode off and trackers have their reasons."""
    groups = {
        **groups,
        "compute": {"shards": V, "samples_per_shard": B, **groups.get("compute", {})},
    }
    assert bits(run(config(**groups, **MINE), 3, dropout=0.5)[0]) == bits(
        run(config(**groups), 3, dropout=0.5)[0]
    )


def test_update_is_the_optimizers_at_the_scheduled_rate() -> None:
    settings = config(optim={"momentum": 0.0, "weight_decay": 0.0, "lr": 0.2})
    state, shards = fresh(settings), batches()
    state.step = 100
    step = step_of(state, settings)
    step(shards, valid(shards))
    rate = learning_rate(100, 400, settings.optim)
    moved = {
        name: p.detach() - rate * (p.grad if p.grad is not None else 0)
        for name, p in named(state)
    }
    told: list[float] = []
    step.watch.applied = told.append  # type: ignore[method-assign]
    step.apply()
    for name, p in named(state):
        torch.testing.assert_close(p.detach(), moved[name])
    assert told == [rate], "what the ledger has"


def test_average_follows_every_update() -> None:
    settings = config(ema={"decay": 0.0})
    state, _ = run(settings, 2)
    live = state.model.state_dict()
    averaged = {
        k: v for k, v in state.ema.model.state_dict().items() if v.is_floating_point()
    }
    assert all(torch.equal(value, live[key]) for key, value in averaged.items())


def test_class_weights_reach_the_loss() -> None:
    settings, shards = config(), batches()
    plain, heavy = (
        TrainStep(settings, Watch(ALONE, fresh(settings)), weights)(
            shards, valid(shards)
        ).loss
        for weights in (None, torch.full((C,), 3.0))
    )
    assert float(heavy) == pytest.approx(3 * float(plain), rel=1e-5)


@pytest.mark.parametrize("balance", [0.0, 0.5])
def test_the_start_says_how_far_the_weights_of_classes_go_apart(balance: float) -> None:
    settings = from_mapping(
        {
            "loss": {"class_weights": "log1.10"},
            "data": {"num_train": 4, "size": [64, 64], "balance": balance},
        }
    )
    samples, lines = open_samples(settings.data, "train", 0), list[str]()
    sampling = counted(settings, ALONE, samples, say=lines.append)
    weights = sampling.loss_weights()
    assert weights is not None
    counts = sampling.counts
    assert counts is not None
    present = weights[torch.from_numpy(counts.pixels.sum(0) > 0)]
    ratio = f"weighs {present.max() / present.min():.1f} times as much"
    assert ratio in lines[-1]
    assert lines[-1].startswith("loss.class_weights = log1.10: ")


def named(state: TrainState) -> list[tuple[str, nn.Parameter]]:
    return list(state.model.named_parameters())


@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_clipping_bounds_the_norm_and_keeps_the_direction(limit: float) -> None:
    shards = batches()
    grads, norms = [], []
    for clip in (0.0, limit):
        settings = config(optim={"clip_norm": clip})
        state = fresh(settings)
        norms.append(float(step_of(state, settings)(shards, valid(shards)).grad_norm))
        grads.append(
            torch.cat(
                [
                    p.grad.flatten()
                    for p in state.model.parameters()
                    if p.grad is not None
                ]
            )
        )
    assert (
        norms[0] == norms[1] > 0.05
    )  # the norm that is reported is that before clipping
    assert float(grads[1].norm()) == pytest.approx(min(limit, norms[0]), rel=1e-4)
    torch.testing.assert_close(
        grads[1] / grads[1].norm(), grads[0] / grads[0].norm(), rtol=1e-4, atol=1e-6
    )


def test_a_step_without_a_label_moves_nothing_but_statistics() -> None:
    settings = config(optim={"weight_decay": 0.0})
    state = fresh(settings)
    weights = [p.detach().clone() for p in state.model.parameters()]
    shards = [
        batch._replace(target=torch.full_like(batch.target, 255)) for batch in batches()
    ]
    step = step_of(state, settings)
    result = step(shards, valid(shards))
    step.apply()
    assert float(result.loss) == 0 == float(result.grad_norm)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights, state.model.parameters(), strict=True)
    )


def test_fp16_scales_and_unscales() -> None:
    settings = config(train={"precision": "fp16"}, optim={"clip_norm": 0.0})
    state, shards = fresh(settings), batches()
    plain = fresh(config())
    step_of(plain, config())(shards, valid(shards))
    result = step_of(state, settings)(shards, valid(shards))
    assert state.scaler.get_scale() == 65536
    reference = torch.cat(
        [p.grad.flatten() for p in plain.model.parameters() if p.grad is not None]
    )
    found = torch.cat(
        [p.grad.flatten() for p in state.model.parameters() if p.grad is not None]
    )
    assert float((found - reference).norm() / reference.norm()) < 0.02
    assert float(result.grad_norm) == pytest.approx(float(reference.norm()), rel=0.02)


def test_fp16_overflow_skips_the_update_and_its_statistics() -> None:
    settings = config(train={"precision": "fp16"})
    state, shards = fresh(settings), batches()
    with torch.no_grad():
        state.model.body.weight.mul_(1e6)  # type: ignore[operator, union-attr]
    before = [
        value.clone()
        for value in state.model.state_dict().values()
        if value.is_floating_point()
    ]
    step = step_of(state, settings)
    result = step(shards, valid(shards))
    assert not torch.isfinite(result.grad_norm)
    step.apply()
    after = [
        value
        for value in state.model.state_dict().values()
        if value.is_floating_point()
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert state.scaler.get_scale() == 32768
    assert state.step == 1


@pytest.mark.parametrize(("precision", "noted"), [("fp32", 1), ("fp16", NEVER)])
def test_the_first_update_that_is_not_finite_is_noted(
    precision: str, noted: int
) -> None:
    """Its gradients alone can overflow, which the loss scaler of fp16 deals with; later ones do not change it."""
    settings, shards = config(train={"precision": precision}), batches()
    state = fresh(settings)
    step = step_of(state, settings)
    state.model.main.bias.register_hook(lambda grad: grad + extra)  # type: ignore[operator, union-attr]
    for extra in (0.0, float("inf"), 0.0):  # noqa: B007 (the hook reads it)
        result = step(shards, valid(shards))
        assert torch.isfinite(result.grad_norm) == (
            state.step == 0 or (precision == "fp16" and state.step == 2)
        )
        assert int(step.first_bad) == (noted if state.step else NEVER)
        assert torch.isfinite(result.loss) or state.step == 2
        step.apply()


def test_bf16_runs_with_gradients_in_fp32() -> None:
    settings = config(train={"precision": "bf16"})
    state, results = run(settings, 2)
    assert all(
        torch.isfinite(result.loss) and result.loss.dtype == torch.float32
        for result in results
    )
    assert all(p.dtype == torch.float32 for p in state.model.parameters())


def test_network_without_norms_trains() -> None:
    state, results = run(config(), 2, norm=False)
    assert state.step == 2
    assert torch.isfinite(results[-1].loss)


def test_loss_falls() -> None:
    settings = config(optim={"lr": 0.1})
    columns = (torch.arange(SIZE) // (SIZE // C)).expand(B, SIZE, SIZE).to(torch.uint8)
    image = (60 * columns).unsqueeze(-1).expand(B, SIZE, SIZE, 3)
    shards = [batch._replace(image=image, target=columns) for batch in batches()]
    state, losses = fresh(settings), []
    step = step_of(state, settings)
    for _ in range(30):
        losses.append(float(step(shards, valid(shards)).loss))
        step.apply()
    assert losses[-1] < 0.5 * losses[0]


class Spy(Watch):
    """Notes what an update does, in its order."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(ALONE, state)
        self.calls: list[str] = []
        agree = self.sum

        def sum_noted(numbers: Any, *, wait: bool = True) -> Tensor:
            self.calls.append("sum")
            return agree(numbers, wait=wait)

        self.sum = sum_noted

    def forward(self, *_: object) -> None:
        self.calls.append("forward")

    def shard(self, *_: object) -> None:
        self.calls.append("shard")

    def reduced(self, valid: Tensor) -> None:
        self.calls.append(f"reduced {int(valid)}")

    def applied(self, rate: float) -> None:
        self.calls.append(f"applied {self.state.step}")

    def after_update(self) -> None:
        self.calls.append("after")


def test_a_train_step_is_seen_by_its_watch_in_order_and_checked_before_it_is_applied() -> (
    None
):
    settings, shards = config(), batches()
    state = fresh(settings)
    before, watch, seen = bits(state), Spy(state), []

    def check(result: StepResult) -> None:
        watch.calls.append("check")
        assert torch.empty(3).isnan().all(), "strict_torch holds inside of an update"
        seen.append((bits(state) == before, float(result.loss)))

    result = train_step(TrainStep(settings, watch), shards, check=check)
    pixels = int(valid(shards))
    assert watch.calls == [
        "sum", *["forward", "shard"] * V, f"reduced {pixels}", "check", "applied 1", "after"
    ]  # fmt: skip
    assert result is not None
    assert seen == [(True, float(result.loss))]
    other, _ = run(settings, 1)
    assert bits(state) == bits(other) != before


def test_a_step_that_is_to_stop_does_nothing_unless_it_has_to_report_a_bad_update() -> (
    None
):
    settings, shards = config(), batches()
    state = fresh(settings)
    step, before = TrainStep(settings, Watch(ALONE, state)), bits(state)
    assert train_step(step, shards, stop=True) is None
    assert bits(state) == before
    assert state.step == 0
    assert train_step(step, shards, stop=True, wait=False) is not None, (
        "nobody looks at this one"
    )
    with torch.no_grad():
        state.model.body.weight.fill_(float("nan"))  # type: ignore[operator, union-attr]
    assert train_step(step, shards, wait=False, check=pytest.fail) is not None  # type: ignore[arg-type]
    checked: list[StepResult] = []
    assert train_step(step, shards, stop=True, check=checked.append) is not None
    assert int(step.first_bad) == 1
    assert len(checked) == 1


def test_a_compiled_network_is_compiled_once_and_without_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not compiled here, since that takes half a minute: docs/log.md has the bits of 1, 2 and 3 processes."""
    compiled, settings = [], config(compute={"compile": True})
    monkeypatch.setattr(
        torch,
        "compile",
        lambda module, *, dynamic: compiled.append((module, dynamic)) or module,
    )
    found = bits(run(settings, 2)[0])
    assert [(type(module), dynamic) for module, dynamic in compiled] == [
        (AllHeads, False)
    ]
    assert torch._inductor.config.deterministic
    assert found == bits(run(config(), 2)[0])
    assert len(compiled) == 1


def test_without_a_compiler_a_compiled_network_is_refused_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config(compute={"compile": True})
    monkeypatch.setenv("PATH", "")
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    for device, missing in (("cpu", r"g\+\+"), ("cuda", "gcc")):
        with pytest.raises(ConfigError, match=f"compile = true needs {missing}"):
            training_heads(nn.Identity(), settings, torch.device(device))
    monkeypatch.setenv("CXX", "/opt/c++")
    training_heads(nn.Identity(), settings, ALONE.device)


class Recorded:
    """What torch.cuda.make_graphed_callables does, without a device: fixed inputs, gradients and formats.

    Kernels run again where a GPU would replay them, under the autocast that held while they were recorded.
    """

    def __init__(
        self, network: nn.Module, inputs: tuple[Tensor], *, allow_unused_input: bool
    ) -> None:
        assert allow_unused_input, "of parameters that have no part in the heads"
        assert not torch.is_autocast_cache_enabled(), "weights that were cast once"
        (self.image,), self.network = inputs, network
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.autocast = torch.is_autocast_enabled("cpu")
        for _ in range(3):  # trial passes
            self.backward([torch.ones_like(each) for each in self.forward()])
        # Of the recording itself, whose graph must not be kept.
        self.outputs = list(network(self.image).values())

    def forward(self) -> list[Tensor]:
        with torch.enable_grad(), self.cast():
            self.heads = self.network.forward(self.image)
        return [logits.detach() for logits in self.heads.values()]

    def cast(self) -> Any:
        return torch.autocast(
            "cpu", torch.bfloat16, enabled=self.autocast, cache_enabled=False
        )

    def backward(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        pairs = zip(self.heads.values(), grads, strict=True)
        trained = [
            (h, torch.empty_like(h).copy_(g)) for h, g in pairs if h.requires_grad
        ]
        heads, given = zip(*trained, strict=True)
        with self.cast():
            return torch.autograd.grad(heads, self.parameters, given, allow_unused=True)

    def __call__(self, image: Tensor) -> dict[str, Tensor]:
        recorded = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, image: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
                recorded.image.copy_(image)
                return tuple(recorded.forward())

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                assert all(g.is_contiguous() for g in grads), "copied to another format"
                return (None, *recorded.backward(grads))

        found = Replay.apply(image, *self.parameters)  # type: ignore[no-untyped-call]
        return dict(zip(self.heads, found, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["fast_scnn", "pidnet_s", "stdc1"])
def test_a_recorded_network_has_the_bits_of_eager(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, statistics and all: gradients in another format, or autocast in the backward, would change them."""
    made: list[Recorded] = []
    monkeypatch.setattr(
        torch.cuda,
        "make_graphed_callables",
        lambda *given, **more: made.append(Recorded(*given, **more)) or made[0],
    )
    settings = config(model={"name": name}, train={"precision": precision})
    # On maps of 1x1, oneDNN's bf16 leaves gradients unwritten: docs/determinism.md.
    size = 64 if name == "pidnet_s" else 32

    def loss(heads: dict[str, Tensor], *given: Any, **more: Any) -> dict[str, Tensor]:
        assert all(logits.is_contiguous() for logits in heads.values())
        return shard_loss(heads, *given, **more)

    monkeypatch.setattr(gradients, "shard_loss", loss)  # which may sum in any order
    found = []
    for recorded in (False, True):
        state = build_state(settings, STREET, ALONE.device)
        step = step_of(state, settings)
        assert isinstance(step.gradients, ElasticGradients)
        if recorded:
            step.gradients.network = GraphedHeads(
                AllHeads(state.model), settings.train.precision
            )
        for number in range(2):
            train_step(step, batches(number, size))
        found.append(bits(state))
    assert found[0] == found[1]
    assert len(made) == 1, "recorded once"
    assert not any(each.requires_grad for each in made[0].outputs), (
        "their graph keeps nodes on the recording's stream"
    )


def test_a_network_whose_head_is_frozen_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All logits of a replay have a gradient, that of the frozen head as well."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", Recorded)
    found = []
    for recorded in (False, True):
        state = fresh(config())
        for part in (state.model.body, state.model.norm, state.model.main):
            part.requires_grad_(False)  # type: ignore[operator, union-attr]
        step = step_of(state, config())
        assert isinstance(step.gradients, ElasticGradients)
        if recorded:
            step.gradients.network = GraphedHeads(AllHeads(state.model), "fp32")
        train_step(step, batches(0))
        found.append(bits(state))
    assert found[0] == found[1]
    assert isinstance(step.gradients.network._replay, Recorded)


def other_logits(replay: Recorded) -> Any:
    return lambda image: {k: v * 2 for k, v in replay(image).items()}


def other_gradients(replay: Recorded) -> Any:
    def heads(image: Tensor) -> dict[str, Tensor]:
        found = replay(image)
        found["main"].register_hook(lambda grad: 2 * grad)
        return found

    return heads


def other_statistics(replay: Recorded) -> Any:
    def heads(image: Tensor) -> dict[str, Tensor]:
        found = replay(image)
        replay.network.heads.model.norm.running_mean.data.add_(1)
        return found

    return heads


def of_the_recorded_image(replay: Recorded) -> Any:
    return lambda image: replay(replay.image)


@pytest.mark.parametrize(
    "fault",
    [other_logits, other_gradients, other_statistics, of_the_recorded_image],
)
def test_a_network_is_not_replayed_where_that_would_change_it(
    fault: Callable[[Recorded], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "make_graphed_callables",
        lambda *given, **more: fault(Recorded(*given, **more)),
    )
    state = fresh(config(), dropout=0.5)
    step = step_of(state, config())
    assert isinstance(step.gradients, ElasticGradients)
    step.gradients.network = GraphedHeads(AllHeads(state.model), "fp32")
    with pytest.warns(
        UserWarning, match="a replay of this network gave different bits"
    ):
        train_step(step, batches(0))
    train_step(step, batches(1))
    assert bits(state) == bits(run(config(), 2, dropout=0.5)[0])


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (
            RuntimeError(".item() while recording"),
            ConfigError,
            r"compute\.cuda_graph: .* \.item\(\) .*\. Set it to off",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            torch.OutOfMemoryError,
            "^CUDA out of memory",
        ),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_a_network_that_cannot_be_recorded_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
    raised: RuntimeError,
    error: type[Exception],
    text: str,
    ends: bool,
) -> None:
    """A capture that broke leaves torch's generator and stream in it, so eager would end in an error of torch.

    torch.cuda.graph ends the capture on its way out, which raises again and hides the cause.
    """

    def record(*_: Any, **__: Any) -> None:
        try:
            raise raised
        finally:
            if ends:
                raise torch.AcceleratorError(
                    "CUDA error: operation failed due to a previous error during capture\nCUDA kernel errors"
                )

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    state = fresh(config())
    step = step_of(state, config())
    assert isinstance(step.gradients, ElasticGradients)
    step.gradients.network = GraphedHeads(AllHeads(state.model), "fp32")
    with pytest.raises(error, match=text):
        train_step(step, batches(0))


def test_a_recording_writes_into_no_buffer_that_a_pass_leaves_alone() -> None:
    """Of users' code, writes into buffers are refused; an overflow must not hide a difference, nor look like one."""
    model = fresh(config()).model
    model.register_buffer("table", torch.ones(3))
    model.register_buffer("wide", torch.ones(1).expand(4))
    for part in (model.body, model.norm, model.main):  # a head without a gradient
        part.requires_grad_(False)
    heads, image = GraphedHeads(AllHeads(model), "fp32"), torch.ones(2, 3, SIZE, SIZE)
    before = model.table._version, model.norm.running_mean.clone()  # type: ignore[union-attr, operator]
    first = heads._trial(AllHeads(model), image)
    assert heads._trial(AllHeads(model), image) == first
    assert model.table._version == before[0]  # type: ignore[union-attr]
    assert torch.equal(model.norm.running_mean, before[1])  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        model.aux.bias.fill_(float("nan"))  # type: ignore[union-attr, operator]
    overflowed = heads._trial(AllHeads(model), image)
    assert heads._trial(AllHeads(model), image) == overflowed != first


def test_networks_that_were_seen_to_repeat_are_recorded_on_a_gpu_in_mode_elastic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kind(
        given: str, device: str = "cuda", mode: str = "elastic", name: str = "pidnet_s"
    ) -> type:
        compute = {"cuda_graph": given, "mode": mode}
        settings = config(compute=compute, model={"name": name})
        return type(training_heads(nn.Identity(), settings, torch.device(device)))

    assert kind("auto") is kind("on") is kind("on", name="a:Net") is GraphedHeads
    made: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda heads, **_: made.append(heads) or heads)  # fmt: skip
    monkeypatch.setattr("segpipe.train.forward.which", lambda name: name)
    settings = config(compute={"cuda_graph": "on", "compile": True})
    compiled = training_heads(nn.Identity(), settings, torch.device("cuda"))
    assert [compiled.heads] == made, "what is recorded is compiled"

    eager = kind("off"), kind("auto", "cpu"), kind("auto", name="a:Net")
    assert {*eager, kind("on", mode="ddp"), kind("auto", name="lraspp")} == {AllHeads}


def test_a_batch_is_copied_by_a_stream_for_which_the_step_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the wait, kernels would read half a batch; without the record, its memory would be taken too early."""
    done: list[Any] = []

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        done.append(f"in {chosen}")
        yield
        done.append("out")

    here = SimpleNamespace(wait_stream=lambda other: done.append(f"wait for {other}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda copy, by: done.append((by, int(copy[0])))
    )
    loss = object.__new__(BatchLoss)
    loss.device, loss._copies = ALONE.device, "copies"  # type: ignore[assignment]
    copies = loss._copied(torch.tensor([1]), torch.tensor([2]))
    assert [int(copy) for copy in copies] == [1, 2]
    assert done == ["in copies", "out", "wait for copies", (here, 1), (here, 2)]


class Questions(TorchDispatchMode):
    """Counts operators that a GPU could not run without the host waiting for it: values or sizes go to the host."""

    WAITS = (
        "aten._local_scalar_dense.default",
        "aten.nonzero.default",
        "aten.masked_select.default",
        "aten.equal.default",
        "aten.where.default",  # of one argument: nonzero by another name
    )

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.operators = 0  # but for those that only look at a tensor otherwise

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators += not func.is_view
        indexes = func.overloadpacket in (
            torch.ops.aten.index,
            torch.ops.aten.index_put_,
        )
        by_mask = indexes and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or str(func) in self.WAITS:
            self.asked.append(f"{func} in {_function_of_segpipe()}")
        return func(*args, **(kwargs or {}))


def _function_of_segpipe() -> str:
    """The innermost function of segpipe that is being called."""
    frame = sys._getframe()
    while frame is not None and not frame.f_globals["__name__"].startswith("segpipe."):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_name if frame is not None else "none"


ON_A_CPU_ALONE = {
    "aten._local_scalar_dense.default in hard_pixels"
}  # `segpipe gpu-check only=syncs` counts on a GPU


@pytest.mark.parametrize("mode", ["elastic", "off"])
@pytest.mark.parametrize("loss", ["ohem", "cross_entropy"])
def test_the_host_asks_nothing_between_logs(
    monkeypatch: pytest.MonkeyPatch, mode: str, loss: str
) -> None:
    """A count of operators, which is as good on a CPU; targets are counted on the host, before they are copied."""
    settings = config(
        compute={"mode": mode},
        optim={"clip_norm": 1.0},
        loss={"name": loss, "dice_weight": 1.0},
    )
    monkeypatch.setattr(
        "segpipe.train.step.valid_pixels", lambda target: target.numel() // 2
    )
    step, shards = step_of(fresh(settings), settings), batches()
    train_step(step, shards, wait=False)
    with Questions() as questions:
        train_step(step, shards, wait=False)
    assert set(questions.asked) <= ON_A_CPU_ALONE
    # The controls: a figure that is read, a mask, and a check of the result.
    monkeypatch.setattr(
        step.gradients.loss, "preprocess", lambda image: masked(Preprocess()(image))
    )
    with Questions() as questions:
        train_step(step, shards, wait=True, check=lambda result: result.loss.item())  # type: ignore[arg-type, return-value]
    assert {
        "aten.nonzero.default",
        "aten.index.Tensor",
        "aten._local_scalar_dense.default",
    } <= {
        asked.split(" in ")[0]
        for asked in questions.asked
        if asked not in ON_A_CPU_ALONE
    }


def masked(image: Tensor) -> Tensor:
    """The image, which its own mask and its own maximum have looked at."""
    assert image[image > 0].numel()
    assert len(torch.nonzero(image > 0))
    return image


def test_launches_do_not_grow_with_the_network_but_for_its_own_and_the_optimizers() -> (
    None
):
    """Each is a kernel on a GPU, whose host has no time for some per tensor. Norms do not count their passes."""

    def launches(mode: str, norms: int, alone: bool = False) -> int:
        """Operators of an update, or `alone` of the network's two passes and the optimizer."""
        settings = config(compute={"mode": mode, "shards": 1}, optim={"clip_norm": 1.0})
        state, shards = fresh(settings, more_norms=norms), batches()[:1]
        step = step_of(state, settings)
        train_step(step, shards, wait=False)
        image = Preprocess()(shards[0].image)
        with Questions() as questions:
            if alone:
                torch.stack(
                    [
                        head.sum()
                        for head in state.model.logits(image, aux=True).values()
                    ]
                ).sum().backward()  # type: ignore[no-untyped-call]
                state.optimizer.step()
            else:
                train_step(step, shards, wait=False)
        return questions.operators

    least = launches("off", 30, alone=True) - launches("off", 0, alone=True)
    growth = {
        mode: launches(mode, 30) - launches(mode, 0) for mode in ("off", "elastic")
    }
    assert growth == {"off": least - 30, "elastic": least - 30}
    assert least > 100
    assert launches("elastic", 0) - launches("off", 0) <= 10
