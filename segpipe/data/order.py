"""Order of the samples as a function of the position in training, so that resuming is arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from segpipe.keys import generator, sample_key


@lru_cache(maxsize=2)  # a batch that spans two epochs needs both
def permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Order of the n samples in one epoch, read-only int64 (n,).

    Sorts raw 64-bit draws: the raw stream of Philox never changes, while the methods of numpy's Generator may change
    between releases.
    """
    draws = generator(sample_key(seed, epoch, 0, "order")).bit_generator.random_raw(n)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


class Positions(Protocol):
    """An order in which samples are not simply each taken once per epoch."""

    def sample(self, position: int) -> tuple[int, int]:
        """Epoch and sample index at `position`, counted from 0; no two positions have the same."""


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
    positions: Positions | None = None

    def sample(self, position: int) -> tuple[int, int]:
        """Epoch and sample index at `position`, counted from 0."""
        if self.positions is not None:
            return self.positions.sample(position)
        epoch, place = divmod(position, self.num_samples)
        return epoch, int(permutation(self.seed, epoch, self.num_samples)[place])

    def shard(self, step: int, shard: int) -> list[tuple[int, int]]:
        """(epoch, index) of the samples of logical shard `shard` in `step`."""
        first = (step * self.shards + shard) * self.samples_per_shard
        return [self.sample(first + j) for j in range(self.samples_per_shard)]
