"""From this rank's shard batches to the gradients of the whole step, in two ways.

`ElasticGradients` sums over the logical shards by one fixed tree: the same bits for any number of processes.
`DdpGradients` leaves the sum to torch: one pass over all shards of a rank, and bits that depend on the world size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segpipe.distributed.reduce import FlatLayout, RankSum, TreeSum, tree_over_ranks
from segpipe.errors import CollectiveError
from segpipe.keys import torch_seed
from segpipe.losses.distill import TeacherLogits
from segpipe.losses.total import shard_loss
from segpipe.models.plugin_network import ShardGuard
from segpipe.models.preprocess import Preprocess
from segpipe.train.heads import AllHeads, training_heads
from segpipe.train.norms import Kept, copy_all, statistics

if TYPE_CHECKING:
    from segpipe.data.loader import ShardBatch
    from segpipe.settings.config import Config
    from segpipe.train.watch import Watch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET_SIZE = 1 << 20  # elements that are sent at once: 4 MiB


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which the network runs; the loss and all sums stay in fp32."""
    return torch.autocast(
        device.type,
        dtype=AUTOCAST.get(precision, torch.bfloat16),
        enabled=precision in AUTOCAST,
    )


@dataclass(frozen=True)
class Reduced:
    """What was reduced over the shards of all ranks besides the gradients, which are in `.grad`."""

    parts: dict[str, Tensor]  # losses, 0-d, over all shards; "total" is their sum
    means: list[
        Tensor
    ]  # BatchNorm statistics after the step, as `statistics` lists them
    shard_losses: dict[
        int, Tensor
    ]  # of this rank; of its first shard where DDP takes all as one batch


