"""Statistics of training images, and the limits outside which the robot refuses a frame."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe.data.order import spaced
from segpipe.export.graph.network import Image
from segpipe.runtime.frames import BLOCKS, QUANTITIES, look_at

_QUANTILES = (0.05, 0.5, 0.95)  # images beyond the outer ones do not affect the limits
_CALIBRATION_IMAGES = 32  # for the activation ranges of int8
_NEARLY_ALL = 0.99  # completely dark, bright or flat frames are refused regardless of the training images
_ENOUGH = 16  # images needed to learn which way is up
_CLEARLY = 0.25  # share of the median score that the least upright image must reach
_OPEN = [-1000.0, 1000.0]  # no limit
_SHARES = ("dark_share", "bright_share", "flat_share")


def frame_entries(images: Iterable[Image], source: str) -> dict[str, Any]:
    """Entries `frame_statistics` and `frame_limits` of the manifest. `source`: kind of the images, such as train."""
    fit = (each for each in images if min(each.shape[:2]) > BLOCKS)
    found, profiles = zip(*map(look_at, fit), strict=True)
    weights = _upright_weights(np.stack(profiles))
    values = {name: [entry[name] for entry in found] for name in found[0]}
    values["upright"] = list(np.stack(profiles) @ weights)
    quantiles = {
        name: np.quantile(column, _QUANTILES).round(4).tolist()
        for name, column in values.items()
    }
    statistics = {"source": source, "images": len(found), "quantiles": quantiles}
    limits = {**_limits(quantiles), "upright_weights": weights.round(6).tolist()}
    return {"frame_statistics": statistics, "frame_limits": limits}


def unknown_frames() -> dict[str, Any]:
    """`frame_statistics` and `frame_limits` without images: only completely dark, bright or flat frames are refused."""
    return {
        "frame_statistics": {"source": "none", "images": 0, "quantiles": {}},
        "frame_limits": {
            **dict.fromkeys(QUANTITIES, _OPEN),
            **{name: [0.0, _NEARLY_ALL] for name in _SHARES},
            "upright_weights": [0.0] * 12,
        },
    }


def frames_of(
    images: Sequence[Image],
    train_images: Iterable[Image] | None,
    shape: tuple[int, ...],
) -> tuple[dict[str, Any], list[Image]]:
    """Frame entries of the manifest, and frames of this shape to calibrate int8 on.

    Both come from the training images; without them, from the check images.
    """
    if train_images is None:
        entries = frame_entries(images, "check") if images else unknown_frames()
        return entries, list(images)
    kept: list[Image] = []

    def watched() -> Iterator[Image]:
        """Yields the training images and keeps those that fit."""
        for image in train_images:
            if image.shape == shape:
                kept.append(image)
            yield image

    entries = frame_entries(watched(), "train")
    # Not the first ones, which would be those of a few drives.
    return entries, spaced(kept, _CALIBRATION_IMAGES) or list(images)


def _limits(quantiles: dict[str, list[float]]) -> dict[str, list[float]]:
    """Limits around the observed values, by quantity.

    A mean level may move three quarters of the way to black or white, and half of the pixels that are usually not dark
    (bright, flat) must stay so. A quarter of the rows may be lost, structure may drop to a quarter, and green may rise
    by a quarter of its headroom. A frame must look more like the images than like their upside-down versions.
    """
    lowest = {name: low for name, (low, _, _) in quantiles.items()}
    highest = {name: high for name, (_, _, high) in quantiles.items()}
    shares = {
        name: [0.0, min((1 + highest[name]) / 2, _NEARLY_ALL)] for name in _SHARES
    }
    limits = {
        "mean": [lowest["mean"] / 4, 255 - (255 - highest["mean"]) / 4],
        **shares,
        "lost_rows": [0.0, highest["lost_rows"] + (1 - highest["lost_rows"]) / 4],
        "structure": [lowest["structure"] / 4, _OPEN[1]],
        "green": [_OPEN[0], highest["green"] + (255 - highest["green"]) / 4],
        "upright": [0.0, _OPEN[1]],
    }
    return {
        name: [round(low, 4), round(high, 4)] for name, (low, high) in limits.items()
    }


def _upright_weights(profiles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights (12,) whose product with a profile is about 1, and about -1 when its image is upside down.

    A linear discriminant with a ridge between the profiles and their negatives. Zeros when the images do not separate
    up from down, or are too few.
    """
    none = np.zeros(profiles.shape[1])
    if len(profiles) < _ENOUGH:
        return none
    scale = np.sqrt(np.square(profiles).mean(0)) + 1e-6
    scaled = profiles / scale
    within = np.cov(scaled.T) + np.eye(len(scale))
    weights = np.linalg.solve(within, scaled.mean(0)) / scale
    scores = profiles @ weights
    median = float(np.median(scores))
    if not scores.min() > _CLEARLY * median > 0:
        return none
    return np.asarray(weights / median)
