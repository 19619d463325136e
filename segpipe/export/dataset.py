"""The images of an export: the check set, of real and generated images; labelled images; training images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from segpipe.data.data_set import Samples
from segpipe.data.samples import open_samples
from segpipe.errors import ConfigError, DataError
from segpipe.export.graph.profiles import BATCH, Free, Image, Size, further_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from segpipe.data.catalog import ClassTable
    from segpipe.settings.config import Config
    from segpipe.settings.groups import ExportConfig


_COPIED = 2  # real images that are also judged in copies
_DARKER, _BLUR_PIXELS, _NOISE_LEVELS = 4, 2.0, 12.0


@dataclass(frozen=True)
class Check:
    """An image of the check set: `is_real` when it comes from the data set, `is_copy` when it is a degraded copy."""

    name: str
    image: Image
    is_real: bool = True
    is_copy: bool = False

    @property
    def is_scene(self) -> bool:
        """Whether it shows what a camera may see, on which a network has something to say."""
        return self.is_real or self.is_copy


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
    shape = (*size, 3) if size and not images else images[0].shape
    real = [Check(name, image) for name, image in zip(names, images, strict=True)]
    for name, image in zip(names, images, strict=True):
        is_rgb = image.dtype == np.uint8 and image.ndim == 3 and shape[2] == 3
        if image.shape != shape or not is_rgb:
            raise ConfigError(
                f"check image {name} is {image.dtype} {image.shape}, but all must be uint8 {shape}, "
                "(height, width, 3). Give images of one size."
            )

    copies = [copy for check in real[:_COPIED] for copy in _copies(check)]
    return [*real, *copies, *_generated(shape)]


def _generated(shape: tuple[int, ...]) -> Iterator[Check]:
    """Three constants, noise and a checkerboard."""
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    squares = ((rows // 8 + columns // 8) % 2 * 255).astype(np.uint8)
    generator = np.random.Generator(np.random.Philox(key=0))

    for level in (0, 128, 255):
        constant = np.full(shape, level, dtype=np.uint8)
        yield Check(f"constant_{level}", constant, is_real=False)
    noise = generator.integers(0, 256, shape, dtype=np.uint8)
    yield Check("noise", noise, is_real=False)
    board = np.repeat(squares[..., None], 3, axis=2)
    yield Check("checkerboard", board, is_real=False)


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
        shape = f"{height}x{width}"
        yield Trial(shape, [_resized(check, height, width) for check in checks])
    for batch in free[BATCH]["tried"][1:] if BATCH in free else ():
        shape = f"batches of {batch}"
        named = [replace(check, name=f"{check.name} ({shape})") for check in checks]
        yield Trial(shape, named, batch)


def _resized(check: Check, height: int, width: int) -> Check:
    image = cv2.resize(check.image, (width, height), interpolation=cv2.INTER_LINEAR)
    name = f"{check.name} ({height}x{width})"
    return replace(check, name=name, image=np.asarray(image, np.uint8))


@dataclass(frozen=True)
class Labelled:
    """Images of `size` with their targets: at most `count`, spread over the split, read again in each iteration."""

    samples: Samples
    size: Size
    count: int

    def __iter__(self) -> Iterator[tuple[Image, NDArray[Any]]]:
        found = 0
        for index in _spread_order(len(self.samples), self.count):
            image, target = self.samples.read(index)
            if image.shape[:2] == self.size:
                yield image, target
                found += 1
                if found == self.count:
                    return


@dataclass(frozen=True)
class GateInputs:
    """What the gates judge by: the check set, labelled images if there are any, and the user's settings."""

    checks: Sequence[Check]
    labelled: Labelled | None
    settings: ExportConfig

    @property
    def size(self) -> Size:
        """Height and width of all images."""
        height, width, _ = self.checks[0].image.shape
        return height, width

    @property
    def real_images(self) -> list[Image]:
        """The images of the data set."""
        return [check.image for check in self.checks if check.is_real]

    def trials(self, free: Free) -> Iterator[Trial]:
        """The check set in every shape that files with these free axes must handle."""
        return trials(free, self.checks)

    def named(self, names: Sequence[str]) -> dict[str, Image]:
        """Those images of the validation split that have one of these names."""
        if self.labelled is None:
            return {}
        samples = self.labelled.samples
        places = {samples.name(index): index for index in range(len(samples))}
        known = [name for name in names if name in places]
        return {name: samples.read(places[name])[0] for name in known}


