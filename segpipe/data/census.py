"""What the samples of a split hold, for the page of the doctor: values of masks, pixels of classes, looks of images.

A file that cannot be read is left out: problems.py reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from segpipe.data.catalog import Color
from segpipe.data.data_set import Content, DataSet
from segpipe.data.overlap import UNKNOWN_LOOK, look
from segpipe.data.readers import threaded
from segpipe.errors import DataError

MOST_LOOKS = 20_000  # images of a split that are decoded to compare them


@dataclass
class Census:
    """Of the samples that can be read, in their order."""

    num_classes: int
    names: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # their indices
    pixels: list[NDArray[np.int64]] = field(default_factory=list)  # rows of `table`
    looks: list[int] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)  # of mask files
    values: Counter[int | Color] = field(default_factory=Counter)  # pixels of each
    files: Counter[int | Color] = field(default_factory=Counter)  # masks that have it
    ambiguous: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def table(self) -> NDArray[np.int64]:
        """Pixels of each class, of ignored ones, and of values that the class table does not have, int64 (n, C + 2)."""
        shape = (len(self.names), self.num_classes + 2)
        return np.array(self.pixels, np.int64).reshape(shape)

    @property
    def unlabelled(self) -> list[int]:
        """Indices of the samples whose pixels are all ignored."""
        rows = zip(self.places, self.pixels, strict=True)
        return [index for index, row in rows if row[-2] == row.sum()]


def take(
    samples: DataSet, progress: Callable[[int, int], None] = lambda done, total: None
) -> Census:
    """The census of a split: of all files, and of some samples of any other data set."""
    indices = samples.countable()
    looked_at = set(indices[:: max(1, -(-len(indices) // MOST_LOOKS))])

    def examine(index: int) -> tuple[Content, int, tuple[int, int]] | None:
        try:
            content = samples.content(index)
            if index not in looked_at:
                return content, UNKNOWN_LOOK, samples.size(index)
            image = samples.image(index)
            return content, look(image), (image.shape[0], image.shape[1])
        except DataError:
            return None

    census = Census(samples.classes.num_classes)
    results = (threaded if samples.thread_safe() else map)(examine, indices)
    for done, (index, result) in enumerate(zip(indices, results, strict=True), 1):
        progress(done, len(indices))
        if result is None:
            continue
        content, seen, size = result
        census.names.append(samples.name(index))
        census.places.append(index)
        census.pixels.append(content.pixels)
        census.looks.append(seen)
        census.sizes[size] += 1
        census.kinds[content.kind] += 1
        census.values.update(content.values)
        census.files.update(content.values.keys())
        census.ambiguous |= content.ambiguous
    samples.keep_facts()
    return census
