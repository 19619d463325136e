"""Order of the samples as a function of only (seed, position), so that resuming is arithmetic.

By default every sample is used once per epoch. For rare classes, a sample has a number of repeats, 1 or more, and is
used that often in every pass over its data set, rounded up or down so that the mean over the passes is exact. For
mixtures, every epoch has the same number of samples of each data set, in a newly shuffled order.

`requests` assigns batches to processes, and repeats of watched samples to other processes for comparison. Which samples
are watched does not depend on the number of workers and ranks.

Sample repeats and class weights depend on class frequencies. A run that needs these counts the masks at every start,
also on resume; inputs.json identifies the masks themselves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.data import Float64, Int64
from segpipe.errors import ConfigError
from segpipe.keys import generator, sample_key

# Repeats are whole multiples of 1 / UNIT; passes of up to 47 million samples are then exact in int64.
UNIT = 2**12

# One repeat finds a transform that is impure in 1 % of its calls within 200,000 samples with p = 0.98; two with 0.997.
REPEATS = 2
Member = tuple[int, int]  # epoch and index of a sample
StepShard = tuple[int, int]  # step and shard of a batch
# Number of samples and weight of each data set of a mixture.
Sets = Sequence[tuple[int, float]]


def shuffled(seed: int, number: int, lane: int, purpose: str, num: int) -> Int64:
    """A permutation of range(num), int64 (num,), that depends only on the arguments.

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
    """The sample at every position of an endless sequence of epochs: each once per epoch, unless `positions` is set.

    Shard v of step t has the positions (t * shards + v) * samples_per_shard + j. Batches span epochs: no sample is
    dropped, and none is repeated to fill a batch.
    """

    seed: int
    num_samples: int
    shards: int
    samples_per_shard: int
    positions: "Draws | None" = None

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

    number: index of the data set in its mixture. first: index of its first sample in the training set. repeats: for
    each sample, at least 1, float64 (n,).
    """

    def __init__(self, seed: int, number: int, first: int, repeats: Float64) -> None:
        self.seed, self.first = seed, first
        self._lane = number + 1  # for the keys; 0 is used for the order of an epoch
        self._repeats = np.round(repeats * UNIT).astype(np.int64)
        assert self._repeats.min() >= UNIT
        self._total = int(self._repeats.sum())
        self.length = -(-self._total // UNIT)  # samples per pass
        self._copies = -(-int(self._repeats.max()) * self.length // self._total)
        self._pass = lru_cache(maxsize=2)(self._make)

    def draw(self, number: int) -> Member:
        """Epoch and index of draw `number`, counted from 0.

        The epoch counts the visits to a sample, repeats included, so no two draws of a run share (epoch, index) or
        augmentation.
        """
        turn, place = divmod(number, self.length)
        indices, copies = self._pass(turn)
        epoch = turn * self._copies + int(copies[place])
        return epoch, self.first + int(indices[place])

    def _make(self, turn: int) -> tuple[Int64, Int64]:
        """Sample and copy number at every place of a pass.

        Systematic sampling: the repeats lie one after another on a line, in a shuffled order; a comb of `length` teeth
        with a random offset decides how often each is used.
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

    An epoch has `numbers[i]` samples of set i, in a shuffled order. The passes of a set continue across epochs, so a
    set with few samples per epoch does not always use the same ones.
    """

    def __init__(
        self, seed: int, sets: Sequence[Passes], numbers: Sequence[int]
    ) -> None:
        self.seed, self.sets, self.numbers = seed, sets, numbers
        self.length = sum(self.numbers)  # samples per epoch
        self._epoch = lru_cache(maxsize=2)(self._make)

    def sample(self, position: int) -> Member:
        """Epoch, as `Passes.draw` counts it, and index at `position`, counted from 0."""
        epoch, place = divmod(position, self.length)
        kinds, ranks = self._epoch(epoch)
        kind = int(kinds[place])
        return self.sets[kind].draw(epoch * self.numbers[kind] + int(ranks[place]))

    def _make(self, epoch: int) -> tuple[Int64, Int64]:
        """For every place of an epoch, the set's number, and the count of its earlier samples in this epoch."""
        order = permutation(self.seed, epoch, self.length)
        kinds = np.searchsorted(list(accumulate(self.numbers)), order, side="right")
        ranks = np.empty_like(kinds)
        for kind, number in enumerate(self.numbers):
            ranks[kinds == kind] = np.arange(number)
        return kinds, ranks


def whole_shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided into whole numbers in the ratio of `weights`, each off by less than 1 (largest remainders).

    Raises ConfigError if a share is below 1.
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
    """One unit of work for a loader process."""

    # Step and shard of a batch to deliver; None: repeats of delivered samples.
    place: StepShard | None
    members: tuple[Member, ...]
    watched: tuple[int, ...] = ()  # rows of `members` to compare


