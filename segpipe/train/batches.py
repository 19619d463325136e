"""What an update takes from the data set: this rank's batches, and the weights of the classes in the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from segpipe.data.augment import Augmenter
from segpipe.data.loader import train_batches
from segpipe.data.order import Order
from segpipe.data.samples import CachedSamples, class_pixels
from segpipe.losses.pixelwise import class_weights
from segpipe.purity.canary import Canary

if TYPE_CHECKING:
    from collections.abc import Generator

    from segpipe.data.loader import ShardBatch
    from segpipe.data.samples import Samples
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config


def shard_stream(config: Config, group: Group, samples: Samples, steps: range) -> Generator[ShardBatch, None, None]:
    """This rank's shard batches of `steps`; workers start when the first is asked for."""
    compute, data = config.compute, config.data
    return train_batches(
        CachedSamples(samples, data.cache_mib) if data.cache_mib else samples,
        Augmenter(config.augment),
        Order(config.seed, len(samples), compute.shards, compute.samples_per_shard),
        seed=config.seed,
        shards=group.own_shards(compute.shards),
        steps=steps,
        workers=data.workers,
        start_method=data.start_method,
        prefetch=data.prefetch,
        pin_memory=group.device.type == "cuda",
        timeout_s=data.timeout_s,
        repeats=None if compute.mode == "off" else Canary(samples),
    )


def loss_weights(config: Config, samples: Samples) -> torch.Tensor | None:
    """Weight of every class in the loss, (C,), from its share of the pixels in `samples`; None without weights."""
    if config.loss.class_weights == "none":
        return None
    return class_weights(torch.from_numpy(class_pixels(samples)), config.loss.class_weights)
