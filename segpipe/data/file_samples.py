"""Pairs of image and mask files: a folder, or a published data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable, MaskTable
from segpipe.data.dataset import Content, DataSet, Image, Sample, Target
from segpipe.data.facts import Facts
from segpipe.data.masks import (
    UNKNOWN,
    ambiguous,
    is_sound,
    meant,
    orientation,
    read_target,
    train_id,
)
from segpipe.data.pack import Pack
from segpipe.data.pairs import Pair
from segpipe.data.readers import read_image
from segpipe.errors import DataError


@dataclass(frozen=True)
class FileSamples(DataSet):
    """Samples in files, and the pack that holds what was already decoded, if there is one."""

    table: MaskTable
    pairs: tuple[Pair, ...]
    pack: Pack | None = None
    facts: Facts = field(default_factory=lambda: Facts("/"), repr=False, compare=False)

    @property
    def classes(self) -> ClassTable:
        return self.table.classes

    def file_pairs(self) -> Sequence[Pair]:
        return self.pairs

    def mask_table(self) -> MaskTable:
        return self.table

    def packs(self) -> Sequence[Pack]:
        return [self.pack] if self.pack else []

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs[index].name

    def read(self, index: int) -> Sample:
        decode = partial(self.decode, index)
        return self.pack.read(self.pairs[index], decode) if self.pack else decode()

    def decode(
        self,
        index: int,
        data: bytes | None = None,
        target: Target | None = None,
    ) -> Sample:
        """The sample from its two files, or from the content of the image's file and the target."""
        pair = self.pairs[index]
        if target is None:
            target = self.target(index)
        image = self._image(pair, target.shape, data)
        check_sizes(pair, image.shape[:2], target.shape)
        return image, target

    def image(self, index: int) -> Image:
        pair = self.pairs[index]
        return self._image(pair, self.facts.header(pair.mask)[:2])

    def _image(
        self, pair: Pair, size: Sequence[int], data: bytes | None = None
    ) -> Image:
        return read_image(
            pair.image,
            lambda header: orientation(header, size, self.table.exif, pair.image),
            data,
        )

    def target(self, index: int) -> Target:
        return read_target(self.table, self.pairs[index].mask)

    def size(self, index: int) -> tuple[int, int]:
        """Of the mask, which is that of the image when it is upright. Reads a header at most."""
        header = self.facts.header(self.pairs[index].mask)
        return header.height, header.width

    def counts(self, index: int) -> NDArray[np.int64]:
        path = self.pairs[index].mask
        values = self.facts.values(path)
        if not is_sound(self.table, self.facts.header(path), values):
            read_target(self.table, path)  # raises
        return self.content(index).pixels[: self.classes.num_classes]

    def content(self, index: int) -> Content:
        path = self.pairs[index].mask
        mask = self.facts.values(path)
        header = self.facts.header(path)
        values = meant(self.table, mask)
        pixels = np.zeros(self.classes.num_classes + 2, np.int64)
        for value, count in values.items():
            train = train_id(self.table, value)
            pixels[{IGNORE_INDEX: -2, UNKNOWN: -1}.get(train, train)] += count
        odd = ambiguous(self.table, mask)
        return Content(pixels, values, f"{header.layout}, {header.bits} bits", odd)

    def countable(self) -> list[int]:
        return list(range(len(self)))

    def keep_facts(self) -> None:
        self.facts.keep()


def check_sizes(pair: Pair, image: Sequence[int], mask: Sequence[int]) -> None:
    """Raise DataError unless image and mask have the same (height, width)."""
    if tuple(image) != tuple(mask):
        raise DataError(
            f"{pair.image} is {image[0]}x{image[1]}, but its mask {pair.mask} is "
            f"{mask[0]}x{mask[1]} (height x width). Take the mask of this image; do "
            "not resize one of them blindly.",
            cause=f"sizes {tuple(image)} and {tuple(mask)}",
            where=pair.mask,
        )
