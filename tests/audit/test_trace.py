"""Traces of a network: its numbers stay as they are, and the first layer that differs is named, not what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.audit.trace import (
    Culprit,
    Tracer,
    Traces,
    first_culprit,
    read_traces,
    write_traces,
)


class Residual(nn.Module):
    """Two layers and a shortcut, joined by an operation that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.join: Callable[[Tensor, Tensor], Tensor] = torch.add

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.join(self.block(x), x), inplace=True)


class Net(nn.Module):
    """In-place operations, a shortcut and a head beside the main one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.inner = Residual()
        self.head = nn.Conv2d(4, 2, 1)
        self.beside = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        return {"main": self.head(self.inner(x)), "beside": self.beside(x)}


Plant = Callable[[Net], Any]


def run(
    plant: Plant | None = None, *, watched: bool = True
) -> tuple[Traces, list[Tensor]]:
    """Traces and gradients of two shards."""
    net, start = Net(), nn.Identity()
    if plant:
        plant(net)
    tracer = Tracer(net, start, [4, 5])
    images = torch.randn(2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def compute() -> None:
        for image in images:
            heads = net(start(image))
            (heads["main"].square().mean() + heads["beside"].square().mean()).backward()

    if watched:
        with tracer.watch():
            compute()
    else:
        compute()
    return tracer.traces(), [
        parameter.grad for parameter in net.parameters() if parameter.grad is not None
    ]


def nudged(tensor: Tensor) -> Tensor:
    other = tensor.detach().clone()
    other.view(-1)[0] = torch.nextafter(other.view(-1)[0], torch.tensor(9.0))
    return other


def test_hooks_change_nothing_and_leave_nothing() -> None:
    traces, watched = run()
    _, alone = run(watched=False)
    assert all(torch.equal(one, two) for one, two in zip(watched, alone, strict=True))
    assert list(traces) == [4, 5]
    assert [call.name for call in traces[4].forward][:4] == [
        "stem.0",
        "stem.1",
        "stem.2",
        "stem",
    ]
    net = Net()
    with Tracer(net, nn.Identity(), [0]).watch():
        pass
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in net.modules()
    )


def test_equal_runs_have_no_culprit(tmp_path: Path) -> None:
    traces, _ = run()
    assert first_culprit(traces, run()[0]) is None
    write_traces(tmp_path / "trace00.json", {4: traces[4]})
    write_traces(tmp_path / "trace01.json", {5: traces[5]})
    assert read_traces(tmp_path) == traces


def forward_plant(name: str) -> Plant:
    """One unit in the last place of the output of a module."""
    return lambda net: net.get_submodule(name).register_forward_hook(
        lambda module, inputs, output: output + (nudged(output) - output.detach())
    )


def backward_plant(name: str) -> Plant:
    """One unit in the last place of the gradient that a module passes back."""

    def listen(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].register_hook(nudged)

    return lambda net: net.get_submodule(name).register_forward_pre_hook(listen)


class Nudge(torch.autograd.Function):
    """The same forward; one unit in the last place of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return nudged(grad)


def own_backward_plant(name: str) -> Plant:
    """The same inside a module, so that the gradient of what the module before gave is the first that differs."""

    def plant(net: Net) -> None:
        module = net.get_submodule(name)
        forward = module.forward
        module.forward = lambda x: forward(Nudge.apply(x))  # type: ignore[method-assign]

    return plant


@pytest.mark.parametrize(
    ("plant", "step_of", "layer"),
    [
        (forward_plant("stem.1"), "forward", "stem.1"),
        (forward_plant("inner.block.0"), "forward", "inner.block.0"),
        (forward_plant("head"), "forward", "head"),
        (backward_plant("head"), "backward", "head"),
        (backward_plant("inner.block.1"), "backward", "inner.block.1"),
        (own_backward_plant("inner.block.1"), "backward", "inner.block.1"),
        (
            lambda net: net.inner.block[0].weight.register_hook(nudged),
            "backward",
            "inner.block.0",
        ),
    ],
)
def test_a_planted_unit_is_named(plant: Plant, step_of: str, layer: str) -> None:
    found = first_culprit(run()[0], run(plant)[0])
    assert found is not None
    assert (found.step_of, found.shard, found.layer) == (step_of, 4, layer), found.words


def test_an_operation_between_modules_is_blamed_on_the_module_that_holds_it() -> None:
    def plant(net: Net) -> None:
        net.inner.join = lambda x, y: x + 1.001 * y

    found = first_culprit(run()[0], run(plant)[0])
    assert found is not None
    assert (found.step_of, found.layer) == ("forward", "inner")


def test_the_loss_is_blamed_when_its_gradient_differs_first() -> None:
    def plant(net: Net) -> None:
        net.head.register_forward_hook(
            lambda module, inputs, output: output.register_hook(nudged) and None
        )

    found = first_culprit(run()[0], run(plant)[0])
    assert found is not None
    assert "what follows head" in found.words
    assert "the loss" in found.words


def test_inputs_that_differ_already_blame_no_layer() -> None:
    one, two = run()[0], run()[0]
    moved = {
        shard: trace._replace(
            forward=[call._replace(inputs=1, outputs=1) for call in trace.forward]
        )
        for shard, trace in two.items()
    }
    assert first_culprit(one, moved) is None


def test_other_networks_are_told_by_the_first_module_of_another_name() -> None:
    one, two = run()[0], run()[0]
    two[4].forward[2] = two[4].forward[2]._replace(name="other")
    assert first_culprit(one, two) == Culprit(
        "forward", 4, "stem.2", "A calls stem.2 where B calls other"
    )