class BatchLoss:
    """Forward and loss of a batch of uint8 images and targets."""

    def __init__(
        self, config: Config, watch: Watch, class_weights: Tensor | None
    ) -> None:
        self.config, self.watch, self.state, self.group = (
            config,
            watch,
            watch.state,
            watch.group,
        )
        self.device = self.group.device
        self.class_weights = (
            class_weights.to(self.device) if class_weights is not None else None
        )
        self.preprocess = Preprocess().to(self.device)
        assert bool(config.loss.teacher) == (self.state.teacher is not None)
        self.guard = ShardGuard(config, self.state.model)
        self._copies: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def __call__(
        self,
        network: nn.Module,
        image: Tensor,
        target: Tensor,
        global_valid: Tensor,
        *,
        shard: int,
        color: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Loss parts, 0-d; dropout is keyed by the step and `shard`, not by what ran before."""
        self.guard.start()
        torch.manual_seed(
            torch_seed(self.config.seed, self.state.step, shard, "dropout")
        )
        with self.watch.span("copy"):
            image, target, *rest = self._on_device(
                image, target, *([] if color is None else [color])
            )
        with (
            self.watch.span("forward"),
            autocast(self.device, self.config.train.precision),
        ):
            seen = self.preprocess(image, *rest)
            heads = network(seen)
            wanted = self._taught(seen)
        self.watch.forward(seen, heads)
        with self.watch.span("loss"):
            return shard_loss(
                heads,
                target,
                self.config.loss,
                class_weights=self.class_weights,
                global_valid=global_valid,
                align_corners=self.state.model.align_corners,
                teacher=wanted,
            )

    def _taught(self, image: Tensor) -> TeacherLogits | None:
        """What the teacher answers, without a gradient; None without a teacher."""
        if self.state.teacher is None:
            return None
        with torch.no_grad():
            logits = self.state.teacher(image)
        return TeacherLogits(logits, self.state.teacher.align_corners)

    def _on_device(self, *values: Tensor) -> list[Tensor]:
        """All on the device; the host does not wait.

        A stream of its own copies them: the host is ahead of a GPU by up to a step, so a batch is there when the GPU
        comes to it, and copies take no time of the stream that computes.
        """
        if self._copies is None:
            return [value.to(self.device, non_blocking=True) for value in values]
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            copies = [value.to(self.device, non_blocking=True) for value in values]
        here.wait_stream(self._copies)
        for value in copies:
            value.record_stream(
                here
            )  # its memory is not used again before `here` has read it
        return copies


class ElasticGradients:
    """Sums over the shards by a fixed tree. Each shard is a batch of its own and starts from the step's statistics."""

    def __init__(self, loss: BatchLoss) -> None:
        self.loss, self.state, self.group = loss, loss.state, loss.group
        self.network = training_heads(
            self.state.model, loss.config.compute, self.group.device
        )
        self.parameters = [p for p in self.state.model.parameters() if p.requires_grad]
        self.statistics = statistics(self.state.model)
        self._part_names: list[str] = []
        self._layout: FlatLayout | None = None
        self._presence: tuple[list[bool], Tensor] | None = None
        # Kept from step to step: fresh memory costs a page fault for every 4 KiB, 1 to 2 % of a small step on a CPU.
        self._vectors: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}  # of each vector, by its address
        self._kept = Kept(self.state.model)
        self._exchange: _Exchange | None = None
        # In how many parts a pass gave each gradient, the most so far: a block that is
        # used three times under reentrant checkpoints gives its own in three.
        self._parts_of: list[int] = []
        self._counted: list[int] = []  # of the pass that runs
        if self.group.world_size > 1:
            for place, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(
                    partial(self._on_grad_ready, place)
                )  # type: ignore[no-untyped-call]

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> Reduced:
        """Leave the reduced gradients in `.grad`: None where no shard of any rank gave one. A collective."""
        leaves, watch = self.loss.config.compute.shards, self.loss.watch
        tree, free, losses = TreeSum(leaves, shards[0].shard), list(self._vectors), {}
        self._kept.keep()
        absent = set(
            range(len(self.parameters))
        )  # parameters for which no own shard gave a gradient
        for number, batch in enumerate(shards, 1):
            parts = self.loss(
                self.network,
                batch.image,
                batch.target,
                global_valid,
                shard=batch.shard,
                color=batch.color,
            )
            layout = self._layout_for(parts)
            flat = free.pop() if free else self._new(layout)
            last = number == len(shards)
            if last and self.group.world_size > 1:
                # Not into `flat`: sums come back while its own gradients are still to be read by the watch.
                total = free.pop() if free else self._new(layout)
                across = RankSum(self.group, leaves)
                self._exchange = _Exchange(
                    layout,
                    tree,
                    flat,
                    self._views_of(flat),
                    self.parameters,
                    across,
                    total,
                    self._parts_of,
                )
            self._counted = [0] * len(self.parameters)
            with watch.span("backward"):
                self.state.scaler.scale(parts["total"]).backward()  # type: ignore[no-untyped-call]
            self._parts_of = [
                max(pair)
                for pair in zip(
                    self._counted, self._parts_of or self._counted, strict=True
                )
            ]
            self.loss.guard.check(self.state.step, batch.shard)
            losses[batch.shard] = parts["total"].detach()
            views, count = self._views_of(flat), len(self.statistics)
            with watch.span("reduction"):
                absent -= self._collect(views, parts)
            watch.shard(batch, parts["total"], views[:count], views[count + 1 :])
            with watch.span("reduction"):
                if self._exchange is not None:
                    self._exchange.wait()
                    self._exchange = None
                if not last:
                    spare = tree.push(flat)
                    free += [spare] if spare is not None else []
                elif self.group.world_size == 1:
                    tree.close(flat, slice(None))
        root = tree.last_sum(flat)
        return self._unpack(
            root if self.group.world_size == 1 else total, losses, absent
        )

    def _collect(self, views: list[Tensor], parts: dict[str, Tensor]) -> set[int]:
        """Move what a shard's pass left behind into its vector; returns the parameters that have a gradient."""
        given = (
            self._exchange.given
            if self._exchange
            else [p.grad is not None for p in self.parameters]
        )
        copy_all(
            views[: len(self.statistics) + 1],
            [*self.statistics, self._figures(parts, given)],
        )
        self._kept.put_back()
        if self._exchange is not None:
            self._exchange.send_rest()
        else:
            _pack(views[len(self.statistics) + 1 :], self.parameters)
        return {place for place, present in enumerate(given) if present}

    def _new(self, layout: FlatLayout) -> Tensor:
        vector = layout.new()
        self._vectors.append(vector)
        self._views[vector.data_ptr()] = layout.views(vector)
        return vector

    def _views_of(self, vector: Tensor) -> list[Tensor]:
        """The tensors inside one of `_vectors`."""
        return self._views[vector.data_ptr()]

    def _on_grad_ready(self, place: int, _: Tensor) -> None:
        """Called by autograd after each addition to the gradient of parameter `place`.

        Raises CollectiveError when the gradient was sent already.
        """
        self._counted[place] += 1
        if self._exchange is None:
            return
        if self._exchange.has_sent(place):
            parameter = self.parameters[place]
            named = self.state.model.named_parameters()
            name = next(name for name, value in named if value is parameter)
            raise CollectiveError(
                f"part {self._counted[place]} of the gradient of {name} came after it was "
                f"sent: no earlier update used {name} so often. Use every block a fixed "
                f"number of times, or checkpoint(use_reentrant=False)."
            )
        self._exchange.on_grad_ready(place, self._counted[place])

    def _layout_for(self, parts: dict[str, Tensor]) -> FlatLayout:
        if self._layout is None:
            self._part_names = list(parts)
            figures = torch.zeros(
                len(parts) + len(self.parameters), device=self.group.device
            )
            tensors = [*self.statistics, figures, *self.parameters]
            self._layout = FlatLayout(tensors, bucket_size=BUCKET_SIZE)
        return self._layout

    def _figures(self, parts: dict[str, Tensor], given: list[bool]) -> Tensor:
        """A shard's losses, then 1 for each parameter that it gave a gradient for: sums of these are exact."""
        if (
            self._presence is None or self._presence[0] != given
        ):  # a copy to the device, as good as once
            self._presence = (
                given,
                torch.tensor(given, dtype=torch.float32).to(self.group.device),
            )
        return torch.cat(
            [torch.stack([part.detach() for part in parts.values()]), self._presence[1]]
        )

    def _unpack(
        self, root: Tensor, losses: dict[int, Tensor], absent: set[int]
    ) -> Reduced:
        """Gradients and figures of the sum. Waits for a GPU only if no own shard used some parameter."""
        views = self._views_of(root)
        count = len(self.statistics)
        figures = views[count].clone()
        for parameter, grad in zip(self.parameters, views[count + 1 :], strict=True):
            parameter.grad = grad
        if absent:
            shards_with = figures[len(self._part_names) :].tolist()
            for place in absent:
                if not shards_with[
                    place
                ]:  # as torch leaves it: no weight decay, no momentum
                    self.parameters[place].grad = None
        parts = dict(
            zip(
                self._part_names, figures[: len(self._part_names)].unbind(), strict=True
            )
        )
        return Reduced(
            parts, _divided(views[:count], self.loss.config.compute.shards), losses
        )


