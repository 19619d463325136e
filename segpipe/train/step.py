"""One optimizer update from V logical shards, with two ways to compute the gradients of a step from a rank's shards.

`ElasticGradients` sums over the logical shards by one fixed tree: the same bits for any number of processes.
`DdpGradients` leaves the sum to torch: one pass over all shards of a rank, and bits that depend on the world size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segpipe.determinism import flags
from segpipe.distributed.reduce import FlatLayout, RankSum, TreeSum, tree_over_ranks
from segpipe.errors import CollectiveError
from segpipe.keys import torch_seed
from segpipe.losses.distill import TeacherLogits
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models.plugin_network import ShardGuard
from segpipe.models.preprocess import Preprocess
from segpipe.train.forward import (
    AllHeads,
    Norms,
    autocast,
    copy_all,
    frozen_modules,
    tf32,
    training_heads,
)
from segpipe.train.state import learning_rate, set_rate

if TYPE_CHECKING:
    from segpipe.data.loader import ShardBatch
    from segpipe.settings.config import Config
    from segpipe.train.recorder import Watch

NEVER = torch.iinfo(torch.int64).max  # a step that no run reaches
BUCKET_SIZE = 1 << 20  # elements per bucket: 4 MiB
REENTRANT = "its block is used several times under checkpoints. Use checkpoint(use_reentrant=False)."


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
        self.gradients: ElasticGradients | DdpGradients = (
            ElasticGradients(self.loss)
            if config.compute.mode in ("elastic", "audit")
            else DdpGradients(self.loss)
        )

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


@dataclass(frozen=True)
class Reduced:
    """What was reduced over all shards of all ranks, besides the gradients, which are in `.grad`."""

    parts: dict[str, Tensor]  # losses, 0-d, over all shards; "total" is their sum
    means: list[Tensor]  # BatchNorm `statistics` after the step
    # This rank's losses by shard; with DDP, one loss of all its shards under the first shard's number.
    shard_losses: dict[int, Tensor]


class BatchLoss:
    """Forward and loss of a batch of uint8 images and targets."""

    def __init__(
        self, config: Config, watch: Watch, class_weights: Tensor | None
    ) -> None:
        self.config = config
        self.watch = watch
        self.state = watch.state
        self.group = watch.group
        self.device = watch.group.device
        self.class_weights = (
            None if class_weights is None else class_weights.to(self.device)
        )
        self.preprocess = Preprocess(standardize=config.model.standardize).to(
            self.device
        )
        assert bool(config.loss.teacher) == (self.state.teacher is not None)
        self.guard = (
            ShardGuard(config, self.state.model) if config.import_paths else None
        )
        self.norms = Norms(self.state.model)
        self._copies = (
            torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            if self.device.type == "cuda"
            else None
        )

    def __call__(
        self, network: nn.Module, batch: ShardBatch, global_valid: Tensor
    ) -> dict[str, Tensor]:
        """Loss parts, 0-d; dropout is seeded by step and shard, not by what ran before."""
        config, watch = self.config, self.watch
        # User code, including data sets and trackers, may have changed the switches. Takes 40 us.
        flags.apply(config.compute.threads, config.compute.mode)
        if self.guard:
            self.guard.start()
        torch.manual_seed(
            torch_seed(config.seed, self.state.step, batch.shard, "dropout")
        )

        with watch.span("copy"):
            image, target = self._copied(batch.image, batch.target)

        teacher = self.state.teacher
        wanted = None
        with (
            watch.span("forward"),
            autocast(self.device, config.train.precision),
            self.norms.uncounted(),
        ):
            seen = self.preprocess(image)
            heads = network(seen)
            if teacher is not None:
                with torch.no_grad():
                    wanted = TeacherLogits(teacher(seen), teacher.align_corners)

        # Contiguous logits and gradients, as in a CUDA graph: another memory format changes the order of sums.
        heads = {name: logits.contiguous() for name, logits in heads.items()}
        for logits in heads.values():
            if logits.requires_grad:
                logits.register_hook(Tensor.contiguous)
        watch.forward(seen, heads)
        with watch.span("loss"):
            return shard_loss(
                heads,
                target,
                config.loss,
                class_weights=self.class_weights,
                global_valid=global_valid,
                align_corners=self.state.model.align_corners,
                teacher=wanted,
            )

    def _copied(self, *values: Tensor) -> list[Tensor]:
        """The values on the device, from page-locked memory, so that the host does not wait.

        On a separate stream: the host is up to one step ahead of a GPU, so the copy overlaps with the previous update.
        """
        if self._copies is None:
            return [value.to(self.device, non_blocking=True) for value in values]
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            copies = [value.to(self.device, non_blocking=True) for value in values]
        here.wait_stream(self._copies)
        for value in copies:
            value.record_stream(here)  # which still reads it when it is freed
        return copies


class ElasticGradients:
    """Sums over the shards by a fixed tree. Each shard is its own batch and starts from the same BatchNorm state."""

    def __init__(self, loss: BatchLoss) -> None:
        self.loss = loss
        self.state = loss.state
        self.group = loss.group
        self.network = training_heads(self.state.model, loss.config, self.group.device)
        self.parameters = [p for p in self.state.model.parameters() if p.requires_grad]
        # Index of the first gradient in a vector, after BatchNorm statistics and figures.
        self._first = len(loss.norms.statistics) + 1

        self._layout: FlatLayout | None = None
        self._presence: tuple[list[bool], Tensor] | None = None

        # Vectors with their views, reused from step to step: new memory costs a page fault per 4 KiB, 1 to 2 % of a
        # small step on a CPU.
        self._views: dict[Tensor, list[Tensor]] = {}

        self._exchange: _Exchange | None = None
        if self.group.world_size > 1:
            for place, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(
                    partial(self._on_grad_ready, place)
                )  # type: ignore[no-untyped-call]

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> Reduced:
        """Put the reduced gradients into `.grad`: None where no shard of any rank had one. A collective."""
        config, watch = self.loss.config, self.loss.watch
        leaves = config.compute.shards
        tree = TreeSum(leaves, shards[0].shard)
        free = list(self._views)
        losses = {}

        # Parameters for which none of this rank's shards had a gradient.
        absent = set(range(len(self.parameters)))

        self.loss.norms.keep()
        for number, batch in enumerate(shards, 1):
            parts = self.loss(self.network, batch, global_valid)
            layout = self._layout_for(parts)
            flat = self._vector(layout, free)
            views = self._views[flat]

            if number == len(shards) and self.group.world_size > 1:
                # Not into `flat`: sums arrive before the watch has read this rank's own gradients there.
                self._exchange = _Exchange(
                    layout,
                    tree,
                    flat,
                    views,
                    self.parameters,
                    RankSum(self.group, leaves),
                    self._vector(layout, free),
                )

            with watch.span("backward"), tf32(config.train.precision):
                self.state.scaler.scale(parts["total"]).backward()  # type: ignore[no-untyped-call]
            if self.loss.guard:
                self.loss.guard.check(self.state.step, batch.shard)
            losses[batch.shard] = parts["total"].detach()

            with watch.span("reduction"):
                absent -= self._collect(views, parts)

            own, grads = views[: self._first - 1], views[self._first :]
            watch.shard(batch, parts["total"], own, grads)

            with watch.span("reduction"):
                if self._exchange is None:
                    free += tree.push(flat)
                else:
                    self._exchange.across.finish()

        root = tree.take() if self._exchange is None else self._exchange.total
        self._exchange = None
        return self._unpack(self._views[root], list(parts), losses, absent)

    def _vector(self, layout: FlatLayout, free: list[Tensor]) -> Tensor:
        """One of the `free` vectors, or a new one."""
        if free:
            return free.pop()
        vector = layout.new()
        self._views[vector] = layout.views(vector)
        return vector

    def _collect(self, views: list[Tensor], parts: dict[str, Tensor]) -> set[int]:
        """Move the results of a shard's pass into its vector; returns the parameters that have a gradient."""
        given = [p.grad is not None for p in self.parameters]
        if self._exchange is not None:
            given = self._exchange.given

        if self._presence is None or self._presence[0] != given:
            # Copies to the device, practically only once.
            ones = torch.tensor(given, dtype=torch.float32).to(self.group.device)
            self._presence = (given, ones)
        # The losses, then 1 for each parameter with a gradient, else 0; sums of the ones are exact.
        losses = torch.stack([part.detach() for part in parts.values()])
        figures = torch.cat([losses, self._presence[1]])

        norms = self.loss.norms
        copy_all(views[: self._first], [*norms.statistics, figures])

        norms.put_back()
        if self._exchange is not None:
            self._exchange.send_rest()
        else:
            _pack(views[self._first :], self.parameters)
        return {place for place, present in enumerate(given) if present}

    def _on_grad_ready(self, place: int, _: Tensor) -> None:
        """Called by autograd after each addition to the gradient of parameter `place`.

        Raises CollectiveError when the gradient was already sent.
        """
        if self._exchange is None or self._exchange.on_grad_ready(place):
            return

        late, named = self.parameters[place], self.state.model.named_parameters()
        name = next(name for name, value in named if value is late)
        raise CollectiveError(
            f"a part of the gradient of {name} arrived after it was sent: {REENTRANT}"
        )

    def _layout_for(self, parts: dict[str, Tensor]) -> FlatLayout:
        if self._layout is None:
            figures = torch.zeros(
                len(parts) + len(self.parameters), device=self.group.device
            )
            tensors = [*self.loss.norms.statistics, figures, *self.parameters]
            self._layout = FlatLayout(tensors, bucket_size=BUCKET_SIZE)
        return self._layout

    def _unpack(
        self,
        views: list[Tensor],
        names: list[str],
        losses: dict[int, Tensor],
        absent: set[int],
    ) -> Reduced:
        """Gradients and figures of the sum. Waits for a GPU only if a parameter was unused in all own shards."""
        *sums, figures = views[: self._first]
        figures = figures.clone()

        for parameter, grad in zip(self.parameters, views[self._first :], strict=True):
            parameter.grad = grad

        if absent:
            shards_with = figures[len(names) :].tolist()
            for place in absent:
                # As in torch: no weight decay and no momentum for unused parameters.
                if not shards_with[place]:
                    self.parameters[place].grad = None

        parts = dict(zip(names, figures.unbind(), strict=False))
        return Reduced(parts, _divided(sums, self.loss.config.compute.shards), losses)


