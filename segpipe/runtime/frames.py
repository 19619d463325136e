"""The result for a frame, and the checks of its content before inference: plausible, and changing."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
NO_ANSWER = 255  # mask value of pixels without an answer; no class has this id
DARK_LEVEL = 8  # a pixel is dark if no channel exceeds it
BRIGHT_LEVEL = 247  # a pixel is bright if no channel is below it
_ROWS, _COLUMNS = 64, 128  # at most about twice as many are sampled
BLOCKS = 8  # along either side
_LOST = 0.95  # share of pixels equal to a neighbour above which a row or column is lost
_ROWS_APART = 61  # between the rows that are compared before the whole frame
_BUFFERS = 4  # frames that a driver may send in turn


class Status(str, Enum):  # noqa: UP042, enum.StrEnum came with Python 3.11
    """Why a frame has an answer or not; Segmenter.last_error has the figures. Other programs read these names: never
    rename one."""

    OK = "OK"
    BAD_SHAPE = "BAD_SHAPE"  # not (height, width, 3) of a size that the model takes
    BAD_DTYPE = "BAD_DTYPE"  # not a uint8 array
    STALE = "STALE"  # stamp too old, too far ahead, before an earlier one, or NaN
    TOO_DARK = "TOO_DARK"  # darker than any training image
    SATURATED = "SATURATED"  # brighter than any training image
    IMPLAUSIBLE = "IMPLAUSIBLE"  # unlike any training image: covered, torn, upside down
    FROZEN = "FROZEN"  # the same bytes repeatedly
    DEADLINE = "DEADLINE"  # no answer in time
    ERROR = "ERROR"  # anything else

    __str__ = str.__str__  # as in StrEnum: only the name, also in messages


class Refused(Exception):
    """A frame without an answer: its status and the reason."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


class Result(NamedTuple):
    """Answer to one frame. Unless `status` is OK, `mask` is 255 and `confidence` 0 everywhere.

    Shapes: mask uint8 (H, W), class ids; confidence uint8 (h, w) at the output stride, 255 * probability. A frame of
    the wrong size also gets the shapes of the exported size.
    """

    status: Status
    mask: Pixels
    confidence: Pixels
    latency_ms: float
    model_id: str


# Quantities of a frame, with the statuses for a value that is too low and too high
QUANTITIES: dict[str, tuple[Status, Status]] = {
    "mean": (Status.TOO_DARK, Status.SATURATED),
    "dark_share": (Status.TOO_DARK, Status.TOO_DARK),
    "bright_share": (Status.SATURATED, Status.SATURATED),
    **dict.fromkeys(
        ("flat_share", "lost_rows", "structure", "green", "upright"),
        (Status.IMPLAUSIBLE, Status.IMPLAUSIBLE),
    ),
}


