"""A transform of the user by import path: one of albumentations, or a callable class."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # or its import asks the network for a newer release

import albumentations as A
import numpy as np

from segpipe import plugins
from segpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "augment.extra"


class CallableTransform(A.DualTransform):  # type: ignore[misc]
    """`function(image, target, rng)`, applied to every sample.

    `rng` is a numpy generator that restarts from the sample's key before every call.

    Shapes: image uint8 (H, W, 3), target uint8 (H, W) -> both of the same size.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(p=1.0)
        self.function, self.name = function, name

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> Any:
        image, target = self.function(data["image"], data["mask"], self.random_generator)
        for what, before, now in (("image", data["image"], image), ("target", data["mask"], target)):
            if not isinstance(now, np.ndarray) or (now.shape, now.dtype) != (before.shape, before.dtype):
                found = f"{now.dtype} {now.shape}" if isinstance(now, np.ndarray) else f"a {type(now).__name__}"
                raise ConfigError(
                    f"{KEY} = {self.name} made {found} of the {what} {before.dtype} {before.shape}, but dtype and "
                    f"shape must stay: the crop has its size already."
                )
        return {**data, "image": image, "mask": target}


def transform_builder(path: str) -> Callable[[], Any]:
    """Builds the transform behind an import path; can be pickled. Raises ConfigError when it cannot be imported."""
    return partial(_build, plugins.load(KEY, path), path)


def _build(kind: Callable[..., Any], path: str) -> Any:
    built = plugins.call(KEY, path, kind, {})
    if isinstance(built, A.BasicTransform | A.BaseCompose):
        return built
    if not callable(built) or isinstance(built, type):
        raise ConfigError(
            f"{KEY} = {path} made {built!r}, but a transform of albumentations, or an object that is called with "
            f"image, target and a random generator, was needed."
        )
    return CallableTransform(built, path)
