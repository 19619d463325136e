"""What would stop the loader processes of a run, found before they start, each with its fix.

torch and OpenCV are imported inside the functions.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from segpipe.data.data_set import DataSet, SubSet
from segpipe.data.samples import image_sizes
from segpipe.errors import ConfigError, DataError, SegpipeError
from segpipe.plugins import is_path

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.data.loader import Pixels, ShardBatch
    from segpipe.settings.config import Config

BYTES_PER_PIXEL = 4  # RGB and class id
FILES_PER_WORKER = 8  # its queues, pipes and sentinel
TINY = 10  # times as small as the usual image
FILES_OF_A_RUN = 96  # libraries, logs, checkpoints


def check_workers(config: Config, samples: DataSet) -> None:
    """Raise ConfigError for the first thing that would stop loader processes."""
    for problem in worker_problems(config, samples):
        raise ConfigError(problem)


def check_crop(config: Config, samples: DataSet) -> None:
    """Raise ConfigError for a crop larger than every image at its largest scale; nobody would notice the padding."""
    sizes = image_sizes(samples)
    largest = config.augment.scale[1]
    height = max(size[0] for size in sizes)
    width = max(size[1] for size in sizes)
    crop = config.augment.crop_size
    fitting = [min(crop[0], int(height * largest)), min(crop[1], int(width * largest))]
    if crop != fitting:
        raise ConfigError(
            f"augment.crop_size = {crop}, but the training images have at most {height}x{width} pixels (height x width)"
            f" and augment.scale reaches {largest}. Set 'augment.crop_size={fitting}' or smaller."
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
    """A message for each thing that would stop loader processes; none without them."""
    if not config.data.workers:
        return
    yield from _memory_problems(config)
    yield from _file_problems(config)
    if config.data.start_method != "fork":
        yield from _pickle_problems(config, samples)
    elif _uses_cuda(config, samples):
        yield (
            "reading or augmenting a sample initialised CUDA in this process, and a loader process that is forked "
            "later cannot use CUDA again. Keep code of a data set or transform off the GPU, or set "
            "data.start_method=spawn."
        )


def _memory_problems(config: Config) -> Iterator[str]:
    data, (height, width) = config.data, config.augment.crop_size
    batch = config.compute.samples_per_shard * height * width * BYTES_PER_PIXEL
    batches = data.workers * data.prefetch * batch
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if batches > memory:
        yield (
            f"data.workers = {data.workers} and data.prefetch = {data.prefetch} need {batches / 2**20:.0f} MiB of "
            f"shared memory, but this machine has {memory / 2**20:.0f} MiB. Lower one of the two."
        )


def _file_problems(config: Config) -> Iterator[str]:
    data = config.data
    needed = FILES_OF_A_RUN + data.workers * FILES_PER_WORKER
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if needed > allowed:
        yield (
            f"data.workers = {data.workers} may keep {needed} files open, but {allowed} are allowed. Run "
            f"`ulimit -n {2 * needed}` before (in Docker: --ulimit nofile={2 * needed}), or lower it."
        )


def _pickle_problems(config: Config, samples: DataSet) -> Iterator[str]:
    from segpipe.data.augment import Augmenter

    sent = {
        f"data.name = {config.data.name}": samples,
        f"augment.extra = {config.augment.extra}": Augmenter(config.augment),
    }
    for setting, value in sent.items():
        if found := unpicklable(value):
            where, reason = found
            yield (
                f"{setting}: {type(value).__name__}{where} cannot be pickled ({reason}), but data.start_method = "
                f"{config.data.start_method} sends it to every loader process. Open files and databases in read, not "
                f"in __init__, and define functions at the top of a module; or set data.start_method=fork."
            )


def unpicklable(value: Any, where: str = "") -> tuple[str, str] | None:
    """Path of the innermost attribute or item that cannot be sent to another process, and why; None if all can."""
    try:
        ForkingPickler.dumps(value)
        return None
    except Exception as error:  # whatever a class raises in __getstate__ or __reduce__
        for name, inner in _parts(value):
            if found := unpicklable(inner, f"{where}{name}"):
                return found
        return where, f"{type(error).__name__}: {error}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What pickling a value sends of it: attributes as `.name`, items as `[key]`."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, partial):
        for name in ("func", "args", "keywords"):
            yield f".{name}", getattr(value, name)
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif not isinstance(value, (type, FunctionType)):
        state = value.__getstate__()
        # A tuple has the attributes of __slots__ too.
        for attributes in state if isinstance(state, tuple) else (state,):
            if isinstance(attributes, dict):
                yield from ((f".{name}", item) for name, item in attributes.items())


def _uses_cuda(config: Config, samples: DataSet) -> bool:
    """Whether code of the user, read and augmented once here, initialises CUDA; False where it was before."""
    if not (is_path(config.data.name) or any(map(is_path, config.augment.extra))):
        return False
    import torch

    from segpipe.data.augment import Augmenter

    initialised: Callable[[], bool] = torch.cuda.is_initialized
    if initialised():
        return False
    Augmenter(config.augment)(*samples.read(0), 0)
    return initialised()


class ThreadsSeen(DataSet):
    """Samples whose `read` raises DataError in a process with threads of OpenCV or OpenMP."""

    def __init__(self, samples: DataSet) -> None:
        self.samples = samples

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples.name(index)

    def parts(self) -> list[SubSet]:
        return self.samples.parts()

    def read(self, index: int) -> Pixels:
        import cv2
        import torch

        sample = self.samples.read(index)
        threads = {"OpenCV": cv2.getNumThreads(), "torch": torch.get_num_threads()}
        for library, number in threads.items():
            if number > 1:
                raise DataError(
                    f"{library} uses {number} threads in a loader process: code of a data set or transform has set "
                    f"them, and the workers compete for the cores. Leave the number of threads alone."
                )
        return sample


def first_batch(config: Config, samples: DataSet) -> tuple[ShardBatch | None, str]:
    """The first shard batch as training would see it, made by one loader process, or a message why there is none."""
    import torch

    from segpipe.distributed.group import Group
    from segpipe.train.batches import shard_stream

    data = replace(
        config.data,
        workers=min(config.data.workers, 1),
        cache_mib=0,
        balance=0.0,
    )
    # Without a canary.
    alone = replace(config, data=data, compute=replace(config.compute, mode="off"))
    group = Group(0, 0, 1, torch.device("cpu"))
    seen = ThreadsSeen(samples) if data.workers else samples
    try:
        with closing(shard_stream(alone, group, seen, range(1), None)) as batches:
            return next(batches), ""
    except SegpipeError as error:
        return None, str(error)