@dataclass
class _Exchange:
    """Sends the last shard's vector to the other ranks, bucket by bucket, while its backward still runs.

    Buckets are sent in the same order on every rank: from the end of the network, whose gradients are ready first, to
    its start. Their sums arrive in that order too, each while the next buckets are computed.
    """

    layout: FlatLayout
    tree: TreeSum
    flat: Tensor  # the last shard's vector
    views: list[Tensor]  # of `flat`
    parameters: list[nn.Parameter]
    across: RankSum
    total: Tensor  # receives the sums

    def __post_init__(self) -> None:
        self.given = [False] * len(self.parameters)  # whether each has a gradient
        self._first = len(self.views) - len(self.parameters)  # the first gradient
        self._missing = [  # gradients of each bucket
            sum(place >= self._first for place in members)
            for members in self.layout.members
        ]

        self._next = len(self.layout.buckets) - 1
        # Buckets up to this index wait for statistics and figures.
        self._held = self.layout.bucket_of[self._first - 1]

    def on_grad_ready(self, place: int) -> bool:
        """Send the buckets that the gradient of parameter `place` completes; False if it was already sent."""
        bucket = self.layout.bucket_of[self._first + place]
        if bucket > self._next:
            return False

        self._missing[bucket] -= not self.given[place]
        self.given[place] = True
        while self._next > self._held and self._missing[self._next] == 0:
            self._send()
        return True

    def send_rest(self) -> None:
        """Send the remaining buckets, with zeros for parameters without a gradient."""
        while self._next >= 0:
            self._send()

    def _send(self) -> None:
        members = self.layout.members[self._next]
        bucket = self.layout.buckets[self._next]

        grads = [place for place in members if place >= self._first]
        _pack(
            [self.views[place] for place in grads],
            [self.parameters[place - self._first] for place in grads],
        )

        self.across.start(self.tree.close(self.flat, bucket), self.total[bucket])
        self._next -= 1


