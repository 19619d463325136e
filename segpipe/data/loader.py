"""Batches of uint8 in shared memory: the same bits for any number of workers, start method and transport.

A worker assembles one whole shard batch as one flat block: in place, in a slot of the ring (ring.py), or in a tensor of
its own that torch's DataLoader passes on (workers.py).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe.data.plan import Member, Request, requests
from segpipe.data.ring import Ring
from segpipe.data.workers import Delivery, InProcess, Room, Source, TorchLoader
from segpipe.errors import ConfigError
from segpipe.keys import sample_key
from segpipe.models.preprocess import colored

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter, Crop
    from segpipe.data.data_set import Samples
    from segpipe.data.order import Order
    from segpipe.data.samples import CachedSamples

SHARED_MEMORY = "/dev/shm"
ROW_BYTES = (
    16 + 48
)  # of a sample beside its pixels: epoch and index, int64; its color, int32 (3, 4)
PIXEL_BYTES = 4  # RGB and class id
WHOLE_BYTES = (
    2**28
)  # of a slot for whole images; memory is only used as far as an image reaches
Pixels = tuple[
    NDArray[np.uint8], NDArray[np.uint8]
]  # image (H, W, 3) and target (H, W)


class ShardBatch(NamedTuple):
    """The samples of one logical shard in one step."""

    step: int
    shard: int
    image: Tensor  # uint8 (b, H, W, 3), RGB
    target: Tensor  # uint8 (b, H, W), train ids
    epoch: Tensor  # int64 (b,)
    index: Tensor  # type: ignore[assignment]  # int64 (b,); hides tuple.index, which nobody needs here
    color: Tensor | None = (
        None  # int32 (b, 3, 4): what the device still has to apply, see models/preprocess.py
    )

    def finished(self) -> NDArray[np.uint8]:
        """Images (b, H, W, 3) as the network sees them, after color."""
        image = (
            self.image
            if self.color is None
            else colored(self.image, self.color).to(torch.uint8)
        )
        return image.numpy()


class Repeats(Protocol):
    """Compares watched samples (see plan.py) as delivered with the same samples as another process made them."""

    @property
    def augment(self) -> Callable[[Augmenter, Pixels, int, bool], tuple[Crop, Any]]:
        """Called in a worker: the augmented sample, and what is compared of it; the last argument: made again."""

    def hold(self, member: Member, pixels: Pixels, made: Any) -> None:
        """A watched sample is delivered."""

    def compare(self, member: Member, pixels: Pixels, made: Any) -> None:
        """It was made again; raises when it is another."""


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
    transport: str = "ring",
    replace: bool = False,
    repeats: Repeats | None = None,
) -> Generator[ShardBatch, None, None]:
    """Shard batches of `steps` and `shards`, step by step and inside a step shard by shard.

    Workers start at the first `next` and end with the iterator; closing it half-way is safe. Raises ConfigError at the
    call when shared memory is too small, and from `next` DataError when a sample cannot be read, or when a worker died
    or sent nothing for `timeout_s` (with `replace`, another worker then takes its place), and what `repeats.compare`
    raises.

    With `repeats`, one sample in `augment.canary` is made again by another worker. A single worker is joined by a
    process that does nothing else; without workers the caller's own does it, some samples later.
    """
    every = augmenter.config.canary if repeats is not None else 0
    height, width = augmenter.config.crop_size
    item_bytes = order.samples_per_shard * (height * width * PIXEL_BYTES + ROW_BYTES)
    if transport == "dataloader":
        _check_shared_memory(workers, prefetch, item_bytes)
    items = _Shards(
        samples,
        augmenter,
        seed,
        repeats.augment if repeats is not None else _not_watched,
    )

    def plan() -> Iterator[Request]:
        return requests(
            product(steps, shards), order, seed=seed, every=every, workers=workers
        )

    how = Delivery(
        workers, start_method, prefetch, pin_memory, timeout_s, transport, replace
    )
    # Of two steps, the second may be asked for before the first is dropped; this module keeps one, too.
    deliver = partial(_source, items, slot_bytes=item_bytes, spare=2 * len(shards) + 1)
    if workers == 1 and every:
        deliveries = (request for request in plan() if request.place is not None)
        again = (request for request in plan() if request.place is None)
        starts = [
            partial(deliver, deliveries, how),
            partial(deliver, again, dataclasses.replace(how, prefetch=1)),
        ]
        stream = _stream(starts, (int(request.place is None) for request in plan()))
    else:
        stream = _stream([partial(deliver, plan(), how)])
    return _shard_batches(stream, repeats, augmenter.defers_color)


def eval_images(
    samples: Samples,
    indices: Sequence[int],
    *,
    workers: int,
    start_method: str,
    timeout_s: float = 300.0,
    transport: str = "ring",
    cache: CachedSamples | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Whole images of any size as (index, image uint8 (1, H, W, 3), target uint8 (1, H, W)), in the order of `indices`.

    Those that are in `cache` are not loaded, and the others are kept there if they fit. Raises DataError as
    `train_batches` does.
    """
    missing = [(index, 0) for index in indices if cache is None or index not in cache]
    how = Delivery(
        workers if missing else 0,
        start_method,
        timeout_s=timeout_s,
        transport=transport,
    )
    start = partial(
        _source, _Images(samples), iter(missing), how, slot_bytes=WHOLE_BYTES, spare=2
    )
    with closing(_stream([start])) as stream:
        for index in indices:
            if (
                cache is not None and index in cache
            ):  # a copy: what is kept is read-only
                image, target = (
                    torch.from_numpy(part[None].copy()) for part in cache.read(index)
                )
            else:
                image, target, _, _ = _views(next(stream))
                if cache is not None:
                    cache.keep(index, image[0].numpy().copy(), target[0].numpy().copy())
            yield index, image, target


