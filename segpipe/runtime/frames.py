"""The result of a frame, and the checks before inference: brightness, and whether the camera still sends new frames."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_ANSWER = 255  # mask value where there is no answer; no class has this id
DARK_LEVEL = 8  # a pixel is dark if no channel is above
BRIGHT_LEVEL = 247  # a pixel is bright if no channel is below
_MAX_PIXELS = 32768  # looked at for brightness
_ROWS_APART = 61  # of the rows that are compared before the whole frame


class Status(str, Enum):  # noqa: UP042, enum.StrEnum came with Python 3.11
    """Why there is an answer or not; Segmenter.last_error has the figures. Other programs read these names: never
    rename one."""

    OK = "OK"
    BAD_SHAPE = "BAD_SHAPE"  # not (height, width, 3) of a size that the model takes
    BAD_DTYPE = "BAD_DTYPE"  # not a uint8 array
    STALE = "STALE"  # stamp too old, too far ahead, before an earlier one, or NaN
    TOO_DARK = "TOO_DARK"  # darker than any training image
    SATURATED = "SATURATED"  # brighter than any training image
    FROZEN = "FROZEN"  # the same bytes again and again
    DEADLINE = "DEADLINE"  # no answer in time
    ERROR = "ERROR"  # anything else

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:  # without it, Python 3.10 and 3.12 differ
        return format(str(self.value), spec)


class Refused(Exception):
    """A frame without an answer: its status, and why."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


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
        """Limits from the manifest's `frame_limits`. Raises ValueError for one that is no level, such as NaN."""
        limits = cls(**{name: float(entry[name]) for name in cls._fields})
        if not all(0 <= limit <= 255 for limit in limits):
            raise ValueError(f"{limits}, but numbers from 0 to 255 were needed")
        return limits

    def status(self, levels: Levels) -> Status:
        """TOO_DARK, SATURATED or OK."""
        if levels.mean < self.min_mean or levels.dark_share > self.max_dark_share:
            return Status.TOO_DARK
        if levels.mean > self.max_mean or levels.bright_share > self.max_bright_share:
            return Status.SATURATED
        return Status.OK


def subsample(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """View of every n-th row and column of an image (H, W, 3), about 32,768 pixels."""
    step = math.ceil(math.sqrt(image.shape[0] * image.shape[1] / _MAX_PIXELS))
    return image[::step, ::step]


def levels(image: NDArray[np.uint8]) -> Levels:
    """Brightness of an image uint8 (H, W, 3), measured on its `subsample`."""
    # One copy, channel by channel: numpy compares neighbors in memory many times faster than every third byte.
    planes = np.ascontiguousarray(np.moveaxis(subsample(image), -1, 0))
    red, green, blue = planes
    highest = np.maximum(np.maximum(red, green), blue)
    lowest = np.minimum(np.minimum(red, green), blue)
    return Levels(
        int(planes.sum(dtype=np.uint32)) / planes.size,
        int(np.count_nonzero(highest <= DARK_LEVEL)) / red.size,
        int(np.count_nonzero(lowest >= BRIGHT_LEVEL)) / red.size,
    )


class RepeatCounter:
    """Counts identical frames in a row. Sensor noise never repeats; the buffer of a hung driver does."""

    def __init__(self) -> None:
        self._last: NDArray[np.uint8] | None = None
        self._count = 0

    def count(self, image: NDArray[np.uint8]) -> int:
        """Number of identical frames directly before this image (H, W, 3)."""
        if self._repeats(image):
            self._count += 1
            return self._count
        self._count = 0
        if self._last is None or self._last.shape != image.shape:
            self._last = np.empty(image.shape, np.uint8)
        # Drivers reuse their buffers, so a reference would always compare equal.
        np.copyto(self._last, image)
        return 0

    def _repeats(self, image: NDArray[np.uint8]) -> bool:
        """Noise makes a few rows differ; only where they do not, all are compared: cheaper than any checksum."""
        last = self._last
        return last is not None and all(
            np.array_equal(image[::step], last[::step]) for step in (_ROWS_APART, 1)
        )


class StampCheck:
    """Whether a frame is recent and newer than those before it; frames may overtake each other in a queue."""

    def __init__(self) -> None:
        self._newest = self._now = -math.inf

    def is_fresh(self, stamp: float, now: float, max_age_s: float) -> bool:
        """Whether `stamp` is within `max_age_s` of `now`, and not before an earlier stamp that was.

        When the clock itself was set back, the stamps of before do not count. NaN is not fresh.
        """
        if now < self._now:
            self._newest = -math.inf
        self._now = now
        fresh = abs(now - stamp) <= max_age_s and stamp >= self._newest
        if fresh:
            self._newest = stamp
        return fresh
