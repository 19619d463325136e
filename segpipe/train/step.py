"""One optimizer update from V logical shards, with either way of summing gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segpipe.determinism import flags
from segpipe.losses.total import valid_pixels
from segpipe.train.forward import copy_all, frozen_modules
from segpipe.train.gradients import BatchLoss, DdpGradients, ElasticGradients
from segpipe.train.state import learning_rate, set_rate

if TYPE_CHECKING:
    from segpipe.data.loader import ShardBatch
    from segpipe.settings.config import Config
    from segpipe.train.recorder import Watch

NEVER = torch.iinfo(torch.int64).max  # a step that no run reaches


@dataclass(frozen=True)
class StepResult:
    """Figures of an update. Tensors stay on the device; the caller decides when to read them and so to synchronize."""

    loss: Tensor  # 0-d, over all shards
    parts: dict[str, Tensor]  # of each head, 0-d, over all shards
    grad_norm: Tensor  # 0-d, of trained parameters, after unscaling and before clipping
    rate: float  # learning rate, before optim.lr_scale
    shard_losses: dict[int, Tensor]  # of this rank's shards


class TrainStep:
    """An update in two halves: the call computes the gradients, `apply` changes the state. `train_step` does both."""

    def __init__(
        self, config: Config, watch: Watch, class_weights: Tensor | None = None
    ) -> None:
        self.config = config
        self.watch = watch
        self.state = watch.state
        self.group = watch.group

        model = self.state.model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.frozen = frozen_modules(model)

        self.loss = BatchLoss(config, watch, class_weights)
        self.gradients: ElasticGradients | DdpGradients
        if config.compute.mode in ("elastic", "audit"):
            self.gradients = ElasticGradients(self.loss)
        else:
            self.gradients = DdpGradients(self.loss)

        self._rate = 0.0
        # BatchNorm statistics that `apply` copies into the network.
        self._means: list[Tensor] = []
        # First update that was not finite, int64, 0-d, on the device, because the host does not check every update. An
        # overflow that the scaler skips does not count.
        self.first_bad = torch.full((), NEVER, device=self.group.device)

    def __call__(
        self, shards: Sequence[ShardBatch], global_valid: Tensor
    ) -> StepResult:
        """Gradients and figures of update `state.step`, from this rank's shards. A collective.

        Changes `.grad` and the rates of the optimizer's groups; `apply` changes weights and averages. `global_valid`:
        number of valid pixels in all shards of all ranks, int64, 0-d, on the device.
        """
        for module in self.frozen:
            # The network's code, or a test, may have called train().
            module.training = False

        reduced = self.gradients(shards, global_valid)
        self.watch.reduced(global_valid)
        self._means = reduced.means

        state = self.state
        optim = self.config.optim
        steps = optim.schedule_steps or self.config.train.steps
        rate = learning_rate(state.step, steps, optim)
        set_rate(state.optimizer, rate)
        self._rate = rate

        with self.watch.span("clip"):
            state.scaler.unscale_(state.optimizer)
            grads = [p.grad for p in self.parameters if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads, foreach=True)
            if optim.clip_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(
                    self.parameters, optim.clip_norm, norm, foreach=True
                )

        parts = dict(reduced.parts)
        total = parts.pop("total")

        figure = total + norm
        finite = figure - figure == 0  # inf - inf is NaN
        if state.scaler.is_enabled():
            # The scaler skips an update that overflowed, so its BatchNorm statistics must be dropped too.
            fits = torch.isfinite(norm)
            pairs = zip(self._means, self.loss.norms.statistics, strict=True)
            self._means = [torch.where(fits, *pair) for pair in pairs]
            finite = torch.isfinite(total)

        bad = self.first_bad.clamp(max=state.step)
        self.first_bad = torch.where(finite, self.first_bad, bad)
        return StepResult(total, parts, norm, rate, reduced.shard_losses)

    def apply(self) -> None:
        """Apply the call's gradients and statistics, then update the average and count the update."""
        state = self.state
        norms = self.loss.norms
        copy_all(norms.statistics, self._means)

        with self.watch.span("optimizer"):
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.optimizer.zero_grad(set_to_none=True)
        with self.watch.span("average"):
            state.ema.update(state.step)

        state.step += 1
        if norms.counters:  # count updates, for any number of shards
            torch._foreach_zero_(norms.counters)
            torch._foreach_add_(norms.counters, state.step)

        self.watch.applied(self._rate)


def train_step(
    step: TrainStep,
    shards: Sequence[ShardBatch],
    *,
    stop: bool = False,
    wait: bool = True,
    check: Callable[[StepResult], None] = lambda result: None,
) -> StepResult | None:
    """One whole update from this rank's shards, as in training and audit. A collective.

    Returns None, with the state unchanged, when a rank asked to `stop`, unless an earlier update was not finite: then
    the update goes on, and `check` reports it. `check` gets the result before it is applied, and may raise. Without
    `wait` the host neither checks nor stops, so that it need not wait for a GPU.
    """
    watch, compute = step.watch, step.config.compute
    with watch.span("counts"):
        own = sum(valid_pixels(batch.target) for batch in shards)
        pixels, stops = watch.sum([own, int(stop)], wait=wait)

    if wait and int(stops) and int(step.first_bad) == NEVER:
        return None

    result = step(shards, pixels)
    if wait:
        check(result)
    # User code may have changed the switches, and other processes run it at other times.
    flags.apply(compute.threads, compute.mode)
    step.apply()
    watch.after_update()
    return result
