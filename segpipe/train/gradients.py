"""From this rank's shard batches to the gradients of the whole step, in the two ways that there are.

`ElasticGradients` sums over the logical shards by one fixed tree: the same bits for any number of processes.
`DdpGradients` leaves the sum to torch: one pass over all shards of a rank, and bits that depend on their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segpipe.data.loader import ShardBatch
from segpipe.distributed import ddp
from segpipe.distributed.group import Group
from segpipe.distributed.reduce import FlatLayout, RankSum, TreeSum, tree_over_ranks
from segpipe.losses.total import shard_loss
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config
from segpipe.train.state import TrainState, seed_torch

if TYPE_CHECKING:
    from segpipe.ledger.recorder import Recorder

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET_SIZE = 1 << 20  # elements that travel between ranks at once: 4 MiB


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which the network runs; the loss and all sums stay in fp32."""
    return torch.autocast(device.type, dtype=AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)


def norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """All BatchNorm layers, in module order."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of all BatchNorm layers, in module order."""
    return [b for m in norms(model) for b in (m.running_mean, m.running_var) if b is not None]


@dataclass(frozen=True)
class Reduced:
    """What the shards of all ranks came to; the gradients are in `.grad`."""

    parts: dict[str, Tensor]  # losses, 0-d, over all shards; "total" is their sum
    means: list[Tensor]  # BatchNorm statistics after the step, as `statistics` lists them
    shard_losses: dict[int, Tensor]  # of this rank; where shards are computed as one batch, of the first


class AllHeads(nn.Module):
    """The network's training heads as a forward, which is what DDP hooks into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        heads: dict[str, Tensor] = self.model.logits(image, aux=True)  # type: ignore[operator]
        return heads


class BatchLoss:
    """Forward and loss of a batch of uint8 images and targets."""

    def __init__(
        self,
        state: TrainState,
        config: Config,
        group: Group,
        class_weights: Tensor | None,
        recorder: Recorder | None = None,
    ) -> None:
        self.state, self.config, self.device, self.recorder = state, config, group.device, recorder
        self.class_weights = class_weights.to(group.device) if class_weights is not None else None
        self.preprocess = Preprocess().to(group.device)

    def __call__(
        self, network: nn.Module, image: Tensor, target: Tensor, global_valid: Tensor, *, shard: int
    ) -> dict[str, Tensor]:
        """Loss parts, 0-d; dropout is keyed by the step and `shard`, not by what ran before."""
        seed_torch(self.config.seed, self.state.step, shard, "dropout")
        seen = self.preprocess(image.to(self.device, non_blocking=True))
        target = target.to(self.device, non_blocking=True)
        with autocast(self.device, self.config.train.precision):
            heads = network(seen)
        if self.recorder is not None:
            self.recorder.forward(seen, heads)
        return shard_loss(
            heads,
            target,
            self.config.loss,
            class_weights=self.class_weights,
            global_valid=global_valid,
            align_corners=self.state.model.align_corners,
        )


class ElasticGradients:
    """Sums over the shards as a fixed tree, each at one shape, with the statistics of the step's start."""

    def __init__(self, state: TrainState, group: Group, loss: BatchLoss, shards: int) -> None:
        self.state, self.group, self.loss, self.shards = state, group, loss, shards
        self.network = AllHeads(state.model)
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.statistics = statistics(state.model)
        self._part_names: list[str] = []
        self._layout: FlatLayout | None = None
        # Kept from step to step: fresh memory costs a page fault for every 4 KiB, 1 to 2 % of a small step on a CPU.
        self._vectors: list[Tensor] = []
        self._travel: _Travel | None = None
        if group.world_size > 1:
            for place, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, place))  # type: ignore[no-untyped-call]

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> Reduced:
        """Leave the reduced gradients in `.grad`."""
        tree, free, losses = TreeSum(), list(self._vectors), {}
        before = [buffer.clone() for buffer in self.statistics]
        for number, batch in enumerate(shards, 1):
            parts = self.loss(self.network, batch.image, batch.target, global_valid, shard=batch.shard)
            layout = self._layout_for(parts)
            flat = free.pop() if free else self._new(layout)
            last = number == len(shards)
            if last and self.group.world_size > 1:
                self._travel = _Travel(layout, tree, flat, self.parameters, RankSum(self.group))
            self.state.scaler.scale(parts["total"]).backward()  # type: ignore[no-untyped-call]
            losses[batch.shard] = parts["total"].detach()
            figures = torch.stack([part.detach() for part in parts.values()])
            views = layout.views(flat)
            torch._foreach_copy_(views[: len(self.statistics) + 1], [*self.statistics, figures])
            _copy(self.statistics, before)
            if self._travel is not None:
                self._travel.send_rest()
            else:
                _pack(views[-len(self.parameters) :], self.parameters)
            if self.loss.recorder is not None:
                self.loss.recorder.shard(
                    batch, parts["total"], views[: len(self.statistics)], views[-len(self.parameters) :]
                )
            if self._travel is not None:
                self._travel.arrive()
                self._travel = None
            if not last:
                spare = tree.push(flat)
                free += [spare] if spare is not None else []
            elif self.group.world_size == 1:
                tree.close(flat, slice(None))
        return self._unpack(tree.root(flat), losses)

    def _new(self, layout: FlatLayout) -> Tensor:
        self._vectors.append(layout.new())
        return self._vectors[-1]

    def _arrived(self, place: int, _: Tensor) -> None:
        """autograd's word that a parameter's gradient is complete."""
        if self._travel is not None:
            self._travel.arrived(place)

    def _layout_for(self, parts: dict[str, Tensor]) -> FlatLayout:
        if self._layout is None:
            self._part_names = list(parts)
            figures = torch.zeros(len(parts), device=self.group.device)
            tensors = [*self.statistics, figures, *self.parameters]
            self._layout = FlatLayout(tensors, pad_to=self.group.world_size, bucket_size=BUCKET_SIZE)
        return self._layout

    def _unpack(self, root: Tensor, losses: dict[int, Tensor]) -> Reduced:
        assert self._layout is not None
        views = self._layout.views(root)
        count = len(self.statistics)
        for parameter, grad in zip(self.parameters, views[count + 1 :], strict=True):
            parameter.grad = grad
        share = 1.0 / self.shards  # exact: a power of two
        means = list(torch._foreach_mul(views[:count], share)) if count else []
        parts = dict(zip(self._part_names, views[count].clone().unbind(), strict=True))
        return Reduced(parts, means, losses)