class _Packed(NamedTuple):
    """What a worker sends: `data` holds ids and colors of all samples, then their images, then their targets."""

    place: (
        tuple[int, int] | None
    )  # (step, shard) of a shard batch, (index, 0) of a whole image, or None; see Request
    shape: tuple[int, int, int]  # samples, height, width
    data: Tensor  # uint8, flat: one block of shared memory
    made: tuple[
        tuple[int, Any], ...
    ] = ()  # rows of watched samples, and what is compared of them


def _pack(
    room: Room, place: tuple[int, int] | None, num: int, height: int, width: int
) -> _Packed:
    return _Packed(
        place,
        (num, height, width),
        room.take(num * (ROW_BYTES + height * width * PIXEL_BYTES)),
    )


def _views(packed: _Packed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Image (b, H, W, 3), target (b, H, W), ids int64 (2, b), color int32 (b, 3, 4) in the memory of `packed`."""
    num, height, width = packed.shape
    sizes = [16 * num, 48 * num, 3 * num * height * width, num * height * width]
    ids, color, image, target = torch.split(packed.data, sizes)
    return (
        image.view(num, height, width, 3),
        target.view(num, height, width),
        ids.view(torch.int64).view(2, num),
        color.view(torch.int32).view(num, 3, 4),
    )


def _shard_batches(
    stream: Generator[_Packed, None, None], repeats: Repeats | None, with_color: bool
) -> Generator[ShardBatch, None, None]:
    with closing(stream):
        for packed in stream:
            image, target, ids, color = _views(packed)
            for row, made in packed.made:
                assert repeats is not None
                epoch, index = ids[:, row].tolist()
                pixels = image[row].numpy(), target[row].numpy()
                if packed.place is None:
                    repeats.compare((epoch, index), pixels, made)
                else:  # held for long: a copy leaves the slot to the next batch
                    repeats.hold(
                        (epoch, index), (pixels[0].copy(), pixels[1].copy()), made
                    )
            if packed.place is not None:
                yield ShardBatch(
                    *packed.place,
                    image,
                    target,
                    ids[0],
                    ids[1],
                    color if with_color else None,
                )


def _not_watched(
    augmenter: Augmenter, pixels: Pixels, key: int, again: bool
) -> tuple[Crop, Any]:
    raise AssertionError("a sample is watched, but nothing compares it")


@dataclass(frozen=True)
class _Shards:
    samples: Samples
    augmenter: Augmenter
    seed: int
    augment_watched: Callable[[Augmenter, Pixels, int, bool], tuple[Crop, Any]]

    def make(self, request: Request, room: Room) -> _Packed:
        height, width = self.augmenter.config.crop_size
        packed = _pack(room, request.place, len(request.members), height, width)
        image, target, ids, color = (part.numpy() for part in _views(packed))
        made = []
        for row, (epoch, index) in enumerate(request.members):
            room.at(row)
            key, pixels = (
                sample_key(self.seed, epoch, index, "augment"),
                self.samples.read(index),
            )
            if row in request.watched:
                crop, found = self.augment_watched(
                    self.augmenter, pixels, key, request.place is None
                )
                made.append((row, found))
            else:
                crop = self.augmenter.crop(*pixels, key)
            image[row], target[row] = crop.image, crop.target
            if crop.color is not None:
                color[row] = crop.color
            ids[:, row] = epoch, index
        return packed._replace(made=tuple(made))

    def label(self, request: Request, row: int) -> str:
        if row >= len(request.members):
            return "no sample"
        epoch, index = request.members[row]
        return f"sample {index} ({self.samples.name(index)}) of epoch {epoch}"


@dataclass(frozen=True)
class _Images:
    samples: Samples

    def make(self, request: tuple[int, int], room: Room) -> _Packed:
        image, target = self.samples.read(request[0])
        packed = _pack(room, request, 1, *target.shape)
        views = _views(packed)
        views[0].numpy()[0], views[1].numpy()[0] = image, target
        return packed

    def label(self, request: tuple[int, int], row: int) -> str:
        return f"image {request[0]} ({self.samples.name(request[0])})"


def _source(
    items: _Shards | _Images,
    requests: Iterator[Any],
    how: Delivery,
    *,
    slot_bytes: int,
    spare: int,
) -> Source:
    if not how.workers:
        return InProcess(items, requests, pinned=how.pinned)
    if how.transport == "dataloader":
        return TorchLoader(items, requests, how)
    return Ring(items, requests, how, slot_bytes=slot_bytes, spare=spare)


def _stream(
    starts: Sequence[Callable[[], Source]], turns: Iterable[int] = repeat(0)
) -> Generator[_Packed, None, None]:
    """Items of sources that take `turns`, until one ends."""
    sources: list[Source] = []
    try:
        for start in starts:
            sources.append(start())
        for turn in turns:
            item = next(sources[turn], None)
            if item is None:
                return
            yield item
    finally:
        for source in sources:
            source.end()


def _check_shared_memory(workers: int, prefetch: int, item_bytes: int) -> None:
    if not workers or not os.path.isdir(SHARED_MEMORY):
        return
    needed, free = (
        workers * prefetch * item_bytes,
        shutil.disk_usage(SHARED_MEMORY).free,
    )
    if needed > free:
        raise ConfigError(
            f"data.workers = {workers} and data.prefetch = {prefetch} need {needed / 2**20:.0f} MiB of shared memory, "
            f"but {SHARED_MEMORY} has {free / 2**20:.0f} MiB free. Enlarge it (docker run --shm-size=...), or lower "
            f"one of the two."
        )
