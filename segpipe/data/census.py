"""What the files of a split hold, counted once: ids or colors of the masks, pixels of classes, looks of the images.

A file that cannot be read is left out: problems.py reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import Color, MaskTable
from segpipe.data.masks import orientation
from segpipe.data.overlap import UNKNOWN_LOOK, look
from segpipe.data.plugin_samples import PluginSamples
from segpipe.data.proposal import count_values
from segpipe.data.readers import RawMask, read_header, read_image, read_mask, threaded
from segpipe.data.samples import FileSamples, Samples, countable, unwrapped
from segpipe.errors import DataError

Value = int | Color
UNKNOWN = -1  # train id of a value that the class table does not have
MOST_LOOKS = 20_000  # images of a split that are decoded to compare them


class _Found(NamedTuple):
    """Of one sample."""

    kind: str
    values: dict[Value, int]  # pixels
    pixels: NDArray[
        np.int64
    ]  # of each class, of ignored ones, and of values that the class table does not have
    odd: dict[
        Value, tuple[int, int]
    ]  # palette index: train ids by index and by color, which differ
    look: int
    size: tuple[int, int]  # (height, width) of the image


@dataclass
class Census:
    """Of the samples that can be read, in their order."""

    num_classes: int
    names: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # their indices
    pixels: list[NDArray[np.int64]] = field(default_factory=list)  # rows of `table`
    looks: list[int] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)  # of mask files
    values: Counter[Value] = field(
        default_factory=Counter
    )  # pixels of each id or color
    files: Counter[Value] = field(
        default_factory=Counter
    )  # masks with each id or color
    odd: dict[Value, tuple[int, int]] = field(default_factory=dict)

    @property
    def table(self) -> NDArray[np.int64]:
        """Pixels of each class, of ignored ones, and of values that the class table does not have, int64 (n, C + 2)."""
        return np.array(self.pixels, np.int64).reshape(
            len(self.names), self.num_classes + 2
        )

    @property
    def unlabelled(self) -> list[int]:
        """Indices of the samples whose pixels are all ignored."""
        return [
            index
            for index, row in zip(self.places, self.pixels, strict=True)
            if row[-2] == row.sum()
        ]


def take(
    samples: Samples, progress: Callable[[int, int], None] = lambda done, total: None
) -> Census:
    """The census of a split: of all files, and of some samples of any other data set."""
    whole = unwrapped(samples)
    indices = countable(samples)
    look_at = set(indices[:: max(1, -(-len(indices) // MOST_LOOKS))])
    found: Iterator[_Found | None]
    if isinstance(whole, FileSamples):
        found = threaded(
            lambda index: _of_files(whole, index, index in look_at), indices
        )
    else:  # the user's class need not be safe to use from several threads
        one = (_of_sample(samples, index) for index in indices)
        found = (
            one
            if isinstance(whole, PluginSamples)
            else threaded(lambda index: _of_sample(samples, index), indices)
        )
    census = Census(samples.classes.num_classes)
    for done, (index, each) in enumerate(zip(indices, found, strict=True), 1):
        progress(done, len(indices))
        if each is None:
            continue
        census.names.append(samples.name(index))
        census.places.append(index)
        census.pixels.append(each.pixels)
        census.looks.append(each.look)
        census.sizes[each.size] += 1
        census.kinds[each.kind] += 1
        census.values.update(each.values)
        census.files.update(each.values.keys())
        census.odd |= each.odd
    return census


def train_id(table: MaskTable, value: Value) -> int:
    """Train id of an id or color, IGNORE_INDEX or UNKNOWN."""
    if isinstance(value, tuple):
        return table.colors.get(value, UNKNOWN)
    return table.classes.train_ids.get(value, UNKNOWN)


def _of_sample(samples: Samples, index: int) -> _Found | None:
    try:
        image, target = samples.read(index)
    except DataError:
        return None
    counts = np.bincount(target.ravel(), minlength=IGNORE_INDEX + 1)
    pixels = np.append(counts[: samples.classes.num_classes], [counts[IGNORE_INDEX], 0])
    return _Found("", {}, pixels, {}, look(image), (target.shape[0], target.shape[1]))


def _of_files(samples: FileSamples, index: int, with_look: bool) -> _Found | None:
    pair = samples.pairs[index]
    try:
        mask = read_mask(pair.mask)
        header = read_header(pair.image)
        turned = (
            orientation(header, mask.header[:2], samples.table.exif, pair.image) != 1
        )
        seen = look(read_image(pair.image)) if with_look else UNKNOWN_LOOK
    except DataError:
        return None
    table = samples.table
    values = _meant(table, mask, count_values(mask)[1])
    pixels = np.zeros(table.classes.num_classes + 2, np.int64)
    for value, count in values.items():
        train = train_id(table, value)
        pixels[{IGNORE_INDEX: -2, UNKNOWN: -1}.get(train, train)] += count
    kind = f"{mask.header.layout}, {mask.header.bits} bits"
    return _Found(
        kind,
        values,
        pixels,
        _odd(table, mask, values),
        seen,
        header.upright if turned else header[:2],
    )


def _meant(
    table: MaskTable, mask: RawMask, counts: dict[Value, int]
) -> dict[Value, int]:
    """Pixels of each value as the table reads it: an id where it says ids, a color where it says colors."""
    meant: Counter[Value] = Counter()
    for value, count in counts.items():
        if table.kind == "colors" and isinstance(value, int):
            color = (
                mask.palette[value].tolist()
                if mask.palette is not None
                else [value] * 3
            )
            meant[(color[0], color[1], color[2])] += count
        elif table.kind == "ids" and isinstance(value, tuple) and len(set(value)) == 1:
            meant[value[0]] += count
        else:
            meant[value] += count
    return meant


def _odd(
    table: MaskTable, mask: RawMask, values: dict[Value, int]
) -> dict[Value, tuple[int, int]]:
    """Indices of a palette that are one class as ids, and another one by the color that the palette gives them."""
    if mask.palette is None or not table.colors:
        return {}
    found: dict[Value, tuple[int, int]] = {}
    for index in values:
        if not isinstance(index, int) or index >= len(mask.palette):
            continue
        red, green, blue = mask.palette[index].tolist()[:3]
        by_color, by_id = (
            table.colors.get((red, green, blue), UNKNOWN),
            train_id(table, index),
        )
        if UNKNOWN != by_color != by_id != IGNORE_INDEX:
            found[index] = (by_id, by_color)
    return found