class _Travel:
    """The last shard's vector on its way to the other ranks, bucket after bucket, while its backward still runs.

    Buckets go in one order on every rank, from the end of the network, whose gradients come first, to its start.
    """

    def __init__(
        self, layout: FlatLayout, tree: TreeSum, flat: Tensor, parameters: list[nn.Parameter], across: RankSum
    ) -> None:
        self._layout, self._tree, self._flat, self._parameters, self._across = layout, tree, flat, parameters, across
        self._views = layout.views(flat)
        self._first = len(self._views) - len(parameters)  # place of the first gradient
        self._missing = [sum(place >= self._first for place in members) for members in layout.members]
        self._next = len(layout.buckets) - 1
        self._held = layout.bucket_of[self._first - 1]  # up to here buckets wait for statistics and figures

    def arrived(self, place: int) -> None:
        """Send what the gradient of parameter `place` completes."""
        self._missing[self._layout.bucket_of[self._first + place]] -= 1
        while self._next > self._held and self._missing[self._next] == 0:
            self._send()

    def send_rest(self) -> None:
        """Send what is left, parameters that no loss touches as zeros."""
        while self._next >= 0:
            self._send()

    def arrive(self) -> None:
        """Wait for the sums, which may lie where the vector was."""
        self._across.finish()

    def _send(self) -> None:
        members, bucket = self._layout.members[self._next], self._layout.buckets[self._next]
        grads = [place for place in members if place >= self._first]
        _pack([self._views[place] for place in grads], [self._parameters[place - self._first] for place in grads])
        self._across.start(self._tree.close(self._flat, bucket))
        self._next -= 1


class DdpGradients:
    """torch's DistributedDataParallel over one batch of all shards of a rank.

    Running statistics and losses are summed over the ranks by the tree, where DDP alone would keep those of rank 0.
    DDP's own collectives lie inside of torch and are not announced one by one. So each place that makes some is: a rank
    that does not come there has made fewer calls than the others, and is named.
    """

    def __init__(self, state: TrainState, group: Group, loss: BatchLoss, *, warm_up: bool, batch: Tensor) -> None:
        self.state, self.group, self.loss = state, group, loss
        self.network: nn.Module = AllHeads(state.model)
        self.statistics = statistics(state.model)
        if group.world_size > 1:
            group.contract.enter("wrap of DDP")
            wrapped = ddp.wrap(self.network, group.device)
            if warm_up:
                group.contract.enter("warm-up of DDP")
                with autocast(group.device, loss.config.train.precision):
                    ddp.warm_up(wrapped, batch)
            self.network = wrapped

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> Reduced:
        """Leave the reduced gradients in `.grad`."""
        if self.loss.recorder is not None:
            for batch in shards:
                self.loss.recorder.read(batch)
        before = [buffer.clone() for buffer in self.statistics]
        device = self.group.device
        image = torch.cat([batch.image.to(device, non_blocking=True) for batch in shards])
        target = torch.cat([batch.target.to(device, non_blocking=True) for batch in shards])
        parts = self.loss(self.network, image, target, global_valid, shard=shards[0].shard)
        world = self.group.world_size
        if world > 1:
            self.group.contract.enter("backward of DDP")
        self.state.scaler.scale(parts["total"] * world).backward()  # type: ignore[no-untyped-call]  # DDP divides
        figures = torch.stack([part.detach() for part in parts.values()])
        tensors = [*self.statistics, figures]
        layout = FlatLayout(tensors, pad_to=world)
        flat = layout.new()
        torch._foreach_copy_(layout.views(flat), tensors)
        _copy(self.statistics, before)
        *means, sums = layout.views(tree_over_ranks(flat, self.group))
        share = 1.0 / world
        means = list(torch._foreach_mul(means, share)) if means else []
        return Reduced(dict(zip(parts, sums.unbind(), strict=True)), means, {shards[0].shard: parts["total"].detach()})


def _pack(views: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """Move gradients to their places. A parameter that no loss touches takes part as zero: all ranks send the same."""
    if not parameters:
        return
    torch._foreach_copy_(views, [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters])
    for parameter in parameters:
        parameter.grad = None


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:  # torch refuses empty lists
        torch._foreach_copy_(into, values)
