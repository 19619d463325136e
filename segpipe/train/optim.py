"""Optimizer, schedule and weight average; the schedule is a pure function of the step."""

from __future__ import annotations

import copy
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from segpipe.models.layers import SegmentationNet
    from segpipe.settings.groups import EmaConfig, OptimConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: convolution and linear weights with weight decay; norms and biases (all 1-D tensors) without."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """SGD with Nesterov-free momentum, or AdamW, over `parameter_groups`."""
    groups = parameter_groups(model, config.weight_decay)
    built: torch.optim.Optimizer
    if config.name == "sgd":
        built = _SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)
    else:
        built = _ADAMW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), foreach=True)
    return built


def _light(kind: type[torch.optim.Optimizer]) -> Any:
    """`kind` without the wrappers that shield its methods from torch.compile, which segpipe does not use.

    In torch 2.14 every public optimizer imports torch._dynamo through them at its construction and at `step`: 1.7 s of
    processor time (2.2 s against 3.9 s for a process that does one update) and 146 MiB per process. There is no public
    switch. Where a method has no wrapper, it is used as it is, so a torch that mends this needs no change here.
    """
    names = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")
    return type(kind.__name__, (kind,), {name: torch.no_grad()(inspect.unwrap(getattr(kind, name))) for name in names})


_SGD, _ADAMW = _light(torch.optim.SGD), _light(torch.optim.AdamW)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of update `step` of `steps`: linear warm-up, then poly or cosine down to 0 after the last."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    if config.schedule == "poly":
        return config.lr * float((1.0 - done) ** config.power)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))


class Ema:
    """Exponential moving average of parameters and float buffers, in a second network that is always in eval mode.

    The decay of update t is min(decay, (1 + t) / (10 + t)), so that a short run is not dominated by its start.
    """

    def __init__(self, model: SegmentationNet, config: EmaConfig) -> None:
        self.decay = config.decay
        self.model: SegmentationNet = copy.deepcopy(model).eval().requires_grad_(False)
        self._pairs = self._match(model)

    def _match(self, model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        averaged, live = self.model.state_dict(), model.state_dict()  # which share memory with the networks
        names = [name for name, value in live.items() if value.is_floating_point()]
        return [averaged[name] for name in names], [live[name] for name in names]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the network after update `step` (0-based)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averaged, live = self._pairs
        torch._foreach_lerp_(averaged, live, 1.0 - decay)
