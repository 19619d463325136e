"""Images that training and validation both read: a score on them says nothing about new images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

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
    small = cv2.resize(
        cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), (9, 8), interpolation=cv2.INTER_AREA
    ).astype(np.float64)
    if small.std() < FLAT:
        return UNKNOWN_LOOK
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes())


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


def shared_files(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of files of equal bytes, one of each list. Reads only files whose sizes occur in both."""
    sizes = {path: os.stat(path).st_size for path in (*first, *second)}
    common = {sizes[path] for path in first} & {sizes[path] for path in second}
    known = {sha256(Path(path)): path for path in first if sizes[path] in common}
    digests = ((sha256(Path(path)), path) for path in second if sizes[path] in common)
    return [(known[digest], path) for digest, path in digests if digest in known]


def check_overlap(train: Sequence[str], val: Sequence[str], split: str) -> None:
    """Raise DataError if images of validation, given as files, are training images too."""
    if found := shared_files(train, val):
        raise DataError(
            f"{len(found)} of the images of split {split} are training images, byte for byte (the first: {found[0][0]} "
            f"= {found[0][1]}): the score would be too good. Remove them from one of the two, or set "
            f"data.allow_overlap=true."
        )
