"""What training images look like, and from that, which frames the robot had better not trust."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from segpipe.export.gates.checks import Samples, spread_indices
from segpipe.export.graph.profiles import Image
from segpipe.runtime.frames import BRIGHT_LEVEL, DARK_LEVEL, FrameLimits, Levels, levels

_USUAL = 0.05  # one image in twenty at either end may be odd without moving a limit
_LEVEL_ROOM, _SHARE_ROOM = 0.5, 0.01
_NEARLY_ALL = 0.99  # a frame that is dark or bright throughout is refused whatever the training images were


def spread(samples: Samples, count: int = 64) -> Iterator[Image]:
    """At most `count` images evenly spaced through a split, read one by one."""
    for index in spread_indices(len(samples), count):
        yield samples.read(index)[0]


def frame_entries(images: Iterable[Image], source: str) -> dict[str, Any]:
    """`frame_statistics` and `frame_limits` of the manifest. `source` says what images they are, such as train.

    Mean and standard deviation are per channel, RGB, in levels of 0 to 255, over all pixels.
    """
    histogram = np.zeros((3, 256), dtype=np.int64)
    found: list[Levels] = []
    for image in images:
        found.append(levels(image))
        for channel in range(3):
            histogram[channel] += np.bincount(image[..., channel].ravel(), minlength=256)
    assert found, "images come from a split that is not empty"
    level = np.arange(256)
    count = histogram.sum(1)
    mean = (histogram * level).sum(1) / count
    variance = (histogram * np.square(level)).sum(1) / count - np.square(mean)
    return {
        "frame_statistics": {
            "source": source,
            "images": len(found),
            "mean": [round(float(value), 3) for value in mean],
            "std": [round(float(value), 3) for value in np.sqrt(np.maximum(variance, 0.0))],
            "dark_level": DARK_LEVEL,
            "bright_level": BRIGHT_LEVEL,
        },
        "frame_limits": frame_limits(found)._asdict(),
    }


def unlike_frames(told: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Which entries about frames are not those that were found, with room for other decoders of the same pictures."""
    return [
        f"{name} are not those of the {found['frame_statistics']['source']} images"
        for name, entry in found.items()
        if told[name].keys() != entry.keys()
        or any(not _is_near(key, told[name][key], value) for key, value in entry.items() if key != "source")
    ]


def _is_near(name: str, told: Any, found: Any) -> bool:
    room = _SHARE_ROOM if name.endswith("share") else _LEVEL_ROOM
    return bool(np.allclose(told, found, rtol=0.0, atol=room))


def unknown_frames() -> dict[str, Any]:
    """`frame_statistics` and `frame_limits` where no image is at hand: only frames that show nothing are refused."""
    limits = FrameLimits(min_mean=0.0, max_mean=255.0, max_dark_share=_NEARLY_ALL, max_bright_share=_NEARLY_ALL)
    nothing = {"source": "none", "images": 0, "mean": [0.0] * 3, "std": [0.0] * 3}
    return {
        "frame_statistics": {**nothing, "dark_level": DARK_LEVEL, "bright_level": BRIGHT_LEVEL},
        "frame_limits": limits._asdict(),
    }


def frame_limits(found: list[Levels]) -> FrameLimits:
    """Limits with room to what was seen: a quarter of the usual distance to black or white is kept as mean level, and
    half of the usual share of other pixels must not turn dark or bright."""
    mean, dark, bright = (np.array(column) for column in zip(*found, strict=True))
    lowest, highest = np.quantile(mean, (_USUAL, 1 - _USUAL))
    dark_share, bright_share = (float(np.quantile(shares, 1 - _USUAL)) for shares in (dark, bright))
    return FrameLimits(
        min_mean=round(float(lowest) / 4, 3),
        max_mean=round(255 - (255 - float(highest)) / 4, 3),
        max_dark_share=round(min((1 + dark_share) / 2, _NEARLY_ALL), 4),
        max_bright_share=round(min((1 + bright_share) / 2, _NEARLY_ALL), 4),
    )
