"""What the data set contributes to an export: check images, labelled images, training images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segpipe.data.data_set import Samples
from segpipe.data.samples import open_samples
from segpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from segpipe.data.catalog import ClassTable
    from segpipe.export.graph.profiles import Image, Size
    from segpipe.settings.config import Config


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
class Material:
    """Names and images to check on, and the labelled images; empty and None without a data set."""

    names: list[str]
    images: list[Image]
    labelled: Labelled | None


def gather(
    samples: Samples | None, config: Config, size: Size | None = None
) -> Material:
    """Material from the validation split, at `size` if given, else at export.height/width or the most common size.

    Without an image of that size, `export.allow_unverified` gives as little as no data set. Raises DataError when no
    image has that size otherwise, ConfigError without both a split and a size.
    """
    export = config.export
    asked = (export.height, export.width) if export.height else None
    if samples is None:
        if size is None and asked is None:
            raise ConfigError(
                "export.height = 0 and export.width = 0, but without the data set the image size is unknown. Set both, "
                "or set data.root."
            )
        return Material([], [], None)
    wanted = size or asked
    try:
        names, images = check_images(samples, export.images, wanted)
    except DataError as error:
        if wanted is None:
            raise
        if export.allow_unverified:  # as without the data set
            return Material([], [], None)
        raise DataError(
            f"{error} export.allow_unverified=true compares on generated images alone."
        ) from None
    height, width, _ = images[0].shape
    return Material(
        names, images, Labelled(samples, (height, width), export.quality_images)
    )


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
