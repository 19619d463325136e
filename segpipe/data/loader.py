"""Batches of uint8 in shared memory: the same bits for any number of workers and any way of starting them.

A worker assembles one whole shard batch and sends it as one flat tensor; now and then it makes samples again that
another one has delivered, which canary.py compares. torch's sharing strategy stays
`file_descriptor`: one descriptor per batch alive, about workers * prefetch and those that the caller keeps, far below
the usual limit of 1024. The other strategy, `file_system`, leaves files in /dev/shm behind when a process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from segpipe.data.augment import Augmenter
from segpipe.data.order import Order
from segpipe.data.workers import LOOK_S, end, isolate, take, watch_over, workers_context
from segpipe.errors import ConfigError, SegpipeError
from segpipe.keys import sample_key
from segpipe.purity.canary import Canary, Task, Trail, Witness, augment_watched, tasks, witness

if TYPE_CHECKING:
    from segpipe.data.samples import Samples

SHARED_MEMORY = "/dev/shm"
ID_BYTES = 16  # epoch and index of a sample, int64 each
PIXEL_BYTES = 4  # RGB and class id


class ShardBatch(NamedTuple):
    """The samples of one logical shard in one step."""

    step: int
    shard: int
    image: Tensor  # uint8 (b, H, W, 3), RGB
    target: Tensor  # uint8 (b, H, W), train ids
    epoch: Tensor  # int64 (b,)
    index: Tensor  # type: ignore[assignment]  # int64 (b,); hides tuple.index, which nobody needs here


def train_batches(
    samples: Samples,
    augmenter: Augmenter,
    order: Order,
    *,
    seed: int,
    shards: range,
    steps: range,
    workers: int,
    start_method: str,
    prefetch: int,
    pin_memory: bool,
    timeout_s: float = 300.0,
) -> Generator[ShardBatch, None, None]:
    """Shard batches of `steps` and `shards`, step by step and inside a step shard by shard.

    Workers start at the first `next` and end with the iterator; closing it half-way is safe. Raises ConfigError at the
    call when shared memory is too small, and from `next` DataError when a sample cannot be read, or when a worker died
    or sent nothing for `timeout_s`, and ImpureAugmentError when a sample that was delivered has other bytes when it is
    made again (`augment.canary`).

    A single worker is joined by a process that does nothing but make samples again; without workers the caller's own
    does it, some samples later.
    """
    every = augmenter.config.canary
    height, width = augmenter.config.crop_size
    item_bytes = order.samples_per_shard * (height * width * PIXEL_BYTES + ID_BYTES)
    _check_shared_memory(workers, prefetch, item_bytes)
    items = _Shards(samples, augmenter, seed)
    plan = partial(tasks, _Places(steps, shards), order, seed=seed, every=every, workers=workers)
    if workers == 1 and every:
        deliveries = (task for task in plan() if task.place is not None)
        repeats = (task for task in plan() if task.place is None)
        loaders = [
            _loader(items, deliveries, workers, start_method, prefetch, pin_memory),
            _loader(items, repeats, 1, start_method, prefetch=1, pin_memory=False),
        ]
        stream = _stream(loaders, timeout_s, (int(task.place is None) for task in plan()))
    else:
        stream = _stream([_loader(items, plan(), workers, start_method, prefetch, pin_memory)], timeout_s)
    return _shard_batches(stream, Canary(samples))


def eval_images(
    samples: Samples, indices: Sequence[int], *, workers: int, start_method: str, timeout_s: float = 300.0
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Whole images of any size as (index, image uint8 (1, H, W, 3), target uint8 (1, H, W)), in the order of `indices`.

    Raises DataError as `train_batches` does.
    """
    loader = _loader(_Frames(samples), _Places(indices, range(1)), workers, start_method, prefetch=2, pin_memory=False)
    with closing(_stream([loader], timeout_s)) as stream:
        for packed in stream:
            assert packed.place is not None
            image, target, _ = _views(packed)
            yield packed.place[0], image, target


class _Packed(NamedTuple):
    """What a worker sends: `data` holds the ids of all samples, then their images, then their targets."""

    place: tuple[int, int] | None  # (step, shard) of a shard batch, (index, 0) of a whole image, or None; see Task
    shape: tuple[int, int, int]  # samples, height, width
    data: Tensor  # uint8, flat: one block of shared memory
    witnesses: tuple[Witness, ...] = ()  # of watched samples


def _pack(place: tuple[int, int] | None, num: int, height: int, width: int) -> _Packed:
    return _Packed(
        place, (num, height, width), torch.empty(num * (ID_BYTES + height * width * PIXEL_BYTES), dtype=torch.uint8)
    )


