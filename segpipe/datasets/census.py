"""What the samples of a split hold, and images that training and validation share."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Sequence
from itertools import chain
from math import ceil
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.data_set import DataSet
from segpipe.data.masks import Content
from segpipe.data.readers import Progress, silent
from segpipe.data.samples import over
from segpipe.errors import DataError
from segpipe.files import sha256

UNKNOWN_LOOK = -1
NEAR = 6  # of 64 bits of a look that may differ
FLAT = 2.0  # grey levels: a picture with less contrast has no look


class NearDuplicate(NamedTuple):
    """Two images that look alike: their places in the two lists, and how many of 64 bits differ."""

    first: int
    second: int
    distance: int


def look(image: NDArray[np.uint8]) -> int:
    """64 bits that tell which of neighbouring parts of an image is brighter, or UNKNOWN_LOOK for a flat one.

    Hardly changed by scale, compression, brightness. Source: the difference hash (dHash), with 8 rows of 9 parts.
    """
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (9, 8), interpolation=cv2.INTER_AREA).astype(float)
    if small.std() < FLAT:
        return UNKNOWN_LOOK

    brighter = small[:, 1:] > small[:, :-1]
    return int.from_bytes(np.packbits(brighter).tobytes())


def near_duplicates(first: Sequence[int], second: Sequence[int]) -> list[NearDuplicate]:
    """For each look of `second` the nearest one of `first`, if at most NEAR bits differ; the nearest pairs first."""
    kept = [place for place, value in enumerate(first) if value != UNKNOWN_LOOK]
    known = np.array([first[place] for place in kept], np.uint64)
    found = []
    for place, value in enumerate(second):
        if value == UNKNOWN_LOOK or not kept:
            continue
        distances = np.bitwise_count(known ^ np.uint64(value))
        nearest = int(distances.argmin())
        if distances[nearest] <= NEAR:
            found.append(NearDuplicate(kept[nearest], place, int(distances[nearest])))

    return sorted(found, key=lambda pair: (pair.distance, pair.second))


def shared_files(first: DataSet, second: DataSet) -> list[tuple[str, str]]:
    """Pairs of image files of equal bytes, one of each data set.

    Reads only files whose sizes occur in both, and whose SHA-256 is not known.
    """
    sets = first.file_sets(), second.file_sets()
    files = [[pair.image for one in each for pair in one.pairs] for each in sets]
    sizes = {path: os.stat(path).st_size for path in chain(*files)}
    common = {sizes[path] for path in files[0]} & {sizes[path] for path in files[1]}
    known = dict(ChainMap(*(one.hashes() for one in chain(*sets))))

    def hashed(paths: Sequence[str]) -> list[tuple[str, str]]:
        """SHA-256 and path of the files whose size occurs on both sides."""
        same_size = [path for path in paths if sizes[path] in common]
        return [(known.get(path) or sha256(Path(path)), path) for path in same_size]

    others = dict(hashed(files[0]))
    found = [(others.get(digest, ""), path) for digest, path in hashed(files[1])]
    return [pair for pair in found if pair[0]]


def check_overlap(train: DataSet, val: DataSet, split: str) -> None:
    """Raise DataError if images of validation are training images too, where both lie in files."""
    found = shared_files(train, val)
    if found:
        raise DataError(
            f"{len(found)} of the images of split {split} are training images, byte for byte (the first: "
            f"{' = '.join(found[0])}): the score would be too good. Remove them from one of the two, or set "
            f"data.allow_overlap=true."
        )


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
    progress: Progress = silent,
) -> Census:
    """The census of a split: of all files, and of some samples of any other data set.

    A file that cannot be read is left out: problems.py reports it.
    """
    indices = samples.countable()
    step = ceil(len(indices) / MOST_LOOKS) or 1
    looked_at = set(indices[::step])

    def examine(index: int) -> CensusRow | None:
        """The row of a sample; None for one that cannot be read."""
        try:
            content = samples.content(index)
            size = samples.size(index)
            seen = UNKNOWN_LOOK
            if index in looked_at:
                image, _ = samples.read(index)
                height, width, _ = image.shape
                size = height, width
                seen = look(image)
        except DataError:
            return None

        return CensusRow(index, samples.name(index), content, seen, size)

    rows = over(samples, examine, indices, progress)
    return Census(split, samples, [row for row in rows if row])
