"""Validation images with their masks, blended and shrunk for a page or a tracker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.predict.outputs import blend as blend

PANEL_WIDTH = 480  # pixels; 32 panels of a page stay below 2 MB


@dataclass(frozen=True)
class Picture:
    """One validation image with its target and prediction."""

    name: str
    miou: float
    image: NDArray[np.uint8]  # (H, W, 3) RGB
    target: NDArray[np.uint8]  # (H, W), 255 ignored
    pred: NDArray[np.uint8]  # (H, W)

    def panels(
        self, palette: Sequence[tuple[int, int, int]]
    ) -> dict[str, NDArray[np.uint8]]:
        """Image, target, prediction and errors as RGB, at most 480 pixels wide."""
        image = shrink(self.image, PANEL_WIDTH, smooth=True)
        target = shrink(self.target, PANEL_WIDTH, smooth=False)
        pred = shrink(self.pred, PANEL_WIDTH, smooth=False)
        return {
            "image": image,
            "target": blend(image, target, palette),
            "prediction": blend(image, pred, palette),
            "errors": errors(image, target, pred, palette),
        }

    def taken(self, names: Sequence[str]) -> str:
        """The two confusions of most pixels: `fence taken for building 4.2 %`; empty if nothing is wrong."""
        labelled = self.target != IGNORE_INDEX
        wrong = labelled & (self.target != self.pred)
        pairs = np.bincount(256 * self.target[wrong].astype(int) + self.pred[wrong])
        most = [place for place in np.argsort(-pairs)[:2].tolist() if pairs[place]]
        return ", ".join(
            f"{names[place // 256]} taken for {names[place % 256]} "
            f"{pairs[place] / labelled.sum():.1%}"
            for place in most
        )


def errors(
    image: NDArray[np.uint8],
    target: NDArray[np.uint8],
    pred: NDArray[np.uint8],
    palette: Sequence[tuple[int, int, int]],
) -> NDArray[np.uint8]:
    """`image` in pale gray; where prediction and target differ, the color of the prediction.

    Pixels without a label get the hatch of `blend`.

    Shapes: image uint8 (H, W, 3) RGB, target and pred uint8 (H, W) -> uint8 (H, W, 3).
    """
    gray = (128 + image.mean(2, keepdims=True) / 2).round().astype(np.uint8)
    shown = np.where(target == IGNORE_INDEX, target, pred)
    colored = blend(gray.repeat(3, axis=2), shown, palette, opacity=0.85)
    right = (shown == target) & (target != IGNORE_INDEX)
    return np.where(right[..., None], gray, colored)


def shrink(image: NDArray[np.uint8], width: int, *, smooth: bool) -> NDArray[np.uint8]:
    """`image` at most `width` pixels wide, same aspect ratio. smooth=False for class ids, which must not be mixed."""
    import cv2

    if image.shape[1] <= width:
        return image
    height = max(1, round(image.shape[0] * width / image.shape[1]))
    interpolation = cv2.INTER_AREA if smooth else cv2.INTER_NEAREST
    shrunk = cv2.resize(image, (width, height), interpolation=interpolation)
    return np.asarray(shrunk, np.uint8)
