"""Tiles of an image that is too large for one forward: where they lie, and how much each counts where two overlap."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import ConfigError

Size = tuple[int, int]  # height, width
LARGEST_OVERLAP = 0.9


class Strip(NamedTuple):
    """A row of tiles: all start at row `top`, and rows `top` to `done` get nothing from the strips below."""

    top: int
    done: int
    lefts: tuple[int, ...]


@dataclass(frozen=True)
class Tiling:
    """Tiles of one size, evenly spread over an image, from edge to edge; none is larger than the image."""

    image: Size
    tile: Size
    overlap: float  # smallest share of a tile that it has in common with its neighbor

    @classmethod
    def of(cls, image: Size, tile: Size | None, overlap: float) -> Tiling:
        """Tiling with tiles of at most `tile`; None for the whole image as one tile."""
        height, width = tile or image
        return cls(image, (min(height, image[0]), min(width, image[1])), overlap)

    @property
    def is_whole(self) -> bool:
        """Whether one tile covers the image."""
        return self.tile == self.image

    def strips(self) -> list[Strip]:
        """All tiles, from top to bottom and from left to right."""
        tops = starts(self.image[0], self.tile[0], self.overlap)
        lefts = tuple(starts(self.image[1], self.tile[1], self.overlap))
        return [
            Strip(top, done, lefts)
            for top, done in itertools.pairwise([*tops, self.image[0]])
        ]

    def weights(self) -> NDArray[np.float32]:
        """How much each pixel of a tile counts, float32 (h, w), above 0: `ramp` of its row times that of its column."""
        rows, columns = (ramp(length, self.overlap) for length in self.tile)
        return np.outer(rows, columns).astype(np.float32)


def starts(length: int, tile: int, overlap: float) -> list[int]:
    """First pixels of the fewest tiles that cover `length` pixels and overlap by at least this share of a tile."""
    if tile >= length:
        return [0]
    step = max(1, math.floor(tile * (1 - overlap)))
    last = math.ceil((length - tile) / step)
    return [place * (length - tile) // last for place in range(last + 1)]


def ramp(length: int, overlap: float) -> NDArray[np.float32]:
    """Weights along one side of a tile: they rise linearly over the overlap, are 1 inside, and fall again.

    At its edges a network sees the padding of its convolutions instead of the image, so its answers there are worse.
    """
    distance = np.minimum(np.arange(1, length + 1), np.arange(length, 0, -1))
    return np.minimum(distance / (math.floor(length * overlap) + 1), 1).astype(
        np.float32
    )


def parse_size(key: str, text: str) -> Size | None:
    """Height and width of `512x1024`; None for an empty text. Raises ConfigError for anything else."""
    if not text:
        return None
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ConfigError(
            f"{key} = {text!r}, but HEIGHTxWIDTH in pixels was needed, such as {key}=512x1024."
        )
    return int(height), int(width)
