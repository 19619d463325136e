"""What would spoil a run or stop its loader processes, found before they start, each with its fix.

torch and OpenCV are imported inside the functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

from segpipe.data.samples import image_sizes
from segpipe.errors import ConfigError, SegpipeError
from segpipe.settings.config import SETTINGS

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.data.loader import ShardBatch
    from segpipe.data.samples import Splits
    from segpipe.settings.config import Config

BYTES_PER_PIXEL = 4  # RGB and class id


def check_splits(config: Config, splits: Splits) -> None:
    """Raise DataError or ConfigError for the first thing in the data that would spoil a run."""
    from segpipe.data.frequency import check_given_weights
    from segpipe.data.samples import check_labelled, sequences
    from segpipe.datasets.census import check_overlap
    from segpipe.datasets.problems import verify

    data, (train, val) = config.data, splits
    verify(data, {"train": train, data.split: val})
    if data.split != "train" and not data.allow_overlap:
        check_overlap(train, val, data.split)
    for opened in splits if data.sequence else ():
        # Scores are told by sequence, after the training.
        sequences(opened, data.sequence)
    check_crop(config, train)
    check_labelled(train)
    if isinstance(config.loss.class_weights, list):
        check_given_weights(config.loss.class_weights, train.classes.names)


def check_crop(config: Config, samples: DataSet) -> None:
    """Raise ConfigError for a crop larger than every image at its largest scale; nobody would notice the padding."""
    sizes = image_sizes(samples)
    largest = config.augment.scale[1]
    height = max(size[0] for size in sizes)
    width = max(size[1] for size in sizes)
    crop = config.augment.crop_size
    fitting = [min(crop[0], int(height * largest)), min(crop[1], int(width * largest))]
    fix = f"Set 'augment.crop_size={fitting}' or smaller."
    if min(fitting) < SETTINGS["augment.crop_size"].low:
        fix = "Use larger images, or raise the second number of augment.scale."
    if crop != fitting:
        raise ConfigError(
            f"augment.crop_size = {crop}, but the training images have at most {height}x{width} pixels (height x width)"
            f" and augment.scale reaches {largest}. {fix}"
        )


def worker_problems(config: Config, samples: DataSet) -> Iterator[str]:
    """A message for each thing that would stop loader processes; none without them."""
    from segpipe.data.augment import Augmenter

    data, method = config.data, config.data.start_method
    if not data.workers:
        return
    # The kernel ends a process whose shared memory no page backs, without a word.
    height, width = config.augment.crop_size
    batch = config.compute.samples_per_shard * height * width * BYTES_PER_PIXEL
    needed = data.workers * data.prefetch * batch
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        yield (
            f"data.workers = {data.workers} and data.prefetch = {data.prefetch} need {needed / 2**20:.0f} MiB of "
            f"shared memory, but this machine has {memory / 2**20:.0f} MiB. Lower one of the two."
        )
    if method == "fork":  # which sends no object
        return
    sent = {
        f"data.name = {config.data.name}": samples,
        f"augment.extra = {config.augment.extra}": Augmenter(config.augment),
    }
    for setting, value in sent.items():
        try:
            ForkingPickler.dumps(value)
        except (
            Exception
        ) as error:  # whatever a class raises in __getstate__ or __reduce__
            yield (
                f"{setting} cannot be pickled ({type(error).__name__}: {error}), but data.start_method = {method} "
                f"sends it to every loader process. Open files and databases in read, not in __init__, and define "
                f"functions at the top of a module; or set data.start_method=fork."
            )


def first_batch(config: Config, samples: DataSet) -> tuple[ShardBatch | None, str]:
    """The first shard batch as training would see it, made by one loader process, or a message why there is none."""
    import torch

    from segpipe.distributed.group import Group
    from segpipe.train.batches import shard_stream

    workers = min(config.data.workers, 1)
    data = replace(config.data, workers=workers, cache_mib=0, balance=0.0)
    # Without a canary.
    alone = replace(config, data=data, compute=replace(config.compute, mode="off"))
    group = Group(0, 0, 1, torch.device("cpu"))
    try:
        with closing(shard_stream(alone, group, samples, range(1), None)) as batches:
            return next(batches), ""
    except SegpipeError as error:
        return None, str(error)
