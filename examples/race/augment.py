"""An augmentation with a silent bug, and one without it: both rotate image and target by a random angle.

The bug: the angle is stored in a module-level object. One call draws it, and the next call uses it. The result depends
on the samples that this process saw before, and on its threads, not on the sample's own seeded random numbers.
"""

from __future__ import annotations

import random
from typing import Any

import albumentations as A
import cv2
import numpy as np
from numpy.typing import NDArray

Uint8 = NDArray[np.uint8]
LARGEST = 30.0  # degrees


def turned(picture: Uint8, angle: float, *, smooth: bool) -> Uint8:
    """Picture rotated about its center; the corners become black in an image and 255 (ignored) in a target."""
    height, width = picture.shape[:2]
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), angle, 1.0)
    how, corner = (cv2.INTER_LINEAR, (0, 0, 0)) if smooth else (cv2.INTER_NEAREST, 255)
    return np.asarray(
        cv2.warpAffine(picture, matrix, (width, height), flags=how, borderValue=corner),
        np.uint8,
    )


class Augmentor:
    """Rotates by its stored angle."""

    def __init__(self) -> None:
        self.angle = 0.0

    def draw(self, chance: random.Random) -> None:
        """Draw a new angle."""
        self.angle = chance.uniform(-LARGEST, LARGEST)

    def __call__(self, image: Uint8, target: Uint8) -> tuple[Uint8, Uint8]:
        return turned(image, self.angle, smooth=True), turned(
            target, self.angle, smooth=False
        )


AUGMENTOR = (
    Augmentor()
)  # the bug: one instance for all samples holds the parameters of one


def racy(image: Uint8, target: Uint8, chance: random.Random) -> tuple[Uint8, Uint8]:
    """The sample, rotated by the angle that the previous call drew."""
    done = AUGMENTOR(image, target)
    AUGMENTOR.draw(chance)  # for the next call
    return done


def repaired(image: Uint8, target: Uint8, chance: random.Random) -> tuple[Uint8, Uint8]:
    """The sample, rotated by an angle from its own random numbers; no state outlives the call."""
    own = Augmentor()
    own.draw(chance)
    return own(image, target)


class Repaired(A.DualTransform):
    """`repaired` as an albumentations transform, as in segpipe's pipelines."""

    def __init__(self) -> None:
        super().__init__(p=1.0)

    def get_params(self) -> dict[str, Any]:
        return {"angle": self.py_random.uniform(-LARGEST, LARGEST)}

    def apply(self, img: Uint8, angle: float, **_: Any) -> Uint8:
        return turned(img, angle, smooth=True)

    def apply_to_mask(self, mask: Uint8, angle: float, **_: Any) -> Uint8:
        return turned(mask, angle, smooth=False)


class Racy(Repaired):
    """`racy` as an albumentations transform."""

    def get_params(self) -> dict[str, Any]:
        params = {"angle": AUGMENTOR.angle}
        AUGMENTOR.draw(self.py_random)  # for the next call
        return params
