"""What BatchNorm keeps from pass to pass: statistics, which shards average, and counters, which updates set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segpipe.train.optim import frozen_modules


def norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """BatchNorm layers that gather statistics, in module order: all but those in frozen parts."""
    frozen = set(frozen_modules(model))
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m not in frozen
    ]


def statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of `norms`, in module order."""
    return [
        b
        for m in norms(model)
        for b in (m.running_mean, m.running_var)
        if b is not None
    ]


def counters(model: nn.Module) -> list[Tensor]:
    """The number of its forward passes of each of `norms`, with which those without a momentum compute."""
    return [
        m.num_batches_tracked for m in norms(model) if m.num_batches_tracked is not None
    ]


class Kept:
    """BatchNorm statistics and counters as they are before a step: every shard starts from them."""

    def __init__(self, model: nn.Module) -> None:
        self._groups = [
            (tensors, [torch.empty_like(t) for t in tensors])
            for tensors in (statistics(model), counters(model))
        ]

    def keep(self) -> None:
        for tensors, kept in self._groups:
            copy_all(kept, tensors)

    def put_back(self) -> None:
        for tensors, kept in self._groups:
            copy_all(tensors, kept)


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its tensor, in one launch for all of a dtype."""
    if into:  # torch refuses empty lists
        torch._foreach_copy_(list(into), list(values))
