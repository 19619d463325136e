"""From a mask file to train ids, whatever way the file writes its classes.

A mask holds ids or colors, and one data set holds one kind. `masks:` in classes.yaml names it; otherwise the first
mask of the split decides, and a file of the other kind is refused.

    ids      grey of 1 to 16 bits: its values; a palette PNG or BMP: its indices; RGB with equal channels: their value
    colors   RGB, the colors of a palette, or grey v as (v, v, v): each must be a color of the class table, exactly

A palette file can be read both ways. Where the two readings give an id different classes, only `masks:` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import Color, MaskTable
from segpipe.data.data_set import Content
from segpipe.data.readers import (
    OPAQUE,
    Header,
    MaskValues,
    RawMask,
    Value,
    color_of,
    read_header,
    read_mask,
    values_of,
)
from segpipe.errors import DataError

if TYPE_CHECKING:
    from segpipe.data.pairs import Pair

UNKNOWN = -1  # train id of a value that the class table does not have
MIXED = "{} is a mask of {}, but {} is one of {}. Set `masks: ids` or `masks: colors` in classes.yaml, or convert it."


def kind_of(table: MaskTable, header: Header) -> str:
    """What a mask with this header holds, ids or colors, if the class table does not name it."""
    return "colors" if header.layout == "color" and table.colors else "ids"


def settled(
    table: MaskTable,
    masks: Sequence[str],
    header: Callable[[str], Header] = read_header,
) -> MaskTable:
    """`table` with the kind of the first of the files `masks`, if it names none itself."""
    if table.kind or not masks:
        return table
    return replace(table, kind=kind_of(table, header(masks[0])), first=masks[0])


def check_kind(table: MaskTable, header: Header, path: str) -> None:
    """Raise DataError for a file of another kind than that of the first mask."""
    if table.first and (kind := kind_of(table, header)) != table.kind:
        raise DataError(MIXED.format(path, kind, table.first, table.kind))


def read_target(table: MaskTable, path: str) -> NDArray[np.uint8]:
    """Train ids of a mask file, uint8 (H, W). Raises DataError for a file or pixel that the table cannot explain."""
    mask = read_mask(path)
    check_kind(table, mask.header, path)
    if table.kind == "colors":
        rgba = _rgba(mask, path)
        _check_opaque(rgba[..., 3], path)
        return _target_of_colors(table, rgba, path)
    if mask.rgba is not None:
        _check_opaque(mask.rgba[..., 3], path)
    ids = mask.ids if mask.ids is not None else _equal_channels(table, mask.rgba, path)
    if mask.palette is not None and table.first and table.colors:
        _check_palette(table, mask, path)
    return table.classes.target(ids, path)


def _rgba(mask: RawMask, path: str) -> NDArray[np.uint8]:
    """Color of each pixel, RGBA uint8 (H, W, 4)."""
    if mask.ids is None:
        assert mask.rgba is not None
        return mask.rgba
    if mask.palette is not None:
        return mask.palette[mask.ids]
    if mask.header.bits != 8:
        raise DataError(
            f"{path} is grey with {mask.header.bits} bits, but masks = colors needs 8. Set `masks: ids`."
        )
    return np.asarray(cv2.cvtColor(mask.ids, cv2.COLOR_GRAY2RGBA), np.uint8)


def _check_palette(table: MaskTable, mask: RawMask, path: str) -> None:
    """Raise DataError where an index means one class as an id and another one by its color."""
    values = values_of(mask)
    for index, (by_id, by_color) in ambiguous(table, values).items():
        if by_id != UNKNOWN:
            raise DataError(
                f"{path}: index {index} of its palette is id {index}, "
                f"{_name(table, by_id)}, but its color "
                f"{tuple(values.palette[index][:3])} is that of "
                f"{_name(table, by_color)}. Set `masks: ids` in classes.yaml if the "
                "indices count, or `masks: colors` if the colors do."
            )


def _check_opaque(alpha: NDArray[np.uint8], path: str) -> None:
    if alpha.min(initial=OPAQUE) < OPAQUE:
        row, column = np.argwhere(alpha < OPAQUE)[0]
        raise DataError(
            f"{path} is transparent in {np.count_nonzero(alpha < OPAQUE)} pixels, the first at row {row}, column "
            f"{column}, which no class explains. Write the mask without an alpha channel."
        )


def _equal_channels(
    table: MaskTable, pixels: NDArray[np.uint8] | None, path: str
) -> NDArray[np.uint8]:
    """Ids of an RGBA picture whose three colors are the same in each pixel."""
    assert pixels is not None
    red = pixels[..., 0]
    differ = (red != pixels[..., 1]) | (red != pixels[..., 2])
    if differ.any():
        row, column = np.argwhere(differ)[0]
        wanted = (
            "masks = ids"
            if table.kind == "ids"
            else "the class table has no palette, so that masks hold ids"
        )
        raise DataError(
            f"{path} is a mask of colors, such as {_as_color(pixels[row, column])} at row {row}, column {column}, but "
            f"{wanted}. Set `masks: colors` and one color per class (`palette`) in classes.yaml.",
            cause="colors, not ids",
            where=path,
        )
    return np.ascontiguousarray(red)


def _target_of_colors(
    table: MaskTable, pixels: NDArray[np.uint8], path: str
) -> NDArray[np.uint8]:
    """Train ids of an opaque RGBA picture. Maps the start of each run of equal pixels, which are few in a mask."""
    packed = np.ascontiguousarray(pixels).view("<u4").ravel()
    starts = np.flatnonzero(np.concatenate(([True], packed[1:] != packed[:-1])))
    known = sorted((_packed(color), train) for color, train in table.colors.items())
    keys, trains = (
        np.array([key for key, _ in known], np.uint32),
        np.array([train for _, train in known], np.uint8),
    )
    places = np.minimum(np.searchsorted(keys, packed[starts]), len(keys) - 1)
    if (keys[places] != packed[starts]).any():
        raise DataError(
            _unknown_color(
                table, pixels, ~np.isin(packed, keys).reshape(pixels.shape[:2]), path
            )
        )
    lengths = np.diff(np.append(starts, packed.size))
    return np.repeat(trains[places], lengths).reshape(pixels.shape[:2])


def _unknown_color(
    table: MaskTable, pixels: NDArray[np.uint8], unknown: NDArray[np.bool_], path: str
) -> str:
    row, column = np.argwhere(unknown)[0]
    color = _as_color(pixels[row, column])
    count = np.count_nonzero((pixels[..., :3] == color).all(axis=2))
    kinds = len(np.unique(pixels[unknown].view("<u4")))
    near = min(
        table.colors,
        key=lambda other: sum((a - b) ** 2 for a, b in zip(color, other, strict=True)),
    )
    others = f" and {kinds - 1} other unknown colors" if kinds > 1 else ""
    blended = (
        " So many colors come from resizing with interpolation or from JPEG."
        if kinds > 8
        else ""
    )
    grey = " If grey values are ids, set `masks: ids`." if len(set(color)) == 1 else ""
    return (
        f"{path} has the color {color} ({count} pixels, the first at row {row}, column {column}){others}, which the "
        f"{table.classes.name} table does not know; the nearest is {near} of {_name(table, table.colors[near])}."
        f"{blended} Correct the mask, or add the color to palette, colors or ignore in classes.yaml.{grey}"
    )


def _name(table: MaskTable, train: int) -> str:
    return "ignore" if train == IGNORE_INDEX else table.classes.names[train]


def _as_color(pixel: NDArray[np.uint8]) -> Color:
    red, green, blue = pixel.tolist()[:3]
    return red, green, blue


def _packed(color: Color) -> int:
    red, green, blue = color
    return red | green << 8 | blue << 16 | OPAQUE << 24


def train_id(table: MaskTable, value: Value) -> int:
    """Train id of an id or color, IGNORE_INDEX or UNKNOWN."""
    if isinstance(value, tuple):
        return table.colors.get(value, UNKNOWN)
    return table.classes.train_ids.get(value, UNKNOWN)


def meant(table: MaskTable, values: MaskValues) -> dict[Value, int]:
    """Pixels of each value as the table reads it: an id where it says ids, a color where it says colors."""
    pixels: dict[Value, int] = {}
    of_ids = values.kind == "ids"
    for number, count in values.pixels.items():
        value: Value = number
        if of_ids and table.kind == "colors":
            red, green, blue = values.palette.get(number, [number] * 3)[:3]
            value = (red, green, blue)
        elif not of_ids:
            value = color_of(number)
            if table.kind == "ids" and len(set(value)) == 1:
                value = value[0]
        pixels[value] = pixels.get(value, 0) + count
    return pixels


def content_of(table: MaskTable, header: Header, values: MaskValues) -> Content:
    """What a mask file holds, as the table reads it."""
    found = meant(table, values)
    pixels = np.zeros(table.classes.num_classes + 2, np.int64)
    for value, count in found.items():
        train = train_id(table, value)
        pixels[{IGNORE_INDEX: -2, UNKNOWN: -1}.get(train, train)] += count
    kind = f"{header.layout}, {header.bits} bits"
    return Content(pixels, found, kind, ambiguous(table, values))


def ambiguous(table: MaskTable, values: MaskValues) -> dict[int, tuple[int, int]]:
    """Palette indices that are one class as ids, and another one by their color: both train ids."""
    found = {}
    for index, (red, green, blue, _) in values.palette.items():
        by_color = table.colors.get((red, green, blue), UNKNOWN)
        by_id = train_id(table, index)
        if UNKNOWN != by_color != by_id != IGNORE_INDEX:
            found[index] = (by_id, by_color)
    return found


def is_sound(table: MaskTable, header: Header, values: MaskValues) -> bool:
    """Whether `read_target` accepts a mask with this content."""
    if not values.opaque or (table.first and kind_of(table, header) != table.kind):
        return False
    if table.kind == "colors":
        alpha = [color[3] for color in values.palette.values()]
        grey = values.kind == "ids" and not values.palette
        if min(alpha, default=OPAQUE) < OPAQUE or (grey and header.bits != 8):
            return False
    elif table.first and ambiguous(table, values):
        return False
    kind = tuple if table.kind == "colors" else int
    return all(
        isinstance(value, kind) and train_id(table, value) != UNKNOWN
        for value in meant(table, values)
    )


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
