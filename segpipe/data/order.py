"""Order of the samples as a function of (seed, position) alone, so that resuming is arithmetic.

By default every sample comes once per epoch. Rare classes: a sample has a number of repeats, 1 or more, and comes that
often in every pass over its data set, rounded up or down so that the mean over the passes is exact. Mixtures: every
epoch holds the same number of samples of each data set, in an order shuffled anew.

`requests` says which process makes which batch, and which samples another process makes again so that both can be
compared: the same for any number of workers and ranks.

Repeats of samples and weights of classes follow from how often classes occur. Masks are counted at every start of a
run that needs it, a resume included; inputs.json binds the masks themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.data import Float64, Int64
from segpipe.errors import ConfigError
from segpipe.keys import generator, sample_key

# Repeats are whole multiples of 1 / UNIT; passes of up to 47 million samples are then exact in int64.
UNIT = 2**12

# One would find a transform that is impure in 1 % of its calls within 200,000 samples with p = 0.98; two, with 0.997.
REPEATS = 2
Member = tuple[int, int]  # epoch and index of a sample
StepShard = tuple[int, int]  # step and shard of a batch
# Of each data set of a mixture, number of samples and weight.
Sets = Sequence[tuple[int, float]]


def shuffled(seed: int, number: int, lane: int, purpose: str, num: int) -> Int64:
    """A permutation of range(num), int64 (num,), as a function of the key that the others make.

    Sorts raw 64-bit draws: the raw stream of Philox never changes, while the methods of numpy's Generator may change
    between releases.
    """
    key = sample_key(seed, number, lane, purpose)
    draws = generator(key).bit_generator.random_raw(num)
    return np.argsort(draws, kind="stable").astype(np.int64)


@lru_cache(maxsize=2)  # a batch that spans two epochs needs both
def permutation(seed: int, epoch: int, n: int) -> Int64:
    """Order of the n samples in one epoch, read-only int64 (n,)."""
    order = shuffled(seed, epoch, 0, "order", n)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class Order:
    """The sample at every position of an endless sequence of epochs: each once per epoch, unless `positions` say else.

    Shard v of step t has the positions (t * shards + v) * samples_per_shard + j. Batches span epochs: no sample is
    dropped, and none is repeated to fill a batch.
    """

    seed: int
    num_samples: int
    shards: int
    samples_per_shard: int
    positions: Draws | None = None

    def sample(self, position: int) -> Member:
        """Epoch and sample index at `position`, counted from 0."""
        if self.positions is not None:
            return self.positions.sample(position)
        epoch, place = divmod(position, self.num_samples)
        return epoch, int(permutation(self.seed, epoch, self.num_samples)[place])

    def shard(self, step: int, shard: int) -> list[Member]:
        """(epoch, index) of the samples of logical shard `shard` in `step`."""
        first = (step * self.shards + shard) * self.samples_per_shard
        return [self.sample(first + j) for j in range(self.samples_per_shard)]


class Passes:
    """The samples of one data set, pass after pass; each pass holds every sample at least once.

    number: of the data set in its mixture. first: index of its first sample in the training set. repeats: of each
    sample, at least 1, float64 (n,).
    """

    def __init__(self, seed: int, number: int, first: int, repeats: Float64) -> None:
        self.seed, self.first = seed, first
        self._lane = number + 1  # in the keys; 0 is the order of an epoch
        self._repeats = np.round(repeats * UNIT).astype(np.int64)
        assert self._repeats.min() >= UNIT
        self._total = int(self._repeats.sum())
        self.length = -(-self._total // UNIT)  # samples of a pass
        self._copies = -(-int(self._repeats.max()) * self.length // self._total)
        self._pass = lru_cache(maxsize=2)(self._make)

    def draw(self, number: int) -> Member:
        """Epoch and index of draw `number`, counted from 0.

        The epoch counts the visits to a sample with its repeats, so no two draws of a run share (epoch, index), and
        none shares its augmentation.
        """
        turn, place = divmod(number, self.length)
        indices, copies = self._pass(turn)
        epoch = turn * self._copies + int(copies[place])
        return epoch, self.first + int(indices[place])

    def _make(self, turn: int) -> tuple[Int64, Int64]:
        """Sample and number of its copy at every place of a pass.

        Systematic sampling: the repeats lie one after another on a line, in a shuffled order, and a comb of `length`
        teeth at a random place counts how many fall on each.
        """
        order = shuffled(self.seed, turn, self._lane, "repeat", len(self._repeats))
        ends = np.cumsum(self._repeats[order]) * self.length
        key = sample_key(self.seed, turn, self._lane, "comb")
        start = int(generator(key).bit_generator.random_raw()) % self._total
        teeth = (ends + start) // self._total
        counts = np.diff(teeth, prepend=0)
        samples = np.repeat(order, counts)
        firsts = np.repeat(teeth - counts, counts)
        copies = np.arange(self.length) - firsts
        places = shuffled(self.seed, turn, self._lane, "order", self.length)
        return samples[places], copies[places]


class Draws:
    """The sample at every position of training on one or several data sets.

    An epoch has `numbers[i]` samples of set i, in a shuffled order. A set's own passes go on from epoch to epoch, so a
    set with few samples in an epoch is not cut to the same ones.
    """

    def __init__(
        self, seed: int, sets: Sequence[Passes], numbers: Sequence[int]
    ) -> None:
        self.seed, self.sets, self.numbers = seed, tuple(sets), tuple(numbers)
        self.length = sum(self.numbers)  # samples of an epoch
        self._epoch = lru_cache(maxsize=2)(self._make)

    def sample(self, position: int) -> Member:
        """Epoch, as `Passes.draw` counts it, and index at `position`, counted from 0."""
        epoch, place = divmod(position, self.length)
        kinds, ranks = self._epoch(epoch)
        kind = int(kinds[place])
        return self.sets[kind].draw(epoch * self.numbers[kind] + int(ranks[place]))

    def _make(self, epoch: int) -> tuple[Int64, Int64]:
        """At every place of an epoch, the number of the set, and how many samples of it came before in this epoch."""
        order = permutation(self.seed, epoch, self.length)
        kinds = np.searchsorted(list(accumulate(self.numbers)), order, side="right")
        ranks = np.empty_like(kinds)
        for kind, number in enumerate(self.numbers):
            ranks[kinds == kind] = np.arange(number)
        return kinds, ranks


def whole_shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in the ratio of `weights` into whole numbers, each off by less than 1 (largest remainders).

    Raises ConfigError when a share is below 1.
    """
    whole = sum(map(Fraction, weights))
    exact = [Fraction(weight) * total / whole for weight in weights]
    found = list(map(int, exact))
    largest_first = sorted(range(len(exact)), key=lambda at: found[at] - exact[at])
    for place in largest_first[: total - sum(found)]:
        found[place] += 1

    for place, number in enumerate(found):
        if not number:
            raise ConfigError(
                f"data.mix[{place}] has weight {weights[place]:g}, which is less than 1 of the {total} samples of an "
                f"epoch. Raise it, or remove the set."
            )

    return found


