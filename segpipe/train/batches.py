"""What an update takes from the data set: this rank's batches, and the class weights of the loss."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from segpipe.data import Float64, Int64
from segpipe.data.augment import Augmenter
from segpipe.data.data_set import CachedSamples, DataSet
from segpipe.data.loader import ShardBatch, train_batches
from segpipe.data.order import (
    Order,
    PixelCounts,
    check_given_weights,
    draws,
    merged_counts,
    pixels_seen,
    repeats_by_class,
    repeats_by_sequence,
)
from segpipe.data.samples import over, sequences
from segpipe.distributed.group import Group
from segpipe.losses.cross_entropy import class_weights
from segpipe.settings.config import Config
from segpipe.train.canary import Canary

SAY_EVERY_S = 10.0  # while masks are counted


@dataclass(frozen=True)
class Sampling:
    """How often the run takes each training sample, its batches, and the class weights of its loss."""

    config: Config
    samples: DataSet
    counts: PixelCounts | None = None  # if order or loss needs them, see `counted`

    def batches(self, group: Group, steps: range) -> Generator[ShardBatch, None, None]:
        """This rank's shard batches of `steps`; workers start when the first batch is requested."""
        compute, data, samples = self.config.compute, self.config.data, self.samples
        return train_batches(
            CachedSamples(samples, data.cache_mib),
            Augmenter(self.config.augment),
            self.order(),
            shards=group.own_shards(compute.shards),
            steps=steps,
            workers=data.workers,
            start_method=data.start_method,
            prefetch=data.prefetch,
            pin_memory=group.device.type == "cuda",
            timeout_s=data.timeout_s,
            repeats=None if compute.mode == "off" else Canary(samples),
        )

    def first_shard(self, workers: int = 0) -> ShardBatch:
        """The run's first shard, made by `workers` loader processes, or in this process if 0."""
        data = self.config.data
        stream = train_batches(
            self.samples,
            Augmenter(self.config.augment),
            self.order(),
            shards=range(1),
            steps=range(1),
            workers=workers,
            start_method=data.start_method,
            prefetch=data.prefetch,
            timeout_s=data.timeout_s,
        )
        with closing(stream):
            return next(stream)

    def order(self) -> Order:
        """Order that says which samples each update takes."""
        seed, compute = self.config.seed, self.config.compute
        return Order(
            seed,
            len(self.samples),
            compute.shards,
            compute.samples_per_shard,
            draws(self.repeats, self.sets, seed),
        )

    @cached_property
    def repeats(self) -> Float64 | None:
        """How often each sample occurs in a pass over its data set; None: once."""
        data = self.config.data
        if data.balance_by == "sequence":
            return repeats_by_sequence(
                [
                    sequences(part.samples, data.sequence)
                    for part in self.samples.parts()
                ]
            )
        if not data.balance:
            return None
        assert self.counts is not None
        return repeats_by_class(data.balance, self.sets, self.counts)

    @cached_property
    def sets(self) -> list[tuple[int, float]]:
        """Number of samples and weight of each data set of a mixture."""
        return [(len(part.samples), part.weight) for part in self.samples.parts()]

    @cached_property
    def pixels(self) -> Int64 | Float64:
        """Pixels of each class as seen in training, (C,)."""
        assert self.counts is not None
        return pixels_seen(self.repeats, self.sets, self.counts)

    def loss_weights(self) -> torch.Tensor | None:
        """Weight of every class in the loss, (C,): as set, or from its share of the pixels; None without weights."""
        chosen = self.config.loss.class_weights
        if chosen == "none":
            return None
        if isinstance(chosen, list):
            check_given_weights(chosen, self.samples.classes.names)
            return torch.tensor(chosen)
        return class_weights(torch.from_numpy(self.pixels), chosen)

    def told_repeats(self) -> str:
        """A phrase on how often images occur."""
        repeats = self.repeats
        assert repeats is not None
        often = f"images occur {repeats.mean():.2f} times per pass on average, at most {repeats.max():.2f} times"
        if repeats.max() > 1:
            return often
        if self.config.data.balance:
            return f"{often}: no class is that rare. Raise it, up to 1"
        return f"{often}: all sequences have the same number of images"

    def told_weights(self) -> str:
        """A phrase on how much more the rarest class weighs than the most common one, of those seen in training."""
        weights, pixels = self.loss_weights(), self.pixels
        assert weights is not None
        present = np.flatnonzero(pixels)
        if not present.size:
            return "no class has a pixel"
        rarest = present[pixels[present].argmin()]
        commonest = pixels.argmax()
        names = self.samples.classes.names
        return (
            f"{names[rarest]}, the rarest class, weighs {weights[rarest] / weights[commonest]:.1f} times as much as "
            f"{names[commonest]}, the most common"
        )


def counted(
    config: Config,
    group: Group,
    samples: DataSet,
    say: Callable[[str], None] = lambda text: None,
) -> Sampling:
    """The sampling of a run, with the pixels of each class by sample if order or loss needs them; equal on every rank.

    The ranks share the work. Raises DataError when a mask cannot be read.
    """
    data, chosen = config.data, config.loss.class_weights
    by_frequency = isinstance(chosen, str) and chosen != "none"
    sampling = Sampling(config, samples)
    if data.balance_by == "sequence":
        say(f"data.balance_by = sequence: {sampling.told_repeats()}")
    if not data.balance and not by_frequency:
        return sampling
    # Balancing needs the counts of every sample.
    indices = list(range(len(samples))) if data.balance else samples.countable()
    own = indices[group.rank :: group.world_size]
    start = last = time.monotonic()
    what = "classes of the training masks"

    def progress(done: int, _: int) -> None:
        nonlocal last
        if time.monotonic() - last > SAY_EVERY_S:
            last = time.monotonic()
            say(f"counting the {what}: {done * group.world_size} of {len(indices)}")

    rows = np.array(over(samples, samples.counts, own, progress), np.int64)
    rows = rows.reshape(len(own), samples.classes.num_classes)
    counts = merged_counts(group.gather(PixelCounts(rows, np.array(own, np.int64))))
    seconds = time.monotonic() - start
    say(f"counted the {what}: {len(indices)} in {seconds:.1f} s")

    sampling = Sampling(config, samples, counts)
    if data.balance:
        say(f"data.balance = {data.balance:g}: {sampling.told_repeats()}")
    if by_frequency:
        say(f"loss.class_weights = {chosen}: {sampling.told_weights()}")
    return sampling
