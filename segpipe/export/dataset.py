"""Images that an export uses: the check set (real and generated), labelled images, training images."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import DataSet, Samples
from segpipe.data.order import spaced
from segpipe.data.samples import open_samples
from segpipe.errors import ConfigError, DataError
from segpipe.export.gates.comparison import Check
from segpipe.export.graph.network import Image, Size
from segpipe.settings.config import Config
from segpipe.settings.groups import ExportConfig

_COPIED = 2  # real images that are also checked as degraded copies
_DARKER, _BLUR_PIXELS, _NOISE_LEVELS = 4, 2.0, 12.0


def check_set(
    images: Sequence[Image], names: Sequence[str], size: Size | None = None
) -> list[Check]:
    """Real images, degraded copies of the first two, three constants, noise and a checkerboard, all of one size.

    `size`: used only without real images.
    """
    shape = images[0].shape if images else (*(size or ()), 3)
    real = [Check(*each) for each in zip(names, images, strict=True)]
    copies = [copy for check in real[:_COPIED] for copy in _copies(check)]
    generated = {
        f"constant_{level}": np.full(shape, level, np.uint8) for level in (0, 128, 255)
    }
    noise = np.random.Generator(np.random.Philox(key=0))
    generated["noise"] = noise.integers(0, 256, shape, dtype=np.uint8)
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    squares = ((rows // 8 + columns // 8) % 2 * 255).astype(np.uint8)
    generated["checkerboard"] = np.repeat(squares[..., None], 3, axis=2)
    made = (
        Check(name, image, is_real=False, is_scene=False)
        for name, image in generated.items()
    )
    return [*real, *copies, *made]


def _copies(check: Check) -> Iterator[Check]:
    """Copies as a robot may see the image: dark, out of focus, noisy, and shifted."""
    image, (height, width, _) = check.image, check.image.shape
    generator = np.random.Generator(np.random.Philox(key=1))
    noise = generator.normal(0.0, _NOISE_LEVELS, image.shape)
    degraded = {
        "dark": image // _DARKER,
        "blurred": cv2.GaussianBlur(image, (0, 0), _BLUR_PIXELS),
        "noisy": np.clip(image + noise, 0, 255),
        "shifted": np.roll(image, (height // 16, width // 16), (0, 1)),
    }
    for how, pixels in degraded.items():
        name = f"{check.name} ({how})"
        yield Check(name, np.asarray(pixels, np.uint8), is_real=False)


@dataclass(frozen=True)
class Labelled:
    """Images at `indices` with their targets; each iteration reads them again."""

    samples: DataSet
    indices: Sequence[int]

    def __iter__(self) -> Iterator[tuple[Image, NDArray[Any]]]:
        return map(self.samples.read, self.indices)


@dataclass(frozen=True)
class GateInputs:
    """Inputs of the gates: the check set, labelled images if there are any, and the user's settings."""

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
        """Check images that come from the data set."""
        return [check.image for check in self.checks if check.is_real]


def gather(
    samples: DataSet | None, config: Config, size: Size | None = None
) -> GateInputs:
    """Check images and labelled images of `size`, by default export.height/width or the most common size.

    A split without images of that size raises DataError; with `export.allow_unverified` it counts as no data set.
    Raises DataError for an empty split, ConfigError when there is neither a split nor a size.
    """
    export = config.export
    size = size or ((export.height, export.width) if export.height else None)
    if samples is None:
        if size is None:
            raise ConfigError(
                "export.height = 0 and export.width = 0, but without the data set the image size is unknown. Set both, "
                "or set data.root."
            )
        return GateInputs(check_set([], [], size), None, export)

    if not len(samples):
        raise DataError(
            "data.split has no images, but an export is checked on real ones. Choose another data.split."
        )
    sizes = [samples.size(index) for index in range(len(samples))]
    wanted = size or Counter(sizes).most_common(1)[0][0]
    fitting = [index for index, found in enumerate(sizes) if found == wanted]
    if not fitting and not (size and export.allow_unverified):
        raise DataError(
            f"data.split has no image of {wanted[0]}x{wanted[1]} pixels (height x width), the size of the files, among "
            f"its {len(samples)} images. Choose another data.root or data.split. export.allow_unverified=true compares "
            "on generated images only."
        )
    chosen = spaced(fitting, export.images)
    images = [samples.read(index)[0] for index in chosen]
    checks = check_set(images, [samples.name(index) for index in chosen], wanted)
    labelled = Labelled(samples, spaced(fitting, export.quality_images))
    return GateInputs(checks, labelled if fitting else None, export)


def validation_samples(config: Config, classes: ClassTable) -> DataSet | None:
    """The validation split; None when it is missing and `export.allow_unverified` is set.

    Raises DataError when it is missing otherwise, ConfigError when its classes differ from the network's.
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
            f"data.root = {config.data.root} has classes other than the network's: {', '.join(samples.classes.names)}. "
            "Choose the data set that it was trained on."
        )
    return samples


def training_images(config: Config) -> Iterator[Image] | None:
    """Images of the training split; None when it is not on this machine."""
    try:
        samples = open_samples(config.data, "train", config.seed, packed=False)
    except DataError:
        return None
    return spread(samples)


def spread(samples: Samples, count: int = 64) -> Iterator[Image]:
    """At most `count` images evenly spaced through a split, read one by one."""
    for index in spaced(range(len(samples)), count):
        yield samples.read(index)[0]
