"""Batches of uint8 in shared memory: the same bits for any number of loader processes and any start method.

A worker assembles one whole shard batch as one flat block, in place in a slot of the ring (ring.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from segpipe.data import Sample
from segpipe.data.order import Member, Order, Request, StepShard, requests
from segpipe.data.ring import Delivery, Take, deliver
from segpipe.keys import sample_key

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter
    from segpipe.data.data_set import Samples
    from segpipe.data.samples import CachedSamples

# Of a slot for a whole image: 268 million pixels. Only what an image covers is used.
WHOLE_BYTES = 2**30
# Called in a worker: the augmented sample, and what is compared of it; the last argument: made again.
AugmentWatched: TypeAlias = (
    "Callable[[Augmenter, Sample, int, bool], tuple[Sample, Any]]"
)


class ShardBatch(NamedTuple):
    """The samples of one logical shard in one step."""

    step: int
    shard: int
    image: Tensor  # uint8 (b, H, W, 3), RGB
    target: Tensor  # uint8 (b, H, W), train ids
    epoch: Tensor  # int64 (b,)
    index: Tensor  # type: ignore[assignment]  # int64 (b,); hides tuple.index


class Repeats(Protocol):
    """Compares watched samples (see order.py) as delivered with the same samples as another process made them."""

    @property
    def augment(self) -> AugmentWatched:
        """Makes a watched sample."""

    def hold(self, member: Member, pixels: Sample, made: Any) -> None:
        """A watched sample is delivered."""

    def compare(self, member: Member, pixels: Sample, made: Any) -> None:
        """It was made again; raises when it is another."""


def train_batches(
    samples: Samples,
    augmenter: Augmenter,
    order: Order,
    *,
    shards: range,
    steps: range,
    workers: int,
    start_method: str,
    prefetch: int,
    pin_memory: bool,
    timeout_s: float = 300.0,
    repeats: Repeats | None = None,
) -> Generator[ShardBatch, None, None]:
    """Shard batches of `steps` and `shards`, step by step and inside a step shard by shard.

    Workers start at the first `next` and end with the iterator; closing it half-way is safe. Raises DataError when a
    sample cannot be read, or when a worker died or sent nothing for `timeout_s`, and what `repeats.compare` raises.

    With `repeats`, one sample in `augment.canary` is made again by another worker, so a single worker gets a second one
    beside it; without workers the caller's own process does it, some samples later.
    """
    every = augmenter.config.canary if repeats is not None else 0
    if workers == 1 and every:
        workers = 2
    height, width = augmenter.config.crop_size
    watch = repeats.augment if repeats is not None else None
    stream = deliver(
        _Shards(samples, augmenter, order.seed, watch),
        requests(product(steps, shards), order, every=every, workers=workers),
        Delivery(
            workers,
            start_method,
            slot_bytes=sum(part_bytes((order.samples_per_shard, height, width))),
            # Of two steps, the second may be asked for before the first is dropped; this function keeps one, too.
            spare=2 * len(shards) + 1,
            prefetch=prefetch,
            pinned=pin_memory,
            timeout_s=timeout_s,
        ),
    )
    with closing(stream):
        for header, data in stream:
            image, target = _views(data, header.shape)
            if header.made:
                assert repeats is not None
                _compare(repeats, header, image, target)
            if header.place is not None:
                step, shard = header.place
                epoch, index = torch.tensor(header.members).unbind(1)
                yield ShardBatch(step, shard, image, target, epoch, index)


def _compare(repeats: Repeats, header: _Header, image: Tensor, target: Tensor) -> None:
    """Hand the watched samples of a batch to `repeats`."""
    for row, made in header.made:
        member = header.members[row]
        pixels = image[row].numpy(), target[row].numpy()
        if header.place is None:
            repeats.compare(member, pixels, made)
        else:  # held for long: a copy leaves the slot to the next batch
            repeats.hold(member, (pixels[0].copy(), pixels[1].copy()), made)


def eval_images(
    samples: Samples,
    indices: Sequence[int],
    *,
    workers: int,
    start_method: str,
    timeout_s: float = 300.0,
    cache: CachedSamples | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Whole images of any size as (index, image uint8 (1, H, W, 3), target uint8 (1, H, W)), in the order of `indices`.

    Those that are in `cache` are not loaded, and the others are kept there if they fit. Raises DataError as
    `train_batches` does.
    """
    missing = [index for index in indices if cache is None or index not in cache]
    stream = deliver(  # starts no worker before an image is asked for
        _Images(samples),
        missing,
        Delivery(workers, start_method, WHOLE_BYTES, spare=2, timeout_s=timeout_s),
    )
    with closing(stream):
        for index in indices:
            if cache is not None and index in cache:
                # Copies: what is kept is read-only.
                image, target = (torch.tensor(part[None]) for part in cache.read(index))
                yield index, image, target
                continue
            header, data = next(stream)
            views = _views(data, header.shape)
            if cache is not None:
                cache.keep(index, *(part[0].numpy().copy() for part in views))
            yield index, *views


class _Header(NamedTuple):
    """What a worker sends beside the pixels."""

    shape: tuple[int, int, int]  # samples, height, width
    members: tuple[Member, ...] = ()
    place: StepShard | None = None  # of a shard batch, see Request
    # Rows of watched samples, and what is compared of them.
    made: tuple[tuple[int, Any], ...] = ()


def part_bytes(shape: tuple[int, int, int]) -> list[int]:
    """Bytes of images and targets of an item of (samples, height, width), as they lie in memory."""
    pixels = prod(shape)
    return [3 * pixels, pixels]


def _views(data: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Image (b, H, W, 3) and target (b, H, W) in flat memory."""
    image, target = torch.split(data, part_bytes(shape))
    return image.view(*shape, 3), target.view(shape)


class _Shards(NamedTuple):
    """Augmented shard batches."""

    samples: Samples
    augmenter: Augmenter
    seed: int
    watch: AugmentWatched | None

    def make(self, request: Request, take: Take) -> tuple[_Header, Tensor]:
        """The batch that a request names."""
        height, width = self.augmenter.config.crop_size
        shape = (len(request.members), height, width)
        data = take(sum(part_bytes(shape)))
        image, target = (part.numpy() for part in _views(data, shape))
        made = []
        for row, (epoch, index) in enumerate(request.members):
            key = sample_key(self.seed, epoch, index, "augment")
            pixels = self.samples.read(index)
            if row in request.watched:
                assert self.watch is not None
                again = request.place is None
                crop, witness = self.watch(self.augmenter, pixels, key, again)
                made.append((row, witness))
            else:
                crop = self.augmenter(*pixels, key)
            image[row], target[row] = crop

        return _Header(shape, request.members, request.place, tuple(made)), data

    def label(self, request: Request) -> str:
        """The samples of the batch."""
        named = [
            f"{index} ({self.samples.name(index)}) of epoch {epoch}"
            for epoch, index in request.members
        ]
        return f"sample {', '.join(named)}"


class _Images(NamedTuple):
    """Whole images of a data set."""

    samples: Samples

    def make(self, index: int, take: Take) -> tuple[_Header, Tensor]:
        """The image of this index with its target."""
        image, target = self.samples.read(index)
        shape = (1, *target.shape)
        data = take(sum(part_bytes(shape)))
        views = _views(data, shape)
        views[0].numpy()[0] = image
        views[1].numpy()[0] = target
        return _Header(shape), data

    def label(self, index: int) -> str:
        """The image."""
        return f"image {index} ({self.samples.name(index)})"
