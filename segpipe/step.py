"""One optimizer update from V logical shards: the same numbers however many processes share the shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segpipe.config import Config
from segpipe.data.loader import ShardBatch
from segpipe.distributed.group import Group
from segpipe.distributed.reduce import FlatLayout, TreeSum, tree_over_ranks
from segpipe.losses import shard_loss
from segpipe.optim import learning_rate
from segpipe.preprocess import Preprocess
from segpipe.state import TrainState, seed_torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """What an update reports; tensors stay on the device, so reading them is the caller's choice of a wait."""

    loss: Tensor  # 0-d, over all shards
    parts: dict[str, Tensor]  # of each head, 0-d, over all shards
    grad_norm: Tensor  # 0-d, after unscaling and before clipping
    shard_losses: dict[int, Tensor]  # this rank's shards


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which the network runs; the loss and all sums stay in fp32."""
    return torch.autocast(device.type, dtype=AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)


def statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of all BatchNorm layers, in module order."""
    return [b for m in _norms(model) for b in (m.running_mean, m.running_var) if b is not None]


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


class TrainStep:
    """Runs updates on a state; holds what is the same for all of them."""

    def __init__(self, state: TrainState, config: Config, group: Group, class_weights: Tensor | None) -> None:
        self.state, self.config, self.group = state, config, group
        self.class_weights = class_weights.to(group.device) if class_weights is not None else None
        self.preprocess = Preprocess().to(group.device)
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.statistics = statistics(state.model)
        self._layout: FlatLayout | None = None
        self._part_names: list[str] = []
        self._means: list[Tensor] = []  # BatchNorm statistics that `apply` puts into the network

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> StepResult:
        """Gradients and figures of update `state.step`, from this rank's shards; ranks meet in the reduction.

        The state stays as it was, but for `.grad`, until `apply`: what is saved in between can be trusted.
        `global_valid` is the number of valid pixels of all shards of all ranks, int64, 0-d, on the device.
        """
        shard_losses = self._accumulate(shards, global_valid)
        state, optim = self.state, self.config.optim
        rate = learning_rate(state.step, self.config.train.steps, optim)
        for entry in state.optimizer.param_groups:
            entry["lr"] = rate
        state.scaler.unscale_(state.optimizer)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        if optim.clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, optim.clip_norm, norm, foreach=True)
        if state.scaler.is_enabled():  # it skips an update that overflowed; the statistics of it must go too
            fine = torch.isfinite(norm)
            self._means = [torch.where(fine, *pair) for pair in zip(self._means, self.statistics, strict=True)]
        parts = dict(zip(self._part_names, self._losses.unbind(), strict=True))
        return StepResult(parts.pop("total"), parts, norm, shard_losses)

    def apply(self) -> None:
        """Move weights and statistics by what the call found, then the average; counts the update."""
        state = self.state
        _copy(self.statistics, self._means)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.ema.update(state.step)
        state.step += 1
        self._count(state.step)

    def _count(self, updates: int) -> None:
        """BatchNorm counts forward passes; here it counts updates, however many shards."""
        for module in _norms(self.state.model):
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.fill_(updates)

    def _accumulate(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> dict[int, Tensor]:
        """Leave the reduced gradients in `.grad`, the mean statistics in `_means`; returns the own shards' losses."""
        tree, spare, losses = TreeSum(), None, {}
        before = [buffer.clone() for buffer in self.statistics]
        for batch in shards:
            parts = self._backward(batch, global_valid)
            losses[batch.shard] = parts["total"]
            stacked = torch.stack(list(parts.values()))
            layout = self._layout_for(parts, stacked)
            flat = spare if spare is not None else layout.new()
            # A head that no loss touches has no gradient; it takes part as zero so that all ranks send the same.
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
            torch._foreach_copy_(layout.views(flat), [*grads, *self.statistics, stacked])
            self.state.optimizer.zero_grad(set_to_none=True)
            _copy(self.statistics, before)
            spare = tree.push(flat)
        self._count(self.state.step)
        self._scatter(tree_over_ranks(tree.take(), self.group))
        return losses

    def _backward(self, batch: ShardBatch, global_valid: Tensor) -> dict[str, Tensor]:
        config, device = self.config, self.group.device
        seed_torch(config.seed, self.state.step, batch.shard, "dropout")
        image = self.preprocess(batch.image.to(device, non_blocking=True))
        target = batch.target.to(device, non_blocking=True)
        with autocast(device, config.train.precision):
            heads = self.state.model.logits(image, aux=True)
        parts = shard_loss(
            heads,
            target,
            config.loss,
            class_weights=self.class_weights,
            global_valid=global_valid,
            align_corners=self.state.model.align_corners,
        )
        self.state.scaler.scale(parts["total"]).backward()  # type: ignore[no-untyped-call]
        return {name: part.detach() for name, part in parts.items()}

    def _layout_for(self, parts: dict[str, Tensor], stacked: Tensor) -> FlatLayout:
        if self._layout is None:
            self._part_names = list(parts)
            self._layout = FlatLayout([*self.parameters, *self.statistics, stacked], pad_to=self.group.world_size)
        return self._layout

    def _scatter(self, root: Tensor) -> None:
        assert self._layout is not None
        views = self._layout.views(root)
        count = len(self.parameters)
        for parameter, grad in zip(self.parameters, views[:count], strict=True):
            parameter.grad = grad
        share = 1.0 / self.config.compute.shards  # exact: a power of two
        self._means = list(torch._foreach_mul(views[count:-1], share)) if self.statistics else []
        self._losses = views[-1].clone()


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:  # torch refuses empty lists
        torch._foreach_copy_(into, values)
