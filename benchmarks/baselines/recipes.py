"""How other projects read and augment a sample, written afresh: torchvision's reference scripts, mmseg, PIDNet.

All draw the factor of the resize as segpipe does (log-uniform), so that they resize the same number of pixels on
average; otherwise each keeps its own order, libraries and output. What a recipe does on the GPU is left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import torch
import torchvision.transforms.v2.functional as F
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

IGNORE = 255
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Recipe = Callable[
    [str, str], tuple[Any, Any]
]  # image file and mask file to image and target


def factor(scale: tuple[float, float]) -> float:
    """Log-uniform, by Python's global generator."""
    return math.exp(random.uniform(math.log(scale[0]), math.log(scale[1])))


class Torchvision:
    """references/segmentation/presets.py with the backend PIL: resize the whole frame, flip, crop, normalise.

    Image float32 (3, H, W), target int64 (H, W). `color` adds ColorJitter, which the reference lacks; `raw` leaves
    image and target uint8, which the reference does not.
    """

    def __init__(
        self,
        crop: int,
        scale: tuple[float, float],
        *,
        color: bool = True,
        raw: bool = False,
    ) -> None:
        self.scale, self.color, self.raw = scale, color, raw
        self.crop = v2.RandomCrop(
            crop,
            pad_if_needed=True,
            fill={tv_tensors.Image: 0, Image.Image: 0, tv_tensors.Mask: IGNORE},
        )
        self.flip = v2.RandomHorizontalFlip(0.5)
        self.jitter = v2.ColorJitter(0.2, 0.2, 0.2, 0.02)
        self.normalise = v2.Normalize(MEAN, STD)

    def __call__(self, image_file: str, mask_file: str) -> tuple[Tensor, Tensor]:
        image: Any = Image.open(image_file).convert("RGB")
        mask: Any = torch.from_numpy(np.array(Image.open(mask_file)))
        size = round(min(image.size) * factor(self.scale))
        image = F.resize(image, [size], antialias=True)
        mask = F.resize(mask[None], [size], interpolation=v2.InterpolationMode.NEAREST)
        image, mask = self.crop(*self.flip(image, tv_tensors.Mask(mask)))
        mask = mask.as_subclass(Tensor)
        if self.color:
            image = self.jitter(image)
        image = F.pil_to_tensor(image)
        if self.raw:
            return image, mask[0]
        return self.normalise(F.to_dtype(image, torch.float32, scale=True)), mask[0].to(
            torch.int64
        )


class Mmseg:
    """configs/_base_/datasets/cityscapes_1024x1024.py: RandomResize, RandomCrop with cat_max_ratio 0.75, RandomFlip,
    PhotoMetricDistortion. Image uint8 (3, H, W), BGR; target int64 (H, W). Padding and normalisation run on the GPU."""

    def __init__(self, crop: int, scale: tuple[float, float]) -> None:
        self.crop, self.scale = crop, scale

    def __call__(self, image_file: str, mask_file: str) -> tuple[Tensor, Tensor]:
        with open(image_file, "rb") as file:
            image = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_COLOR)
        mask: Any = np.array(Image.open(mask_file)).astype(np.uint8)
        assert image is not None
        by = factor(self.scale)
        size = round(image.shape[1] * by), round(image.shape[0] * by)
        image = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
        mask = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
        box = self._box(mask)
        image, mask = image[box], mask[box]
        if random.random() < 0.5:
            image, mask = np.flip(image, axis=1), np.flip(mask, axis=1)
        image = self._distorted(np.ascontiguousarray(image))
        return torch.from_numpy(
            np.ascontiguousarray(image.transpose(2, 0, 1))
        ), torch.from_numpy(mask.astype(np.int64))

    def _box(self, mask: Any) -> tuple[slice, slice]:
        for _ in range(10):
            row, column = (
                random.randint(0, max(length - self.crop, 0)) for length in mask.shape
            )
            box = slice(row, row + self.crop), slice(column, column + self.crop)
            labels, counts = np.unique(mask[box], return_counts=True)
            counts = counts[labels != IGNORE]
            if len(counts) > 1 and counts.max() / counts.sum() < 0.75:
                break
        return box

    def _distorted(self, image: Any) -> Any:
        def convert(pixels: Any, alpha: float = 1.0, beta: float = 0.0) -> Any:
            return np.clip(pixels.astype(np.float32) * alpha + beta, 0, 255).astype(
                np.uint8
            )

        if random.randint(0, 1):
            image = convert(image, beta=random.uniform(-32, 32))
        first = random.randint(0, 1)
        if first and random.randint(0, 1):
            image = convert(image, alpha=random.uniform(0.5, 1.5))
        if random.randint(0, 1):
            hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
            hsv[:, :, 1] = convert(hsv[:, :, 1], alpha=random.uniform(0.5, 1.5))
            image = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)
        if random.randint(0, 1):
            hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
            hsv[:, :, 0] = (hsv[:, :, 0].astype(int) + random.randint(-18, 17)) % 180
            image = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)
        if not first and random.randint(0, 1):
            image = convert(image, alpha=random.uniform(0.5, 1.5))
        return image


class Pidnet:
    """datasets/cityscapes.py and base_dataset.py: edges by Canny on the full mask, resize, crop, normalise, flip; no
    color. Image float32 (3, H, W), target int64 (H, W). Without its loop over label ids: the masks hold train ids."""

    def __init__(self, crop: int, scale: tuple[float, float]) -> None:
        self.crop, self.scale = crop, scale

    def __call__(self, image_file: str, mask_file: str) -> tuple[Any, Any]:
        image: Any = cv2.imread(image_file, cv2.IMREAD_COLOR)
        mask: Any = cv2.imread(mask_file, cv2.IMREAD_GRAYSCALE)
        edge: Any = cv2.Canny(mask, 0.1, 0.2)
        edge = edge[6:-6, 6:-6]
        edge = np.pad(edge, ((6, 6), (6, 6)), mode="constant")
        edge = (cv2.dilate(edge, np.ones((4, 4), np.uint8), iterations=1) > 50) * 1.0
        by = factor(self.scale)
        size = round(image.shape[1] * by), round(image.shape[0] * by)
        image = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
        mask = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
        edge = cv2.resize(edge, size, interpolation=cv2.INTER_NEAREST)
        image, mask, edge = self._cropped(image, mask, edge)
        image = image.astype(np.float32)[:, :, ::-1] / 255.0
        image = (image - MEAN) / STD
        mask = np.array(mask).astype(np.uint8)
        image = image.transpose((2, 0, 1))
        flip = np.random.choice(2) * 2 - 1
        image, mask, edge = image[:, :, ::flip], mask[:, ::flip], edge[:, ::flip]
        return np.ascontiguousarray(image, np.float32), (
            mask.astype(np.int64),
            edge.copy(),
        )

    def _cropped(self, *arrays: Any) -> list[Any]:
        height, width = arrays[0].shape[:2]
        below, right = max(self.crop - height, 0), max(self.crop - width, 0)
        row, column = (
            random.randint(0, height + below - self.crop),
            random.randint(0, width + right - self.crop),
        )
        found = []
        for array, fill in zip(arrays, ((0, 0, 0), (IGNORE,), (0,)), strict=True):
            if below or right:
                array = cv2.copyMakeBorder(
                    array, 0, below, 0, right, cv2.BORDER_CONSTANT, value=fill
                )
            found.append(array[row : row + self.crop, column : column + self.crop])
        return found
