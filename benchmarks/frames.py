"""Frames of 2048x1024 that cost a decoder what those of Cityscapes cost: PNG 2.3 MB (37 %), JPEG q95 0.5 MB.

Colors are smooth fields with edges at the borders of labels, texture, and noise of a camera; labels are regions of 19
classes. Drawn from a seed, written as PNG with adaptive filters or as JPEG.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

SIZE, CLASSES = (1024, 2048), 19
PNG = [cv2.IMWRITE_PNG_COMPRESSION, 6, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_DEFAULT,
       cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_ALL_FILTERS]  # fmt: skip
JPEG = [cv2.IMWRITE_JPEG_QUALITY, 95]


def draw(
    number: int, size: tuple[int, int] = SIZE
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Image (H, W, 3) and labels (H, W) of `size`."""
    height, width = size
    random = np.random.default_rng([13, number])

    def field(rows: int, channels: int) -> NDArray[np.float32]:
        small = random.standard_normal((rows, 2 * rows, channels), dtype=np.float32)
        return np.asarray(
            cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
        ).reshape(height, width, -1)

    coarse = random.standard_normal((9, 18, CLASSES), dtype=np.float32)
    scores = [
        cv2.resize(coarse[..., one], (width, height), interpolation=cv2.INTER_CUBIC)
        for one in range(CLASSES)
    ]
    labels = np.argmax(scores, axis=0).astype(np.uint8)
    colors = random.uniform(30, 180, (CLASSES, 3)).astype(np.float32)
    image = colors[labels] + 12 * field(16, 3) + 4 * field(128, 1) + 1.0 * field(512, 1)
    image += 0.5 * random.standard_normal(image.shape, dtype=np.float32)
    return np.clip(image, 0, 255).astype(np.uint8), labels


def write(
    root: Path,
    num: int,
    *,
    size: tuple[int, int] = SIZE,
    jpeg: bool = False,
    splits: Sequence[str] = ("train",),
) -> None:
    """A data set of the kind `folder` with `num` frames in each split."""
    suffix, options = ("jpg", JPEG) if jpeg else ("png", PNG)
    for split in splits:
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
    names = ", ".join(f"class{number}" for number in range(CLASSES))
    (root / "classes.yaml").write_text(f"names: [{names}]\n")

    def one(number: int) -> None:
        split, name = splits[number // num], f"{number % num:03d}"
        image, labels = draw(number, size)
        bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(root / "images" / split / f"{name}.{suffix}"), bgr, options)
        cv2.imwrite(str(root / "masks" / split / f"{name}.png"), labels, PNG)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, range(num * len(splits))))