def _views(packed: _Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Image (b, H, W, 3), target (b, H, W) and ids int64 (2, b) in the memory of `packed`."""
    num, height, width = packed.shape
    first_pixel, first_label = num * ID_BYTES, num * (ID_BYTES + 3 * height * width)
    ids, image = packed.data[:first_pixel], packed.data[first_pixel:first_label]
    target = packed.data[first_label:]
    return image.view(num, height, width, 3), target.view(num, height, width), ids.view(torch.int64).view(2, num)


def _shard_batches(stream: Generator[_Packed, None, None], canary: Canary) -> Generator[ShardBatch, None, None]:
    with closing(stream):
        for packed in stream:
            image, target, ids = _views(packed)
            see = canary.compare if packed.place is None else canary.hold
            for made in packed.witnesses:
                epoch, index = ids[:, made.row].tolist()
                see((epoch, index), (image[made.row].numpy(), target[made.row].numpy()), made)
            if packed.place is not None:
                yield ShardBatch(*packed.place, image, target, ids[0], ids[1])


@dataclass(frozen=True)
class _Failure:
    """An expected error of a worker, sent as an item: it reaches the caller in order and without a traceback."""

    error: SegpipeError


class _Items(Dataset[Any]):
    def pack(self, request: Any) -> _Packed:
        raise NotImplementedError

    def __getitem__(self, request: Any) -> _Packed | _Failure:
        try:
            return self.pack(request)
        except SegpipeError as error:
            return _Failure(error)


@dataclass(frozen=True)
class _Shards(_Items):
    samples: Samples
    augmenter: Augmenter
    seed: int

    def pack(self, request: Task) -> _Packed:
        height, width = self.augmenter.config.crop_size
        packed = _pack(request.place, len(request.members), height, width)
        image, target, ids = (part.numpy() for part in _views(packed))
        trails: dict[int, Trail] = {}
        for row, (epoch, index) in enumerate(request.members):
            key, frame = sample_key(self.seed, epoch, index, "augment"), self.samples.read(index)
            if row in request.watched:
                (image[row], target[row]), trails[row] = augment_watched(self.augmenter, frame, key)
            else:
                image[row], target[row] = self.augmenter(*frame, key)
            ids[:, row] = epoch, index
        return packed._replace(witnesses=tuple(witness(row, image[row], target[row], trails[row]) for row in trails))


@dataclass(frozen=True)
class _Frames(_Items):
    samples: Samples

    def pack(self, request: tuple[int, int]) -> _Packed:
        image, target = self.samples.read(request[0])
        packed = _pack(request, 1, *target.shape)
        views = _views(packed)
        views[0].numpy()[0], views[1].numpy()[0] = image, target
        return packed


@dataclass(frozen=True)
class _Places:
    """Every pair of an outer and an inner number, outer-major; may be iterated again, unlike itertools.product."""

    outer: Sequence[int]
    inner: Sequence[int]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((first, second) for first in self.outer for second in self.inner)

    def __len__(self) -> int:
        return len(self.outer) * len(self.inner)


def _loader(
    items: _Items, requests: Iterable[Any], workers: int, start_method: str, prefetch: int, pin_memory: bool
) -> DataLoader[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        return DataLoader(
            items,
            sampler=requests,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=isolate,
            timeout=LOOK_S if workers else 0,
            multiprocessing_context=workers_context(start_method) if workers else None,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # its one draw would otherwise come from the trainer's global state
        )


def _as_it_is(item: Any) -> Any:
    return item


def _stream(
    loaders: Sequence[DataLoader[Any]], timeout_s: float, turns: Iterable[int] = repeat(0)
) -> Generator[_Packed, None, None]:
    """Items of loaders that take `turns`, until one ends; expected errors of workers, and their deaths, come here."""
    sources: list[Any] = []
    try:
        for loader in loaders:
            sources.append(_start(loader))
        for turn in turns:
            item = _take(sources[turn], timeout_s)
            if item is None:
                return
            yield item
    finally:
        end([source for source in sources if hasattr(source, "_workers")])


def _start(loader: DataLoader[Any]) -> Any:
    # torch's own SIGCHLD handler raises RuntimeError wherever the trainer happens to be, even inside a write of a
    # checkpoint. Without it a death is noticed when the next batch is asked for, within 5 s.
    before = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        # Python 3.12 and later warn of any thread; the workers take no lock that a thread of torch could hold.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        source = iter(loader)
    watch_over(source)
    if signal.getsignal(signal.SIGCHLD) is not before:
        signal.signal(signal.SIGCHLD, before)
    return source


def _take(source: Any, timeout_s: float) -> _Packed | None:
    try:
        item = take(source, timeout_s)
    except StopIteration:
        return None
    if isinstance(item, _Failure):
        raise item.error
    assert isinstance(item, _Packed)
    return item


def _check_shared_memory(workers: int, prefetch: int, item_bytes: int) -> None:
    if not workers or not os.path.isdir(SHARED_MEMORY):
        return
    needed, free = workers * prefetch * item_bytes, shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise ConfigError(
            f"data.workers = {workers} and data.prefetch = {prefetch} need {needed / 2**20:.0f} MiB of shared memory, "
            f"but {SHARED_MEMORY} has {free / 2**20:.0f} MiB free. Enlarge it (docker run --shm-size=...), or lower "
            f"one of the two."
        )
