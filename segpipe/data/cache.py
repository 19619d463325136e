"""Decoded samples kept in memory: a PNG costs more to decode than all of its augmentation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from segpipe.data.catalog import ClassTable
from segpipe.data.samples import Samples

Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]


@dataclass
class CachedSamples:
    """`samples`, of which each process keeps those it has read until `budget_mib` is full; bits do not change.

    The first come stay: with random access a full cache gains nothing by replacing one sample with another. Arrays are
    read-only, so that no user can change what the next one sees. A copy for another process starts empty.
    """

    samples: Samples
    budget_mib: int
    _kept: dict[int, Pair] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def __getstate__(self) -> dict[str, object]:
        return {"samples": self.samples, "budget_mib": self.budget_mib, "_kept": {}, "_bytes": 0}

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples.name(index)

    def read(self, index: int) -> Pair:
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        image, target = self.samples.read(index)
        size = image.nbytes + target.nbytes
        if self._bytes + size <= self.budget_mib * 2**20:
            image.flags.writeable = target.flags.writeable = False
            self._kept[index] = (image, target)
            self._bytes += size
        return image, target
