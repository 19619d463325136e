"""What would spoil a run or stop its loader processes, found before they start, each with its fix.

torch and OpenCV are imported inside the functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

from segpipe.errors import ConfigError, DataError
from segpipe.settings.config import SETTINGS

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.data.samples import Splits
    from segpipe.settings.config import Config

BYTES_PER_PIXEL = 4  # RGB and class id
Checks = Iterable[Callable[[], object]]


def checks(config: Config, splits: Splits) -> list[Callable[[], object]]:
    """What raises DataError or ConfigError for data of whole files that would spoil a run."""
    from segpipe.data.order import check_given_weights
    from segpipe.data.samples import check_labelled, check_scorable, sequences
    from segpipe.datasets.problems import check_overlap

    data, (train, val) = config.data, splits
    found: list[Callable[[], object]] = [partial(check_labelled, train)]
    if data.split != "train":
        found.append(partial(check_scorable, val, data.split))
        if not data.allow_overlap:
            found.append(partial(check_overlap, train, val, data.split))
    if data.sequence:  # scores are told by it, after the training
        found += [partial(sequences, samples, data.sequence) for samples in splits]
    if isinstance(weights := config.loss.class_weights, list):
        found.append(partial(check_given_weights, weights, train.classes.names))
    return found


def refusals(checks: Checks) -> list[str]:
    """The messages of checks that raise."""
    found = []
    for check in checks:
        try:
            check()
        except (ConfigError, DataError) as error:
            found.append(str(error))
    return found


def check_crop(config: Config, samples: DataSet) -> None:
    """Raise ConfigError for a crop larger than every image at its largest scale; nobody would notice the padding."""
    from segpipe.data.samples import image_sizes

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


def check_workers(config: Config, samples: DataSet) -> None:
    """Raise ConfigError for what would stop loader processes."""
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
        raise ConfigError(
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
        except Exception as error:  # whatever a class raises in __reduce__
            raise ConfigError(
                f"{setting} cannot be pickled ({type(error).__name__}: {error}), but data.start_method = {method} "
                f"sends it to every loader process. Open files and databases in read, not in __init__, and define "
                f"functions at the top of a module; or set data.start_method=fork."
            ) from error