class _Exchange:
    """Sends the last shard's vector to the other ranks, bucket after bucket, while its backward still runs.

    Buckets leave in one order on every rank: from the end of the network, whose gradients come first, to its start.
    Their sums come back in that order too, each while the next buckets are computed.
    """

    def __init__(
        self,
        layout: FlatLayout,
        tree: TreeSum,
        flat: Tensor,
        views: list[Tensor],
        parameters: list[nn.Parameter],
        across: RankSum,
        total: Tensor,
        parts_of: list[int],
    ) -> None:
        """`flat` is the last shard's vector, with its `views`; `total` receives the sums.

        `parts_of`: additions by which each gradient was complete in earlier passes. In
        the first pass there are none, and everything is sent at its end.
        """
        self._layout = layout
        self._tree = tree
        self._flat = flat
        self._parameters = parameters
        self._across = across
        self._total = total
        self._parts_of = [max(count, 1) for count in parts_of]
        self.given = [False] * len(parameters)  # which have a gradient
        self._views = views
        self._first = len(self._views) - len(parameters)  # place of the first gradient
        self._missing = [
            sum(place >= self._first for place in members) for members in layout.members
        ]
        self._next = len(layout.buckets) - 1
        # Buckets up to this one wait for statistics and figures.
        self._held = layout.bucket_of[self._first - 1]

    def has_sent(self, place: int) -> bool:
        """Whether the gradient of parameter `place` has left."""
        return self._layout.bucket_of[self._first + place] > self._next

    def on_grad_ready(self, place: int, parts: int) -> None:
        """Send the buckets that addition number `parts` to a gradient completes."""
        self.given[place] = True
        if not self._parts_of:
            return
        bucket = self._layout.bucket_of[self._first + place]
        if parts == self._parts_of[place]:
            self._missing[bucket] -= 1
        elif parts > self._parts_of[place]:
            self._held = max(self._held, bucket)  # how many more come is not known
        while self._next > self._held and self._missing[self._next] == 0:
            self._send()

    def send_rest(self) -> None:
        """Send what is left; parameters without a gradient as zeros."""
        while self._next >= 0:
            self._send()

    def wait(self) -> None:
        """Wait for the sums."""
        self._across.finish()

    def _send(self) -> None:
        members, bucket = (
            self._layout.members[self._next],
            self._layout.buckets[self._next],
        )
        grads = [place for place in members if place >= self._first]
        _pack(
            [self._views[place] for place in grads],
            [self._parameters[place - self._first] for place in grads],
        )
        self._across.start(self._tree.close(self._flat, bucket), self._total[bucket])
        self._next -= 1