def gather(
    samples: Samples | None, config: Config, size: Size | None = None
) -> GateInputs:
    """Check images and labelled images of `size`, by default export.height/width or the most common size.

    Without an image of that size, `export.allow_unverified` gives as little as no data set. Raises DataError when no
    image has that size otherwise, ConfigError without both a split and a size.
    """
    export = config.export
    size = size or ((export.height, export.width) if export.height else None)
    if samples is None and size is None:
        raise ConfigError(
            "export.height = 0 and export.width = 0, but without the data set the image size is unknown. Set both, "
            "or set data.root."
        )
    names: list[str] = []
    images: list[Image] = []
    labelled = None

    if samples is not None:
        try:
            names, images = check_images(samples, export.images, size)
            height, width, _ = images[0].shape
            labelled = Labelled(samples, (height, width), export.quality_images)
        except DataError as error:
            if size is None:
                raise
            if not export.allow_unverified:
                raise DataError(
                    f"{error} export.allow_unverified=true compares on generated images alone."
                ) from None
    return GateInputs(check_set(images, names, size), labelled, export)


def validation_samples(config: Config, classes: ClassTable) -> Samples | None:
    """The validation split; None when it is missing and `export.allow_unverified` is set.

    Raises DataError when it is missing otherwise, ConfigError when its classes are not those of the network.
    """
    try:
        samples = open_samples(
            config.data, config.data.split, config.seed, packed=False
        )
    except DataError as error:
        if config.export.allow_unverified:
            return None
        raise DataError(
            f"{error} Nothing can be verified without real images. export.allow_unverified=true exports anyway and "
            "marks the files UNVERIFIED_REAL_DATA."
        ) from None
    if samples.classes.names != classes.names:
        raise ConfigError(
            f"data.root = {config.data.root} has other classes than the network: {', '.join(samples.classes.names)}. "
            "Choose the data set of the training."
        )
    return samples


def training_images(config: Config) -> Spread | None:
    """Images of the training split; None when it is not on this machine."""
    try:
        samples = open_samples(config.data, "train", config.seed, packed=False)
    except DataError:
        return None
    return Spread(samples)


@dataclass(frozen=True)
class Spread:
    """At most `count` images evenly spaced through a split, read one by one in each iteration."""

    samples: Samples
    count: int = 64

    @property
    def total(self) -> int:
        """Number of images in the split."""
        return len(self.samples)

    def __iter__(self) -> Iterator[Image]:
        return (
            self.samples.read(index)[0]
            for index in _spread_indices(len(self.samples), self.count)
        )


def check_images(
    samples: Samples, count: int, size: Size | None = None
) -> tuple[list[str], list[Image]]:
    """Names and images of `count` samples spread over the split, or of all that fit when there are fewer.

    An exported file has one image size: `size`, or without it the most common size among the first `count` samples.
    Samples of other sizes are skipped. Raises DataError when none is left.
    """
    order = _spread_order(len(samples), count)

    read = [(samples.name(index), samples.read(index)[0]) for index in order[:count]]
    if not read:
        raise DataError(
            "data.split has no images, but an export is checked on real ones. Choose another data.split."
        )

    # Others take the places of those that do not fit.
    wanted = size or Counter(image.shape[:2] for _, image in read).most_common(1)[0][0]
    kept = [(name, image) for name, image in read if image.shape[:2] == wanted]
    for index in order[count:]:
        if len(kept) == count:
            break
        image = samples.read(index)[0]
        if image.shape[:2] == wanted:
            kept.append((samples.name(index), image))

    if not kept:
        name, (height, width, _) = read[0][0], read[0][1].shape
        raise DataError(
            f"data.split has no image of {wanted[0]}x{wanted[1]} pixels (height x width), the size of the files, among "
            f"its {len(order)} images; {name} is {height}x{width}. Choose another data.root or data.split."
        )
    return [name for name, _ in kept], [image for _, image in kept]


def _spread_indices(length: int, count: int) -> list[int]:
    count = min(count, length)
    return [place * length // count for place in range(count)]


def _spread_order(length: int, count: int) -> list[int]:
    """All indices: first `count` evenly spaced ones, then those between them as replacements."""
    order: dict[int, None] = {}
    while len(order) < length:
        order |= dict.fromkeys(_spread_indices(length, count))
        count *= 2
    return list(order)
