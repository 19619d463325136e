"""Which sample is drawn when, where samples are not simply each taken once per epoch.

Rare classes: a sample has a number of repeats, 1 or more, and comes that often in every pass over its data set, rounded
up or down so that the mean over the passes is exact. Mixtures: every epoch holds the same number of samples of each
data set, in an order shuffled anew. Everything is a function of (seed, position), so resuming is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from segpipe.data.order import permutation
from segpipe.errors import ConfigError
from segpipe.keys import generator, sample_key

Int64 = NDArray[np.int64]
UNIT = (
    2**12
)  # repeats are whole multiples of 1 / UNIT; passes of up to 47 million samples are then exact in int64


class Passes:
    """The samples of one data set, pass after pass; each pass holds every sample at least once.

    number: of the data set in its mixture. first: index of its first sample in the training set. repeats: of each
    sample, at least 1, float64 (n,).
    """

    def __init__(
        self, seed: int, number: int, first: int, repeats: NDArray[np.float64]
    ) -> None:
        self.seed, self.first = seed, first
        self._lane = number + 1  # in the keys; 0 is the order of an epoch
        self._repeats = np.round(repeats * UNIT).astype(np.int64)
        assert self._repeats.min() >= UNIT
        self._total = int(self._repeats.sum())
        self.length = -(-self._total // UNIT)  # samples of a pass
        self._copies = -(-int(self._repeats.max()) * self.length // self._total)
        self._pass = lru_cache(maxsize=2)(self._make)

    def draw(self, number: int) -> tuple[int, int]:
        """Epoch and index of draw `number`, counted from 0.

        The epoch counts the visits to a sample with its repeats, so no two draws of a run share (epoch, index), and
        none shares its augmentation.
        """
        turn, place = divmod(number, self.length)
        indices, copies = self._pass(turn)
        return turn * self._copies + int(copies[place]), self.first + int(
            indices[place]
        )

    def _make(self, turn: int) -> tuple[Int64, Int64]:
        """Sample and number of its copy at every place of a pass.

        Systematic sampling: the repeats lie one after another on a line, in a shuffled order, and a comb of `length`
        teeth at a random place counts how many fall on each.
        """
        order = self._shuffled(turn, "repeat", len(self._repeats))
        ends = np.cumsum(self._repeats[order]) * self.length
        draws = generator(
            sample_key(self.seed, turn, self._lane, "comb")
        ).bit_generator.random_raw()
        teeth = (ends + int(draws) % self._total) // self._total
        counts = np.diff(teeth, prepend=0)
        copies = np.arange(self.length) - np.repeat(teeth - counts, counts)
        places = self._shuffled(turn, "order", self.length)
        return np.repeat(order, counts)[places], copies[places]

    def _shuffled(self, turn: int, purpose: str, num: int) -> Int64:
        draws = generator(
            sample_key(self.seed, turn, self._lane, purpose)
        ).bit_generator.random_raw(num)
        return np.argsort(draws, kind="stable")


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

    def sample(self, position: int) -> tuple[int, int]:
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
    found = [int(share) for share in exact]
    by_remainder = sorted(
        range(len(exact)), key=lambda place: found[place] - exact[place]
    )
    for place in by_remainder[: total - sum(found)]:
        found[place] += 1
    for place, number in enumerate(found):
        if not number:
            raise ConfigError(
                f"data.mix[{place}] has weight {weights[place]:g}, which is less than 1 of the {total} samples of an "
                f"epoch. Raise it, or remove the set."
            )
    return found
