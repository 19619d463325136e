"""Which process makes which batch, and which samples another process makes again so that both can be compared.

The choice of samples is a function of (seed, epoch, index) alone: the same for any number of workers and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from segpipe.data.order import Order
from segpipe.keys import generator, sample_key

# One would find a transform that is impure in 1 % of its calls within 200,000 samples with p = 0.98; two, with 0.997.
REPEATS = 2
Member = tuple[int, int]  # epoch and index of a sample


class Request(NamedTuple):
    """What a loader process makes at a time."""

    # (step, shard) of a batch to deliver; None: samples that were delivered before.
    place: tuple[int, int] | None
    members: tuple[Member, ...]
    watched: tuple[int, ...] = ()  # rows of `members` that are compared


@lru_cache(maxsize=64)  # a batch of a mixture may hold samples of many epochs
def chosen(seed: int, epoch: int, num: int, every: int) -> frozenset[int]:
    """Those of the first `num` indices that are watched in an epoch: one in `every` on average, none for 0."""
    if not every:
        return frozenset()
    random = generator(sample_key(seed, epoch, 0, "canary")).bit_generator
    draws = random.random_raw(num)
    return frozenset(np.flatnonzero(draws % np.uint64(every) == 0).tolist())


@dataclass
class _Repeat:
    """A sample that has to be made again."""

    member: Member
    due: int  # number of the first request that may do it
    made_by: set[int]  # workers that may not
    left: int = field(default=REPEATS)


def requests(
    places: Iterable[tuple[int, int]],
    order: Order,
    *,
    seed: int,
    every: int,
    workers: int,
) -> Iterator[Request]:
    """Requests that deliver `places` in their order; between them, requests that make watched samples again.

    Request n is for worker n % workers. A repeat waits for the turn of a worker that has not made the sample. With two
    workers the other one makes it twice; with one or none the caller decides. After the last place, requests without
    members pass the turn on until every watched sample was made often enough.
    """
    workers = max(workers, 1)
    most = order.samples_per_shard  # for more a loader's slot has no room
    number = 0
    repeats: list[_Repeat] = []
    for place in places:
        while (again := _due(repeats, number, workers, most)).members:
            yield again
            number += 1
        request = _delivery(place, order, seed, every)
        yield request
        # Not at once: if no other process can make it, other samples must come in between.
        repeats += [
            _Repeat(request.members[row], number + 2, {number % workers})
            for row in request.watched
        ]
        number += 1
    while repeats:
        yield _due(repeats, number, workers, most)
        number += 1


def _delivery(place: tuple[int, int], order: Order, seed: int, every: int) -> Request:
    members = tuple(order.shard(*place))
    watched = [
        row
        for row, (epoch, index) in enumerate(members)
        if index in chosen(seed, epoch, order.num_samples, every)
    ]
    return Request(place, members, tuple(watched))


def _due(repeats: list[_Repeat], number: int, workers: int, most: int) -> Request:
    """At most `most` repeats that request `number` makes; those that are then done leave `repeats`."""
    turn = number % workers
    ready = [
        repeat
        for repeat in repeats
        if repeat.due <= number and (workers == 1 or turn not in repeat.made_by)
    ][:most]
    for repeat in ready:
        repeat.left -= 1
        repeat.due = number + 2 * workers
        if workers > REPEATS:
            repeat.made_by.add(turn)
    repeats[:] = [repeat for repeat in repeats if repeat.left]
    # Backwards, so that a sample's predecessor is another one than the first time.
    members = tuple(repeat.member for repeat in reversed(ready))
    return Request(None, members, tuple(range(len(members))))
