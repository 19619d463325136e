"""Further transforms by name: `augment.extra=[noise, jpeg]` applies them after scale, crop, flip and color.

One of your own is given by its import path, `augment.extra=[package.module:Class]`, see docs/plugins.md. A transform
may draw only from `self.py_random` and `self.random_generator`, which are set from the sample's key before every call,
and must keep nothing from one call to the next; segpipe check-augment checks this. albumentations' GaussNoise,
AdditiveNoise and RGBShift pass it, but seed OpenCV's global generator with one of only 65,536 values.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

# Or the import of albumentations asks the network for a newer release.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX, plugins
from segpipe.errors import ConfigError
from segpipe.plugins import is_path
from segpipe.settings.setting import nearest

KEY = "augment.extra"
Uint8 = NDArray[np.uint8]
Builder = Callable[[], "A.BasicTransform | A.BaseCompose"]
PAD_COLOR = (124, 116, 104)  # mean color of ImageNet: about 0 after normalization


TRANSFORMS: dict[str, Builder] = {
    "shadow": partial(
        A.RandomShadow,
        num_shadows_limit=(1, 2),
        shadow_intensity_range=(0.3, 0.6),
        p=0.2,
    ),
    "gaussian_blur": partial(A.GaussianBlur, sigma_limit=(0.3, 1.5), p=0.15),
    # Camera motion during the exposure; without a shift, the image stays aligned with its target.
    "motion_blur": partial(
        A.MotionBlur,
        blur_limit=(3, 9),
        allow_shifted=False,
        direction_range=(0.0, 0.0),
        p=0.15,
    ),
    "noise": partial(A.ISONoise, p=0.3),
    "jpeg": partial(A.ImageCompression, quality_range=(30, 90), p=0.2),
    "cutout": partial(
        A.CoarseDropout,
        num_holes_range=(1, 4),
        hole_height_range=(0.05, 0.2),
        hole_width_range=(0.05, 0.2),
        fill=PAD_COLOR,
        fill_mask=IGNORE_INDEX,
        p=0.2,
    ),
}


class CallableTransform(A.DualTransform):  # type: ignore[misc]
    """`function(image, target, rng)`, applied to every sample.

    `rng` is a numpy generator that restarts from the sample's key before every call.

    Shapes: image uint8 (H, W, 3), target uint8 (H, W) -> both of the same size.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(p=1.0)
        self.function, self.name = function, name

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> Any:
        """The sample that the function makes. Raises ConfigError for other shapes or dtypes."""
        before = data["image"], data["mask"]
        now = self.function(*before, self.random_generator)
        for what, old, new in zip(("image", "target"), before, now, strict=True):
            wanted = f"{old.dtype} {old.shape}"
            found = f"a {type(new).__name__}"
            if isinstance(new, np.ndarray):
                found = f"{new.dtype} {new.shape}"
            if found != wanted:
                raise ConfigError(
                    f"{KEY} = {self.name} made {found} of the {what} {wanted}, but dtype and shape must stay: the crop "
                    "has its size already."
                )

        return {**data, "image": now[0], "mask": now[1]}


def builder(name: str) -> Builder:
    """Builds the transform of this name or import path; can be pickled.

    Raises ConfigError when it cannot be imported, and with the nearest name when there is none.
    """
    if is_path(name):
        return partial(_build, plugins.load(KEY, name), name)
    if name not in TRANSFORMS:
        valid = list(TRANSFORMS)
        raise ConfigError(
            f"{KEY} = {name!r} is not one of {', '.join(valid)}.{nearest(name, valid)}"
        )

    return TRANSFORMS[name]


def _build(kind: Callable[..., Any], path: str) -> Any:
    """The transform that a user's class makes. Raises ConfigError for anything else."""
    built = plugins.call(KEY, path, kind, {})
    if isinstance(built, A.BasicTransform | A.BaseCompose):
        return built
    if not callable(built) or isinstance(built, type):
        raise ConfigError(
            f"{KEY} = {path} made {built!r}, but a transform of albumentations, or an object that is called with "
            f"image, target and a random generator, was needed."
        )

    return CallableTransform(built, path)
