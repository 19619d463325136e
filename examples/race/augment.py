"""An augmentation with a mistake that raises no error, and the same without it: both turn image and target.

The mistake: the angle lives in an object of the module. One call draws it, and the next call uses it. So what happens
to a sample depends on which samples this process has seen before, and on its threads; not on the sample's own random
numbers, however well they are seeded.
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
    """A picture turned about its middle; the corners become black, or class 255, which no loss counts."""
    height, width = picture.shape[:2]
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), angle, 1.0)
    how, corner = (cv2.INTER_LINEAR, (0, 0, 0)) if smooth else (cv2.INTER_NEAREST, 255)
    return np.asarray(cv2.warpAffine(picture, matrix, (width, height), flags=how, borderValue=corner), np.uint8)


class Augmentor:
    """Turns pictures by the angle that it holds."""

    def __init__(self) -> None:
        self.angle = 0.0

    def draw(self, chance: random.Random) -> None:
        """Take another angle."""
        self.angle = chance.uniform(-LARGEST, LARGEST)

    def __call__(self, image: Uint8, target: Uint8) -> tuple[Uint8, Uint8]:
        return turned(image, self.angle, smooth=True), turned(target, self.angle, smooth=False)


AUGMENTOR = Augmentor()  # the mistake: one for the whole module, with the parameters of a sample inside


def racy(image: Uint8, target: Uint8, chance: random.Random) -> tuple[Uint8, Uint8]:
    """The sample turned by what the call before this one has drawn."""
    done = AUGMENTOR(image, target)
    AUGMENTOR.draw(chance)  # ready for the next one
    return done


def repaired(image: Uint8, target: Uint8, chance: random.Random) -> tuple[Uint8, Uint8]:
    """The sample turned by what its own random numbers say; nothing outlives the call."""
    own = Augmentor()
    own.draw(chance)
    return own(image, target)


class Repaired(A.DualTransform):
    """`repaired` as a transform of albumentations, which is what segpipe's pipelines are made of."""

    def __init__(self) -> None:
        super().__init__(p=1.0)

    def get_params(self) -> dict[str, Any]:
        return {"angle": self.py_random.uniform(-LARGEST, LARGEST)}

    def apply(self, img: Uint8, angle: float, **_: Any) -> Uint8:
        return turned(img, angle, smooth=True)

    def apply_to_mask(self, mask: Uint8, angle: float, **_: Any) -> Uint8:
        return turned(mask, angle, smooth=False)


class Racy(Repaired):
    """`racy` as such a transform."""

    def get_params(self) -> dict[str, Any]:
        params = {"angle": AUGMENTOR.angle}
        AUGMENTOR.draw(self.py_random)  # ready for the next one
        return params
