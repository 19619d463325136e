"""What a data set gives to an export: check images, labels, training images; or nothing, if the user allows that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from segpipe.data.catalog import ClassTable
from segpipe.data.samples import Samples, open_samples
from segpipe.errors import ConfigError, DataError
from segpipe.export.artifact.statistics import spread
from segpipe.export.gates.checks import Labelled, check_images
from segpipe.export.graph.profiles import Image
from segpipe.settings.config import Config


@dataclass(frozen=True)
class Material:
    """Names and images of the check set, and the labelled images; empty and None without a data set."""

    names: list[str]
    images: list[Image]
    labelled: Labelled | None


def gather(samples: Samples | None, config: Config, size: tuple[int, int] | None = None) -> Material:
    """Material from the validation split, of `size` = (height, width) if given, else of the commonest one.

    Raises DataError when no image has that size, ConfigError when there is no split and no size either.
    """
    export = config.export
    asked = (export.height, export.width) if export.height else None
    if samples is None:
        if size is None and asked is None:
            raise ConfigError(
                "export.height = 0 and export.width = 0, but without the data set nothing tells the size of the "
                "images. Set both, or data.root."
            )
        return Material([], [], None)
    names, images = check_images(samples, export.images, size or asked)
    height, width, _ = images[0].shape
    return Material(names, images, Labelled(samples, (height, width), export.quality_images))


def validation_samples(config: Config, classes: ClassTable) -> Samples | None:
    """The validation split; None when it is not there and `export.allow_unverified` is set.

    Raises DataError when it is not there otherwise, ConfigError when it has other classes than the network.
    """
    try:
        samples = open_samples(config.data, config.data.split, config.seed)
    except DataError as error:
        if config.export.allow_unverified:
            return None
        raise DataError(
            f"{error} Without real images nothing is verified; export.allow_unverified=true goes on nevertheless and "
            "marks the files UNVERIFIED_REAL_DATA."
        ) from None
    if samples.classes.names != classes.names:
        raise ConfigError(
            f"data.root = {config.data.root} has other classes than the network: {', '.join(samples.classes.names)}. "
            "Choose the data set of the training."
        )
    return samples


def training_images(config: Config) -> Iterator[Image] | None:
    """Images of the training split; None on a machine that has the other splits alone."""
    try:
        samples = open_samples(config.data, "train", config.seed)
    except DataError:
        return None
    return spread(samples)
