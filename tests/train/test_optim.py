"""Schedule, weight decay and the weight average."""

import itertools
import math
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import launched
from segpipe.errors import ConfigError
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.settings.groups import EmaConfig, OptimConfig
from segpipe.train import state
from segpipe.train.checkpoint import load_optimizer
from segpipe.train.forward import norms
from segpipe.train.state import (
    Ema,
    build_optimizer,
    freeze,
    learning_rate,
    parameter_groups,
    set_rate,
)

pytestmark = pytest.mark.usefixtures("strict_torch")


def test_warm_up_is_linear_and_ends_at_the_full_rate() -> None:
    config = OptimConfig(lr=0.5, warmup_steps=10)
    rates = [learning_rate(step, 100, config) for step in range(11)]
    assert rates == pytest.approx(
        [0.05 * (step + 1) for step in range(10)] + [0.5], rel=1e-12
    )


@pytest.mark.parametrize("warmup", [0, 7])
def test_poly_and_cosine_go_from_lr_to_0(warmup: int) -> None:
    for schedule, middle in (("poly", 0.5**0.9), ("cosine", 0.5)):
        config = OptimConfig(lr=0.2, warmup_steps=warmup, schedule=schedule)
        rates = [
            learning_rate(step, warmup + 100, config)
            for step in range(warmup, warmup + 101)
        ]
        assert rates[0] == pytest.approx(0.2)
        assert rates[50] == pytest.approx(0.2 * middle)
        assert rates[100] == pytest.approx(0, abs=1e-12)
        assert all(later < earlier for earlier, later in itertools.pairwise(rates))
        assert min(rates[:100]) > 0  # every update that is done moves the weights


def test_power_reaches_the_rate() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=0, power=2.0)
    assert learning_rate(30, 100, config) == pytest.approx(0.49)