def look_at(image: Pixels) -> tuple[dict[str, float], NDArray[np.float64]]:
    """Quantities of an image uint8 (H, W, 3) without `upright`, and a profile that tells up from down.

    mean: level of all channels. dark_share, bright_share: of pixels. flat_share: of pixels that equal their right
    neighbour (coarse blocks of a decoder). lost_rows: share of the rows that are constant or equal to the next one, or
    of such columns, if that is larger.
    structure: standard deviation of the luminance of 8x8 blocks, in levels (a covered lens has none). green: largest
    excess of green over the other channels in a band of rows, in levels. profile (12,): luminance, detail and blueness
    of four bands of rows minus those of the opposite bands; its sign changes when the image is turned upside down.
    """
    height, width, _ = image.shape
    down, right = max(1, height // _ROWS), max(1, width // _COLUMNS)
    here = _planes(image[: height - 1 : down, : width - 1 : right])
    beside = _planes(image[: height - 1 : down, 1::right])
    below = _planes(image[1::down, : width - 1 : right])
    flat, same = (here == beside).all(0), (here == below).all(0)
    lost = [np.maximum(flat.mean(a), same.mean(a)) > _LOST for a in (0, 1)]
    highest, lowest = here.max(0), here.min(0)

    red, green, blue = here.astype(np.int16)
    grid = _in_bands(_in_bands((red + 2 * green + blue) / 4).T).T  # (8, 8)
    detail = np.abs(green - beside[1]).mean(1, dtype=np.float64)
    bands = (grid.mean(1), _in_bands(np.log1p(detail)), _in_bands((blue - red).mean(1)))
    opposite = [(band - band[::-1])[: BLOCKS // 2] for band in bands]
    found = {
        "mean": here.mean(),
        "dark_share": np.mean(highest <= DARK_LEVEL),
        "bright_share": np.mean(lowest >= BRIGHT_LEVEL),
        "flat_share": flat.mean(),
        "lost_rows": max(map(np.mean, lost)),
        "structure": grid.std(),
        "green": _in_bands((2 * green - red - blue).mean(1)).max() / 2,
    }
    quantities = {name: float(value) for name, value in found.items()}
    return quantities, np.concatenate(opposite)


def _planes(pixels: Pixels) -> Pixels:
    # numpy compares contiguous bytes many times faster than every third byte.
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0))


def _in_bands(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Means over eight bands of rows: (h, ...) -> (8, ...)."""
    starts = np.arange(BLOCKS) * len(rows) // BLOCKS
    sums = np.add.reduceat(rows, starts, axis=0, dtype=np.float64)
    return np.asarray((sums.T / np.diff([*starts, len(rows)])).T)


class FrameLimits:
    """Accepted ranges of the quantities of a frame; the export derives them from training images."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        """Reads `frame_limits` of the manifest."""
        self._ranges = {
            name: np.array(entry[name], np.float64)
            for name in (*QUANTITIES, "upright_weights")
        }

    def check(self, image: Pixels) -> None:
        """Raises Refused for an image (H, W, 3) outside a range."""
        found, profile = look_at(image)
        found["upright"] = float(profile @ self._ranges["upright_weights"])
        for name, value in found.items():
            low, high = self._ranges[name]
            if not low <= value <= high:
                status = QUANTITIES[name][int(value > high)]
                why = f"{name} = {value:.3g}, but the export allows {low:g} to {high:g}"
                raise Refused(status, why)


class RepeatCounter:
    """Counts consecutive repeated frames. Sensor noise never repeats; the buffers of a hung driver do."""

    def __init__(self) -> None:
        self._kept: deque[Pixels] = deque(maxlen=_BUFFERS)
        self._count = 0

    def count(self, image: Pixels) -> int:
        """Number of consecutive frames, up to this one (H, W, 3), that equal one of the last four different frames."""
        # Noise makes a few rows differ; only if those are equal, all are compared: cheaper than any checksum.
        if any(
            all(np.array_equal(image[::s], kept[::s]) for s in (_ROWS_APART, 1))
            for kept in self._kept
        ):
            self._count += 1
            return self._count
        self._count = 0
        # Drivers reuse their buffers, so a reference would always compare equal.
        self._kept.append(image.copy())
        return 0


def enlarged(
    mask: NDArray[Any], height: int, width: int, *, align_corners: bool
) -> NDArray[Any]:
    """The mask scaled to this size: each pixel takes the id of its cell.

    align_corners: as in the manifest. Then the cells at the borders are centered on the first and the last pixel.
    """
    places = nearest if align_corners else _cells
    rows_columns = map(places, (height, width), mask.shape)
    return np.asarray(mask[np.ix_(*rows_columns)])


def nearest(num: int, others: int) -> NDArray[Any]:
    """For each of `num` evenly spaced points, the nearest of `others`, if the first and the last coincide."""
    places = np.arange(num) * ((others - 1) / max(num - 1, 1))
    return np.asarray(np.rint(places), np.int64)


def _cells(num: int, cells: int) -> NDArray[Any]:
    return (2 * np.arange(num) + 1) * cells // (2 * num)  # of the pixels' centers
