"""One optimizer update from V logical shards, whichever way their gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segpipe.data.loader import ShardBatch
from segpipe.distributed.group import Group
from segpipe.settings.config import Config
from segpipe.train.gradients import BatchLoss, DdpGradients, ElasticGradients, norms, statistics
from segpipe.train.optim import learning_rate
from segpipe.train.state import TrainState

if TYPE_CHECKING:
    from segpipe.ledger.recorder import Recorder


@dataclass(frozen=True)
class StepResult:
    """What an update reports; tensors stay on the device, so reading them is the caller's choice of a wait."""

    loss: Tensor  # 0-d, over all shards
    parts: dict[str, Tensor]  # of each head, 0-d, over all shards
    grad_norm: Tensor  # 0-d, after unscaling and before clipping
    shard_losses: dict[int, Tensor]  # this rank's shards


class TrainStep:
    """Runs updates on a state; holds what is the same for all of them."""

    def __init__(
        self,
        state: TrainState,
        config: Config,
        group: Group,
        class_weights: Tensor | None,
        recorder: Recorder | None = None,
    ) -> None:
        self.state, self.config, self.group, self.recorder = state, config, group, recorder
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.statistics = statistics(state.model)
        self.gradients = _gradients(state, config, group, BatchLoss(state, config, group, class_weights, recorder))
        self._means: list[Tensor] = []  # BatchNorm statistics that `apply` puts into the network
        # The first update that was not finite, or a number that none reaches; int64, 0-d, on the device: where the host
        # does not look at every update, this remembers. An overflow that the scaler skips does not count.
        self.first_bad = torch.full((), torch.iinfo(torch.int64).max, device=group.device)

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> StepResult:
        """Gradients and figures of update `state.step`, from this rank's shards; ranks meet in the reduction.

        The state stays as it was, but for `.grad`, until `apply`: what is saved in between can be trusted.
        `global_valid` is the number of valid pixels of all shards of all ranks, int64, 0-d, on the device.
        """
        reduced = self.gradients(shards, global_valid)
        if self.recorder is not None:
            self.recorder.reduced(global_valid)
        self._means = reduced.means
        self._count(self.state.step)
        state, optim = self.state, self.config.optim
        rate = learning_rate(state.step, optim.schedule_steps or self.config.train.steps, optim)
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
        parts = dict(reduced.parts)
        total = parts.pop("total")
        fine = torch.isfinite(total if state.scaler.is_enabled() else total + norm)
        self.first_bad = torch.where(fine, self.first_bad, self.first_bad.clamp(max=state.step))
        return StepResult(total, parts, norm, reduced.shard_losses)

    def apply(self) -> None:
        """Move weights and statistics by what the call found, then the average; counts the update."""
        state = self.state
        if self._means:
            torch._foreach_copy_(self.statistics, self._means)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.ema.update(state.step)
        state.step += 1
        self._count(state.step)
        if self.recorder is not None:
            self.recorder.applied(state.optimizer.param_groups[0]["lr"])

    def _count(self, updates: int) -> None:
        """BatchNorm counts forward passes; here it counts updates, however many shards."""
        for module in norms(self.state.model):
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.fill_(updates)


def _gradients(state: TrainState, config: Config, group: Group, loss: BatchLoss) -> ElasticGradients | DdpGradients:
    """The way that `compute.mode` asks for."""
    compute = config.compute
    if compute.mode in ("elastic", "audit"):
        return ElasticGradients(state, group, loss, compute.shards)
    number = len(group.own_shards(compute.shards)) * compute.samples_per_shard
    batch = torch.zeros(number, 3, *config.augment.crop_size, device=group.device)
    return DdpGradients(state, group, loss, warm_up=compute.mode == "run", batch=batch)
