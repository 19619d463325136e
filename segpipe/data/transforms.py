"""Further transforms by name: `augment.extra=[noise, jpeg]` applies them after scale, crop, flip and color.

One of your own is given by its import path, `augment.extra=[package.module:Class]`, see docs/plugins.md. A transform
may draw only from `self.py_random` and `self.random_generator`, which are set from the sample's key before every call,
and must keep nothing from one call to the next; segpipe check-augment checks this. albumentations' GaussNoise,
AdditiveNoise and RGBShift pass it, but seed OpenCV's global generator with one of only 65,536 values.
"""

from __future__ import annotations

import math
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
BYTE_SUM_STD = math.sqrt(4 * (256**2 - 1) / 12)  # of the sum of four uniform bytes


class SensorNoise(A.ImageOnlyTransform):  # type: ignore[misc]
    """Camera noise, independent per pixel and channel: variance = read**2 + shot * value, in 8-bit levels.

    All bits come from the raw stream of the sample's own generator, and the rest is integer arithmetic, so that every
    release of numpy and every CPU gives the same bytes. A sum of four uniform bytes approximates the normal
    distribution up to 3.45 standard deviations.
    """

    def __init__(
        self,
        read: tuple[float, float] = (0.5, 4.0),
        shot: tuple[float, float] = (0.0, 0.1),
        p: float = 0.5,
    ) -> None:
        super().__init__(p=p)
        self.read, self.shot = read, shot

    def get_params_dependent_on_data(
        self, params: dict[str, Any], data: dict[str, Any]
    ) -> dict[str, Any]:
        """Noise of each pixel, int32 (H, W, 3), and its factor by value, int32 (256,)."""
        read = self.py_random.uniform(*self.read)
        shot = self.py_random.uniform(*self.shot)
        shape = data["image"].shape
        num_bytes = 4 * math.prod(shape)
        words = self.random_generator.bit_generator.random_raw(-(-num_bytes // 8))
        raw = words.view(np.uint8)[:num_bytes]
        sums = raw.reshape(4, *shape).sum(axis=0, dtype=np.int32)
        std = np.sqrt(read**2 + shot * np.arange(256))
        factor = np.rint(std * 2**16 / BYTE_SUM_STD)
        return {
            "noise": sums - 510,
            "factor": factor.astype(np.int32),
        }

    def apply(
        self, img: Uint8, noise: NDArray[np.int32], factor: NDArray[np.int32], **_: Any
    ) -> Uint8:
        """The noisy image."""
        levels = (noise * factor[img] + 2**15) >> 16
        noisy = np.clip(img + levels, 0, 255)
        return noisy.astype(np.uint8)


class Fog(A.ImageOnlyTransform):  # type: ignore[misc]
    """Light scattered into the camera, denser towards the top of the image, where objects are further away."""

    def __init__(
        self,
        density: tuple[float, float] = (0.1, 0.6),
        light: tuple[int, int] = (180, 235),
        p: float = 0.5,
    ):
        super().__init__(p=p)
        self.density, self.light = density, light

    def get_params(self) -> dict[str, Any]:
        """How dense the fog is, and how bright."""
        return {
            "density": self.py_random.uniform(*self.density),
            "light": self.py_random.randint(*self.light),
        }

    def apply(self, img: Uint8, density: float, light: int, **_: Any) -> Uint8:
        """The image in fog."""
        falling = np.linspace(1.0, 0.4, img.shape[0])
        share = np.rint(256 * density * falling).astype(np.uint16)[:, None, None]
        clear = img * (np.uint16(256) - share)
        foggy = np.uint16(light) * share
        # At most 255 * 256 + 128, which fits in uint16.
        rounded = (clear + foggy + np.uint16(128)) >> 8
        return np.asarray(rounded, np.uint8)


TRANSFORMS: dict[str, Builder] = {
    "shadow": partial(
        A.RandomShadow,
        num_shadows_limit=(1, 2),
        shadow_intensity_range=(0.3, 0.6),
        p=0.2,
    ),
    "fog": partial(Fog, p=0.15),
    "gaussian_blur": partial(A.GaussianBlur, sigma_limit=(0.3, 1.5), p=0.15),
    # Camera motion during the exposure; without a shift, the image stays aligned with its target.
    "motion_blur": partial(
        A.MotionBlur,
        blur_limit=(3, 9),
        allow_shifted=False,
        direction_range=(0.0, 0.0),
        p=0.15,
    ),
    "gamma": partial(A.RandomGamma, gamma_limit=(65, 150), p=0.3),
    "noise": partial(SensorNoise, p=0.3),
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