class DdpGradients:
    """torch's DistributedDataParallel over one batch of all shards of a rank.

    Running statistics and losses are summed over the ranks by the tree, where DDP alone would keep those of rank 0.
    DDP's collectives are inside torch and cannot be announced one by one, so each place that makes some is announced: a
    rank that does not come there has made fewer calls than the others, and is named.
    """

    def __init__(self, loss: BatchLoss, *, warm_up: bool) -> None:
        self.loss, self.state, self.group = loss, loss.state, loss.group
        self.network: nn.Module = AllHeads(self.state.model)
        self.statistics = statistics(self.state.model)
        self._kept = Kept(self.state.model)
        self._layout: FlatLayout | None = None
        if self.group.world_size > 1:
            device = self.group.device
            self.group.contract.enter("wrap of DDP")
            ids = [device.index] if device.type == "cuda" else None
            self.network = DistributedDataParallel(
                self.network,
                device_ids=ids,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=self._leaves_out_parameters(),
            )
            if warm_up:
                self._warm_up()

    def _leaves_out_parameters(self) -> bool:
        """Whether trained parameters have no part in the heads: DDP then looks for them in every step, or it stops."""
        trained = [p for p in self.network.parameters() if p.requires_grad]
        with self._trial() as image:
            grads = torch.autograd.grad(
                self._mean(image[:2]), trained, allow_unused=True
            )
        return any(grad is None for grad in grads)

    def _warm_up(self) -> None:
        """Two passes without an update, so that the buckets have their final order before the first real step.

        DDP packs gradients by parameter order at first and by order of arrival from the second step on, and a sum over
        ranks depends on the place in the bucket. Without this, a resumed run would differ.
        """
        self.group.contract.enter("warm-up of DDP")
        with self._trial() as image:
            for _ in range(2):
                self._mean(image).backward()  # type: ignore[no-untyped-call]
                self.network.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _trial(self) -> Iterator[Tensor]:
        """An empty batch of this rank's size, for passes that leave the statistics of norms as they were."""
        config = self.loss.config
        number = (
            len(self.group.own_shards(config.compute.shards))
            * config.compute.samples_per_shard
        )
        before = [buffer.clone() for buffer in self.network.buffers()]
        yield torch.zeros(
            number, 3, *config.augment.crop_size, device=self.group.device
        )
        copy_all(list(self.network.buffers()), before)

    def _mean(self, image: Tensor) -> Tensor:
        with autocast(self.group.device, self.loss.config.train.precision):
            heads = self.network(image)
            return torch.stack(
                [logits.float().mean() for logits in heads.values()]
            ).sum()

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> Reduced:
        """Leave the reduced gradients in `.grad`. A collective."""
        self.loss.watch.whole_batch(shards)
        self._kept.keep()
        device, world_size = self.group.device, self.group.world_size
        image = torch.cat(
            [batch.image.to(device, non_blocking=True) for batch in shards]
        )
        target = torch.cat(
            [batch.target.to(device, non_blocking=True) for batch in shards]
        )
        colors = [
            batch.color.to(device, non_blocking=True)
            for batch in shards
            if batch.color is not None
        ]
        color = torch.cat(colors) if colors else None
        parts = self.loss(
            self.network,
            image,
            target,
            global_valid,
            shard=shards[0].shard,
            color=color,
        )
        if world_size > 1:
            self.group.contract.enter("backward of DDP")
        total = (
            parts["total"] * world_size
        )  # DDP takes the mean over ranks, but the loss is divided by all pixels
        self.state.scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        self.loss.guard.check(self.state.step, shards[0].shard)
        tensors = [
            *self.statistics,
            torch.stack([part.detach() for part in parts.values()]),
        ]
        self._layout = self._layout or FlatLayout(tensors)
        flat = self._layout.new()
        views = self._layout.views(flat)
        copy_all(views, tensors)
        self._kept.put_back()
        tree_over_ranks(flat, self.group)
        *sums, figures = views
        losses = {shards[0].shard: parts["total"].detach()}
        return Reduced(
            dict(zip(parts, figures.unbind(), strict=True)),
            _divided(sums, world_size),
            losses,
        )


def _divided(sums: list[Tensor], count: int) -> list[Tensor]:
    return list(torch._foreach_div(sums, count)) if sums else []


def _pack(views: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """Move gradients to their places; a parameter without one takes part as zeros, so that all ranks send the same."""
    copy_all(
        views,
        [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters],
    )
    for parameter in parameters:
        parameter.grad = None
