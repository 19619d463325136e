"""On what a file is checked: images of the split, made ones of their size, and the labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import ConfigError, DataError
from segpipe.export.graph.profiles import Image

Target = NDArray[np.uint8]  # (H, W) train ids


@dataclass(frozen=True)
class Check:
    """An image of the check set; `is_real` when it is one of the split's, not made up."""

    name: str
    image: Image
    is_real: bool = True


class Samples(Protocol):
    """The part of segpipe.data.samples.Samples that is needed here."""

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> tuple[Image, Target]: ...


@dataclass(frozen=True)
class Labelled:
    """Images with targets, read anew whenever it is gone through: at most `count`, spread over the split.

    Those of another size than `size` = (height, width) are passed over, since an exported graph has one image size.
    """

    samples: Samples
    size: tuple[int, int]
    count: int

    def __iter__(self) -> Iterator[tuple[Image, Target]]:
        found = 0
        for index in spread_order(len(self.samples), self.count):
            image, target = self.samples.read(index)
            if image.shape[:2] == self.size:
                yield image, target
                found += 1
                if found == self.count:
                    return


def spread_indices(length: int, count: int) -> list[int]:
    """At most `count` places evenly spaced through `length`."""
    count = min(count, length)
    return [place * length // count for place in range(count)]


def spread_order(length: int, count: int) -> list[int]:
    """All places: first `count` evenly spaced ones, then others between them, for when some of these do not do."""
    order: dict[int, None] = {}
    while len(order) < length:
        order |= dict.fromkeys(spread_indices(length, count))
        count *= 2
    return list(order)


def check_images(samples: Samples, count: int, size: tuple[int, int] | None = None) -> tuple[list[str], list[Image]]:
    """Names and images of `count` samples spread over the split, or of all that fit when there are fewer.

    An exported graph has one image size: of a mixed split, samples of `size` = (height, width) are taken, or without it
    those of the commonest size among the first `count`. Raises DataError when there is none.
    """
    order = spread_order(len(samples), count)
    read = [(samples.name(index), samples.read(index)[0]) for index in order[:count]]
    if not read:
        raise DataError("data.split holds no image, but the export is checked on real ones. Choose another data.split.")
    wanted = size or Counter(image.shape[:2] for _, image in read).most_common(1)[0][0]
    kept = [(name, image) for name, image in read if image.shape[:2] == wanted]
    for index in order[count:]:
        if len(kept) == count:
            break
        image = samples.read(index)[0]
        if image.shape[:2] == wanted:
            kept.append((samples.name(index), image))
    if not kept:
        raise DataError(
            f"data.split holds no image of {wanted[0]}x{wanted[1]} pixels (height x width) among {len(order)}, which "
            f"is the size of the files; {read[0][0]} is {read[0][1].shape[0]}x{read[0][1].shape[1]}. Choose another "
            "data.root or data.split."
        )
    return [name for name, _ in kept], [image for _, image in kept]


def check_set(images: Sequence[Image], names: Sequence[str], size: tuple[int, int] | None = None) -> list[Check]:
    """The real images, then constants, noise and a checkerboard of their size, or of `size` where there is none.

    Raises ConfigError for images of several sizes, of other types, or when neither images nor a size are given.
    """
    if not images and size is None:
        raise ConfigError("export.images gave no image, but a file is only published after a check on real ones.")
    shape = images[0].shape if images else (*size, 3) if size else ()
    for name, image in zip(names, images, strict=True):
        if image.shape != shape or image.dtype != np.uint8 or image.ndim != 3 or shape[2] != 3:
            raise ConfigError(
                f"check image {name} is {image.dtype} {image.shape}; the graph has one shape, so uint8 {shape} was "
                "needed, (height, width, 3). Give images of one size."
            )
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    squares = ((rows // 8 + columns // 8) % 2 * 255).astype(np.uint8)
    made: dict[str, Image] = {f"constant_{level}": np.full(shape, level, dtype=np.uint8) for level in (0, 128, 255)}
    made["noise"] = np.random.Generator(np.random.Philox(key=0)).integers(0, 256, shape, dtype=np.uint8)
    made["checkerboard"] = np.repeat(squares[..., None], 3, axis=2)
    real = [Check(name, image) for name, image in zip(names, images, strict=True)]
    return [*real, *(Check(name, image, is_real=False) for name, image in made.items())]
