"""The result of a frame, and the checks before inference: brightness, and whether the camera still sends new frames."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_ANSWER = 255  # mask value where there is no answer; no class has this id
DARK_LEVEL, BRIGHT_LEVEL = 8, 247  # a pixel is dark if no channel is above, bright if no channel is below
_MAX_PIXELS = 65536  # looked at for brightness, which takes half a millisecond


class Status(str, Enum):  # noqa: UP042, enum.StrEnum came with Python 3.11
    """Why there is an answer or not. Other programs read these names: never rename one."""

    OK = "OK"
    BAD_SHAPE = "BAD_SHAPE"  # not (height, width, 3) of a size that the model takes
    BAD_DTYPE = "BAD_DTYPE"  # not a uint8 array
    STALE = "STALE"  # the stamp is too old, too far ahead, or not a number
    TOO_DARK = "TOO_DARK"  # darker than any training image
    SATURATED = "SATURATED"  # brighter than any training image
    FROZEN = "FROZEN"  # the same bytes again and again
    DEADLINE = "DEADLINE"  # no answer in time
    ERROR = "ERROR"  # anything else; Segmenter.last_error has the message

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:  # without it, Python 3.10 and 3.12 differ
        return format(str(self.value), spec)


class Result(NamedTuple):
    """Answer to one frame. Unless `status` is OK, `mask` is 255 and `confidence` 0 everywhere.

    Shapes: mask uint8 (H, W), class ids; confidence uint8 (h, w) at the output stride, 255 * probability. A frame of a
    wrong size gets the shapes of the exported size.
    """

    status: Status
    mask: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    latency_ms: float
    model_id: str


class Levels(NamedTuple):
    """Brightness of a frame: mean over all channels, fractions of dark and of bright pixels."""

    mean: float
    dark_share: float
    bright_share: float


class FrameLimits(NamedTuple):
    """Range of brightness in which frames are answered; the export derives it from training images."""

    min_mean: float
    max_mean: float
    max_dark_share: float
    max_bright_share: float

    @classmethod
    def from_manifest(cls, entry: dict[str, Any]) -> FrameLimits:
        """Limits from the manifest's `frame_limits`."""
        return cls(**{name: float(entry[name]) for name in cls._fields})

    def status(self, levels: Levels) -> Status:
        """TOO_DARK, SATURATED or OK."""
        if levels.mean < self.min_mean or levels.dark_share > self.max_dark_share:
            return Status.TOO_DARK
        if levels.mean > self.max_mean or levels.bright_share > self.max_bright_share:
            return Status.SATURATED
        return Status.OK


def subsample(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """View of every n-th row and column of an image (H, W, 3), about 65,536 pixels."""
    step = math.ceil(math.sqrt(image.shape[0] * image.shape[1] / _MAX_PIXELS))
    return image[::step, ::step]


def levels(image: NDArray[np.uint8]) -> Levels:
    """Brightness of an image uint8 (H, W, 3), measured on its `subsample`."""
    red, green, blue = np.moveaxis(subsample(image), -1, 0)
    highest = np.maximum(np.maximum(red, green), blue)
    lowest = np.minimum(np.minimum(red, green), blue)
    mean = (red.mean() + green.mean() + blue.mean()) / 3
    return Levels(float(mean), float((highest <= DARK_LEVEL).mean()), float((lowest >= BRIGHT_LEVEL).mean()))


class RepeatCounter:
    """Counts identical frames in a row. Sensor noise never repeats; the buffer of a hung driver does."""

    def __init__(self) -> None:
        self._last: NDArray[np.uint8] | None = None
        self._count = 0

    def count(self, image: NDArray[np.uint8]) -> int:
        """Number of identical frames directly before this image (H, W, 3)."""
        last = self._last
        if last is not None and np.array_equal(subsample(image), subsample(last)) and np.array_equal(image, last):
            self._count += 1
            return self._count
        self._count = 0
        if last is None or last.shape != image.shape:
            self._last = image.copy()
        else:  # copy: drivers reuse their buffers, so a reference would always compare equal
            np.copyto(last, image)
        return 0
