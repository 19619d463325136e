"""Brightness statistics of training images, and the limits outside which the robot refuses a frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from segpipe.runtime.frames import BRIGHT_LEVEL, DARK_LEVEL, FrameLimits, Levels, levels

if TYPE_CHECKING:
    from segpipe.export.graph.profiles import Image

_OUTLIERS = 0.05  # share of images at either end that do not move a limit
_LEVEL_TOLERANCE, _SHARE_TOLERANCE = 0.5, 0.01
_CALIBRATION_IMAGES = 32  # for the activation ranges of int8
_NEARLY_ALL = 0.99  # a completely dark or bright frame is refused whatever the training images were


def frame_entries(images: Iterable[Image], source: str) -> dict[str, Any]:
    """`frame_statistics` and `frame_limits` of the manifest. `source`: which images, such as train.

    Mean and standard deviation are per channel, RGB, in levels of 0 to 255, over all pixels.
    """
    histogram = np.zeros((3, 256), dtype=np.int64)
    found: list[Levels] = []
    for image in images:
        found.append(levels(image))
        for channel in range(3):
            histogram[channel] += np.bincount(
                image[..., channel].ravel(), minlength=256
            )
    assert found, "a split is never empty"
    level = np.arange(256)
    count = histogram.sum(1)
    mean = (histogram * level).sum(1) / count
    variance = (histogram * np.square(level)).sum(1) / count - np.square(mean)
    return {
        "frame_statistics": {
            "source": source,
            "images": len(found),
            "mean": [round(float(value), 3) for value in mean],
            "std": [
                round(float(value), 3) for value in np.sqrt(np.maximum(variance, 0.0))
            ],
            "dark_level": DARK_LEVEL,
            "bright_level": BRIGHT_LEVEL,
        },
        "frame_limits": frame_limits(found)._asdict(),
    }


def frames_of(
    images: Sequence[Image],
    train_images: Iterable[Image] | None,
    shape: tuple[int, ...],
) -> tuple[dict[str, Any], list[Image]]:
    """Entries of the manifest about frames, and the frames of this shape for the calibration of int8.

    Both come from the training images; without them, from the check images.
    """
    if train_images is None:
        return frame_entries(images, "check") if images else unknown_frames(), list(
            images
        )
    kept: list[Image] = []

    def watched() -> Iterator[Image]:
        for image in train_images:
            if image.shape == shape and len(kept) < _CALIBRATION_IMAGES:
                kept.append(image)
            yield image

    entries = frame_entries(watched(), "train")
    if total := getattr(
        train_images, "total", 0
    ):  # of a Spread, which does not read all images
        entries["frame_statistics"]["of"] = total
    return entries, kept or list(images)


def unknown_frames() -> dict[str, Any]:
    """`frame_statistics` and `frame_limits` without images: only completely dark or bright frames are refused."""
    limits = FrameLimits(
        min_mean=0.0,
        max_mean=255.0,
        max_dark_share=_NEARLY_ALL,
        max_bright_share=_NEARLY_ALL,
    )
    nothing = {"source": "none", "images": 0, "mean": [0.0] * 3, "std": [0.0] * 3}
    return {
        "frame_statistics": {
            **nothing,
            "dark_level": DARK_LEVEL,
            "bright_level": BRIGHT_LEVEL,
        },
        "frame_limits": limits._asdict(),
    }


def frame_problems(manifest: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Entries about frames that differ from those computed again, with a tolerance for other image decoders."""
    return [
        f"{name} are not those of the {found['frame_statistics']['source']} images"
        for name, entry in found.items()
        if (manifest[name].keys() ^ entry.keys()) - {"of"}  # older exports lack it
        or any(
            not _is_near(key, manifest[name].get(key, value), value)
            for key, value in entry.items()
            if key != "source"
        )
    ]


def _is_near(name: str, claimed: Any, found: Any) -> bool:
    tolerance = _SHARE_TOLERANCE if name.endswith("share") else _LEVEL_TOLERANCE
    return bool(np.allclose(claimed, found, rtol=0.0, atol=tolerance))


def frame_limits(found: list[Levels]) -> FrameLimits:
    """Limits around what was seen: a mean level may move three quarters of the way to black or white, and half of the
    pixels that are usually not dark (bright) must stay so."""
    mean, dark, bright = (np.array(column) for column in zip(*found, strict=True))
    lowest, highest = np.quantile(mean, (_OUTLIERS, 1 - _OUTLIERS))
    dark_share, bright_share = (
        float(np.quantile(shares, 1 - _OUTLIERS)) for shares in (dark, bright)
    )
    return FrameLimits(
        min_mean=round(float(lowest) / 4, 3),
        max_mean=round(255 - (255 - float(highest)) / 4, 3),
        max_dark_share=round(min((1 + dark_share) / 2, _NEARLY_ALL), 4),
        max_bright_share=round(min((1 + bright_share) / 2, _NEARLY_ALL), 4),
    )
