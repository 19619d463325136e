"""Brightness statistics of training images, and the limits outside which the robot refuses a frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe.runtime.frames import BRIGHT_LEVEL, DARK_LEVEL, FrameLimits, Levels, levels

if TYPE_CHECKING:
    from segpipe.export.graph.profiles import Image

_OUTLIERS = 0.05  # share of images at either end that do not move a limit
_CALIBRATION_IMAGES = 32  # for the activation ranges of int8
_NEARLY_ALL = 0.99  # a completely dark or bright frame is refused whatever the training images were


def frame_entries(images: Iterable[Image], source: str) -> dict[str, Any]:
    """`frame_statistics` and `frame_limits` of the manifest. `source`: which images, such as train.

    Mean and standard deviation are per channel, RGB, in levels of 0 to 255, over all pixels.
    """
    # Of each channel; it is exact, whatever the number of images
    histogram = np.zeros((3, 256), dtype=np.int64)
    found: list[Levels] = []
    for image in images:
        found.append(levels(image))
        for channel in range(3):
            values = image[..., channel].ravel()
            histogram[channel] += np.bincount(values, minlength=256)
    assert found, "a split is never empty"

    level = np.arange(256)
    count = histogram.sum(1)
    mean = (histogram * level).sum(1) / count
    variance = (histogram * np.square(level)).sum(1) / count - np.square(mean)
    std = np.sqrt(np.maximum(variance, 0.0))
    return _entries(source, len(found), mean, std, frame_limits(found))


def frames_of(
    images: Sequence[Image],
    train_images: Iterable[Image] | None,
    shape: tuple[int, ...],
) -> tuple[dict[str, Any], list[Image]]:
    """Entries of the manifest about frames, and the frames of this shape for the calibration of int8.

    Both come from the training images; without them, from the check images.
    """
    if train_images is None:
        entries = frame_entries(images, "check") if images else unknown_frames()
        return entries, list(images)
    kept: list[Image] = []

    def watched() -> Iterator[Image]:
        """The training images, of which the first that fit are kept."""
        for image in train_images:
            if image.shape == shape and len(kept) < _CALIBRATION_IMAGES:
                kept.append(image)
            yield image

    entries = frame_entries(watched(), "train")
    # Of a Spread, which does not read all images of its split
    if total := getattr(train_images, "total", 0):
        entries["frame_statistics"]["of"] = total
    return entries, kept or list(images)


def unknown_frames() -> dict[str, Any]:
    """`frame_statistics` and `frame_limits` without images: only completely dark or bright frames are refused."""
    limits = FrameLimits(0.0, 255.0, _NEARLY_ALL, _NEARLY_ALL)
    return _entries("none", 0, np.zeros(3), np.zeros(3), limits)


def _entries(
    source: str,
    count: int,
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
    limits: FrameLimits,
) -> dict[str, Any]:
    statistics = {
        "source": source,
        "images": count,
        "mean": mean.round(3).tolist(),
        "std": std.round(3).tolist(),
        "dark_level": DARK_LEVEL,
        "bright_level": BRIGHT_LEVEL,
    }
    return {"frame_statistics": statistics, "frame_limits": limits._asdict()}


def frame_limits(found: list[Levels]) -> FrameLimits:
    """Limits around what was seen: a mean level may move three quarters of the way to black or white, and half of the
    pixels that are usually not dark (bright) must stay so."""
    mean, dark, bright = (np.array(column) for column in zip(*found, strict=True))
    lowest, highest = np.quantile(mean, (_OUTLIERS, 1 - _OUTLIERS))
    dark_share = float(np.quantile(dark, 1 - _OUTLIERS))
    bright_share = float(np.quantile(bright, 1 - _OUTLIERS))
    return FrameLimits(
        min_mean=round(float(lowest) / 4, 3),
        max_mean=round(255 - (255 - float(highest)) / 4, 3),
        max_dark_share=round(min((1 + dark_share) / 2, _NEARLY_ALL), 4),
        max_bright_share=round(min((1 + bright_share) / 2, _NEARLY_ALL), 4),
    )
