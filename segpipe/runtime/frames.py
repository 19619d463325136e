"""Whether a frame is worth an answer: how dark and how bright it is, and whether the camera still moves."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.runtime.status import Status

DARK_LEVEL, BRIGHT_LEVEL = 8, 247  # a pixel is dark when no channel is above, bright when none is below
_PIXELS = 65536  # no more are looked at, which takes half a millisecond


class Levels(NamedTuple):
    """Brightness of a frame: mean level over all channels, shares of dark and of bright pixels."""

    mean: float
    dark_share: float
    bright_share: float


class FrameLimits(NamedTuple):
    """Outside of these a frame gets no answer; the export derives them from training images."""

    min_mean: float
    max_mean: float
    max_dark_share: float
    max_bright_share: float

    @classmethod
    def from_manifest(cls, entry: dict[str, Any]) -> FrameLimits:
        """Limits as `frame_limits` of the manifest has them."""
        return cls(**{name: float(entry[name]) for name in cls._fields})

    def status(self, levels: Levels) -> Status:
        """TOO_DARK, SATURATED or OK."""
        if levels.mean < self.min_mean or levels.dark_share > self.max_dark_share:
            return Status.TOO_DARK
        if levels.mean > self.max_mean or levels.bright_share > self.max_bright_share:
            return Status.SATURATED
        return Status.OK


def thin(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Every n-th row and column of an image (H, W, 3), a view: brightness needs no more."""
    step = math.ceil(math.sqrt(image.shape[0] * image.shape[1] / _PIXELS))
    return image[::step, ::step]


def levels(image: NDArray[np.uint8]) -> Levels:
    """Brightness of an image uint8 (H, W, 3), of the pixels that `thin` keeps."""
    red, green, blue = np.moveaxis(thin(image), -1, 0)
    highest = np.maximum(np.maximum(red, green), blue)
    lowest = np.minimum(np.minimum(red, green), blue)
    mean = (red.mean() + green.mean() + blue.mean()) / 3
    return Levels(float(mean), float((highest <= DARK_LEVEL).mean()), float((lowest >= BRIGHT_LEVEL).mean()))


class Repetition:
    """Counts how often in a row the same frame came: a sensor's noise never repeats, a frozen driver's buffer does."""

    def __init__(self) -> None:
        self._last: NDArray[np.uint8] | None = None
        self._count = 0

    def count(self, image: NDArray[np.uint8]) -> int:
        """How often `image` (H, W, 3) came directly before; 0 when the last frame was another."""
        last = self._last
        if last is not None and np.array_equal(thin(image), thin(last)) and np.array_equal(image, last):
            self._count += 1
            return self._count
        self._count = 0
        if last is None or last.shape != image.shape:
            self._last = image.copy()
        else:  # drivers reuse their buffers, so a reference would always be equal
            np.copyto(last, image)
        return 0
