"""What the samples of a split hold, for the page of the doctor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.data.data_set import Content, DataSet
from segpipe.data.readers import threaded
from segpipe.datasets.overlap import UNKNOWN_LOOK, look
from segpipe.errors import DataError

MOST_LOOKS = 20_000  # images of a split that are decoded to compare them


class CensusRow(NamedTuple):
    """One sample: its place in the split, its name, what its target and its image hold."""

    place: int
    name: str
    content: Content
    look: int
    size: tuple[int, int]


class Census(NamedTuple):
    """A split as it was opened, and a row for each sample that can be read, in their order."""

    split: str
    samples: DataSet
    rows: list[CensusRow]

    @property
    def table(self) -> NDArray[np.int64]:
        """Pixels of each class, of ignored ones, and of values that the class table does not have, int64 (n, C + 2)."""
        shape = (len(self.rows), self.samples.classes.num_classes + 2)
        return np.array([row.content.pixels for row in self.rows]).reshape(shape)


def take(
    split: str,
    samples: DataSet,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Census:
    """The census of a split: of all files, and of some samples of any other data set.

    A file that cannot be read is left out: problems.py reports it.
    """
    indices = samples.countable()
    looked_at = set(indices[:: max(1, -(-len(indices) // MOST_LOOKS))])

    def examine(index: int) -> CensusRow | None:
        try:
            content, seen = samples.content(index), UNKNOWN_LOOK
            size = samples.size(index)
            if index in looked_at:
                image = samples.image(index)
                seen, size = look(image), (image.shape[0], image.shape[1])
            return CensusRow(index, samples.name(index), content, seen, size)
        except DataError:
            return None

    rows: list[CensusRow] = []
    results = (threaded if samples.thread_safe() else map)(examine, indices)
    for done, row in enumerate(results, 1):
        progress(done, len(indices))
        rows += [row] if row else []
    samples.keep_facts()
    return Census(split, samples, rows)
