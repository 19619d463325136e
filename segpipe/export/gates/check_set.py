"""The check set: real images and generated ones, in every shape that a file must handle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np

from segpipe.errors import ConfigError
from segpipe.export.graph.profiles import BATCH, Free, Image, Size, further_sizes

_COPIED = 2  # real images that are also judged in copies
_DARKER, _BLUR_PIXELS, _NOISE_LEVELS = 4, 2.0, 12.0


@dataclass(frozen=True)
class Check:
    """An image of the check set: `is_real` when it comes from the data set, `is_copy` when it is a degraded copy."""

    name: str
    image: Image
    is_real: bool = True
    is_copy: bool = False


@dataclass(frozen=True)
class Trial:
    """Check images of one shape, run in batches. `name` is the shape, empty for the exported one."""

    name: str
    checks: Sequence[Check]
    batch: int = 1


def check_set(
    images: Sequence[Image], names: Sequence[str], size: Size | None = None
) -> list[Check]:
    """The real images, degraded copies of the first, three constants, noise and a checkerboard, all of one size.

    `size` is that size where there is no real image.

    Raises ConfigError for images of different sizes or of another dtype, and without both images and size.
    """
    if not images and size is None:
        raise ConfigError(
            "export.images = 0, but a file is published only after a check on real images."
        )
    shape = images[0].shape if images else (*size, 3) if size else ()
    for name, image in zip(names, images, strict=True):
        if (
            image.shape != shape
            or image.dtype != np.uint8
            or image.ndim != 3
            or shape[2] != 3
        ):
            raise ConfigError(
                f"check image {name} is {image.dtype} {image.shape}, but all must be uint8 {shape}, "
                "(height, width, 3). Give images of one size."
            )
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    squares = ((rows // 8 + columns // 8) % 2 * 255).astype(np.uint8)
    made: dict[str, Image] = {
        f"constant_{level}": np.full(shape, level, dtype=np.uint8)
        for level in (0, 128, 255)
    }
    made["noise"] = np.random.Generator(np.random.Philox(key=0)).integers(
        0, 256, shape, dtype=np.uint8
    )
    made["checkerboard"] = np.repeat(squares[..., None], 3, axis=2)
    real = [Check(name, image) for name, image in zip(names, images, strict=True)]
    copies = [copy for check in real[:_COPIED] for copy in _copies(check)]
    return [
        *real,
        *copies,
        *(Check(name, image, is_real=False) for name, image in made.items()),
    ]


def _copies(check: Check) -> Iterator[Check]:
    """The image as a robot may see it: in the dark, out of focus, noisy, and from beside."""
    image, (height, width, _) = check.image, check.image.shape
    noise = np.random.Generator(np.random.Philox(key=1)).normal(
        0.0, _NOISE_LEVELS, image.shape
    )
    degraded = {
        "dark": image // _DARKER,
        "blurred": cv2.GaussianBlur(image, (0, 0), _BLUR_PIXELS),
        "noisy": np.clip(image + noise, 0, 255),
        "shifted": np.roll(image, (height // 16, width // 16), (0, 1)),
    }
    for how, pixels in degraded.items():
        yield Check(
            f"{check.name} ({how})",
            np.asarray(pixels, np.uint8),
            is_real=False,
            is_copy=True,
        )


def trials(free: Free, checks: Sequence[Check]) -> Iterator[Trial]:
    """The check set as it is, then resized or batched for each further shape; check names include the shape."""
    yield Trial("", checks)
    for height, width in further_sizes(free):
        name = f"{height}x{width}"
        resized = [
            replace(
                check,
                name=f"{check.name} ({name})",
                image=np.asarray(
                    cv2.resize(
                        check.image, (width, height), interpolation=cv2.INTER_LINEAR
                    ),
                    np.uint8,
                ),
            )
            for check in checks
        ]
        yield Trial(name, resized)
    for batch in free[BATCH]["tried"][1:] if BATCH in free else ():
        name = f"batches of {batch}"
        yield Trial(
            name,
            [replace(check, name=f"{check.name} ({name})") for check in checks],
            batch,
        )