class DdpGradients:
    """torch's DistributedDataParallel over one batch of all shards of a rank.

    Running statistics and losses are averaged or summed over the ranks by the tree; DDP would keep those of rank 0.
    DDP's collectives are inside torch and cannot be announced one by one, so each place that makes some is announced
    instead: a rank that does not reach it has made fewer calls than the others, and is named.
    """

    def __init__(self, loss: BatchLoss) -> None:
        self.loss = loss
        self.state = loss.state
        self.group = loss.group
        self.network: nn.Module = AllHeads(self.state.model)
        self._layout: FlatLayout | None = None

        if self.group.world_size > 1:
            device = self.group.device
            self.group.contract.enter("wrap of DDP")
            # torch warns once if no parameter is unused, and about a renamed argument.
            warnings.filterwarnings(
                "ignore", "find_unused_parameters=True was|`broadcast_buffers`"
            )
            # find_unused_parameters also fixes the buckets: otherwise DDP repacks gradients in order of arrival from
            # the second step on, and a sum over ranks depends on the position in the bucket. A resumed run would
            # differ.
            self.network = DistributedDataParallel(
                self.network,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=True,
            )

    def __call__(self, shards: Sequence[ShardBatch], global_valid: Tensor) -> Reduced:
        """Put the reduced gradients into `.grad`. A collective."""
        norms, world_size = self.loss.norms, self.group.world_size
        device, watch = self.group.device, self.loss.watch
        watch.whole_batch(shards)
        norms.keep()

        with watch.span("copy"):
            # From page-locked memory: the host does not wait.
            whole = shards[0]._replace(
                image=torch.cat(
                    [each.image.to(device, non_blocking=True) for each in shards]
                ),
                target=torch.cat(
                    [each.target.to(device, non_blocking=True) for each in shards]
                ),
            )

        parts = self.loss(self.network, whole, global_valid)
        if world_size > 1:
            self.group.contract.enter("backward of DDP")

        # DDP averages over ranks, but the loss is already divided by all pixels.
        total = parts["total"] * world_size
        try:
            with watch.span("backward"), tf32(self.loss.config.train.precision):
                self.state.scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise CollectiveError(f"DDP got a gradient twice: {REENTRANT}") from error
        if self.loss.guard:
            self.loss.guard.check(self.state.step, whole.shard)

        with watch.span("reduction"):
            losses = torch.stack([part.detach() for part in parts.values()])
            tensors = [*norms.statistics, losses]
            self._layout = self._layout or FlatLayout(tensors)
            flat = self._layout.new()
            views = self._layout.views(flat)
            copy_all(views, tensors)

            norms.put_back()
            tree_over_ranks(flat, self.group)
        *sums, figures = views

        return Reduced(
            dict(zip(parts, figures.unbind(), strict=True)),
            _divided(sums, world_size),
            {whole.shard: parts["total"].detach()},
        )


def _divided(sums: list[Tensor], count: int) -> list[Tensor]:
    return list(torch._foreach_div(sums, count)) if sums else []


def _pack(views: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """Move gradients into the views, as zeros for parameters without one, so that all ranks send the same sizes."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    copy_all(views, grads)
    for parameter in parameters:
        parameter.grad = None