def test_rate_is_a_function_of_the_step_alone() -> None:
    config = OptimConfig()
    forwards = [learning_rate(step, 400, config) for step in range(400)]
    assert [
        learning_rate(step, 400, config) for step in reversed(range(400))
    ] == forwards[::-1]
    assert all(
        math.isfinite(learning_rate(step, 4, config)) for step in range(4)
    )  # shorter than the warm-up
    steps = config.warmup_steps
    assert (
        learning_rate(steps, steps, config) == config.lr
    )  # a schedule that is all warm-up, after its end


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_only_weights_of_more_than_one_dimension_decay(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.PReLU(4),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    for p in net.parameters():
        nn.init.uniform_(p, 0.5, 1.0)
    optimizer = build_optimizer(net, OptimConfig(name=name, lr=0.1, weight_decay=0.3))
    before = {key: p.detach().clone() for key, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, p in net.named_parameters():
        if key in ("0.weight", "4.weight"):
            torch.testing.assert_close(p.detach(), before[key] * (1 - 0.1 * 0.3))
        else:
            assert torch.equal(p.detach(), before[key]), key


def test_every_parameter_is_in_one_group() -> None:
    model = build_model("pidnet_s", 5)
    groups = parameter_groups(model, 0.1)
    members = [id(p) for group in groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_settings_reach_the_optimizer() -> None:
    net = nn.Conv2d(2, 2, 3)
    sgd = build_optimizer(net, OptimConfig(momentum=0.7))
    assert all(
        group["momentum"] == 0.7 and not group["nesterov"] for group in sgd.param_groups
    )
    adam = build_optimizer(net, OptimConfig(name="adamw", betas=[0.8, 0.95]))
    assert isinstance(adam, torch.optim.AdamW)
    assert all(group["betas"] == (0.8, 0.95) for group in adam.param_groups)
    # On a CPU; on a GPU in few kernels.
    assert not any(
        group["foreach"]
        for optimizer in (sgd, adam)
        for group in optimizer.param_groups
    )


def steps_of(
    name: str,
    *,
    fused: bool = False,
    foreach: bool = False,
    overflows: tuple[int, ...] = (),
) -> list[Any]:
    """Weights and moments after each of some updates under a loss scale, and the scale; some updates overflow."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = build_optimizer(
        net, OptimConfig(name=name, lr=0.1, weight_decay=0.3), fused=fused
    )
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    scaler, found = torch.amp.GradScaler("cpu", init_scale=8.0), []
    for number in range(4):
        for place, p in enumerate(net.parameters()):
            random = torch.Generator().manual_seed(10 * number + place)
            p.grad = torch.randn(p.shape, generator=random) * (
                float("inf") if number in overflows else 1
            )
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moments = [
            value.float()
            for p in net.parameters()
            for _, value in sorted(optimizer.state[p].items())
        ]
        found.append(
            (
                [p.detach().clone() for p in net.parameters()],
                [m.clone() for m in moments],
                scaler.get_scale(),
            )
        )
    return found


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_one_parameter_after_the_other_gives_the_bits_of_foreach(name: str) -> None:
    for (weights, moments, _), (others, their, _) in zip(
        steps_of(name), steps_of(name, foreach=True), strict=True
    ):
        assert all(map(torch.equal, [*weights, *moments], [*others, *their]))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_kernels_leave_out_updates_that_overflow_without_asking_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first, after which torch's own momentum is whatever memory held."""
    plain = steps_of(name, overflows=(0, 2))
    asked = []
    monkeypatch.setattr(
        torch.amp.GradScaler, "_maybe_opt_step", lambda *_: asked.append(1)
    )
    found = steps_of(name, fused=True, overflows=(0, 2))
    assert not asked
    assert (
        [scale for *_, scale in found]
        == [scale for *_, scale in plain]
        == [4.0, 4.0, 2.0, 2.0]
    )
    for (weights, moments, _), (others, their, _) in zip(found, plain, strict=True):
        for a, b in zip(
            [*weights, *(moments if their else [])], [*others, *their], strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, found[1][0], found[2][0]))
    steps_of(name, overflows=(0,))
    assert asked, "the control: other kernels ask"


def test_a_state_is_restored_without_its_kernels_and_hyperparameters() -> None:
    """Settings decide these: a file in which they were altered trains, and is audited, as the settings say."""
    net = nn.Conv2d(2, 2, 3)
    saved = build_optimizer(net, OptimConfig(momentum=0.5)).state_dict()
    altered = {
        "momentum": 0.0,
        "weight_decay": 9.0,
        "maximize": True,
        "lr_scale": 3.0,
        "params": [1],
    }
    kept = {"foreach": True, "fused": None, "lr": 0.25, **altered}
    saved["param_groups"] = [{**group, **kept} for group in saved["param_groups"]]
    for fused in (False, True):
        optimizer = build_optimizer(net, OptimConfig(momentum=0.5), fused=fused)
        load_optimizer(optimizer, saved)
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
        fresh = build_optimizer(net, OptimConfig(momentum=0.5), fused=fused)
        assert [
            {**group, "lr": 0.25} for group in fresh.state_dict()["param_groups"]
        ] == [*optimizer.state_dict()["param_groups"]]
        assert not any(group["foreach"] for group in optimizer.param_groups)
        assert all(bool(group["fused"]) == fused for group in optimizer.param_groups)


class Tiny(SegmentationNet):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.norm = nn.BatchNorm2d(2)

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        return {}


def shift(net: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point():
                value.add_(amount)


def test_average_follows_its_formula() -> None:
    net = Tiny().train()
    ema = Ema(net, EmaConfig(decay=0.4))
    expected = {key: value.double() for key, value in net.state_dict().items()}
    for step in range(12):
        shift(net, 0.5)
        ema.update(step)
        decay = min(0.4, (1 + step) / (10 + step))
        live = net.state_dict()
        expected = {
            key: decay * value + (1 - decay) * live[key].double()
            for key, value in expected.items()
        }
    for key, value in ema.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(
                value.double(), expected[key], rtol=1e-5, atol=1e-5
            )
    assert ema.decay == 0.4
    assert not torch.equal(ema.model.conv.weight, net.conv.weight)  # type: ignore[arg-type]


def test_decay_0_turns_the_average_off() -> None:
    net = Tiny()
    ema = Ema(net, EmaConfig(decay=0.0))
    shift(net, 0.37)
    ema.update(1000)
    live = net.state_dict()
    assert all(
        torch.equal(v, live[k])
        for k, v in ema.model.state_dict().items()
        if v.is_floating_point()
    )


def test_average_is_another_network_and_stays_in_eval_mode() -> None:
    net = Tiny().train()
    ema = Ema(net, EmaConfig())
    net.train()
    ema.update(0)
    assert not any(module.training for module in ema.model.modules())
    assert net.training
    assert not any(p.requires_grad for p in ema.model.parameters())
    assert all(p.requires_grad for p in net.parameters())
    own = {value.data_ptr() for value in ema.model.state_dict().values()}
    assert own.isdisjoint({value.data_ptr() for value in net.state_dict().values()})


def test_tied_weights_are_averaged_once() -> None:
    net, untied = Tiny(), Tiny()
    untied.load_state_dict(net.state_dict())
    net.tied = net.conv.weight
    averages = [Ema(net, EmaConfig()), Ema(untied, EmaConfig())]
    for step in range(3):
        for model in (net, untied):
            with torch.no_grad():
                model.conv.weight.add_(1.0)
        for average in averages:
            average.update(step)
    tied, alone = (average.model.state_dict()["conv.weight"] for average in averages)
    assert torch.equal(tied, alone)


def test_average_follows_weights_that_are_loaded_later() -> None:
    net = Tiny()
    ema = Ema(net, EmaConfig(decay=0.0))
    net.load_state_dict(
        {key: torch.full_like(value, 3) for key, value in net.state_dict().items()}
    )
    ema.model.load_state_dict(
        {key: torch.full_like(value, 9) for key, value in net.state_dict().items()}
    )
    ema.update(5)
    assert all(
        (value == 3).all()
        for value in ema.model.state_dict().values()
        if value.is_floating_point()
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_updates_are_those_of_torch_bit_by_bit(name: str) -> None:
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.01)
    ours, theirs = (build_model("fast_scnn", 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = parameter_groups(theirs, config.weight_decay)
    other: torch.optim.Optimizer = torch.optim.SGD(
        groups, lr=0.1, momentum=config.momentum, foreach=True
    )
    if name == "adamw":
        other = torch.optim.AdamW(
            groups, lr=0.1, betas=(config.betas[0], config.betas[1]), foreach=True
        )
    optimizer = build_optimizer(ours, config)
    for _ in range(3):
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        optimizer.step()
        other.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in ours.parameters())
    optimizer.load_state_dict(other.state_dict())
    assert str(optimizer.state_dict()) == str(other.state_dict())


def _loads_the_compiler(rank: int, control: bool) -> bool:
    if control:
        state._SGD = torch.optim.SGD  # type: ignore[misc, assignment]
    model = build_model("fast_scnn", 3)
    for name in ("sgd", "adamw"):
        optimizer = build_optimizer(model, OptimConfig(name=name))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=True)
    return "torch._dynamo" in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("control", [False, True], ids=["as_it_is", "control"])
def test_no_process_loads_the_compiler(control: bool) -> None:
    """It takes 2 s, in each of 16 processes."""
    assert launched(1, _loads_the_compiler, control) == [control]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 1)
    )
    return nn.Sequential(
        OrderedDict(encoder=encoder, neck=nn.BatchNorm2d(4), head=nn.Conv2d(4, 2, 1))
    )


def test_frozen_parameters_get_no_gradient_and_whole_frozen_modules_run_in_eval_mode() -> (
    None
):
    net = network().train()
    told = freeze(net, ["encoder.*", "neck.weight"])
    assert told.startswith("frozen: 7 of 10 tensors, ")
    assert {name for name, p in net.named_parameters() if p.requires_grad} == {
        "neck.bias",
        "head.weight",
        "head.bias",
    }
    assert {name for name, module in net.named_modules() if not module.training} == {
        "encoder", "encoder.0", "encoder.1", "encoder.2", "encoder.3"
    }  # fmt: skip
    net.train()
    assert list(norms(net).values()) == [net.neck]
    groups = parameter_groups(net, 0.1)
    assert sum(len(group["params"]) for group in groups) == 3
    assert freeze(network(), []) == ""


def test_wrong_patterns_are_refused_with_the_names() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'enc\.\*' matches no parameter of Sequential, which has encoder\.\*, neck",
    ):
        freeze(network(), ["head.*", "enc.*"])
    with pytest.raises(ConfigError, match="nothing is left to train"):
        freeze(network(), ["*"])
    with pytest.raises(ConfigError, match=r"'head\.\*' and another pattern match"):
        parameter_groups(network(), 0.1, {"head.*": 10.0, "*weight": 2.0})
    frozen = network()
    freeze(frozen, ["encoder.*"])
    with pytest.raises(
        ConfigError,
        match=r"'encoder\.0\.\*' matches only parameters that model\.freeze freezes",
    ):
        parameter_groups(frozen, 0.1, {"encoder.0.*": 0.5})


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_scaled_rates_move_parameters_by_their_factor_and_leave_the_others_alone(
    name: str,
) -> None:
    def trained(scale: dict[str, float], rate: float) -> dict[str, torch.Tensor]:
        net = network()
        optimizer = build_optimizer(
            net, OptimConfig(name=name, lr=0.5, weight_decay=0.1, lr_scale=scale)
        )
        set_rate(optimizer, rate)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return {key: p.detach() for key, p in net.named_parameters()}

    plain, fast = trained({}, 0.01), trained({}, 0.08)
    scaled = trained({"head.*": 8.0, "encoder.1.*": 8.0}, 0.01)
    for key, value in scaled.items():
        expected = fast if key.startswith(("head.", "encoder.1.")) else plain
        assert torch.equal(value, expected[key]), key
        assert not torch.equal(fast[key], plain[key]), (
            "the control: the rate reaches the optimizer"
        )


def test_groups_do_not_depend_on_the_order_of_the_patterns() -> None:
    net, scale = network(), {"head.*": 10.0, "encoder.0.*": 0.1}
    one, two = (
        parameter_groups(net, 0.1, dict(items))
        for items in (scale.items(), reversed(scale.items()))
    )
    assert [[id(p) for p in group["params"]] for group in one] == [
        [id(p) for p in group["params"]] for group in two
    ]
    assert [group.get("lr_scale") for group in one] == [
        None,
        None,
        0.1,
        0.1,
        10.0,
        10.0,
    ]
