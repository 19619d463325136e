"""What would spoil a run or stop its loader processes, found before they start, each with its fix.

torch and OpenCV are imported inside the functions.
"""

from __future__ import annotations

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

TINY = 10  # times as small as the usual image


def check_splits(config: Config, splits: Splits) -> None:
    """Raise DataError or ConfigError for the first thing in the data that would spoil a run."""
    from segpipe.data.frequency import check_given_weights
    from segpipe.data.samples import check_labelled, image_files, sequences
    from segpipe.datasets.overlap import check_overlap
    from segpipe.datasets.problems import verify

    data, (train, val) = config.data, splits
    verify(data, {"train": train, data.split: val})
    if data.split != "train" and not data.allow_overlap:
        check_overlap(image_files(train), image_files(val), data.split)
    for opened in splits:  # scores are told by sequence, after the training
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


def size_warnings(config: Config, samples: DataSet) -> Iterator[str]:
    """What `check_crop` would refuse, and images that are tiny beside the others."""
    try:
        check_crop(config, samples)
    except ConfigError as error:
        yield f"training would refuse this: {error}"
    sides = sorted(min(size) for size in image_sizes(samples).elements())
    usual = sides[len(sides) // 2]
    if sides[0] * TINY < usual:
        count = sum(side * TINY < usual for side in sides)
        yield (
            f"{count} of the {len(sides)} training images {'are' if count > 1 else 'is'} tiny: the smallest has a side "
            f"of {sides[0]} pixels, and half of the images have one of at least {usual}. Remove what is no photo."
        )


def worker_problems(config: Config, samples: DataSet) -> Iterator[str]:
    """A message for each object that cannot be sent to loader processes; a fork sends none."""
    from segpipe.data.augment import Augmenter

    method = config.data.start_method
    if not config.data.workers or method == "fork":
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
