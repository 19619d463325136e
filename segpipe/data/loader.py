"""Batches of uint8 in shared memory: the same bits for any number of loader processes and any start method.

A worker assembles a whole shard batch as one flat block, directly in a slot of the ring (ring.py).
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
    from segpipe.data.data_set import CachedSamples, Samples

# Size of a slot for a whole image: 268 million pixels. Only the pages that an image covers use memory.
WHOLE_BYTES = 2**30
# Called in a worker: returns the augmented sample and its record for comparison. Last argument: whether it is a repeat.
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
    """Compares watched samples (see order.py), as delivered, with repeats of them by another process."""

    @property
    def augment(self) -> AugmentWatched:
        """Function that makes a watched sample."""

    def hold(self, member: Member, pixels: Sample, made: Any) -> None:
        """Store a delivered watched sample."""

    def compare(self, member: Member, pixels: Sample, made: Any) -> None:
        """Compare a repeat with the stored sample; raises if they differ."""


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
    pin_memory: bool = False,
    timeout_s: float = 300.0,
    repeats: Repeats | None = None,
) -> Generator[ShardBatch, None, None]:
    """Shard batches of `steps` and `shards`, step by step and shard by shard within a step.

    Workers start at the first `next` and end with the iterator; closing it early is safe. Raises DataError if a
    sample cannot be read, or a worker died or sent nothing for `timeout_s`, and the errors of `repeats.compare`.

    With `repeats`, another worker repeats one sample in `augment.canary`, so a single worker gets a second one to help;
    without workers, the caller's process repeats it some samples later.
    """
    every = augmenter.config.canary if repeats is not None else 0
    if workers == 1 and every:
        workers = 2
    height, width = augmenter.config.crop_size
    watch = repeats.augment if repeats is not None else None
    stream = deliver(
        _Maker(samples, augmenter, order.seed, watch),
        requests(product(steps, shards), order, every=every, workers=workers),
        Delivery(
            workers,
            start_method,
            slot_bytes=sum(part_bytes((order.samples_per_shard, height, width))),
            # The caller may ask for a second step before dropping the first, and this function holds one batch, too.
            spare=2 * len(shards) + 1,
            prefetch=prefetch,
            pinned=pin_memory,
            timeout_s=timeout_s,
        ),
    )
    with closing(stream):
        for header, data in stream:
            image, target = _views(data, header.shape)
            for row, made in header.made:
                assert repeats is not None
                member = header.members[row]
                pixels = image[row].numpy(), target[row].numpy()
                if header.place is None:
                    repeats.compare(member, pixels, made)
                else:  # a copy, since it is held for long and would block the slot
                    repeats.hold(member, (pixels[0].copy(), pixels[1].copy()), made)
                del pixels  # views of a slot, which waits for them
            if header.place is not None:
                step, shard = header.place
                epoch, index = torch.tensor(header.members).unbind(1)
                yield ShardBatch(step, shard, image, target, epoch, index)


def eval_images(
    samples: Samples,
    indices: Sequence[int],
    *,
    workers: int,
    start_method: str,
    timeout_s: float = 300.0,
    cache: CachedSamples | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Whole images of any size: (index, image uint8 (1, H, W, 3), target uint8 (1, H, W)), in the order of `indices`.

    Images in `cache` are not loaded again; others are added to it if they fit. Raises DataError as `train_batches`
    does.
    """
    missing = [index for index in indices if cache is None or index not in cache]
    stream = deliver(  # starts no worker before the first `next`
        _Maker(samples),
        [Request(None, ((0, index),)) for index in missing],
        Delivery(workers, start_method, WHOLE_BYTES, spare=2, timeout_s=timeout_s),
    )
    with closing(stream):
        for index in indices:
            if cache is not None and index in cache:
                # Copies, since cached arrays are read-only.
                image, target = (torch.tensor(part[None]) for part in cache.read(index))
                yield index, image, target
                continue
            header, data = next(stream)
            views = _views(data, header.shape)
            if cache is not None:
                cache.keep(index, *(part[0].numpy().copy() for part in views))
            yield index, *views


class _Header(NamedTuple):
    """Message that a worker sends with the pixels."""

    shape: tuple[int, int, int]  # samples, height, width
    members: tuple[Member, ...]
    place: StepShard | None  # step and shard of a batch, see Request
    # Rows of watched samples, and their records for comparison.
    made: tuple[tuple[int, Any], ...]


def part_bytes(shape: tuple[int, int, int]) -> list[int]:
    """Bytes of the images and of the targets of an item of (samples, height, width), in memory order."""
    pixels = prod(shape)
    return [3 * pixels, pixels]


def _views(data: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Views of flat memory as image (b, H, W, 3) and target (b, H, W)."""
    image, target = torch.split(data, part_bytes(shape))
    return image.view(*shape, 3), target.view(shape)


class _Maker(NamedTuple):
    """Makes shard batches with an augmenter, and whole images without one."""

    samples: Samples
    augmenter: Augmenter | None = None
    seed: int = 0
    watch: AugmentWatched | None = None

    def make(self, request: Request, take: Take) -> tuple[_Header, Tensor]:
        """The samples of a request; whole images one at a time."""
        shape, data, made = (0, 0, 0), take(0), []
        for row, (epoch, index) in enumerate(request.members):
            crop = self.samples.read(index)
            key = sample_key(self.seed, epoch, index, "augment")
            if row in request.watched:
                assert self.augmenter is not None
                assert self.watch is not None
                again = request.place is None
                crop, witness = self.watch(self.augmenter, crop, key, again)
                made.append((row, witness))
            elif self.augmenter is not None:
                crop = self.augmenter(*crop, key)
            if not row:
                height, width = crop[1].shape
                shape = len(request.members), height, width
                data = take(sum(part_bytes(shape)))
                image, target = (part.numpy() for part in _views(data, shape))
            # Now: a transform may fill its memory again for the next sample.
            image[row], target[row] = crop
        return _Header(shape, request.members, request.place, tuple(made)), data

    def label(self, request: Request) -> str:
        """Names of the samples."""
        named = [
            f"{index} ({self.samples.name(index)}) of epoch {epoch}"
            for epoch, index in request.members
        ]
        text = f"sample {', '.join(named)}"
        return text if self.augmenter else text.removesuffix(" of epoch 0")