class Request(NamedTuple):
    """What a loader process makes at a time."""

    # Of a batch to deliver; None: samples that were delivered before.
    place: StepShard | None
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
    left: int = REPEATS


def requests(
    places: Iterable[StepShard],
    order: Order,
    *,
    every: int,
    workers: int,
) -> Iterator[Request]:
    """Requests that deliver `places` in their order; between them, requests that make watched samples again.

    Request n is for worker n % workers. A repeat waits for the turn of a worker that has not made the sample. With two
    workers the other one makes it twice; without workers the caller does. After the last place, requests without
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
        request = _delivery(place, order, every)
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


def _delivery(place: StepShard, order: Order, every: int) -> Request:
    """The request for the batch at `place`."""
    members = tuple(order.shard(*place))
    watched = tuple(
        row
        for row, (epoch, index) in enumerate(members)
        if index in chosen(order.seed, epoch, order.num_samples, every)
    )
    return Request(place, members, watched)


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


class PixelCounts(NamedTuple):
    """Pixels of each class in samples, int64 (n, C), and their indices, int64 (n,)."""

    pixels: Int64
    indices: Int64


def merged_counts(parts: Sequence[PixelCounts]) -> PixelCounts:
    """The counts of all parts, by index."""
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices)
    return PixelCounts(
        np.concatenate([part.pixels for part in parts])[order], indices[order]
    )


def repeat_factors(
    present: NDArray[np.bool_], threshold: float, weights: Float64
) -> Float64:
    """How many times each sample comes in a pass: max over its classes of max(1, sqrt(threshold / f)).

    f is the fraction of the samples that hold the class, each counted with its weight.

    Shapes: present bool (n, C), weights (n,) -> float64 (n,). Source: repeat factor sampling of LVIS, arXiv:1908.03195.
    """
    fractions = (present * weights[:, None]).sum(0) / weights.sum()
    factors = np.sqrt(threshold / np.maximum(fractions, np.finfo(float).tiny))
    return np.asarray(np.where(present, factors, 1.0).max(axis=1, initial=1.0))


def repeats_by_class(threshold: float, sets: Sets, counts: PixelCounts) -> Float64:
    """Repeats of each sample under data.balance, float64 (n,)."""
    sizes = [size for size, _ in sets]
    weights = np.repeat(_shares(sets) / sizes, sizes)
    return repeat_factors(counts.pixels > 0, threshold, weights)


def repeats_by_sequence(
    sequences: Sequence[Sequence[str]],
) -> Float64:
    """Repeats of each sample with which every sequence of a data set comes equally often, float64 (n,).

    sequences: that of each sample, for each data set of a mixture. Raises ConfigError when no set has two.
    """
    counts = [Counter(names) for names in sequences]
    if all(len(of_set) == 1 for of_set in counts):
        name = sequences[0][0]
        raise ConfigError(
            f"data.balance_by = sequence, but all training images are of one sequence, {name}. Set data.sequence to a "
            "regular expression that finds it in their names, or data.balance_by=class."
        )
    return np.array(
        [
            max(of_set.values()) / of_set[name]
            for names, of_set in zip(sequences, counts, strict=True)
            for name in names
        ]
    )


def draws(repeats: Float64 | None, sets: Sets, seed: int) -> Draws | None:
    """The order of balanced or mixed samples; None when each is taken once per epoch.

    repeats: of each sample; None: all alike. Raises ConfigError when a data set of a mixture would get less than one
    sample of an epoch.
    """
    if repeats is None and len(sets) == 1:
        return None
    first, passes = 0, []
    for number, (size, _) in enumerate(sets):
        own = np.ones(size) if repeats is None else repeats[first : first + size]
        passes.append(Passes(seed, number, first, own))
        first += size
    numbers = whole_shares(
        [weight for _, weight in sets], sum(one.length for one in passes)
    )
    return Draws(seed, passes, numbers)


def pixels_seen(
    repeats: Float64 | None, sets: Sets, counts: PixelCounts
) -> Int64 | Float64:
    """Pixels of each class as training meets them, (C,): with the shares of a mixture and with repeats.

    Exact counts where every sample comes once per epoch, else their mean over the samples.
    """
    if repeats is None and len(sets) == 1:
        return np.asarray(counts.pixels.sum(0))
    ends = np.cumsum([size for size, _ in sets])
    factors = (np.ones(ends[-1]) if repeats is None else repeats)[counts.indices]
    number = np.searchsorted(ends, counts.indices, side="right")
    weights = (
        factors * (_shares(sets) / np.bincount(number, factors, len(sets)))[number]
    )
    total: Float64 = (counts.pixels * weights[:, None]).sum(0)
    return total


def _shares(sets: Sets) -> Float64:
    """Share of each data set in the samples of an epoch, float64 (sets,)."""
    weights = np.array([weight for _, weight in sets])
    return np.asarray(weights / weights.sum())


def check_given_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raise ConfigError unless there is one weight per class, and one above 0."""
    if len(weights) != len(names):
        raise ConfigError(
            f"loss.class_weights holds {len(weights)} weights, but the data set has {len(names)} classes. Give one "
            f"weight for each, in this order: {', '.join(names)}."
        )
    if not any(weights):
        raise ConfigError(
            "loss.class_weights holds only zeros: nothing could be learned. Set one above 0."
        )