@lru_cache(maxsize=64)  # a batch of a mixture may hold samples of many epochs
def chosen(seed: int, epoch: int, num: int, every: int) -> frozenset[int]:
    """Indices below `num` that are watched in an epoch: one in `every` on average, none for 0."""
    if not every:
        return frozenset()
    random = generator(sample_key(seed, epoch, 0, "canary")).bit_generator
    draws = random.random_raw(num)
    return frozenset(np.flatnonzero(draws % np.uint64(every) == 0).tolist())


@dataclass
class _Repeat:
    """A pending repeat of a sample."""

    member: Member
    due: int  # number of the first request that may make it
    made_by: set[int]  # workers that may not make it
    left: int = REPEATS


def requests(
    places: Iterable[StepShard], order: Order, *, every: int, workers: int
) -> Iterator[Request]:
    """Requests that deliver `places` in order; between them, requests that repeat watched samples.

    Request n goes to worker n % workers. A repeat waits for a worker that has not made the sample yet. With two
    workers the other one makes it twice; without workers the caller does. After the last place, requests without
    members skip a worker's turn until all repeats are made.
    """
    workers = max(workers, 1)
    most = order.samples_per_shard  # a loader's slot has no room for more
    number = 0
    repeats: list[_Repeat] = []
    for place in places:
        while (again := _due(repeats, number, workers, most)).members:
            yield again
            number += 1
        members = tuple(order.shard(*place))
        watched = tuple(
            row
            for row, (epoch, index) in enumerate(members)
            if index in chosen(order.seed, epoch, order.num_samples, every)
        )
        yield Request(place, members, watched)
        # Delayed: if no other process can make it, other samples must come in between.
        repeats += [
            _Repeat(members[row], number + 2, {number % workers}) for row in watched
        ]
        number += 1

    while repeats:
        yield _due(repeats, number, workers, most)
        number += 1


def _due(repeats: list[_Repeat], number: int, workers: int, most: int) -> Request:
    """The request of at most `most` repeats for request `number`; removes completed ones from `repeats`."""
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
    # Reversed, so that a sample's predecessor differs from the first time.
    members = tuple(repeat.member for repeat in reversed(ready))
    return Request(None, members, tuple(range(len(members))))


class PixelCounts(NamedTuple):
    """Pixels of each class per sample, int64 (n, C), and the samples' indices, int64 (n,)."""

    pixels: Int64
    indices: Int64


def merged_counts(parts: Sequence[PixelCounts]) -> PixelCounts:
    """The counts of all parts, sorted by index."""
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices)
    return PixelCounts(
        np.concatenate([part.pixels for part in parts])[order], indices[order]
    )


def repeat_factors(
    present: NDArray[np.bool_], threshold: float, weights: Float64
) -> Float64:
    """How often each sample is used in a pass: max over its classes of max(1, sqrt(threshold / f)).

    f is the weighted fraction of the samples that contain the class.

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


def repeats_by_sequence(sequences: Sequence[Sequence[str]]) -> Float64:
    """Repeats of each sample so that all sequences of a data set are used equally often, float64 (n,).

    sequences: sequence of each sample, per data set of a mixture. Raises ConfigError if no set has two sequences.
    """
    counts = [Counter(names) for names in sequences]
    if all(len(of_set) == 1 for of_set in counts):
        name = sequences[0][0]
        raise ConfigError(
            f"data.balance_by = sequence, but all training images belong to one sequence, {name}. Set data.sequence to "
            "a regular expression that finds the sequence in a name, or data.balance_by=class."
        )
    return np.array(
        [
            max(of_set.values()) / of_set[name]
            for names, of_set in zip(sequences, counts, strict=True)
            for name in names
        ]
    )


def draws(repeats: Float64 | None, sets: Sets, seed: int) -> Draws | None:
    """The order of balanced or mixed samples; None if each is used once per epoch.

    repeats: for each sample; None: all equal. Raises ConfigError if a data set of a mixture would get less than one
    sample per epoch.
    """
    if repeats is None and len(sets) == 1:
        return None
    first, passes = 0, []
    for number, (size, _) in enumerate(sets):
        own = np.ones(size) if repeats is None else repeats[first : first + size]
        passes.append(Passes(seed, number, first, own))
        first += size
    total = sum(one.length for one in passes)
    return Draws(seed, passes, whole_shares([weight for _, weight in sets], total))


def pixels_seen(
    repeats: Float64 | None, sets: Sets, counts: PixelCounts
) -> Int64 | Float64:
    """Pixels of each class as seen in training, (C,), with repeats and the shares of a mixture.

    Exact counts if every sample is used once per epoch, else their mean over the samples.
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
    """Share of each data set in an epoch, float64 (sets,)."""
    weights = np.array([weight for _, weight in sets])
    return np.asarray(weights / weights.sum())


def spaced(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def check_given_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raise ConfigError unless there is one weight per class, and at least one above 0."""
    if len(weights) != len(names):
        raise ConfigError(
            f"loss.class_weights has {len(weights)} weights, but the data set has {len(names)} classes. Give one "
            f"weight per class, in this order: {', '.join(names)}."
        )
    if not any(weights):
        raise ConfigError(
            "loss.class_weights has only zeros, so nothing could be learned. Set one above 0."
        )
