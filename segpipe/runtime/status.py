"""What a frame gives: an answer, or the reason why there is none."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_ANSWER = 255  # in a mask; the id of no class


class Status(StrEnum):
    """Why there is an answer or none; other programs read these names, so they never change."""

    OK = "OK"
    BAD_SHAPE = "BAD_SHAPE"  # not (height, width, 3) as the exported file takes it
    BAD_DTYPE = "BAD_DTYPE"  # not a uint8 array
    STALE = "STALE"  # the stamp is too old, too far ahead, or no number
    TOO_DARK = "TOO_DARK"  # darker than anything the network has seen
    SATURATED = "SATURATED"  # brighter than anything the network has seen
    FROZEN = "FROZEN"  # the same bytes again and again
    DEADLINE = "DEADLINE"  # the answer was not there in time
    ERROR = "ERROR"  # anything else; Segmenter.last_error says what


class Result(NamedTuple):
    """Answer to one frame. Unless `status` is OK, `mask` is 255 and `confidence` 0 everywhere.

    Shapes: mask uint8 (H, W) of class ids, confidence uint8 (h, w) at the output stride, 255 * probability; those of
    the exported size for a frame that does not fit.
    """

    status: Status
    mask: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    latency_ms: float
    model_id: str
