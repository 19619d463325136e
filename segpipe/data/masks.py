"""Converts mask files of every encoding to train ids.

A mask holds ids or colors; all masks of a data set hold the same kind. `masks:` in classes.yaml names it; otherwise
the first mask of the split decides, and files of the other kind are refused.

    ids      grey of 1 to 16 bits: its values; a palette PNG or BMP: its indices; RGB with equal channels: their value
    colors   RGB, the colors of a palette, or grey v as (v, v, v): each must be a color of the class table, exactly

A palette file can be read both ways. If the two give an index different classes, `masks:` must decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import dist
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data import Int64, Pixels, Uint8
from segpipe.data.catalog import ClassTable, MaskTable
from segpipe.data.readers import (
    OPAQUE,
    Check,
    Header,
    RawMask,
    mask_of,
    packed,
    read_header,
    read_mask,
)
from segpipe.errors import DataError

if TYPE_CHECKING:
    from segpipe.data.pairs import Pair


def kind_of(table: MaskTable, header: Header) -> str:
    """Kind of a mask with this header, ids or colors, if the class table does not specify it."""
    return "colors" if header.layout == "color" and table.colors else "ids"


def settled(
    table: MaskTable,
    masks: Iterable[str],
    header: Callable[[str], Header] = read_header,
) -> MaskTable:
    """`table` with the kind of the first readable file of `masks`, unless it specifies a kind itself."""
    for path in () if table.kind else masks:
        with suppress(DataError):
            return replace(table, kind=kind_of(table, header(path)), first=path)
    return table


def check_kind(table: MaskTable, header: Header, path: str) -> None:
    """Raise DataError for a file of a different kind than the first mask."""
    kind = kind_of(table, header)
    if table.first and kind != table.kind:
        raise DataError(
            f"{path} holds {kind}, but {table.first} holds {table.kind}. Set `masks: ids` or "
            "`masks: colors` in classes.yaml, or convert it."
        )


def read_target(table: MaskTable, path: str) -> Uint8:
    """Train ids of a mask file, uint8 (H, W). Raises DataError for an unreadable file or a value not in the table."""
    return target_of(table, read_mask(path), path)


def target_of(table: MaskTable, mask: RawMask, path: str) -> Uint8:
    """Train ids of a mask already read, uint8 (H, W); `path` is for messages."""
    check_kind(table, mask.header, path)
    if table.kind == "colors":
        return _target_of_colors(table, _rgba(mask, path), path)
    ids = mask.pixels
    if mask.pixels.ndim == 3:
        ids = _equal_channels(table, ids, path)
    if mask.palette is not None and table.first and table.colors:
        _check_palette(table, mask.palette, ids, path)
    return target_of_ids(table.classes, ids, path)


def target_of_ids(classes: ClassTable, ids: Pixels, path: str) -> Uint8:
    """Train ids, uint8 (H, W), of raw ids. Raises DataError for ids that are not `known`."""
    if ids.dtype == np.uint16:
        if classes.known[ids].all():
            return classes.lut[ids]
    else:  # OpenCV needs a tenth of numpy's time
        unknown = (~classes.known[:256]).view(np.uint8)
        if not cv2.countNonZero(cv2.LUT(ids, unknown)):
            return np.asarray(cv2.LUT(ids, classes.lut[:256]), np.uint8)

    raise classes.unknown(ids, path)


def counted(
    table: MaskTable, content: bytes, path: str, check: Check
) -> tuple[Header, list[int]]:
    """Header of a mask file with this content, and its `counts_of`. Raises as `read_target` does."""
    mask = mask_of(content, path, check)
    target = target_of(table, mask, path)
    return mask.header, counts_of(target, table.classes.num_classes).tolist()


def counts_of(target: Uint8, num_classes: int) -> Int64:
    """Pixels of each class, and of ignored ones, int64 (C + 1,)."""
    pixels = np.bincount(target.ravel(), minlength=IGNORE_INDEX + 1)
    return np.append(pixels[:num_classes], pixels[IGNORE_INDEX])


def _rgba(mask: RawMask, path: str) -> Uint8:
    """Color of each pixel, RGBA uint8 (H, W, 4)."""
    if mask.pixels.ndim == 3:
        return mask.pixels
    if mask.palette is not None:
        return np.asarray(mask.palette[mask.pixels])
    if mask.header.bits != 8:
        raise DataError(
            f"{path} is grayscale with {mask.header.bits} bits, but masks = colors needs 8. Set `masks: ids`."
        )

    return np.asarray(cv2.cvtColor(mask.pixels, cv2.COLOR_GRAY2RGBA), np.uint8)


def _check_palette(table: MaskTable, palette: Uint8, ids: Pixels, path: str) -> None:
    """Raise DataError if an index means one class as an id and another by its color."""
    for index in np.flatnonzero(np.bincount(ids.ravel())).tolist():
        red, green, blue, _ = palette[index].tolist()
        by_id = table.classes.train_ids.get(index, IGNORE_INDEX)
        by_color = table.colors.get((red, green, blue), by_id)
        if by_id not in (by_color, IGNORE_INDEX):
            raise DataError(
                f"{path}: index {index} of its palette is id {index}, {_name(table, by_id)}, but its color "
                f"{(red, green, blue)} belongs to {_name(table, by_color)}. Set `masks: ids` in classes.yaml if the "
                "indices are right, or `masks: colors` if the colors are."
            )


def _check_opaque(alpha: Uint8, path: str) -> None:
    """Raise DataError for a mask with transparent pixels."""
    if alpha.min(initial=OPAQUE) < OPAQUE:
        row, column = np.argwhere(alpha < OPAQUE)[0]
        raise DataError(
            f"{path} has {np.count_nonzero(alpha < OPAQUE)} transparent pixels, the first at row {row}, column "
            f"{column}, which cannot be a class. Write the mask without an alpha channel.",
            cause="transparent pixels",
            where=path,
        )


def _equal_channels(table: MaskTable, pixels: Uint8, path: str) -> Uint8:
    """Ids of an RGBA image whose three color channels are equal in each pixel."""
    _check_opaque(pixels[..., 3], path)
    red, green, blue = (pixels[..., channel] for channel in range(3))
    differ = (red != green) | (red != blue)
    if differ.any():
        row, column = np.argwhere(differ)[0]
        of_camvid = table.classes.name == "camvid"
        other = " For CamVid's 32 colors, set data=camvid32." * of_camvid
        raise DataError(
            f"{path} holds colors, such as {tuple(pixels[row, column, :3].tolist())} at row {row}, column "
            f"{column}, but masks = ids, or the class table has no palette. Set `masks: colors` and one color per "
            f"class (`palette`) in classes.yaml.{other}",
            cause="colors, not ids",
            where=path,
        )

    return np.ascontiguousarray(red)


def _target_of_colors(table: MaskTable, pixels: Uint8, path: str) -> Uint8:
    """Train ids of an RGBA image. Maps only the start of each run of equal pixels, since a mask has few runs."""
    _check_opaque(pixels[..., 3], path)
    keys, trains = table.color_keys
    colors = packed(pixels)
    starts = np.append(0, np.flatnonzero(colors[1:] != colors[:-1]) + 1)
    places = np.minimum(np.searchsorted(keys, colors[starts]), len(keys) - 1)
    if (keys[places] != colors[starts]).any():
        unknown = ~np.isin(colors, keys).reshape(pixels.shape[:2])
        raise _unknown_color(table, pixels, unknown, path)

    lengths = np.diff(starts, append=colors.size)
    return np.repeat(trains[places], lengths).reshape(pixels.shape[:2])


def _unknown_color(
    table: MaskTable, pixels: Uint8, unknown: NDArray[np.bool_], path: str
) -> DataError:
    """The error for a mask with a color that is not in the class table; names the first."""
    row, column = np.argwhere(unknown)[0]
    color = tuple(pixels[row, column, :3].tolist())
    count = np.count_nonzero((pixels[..., :3] == color).all(2))
    kinds = len(np.unique(pixels[unknown].view("<u4")))
    near = min(table.colors, key=lambda other: dist(color, other))
    more = f" and {kinds - 1} other unknown colors" if kinds > 1 else ""
    advice = "add the color to palette, colors or ignore in classes.yaml (of an import: to labelmap.txt)."
    if kinds > 8:
        advice += " So many colors usually come from resizing with interpolation or from JPEG."
    if len(set(color)) == 1:
        advice += " If gray values are ids, set `masks: ids`."

    return DataError(
        f"{path} has the color {color} ({count} pixels, the first at row {row}, column {column}){more}, which the "
        f"{table.classes.name} table does not have; the nearest is {near} of {_name(table, table.colors[near])}. "
        f"Correct the mask, or {advice}",
        cause=f"color {color}",
        where=path,
    )


def _name(table: MaskTable, train: int) -> str:
    """Name of a class in messages."""
    return "ignore" if train == IGNORE_INDEX else table.classes.names[train]


def check_sizes(pair: Pair, image: Sequence[int], mask: Sequence[int]) -> None:
    """Raise DataError unless image and mask have the same (height, width)."""
    if tuple(image) != tuple(mask):
        raise DataError(
            f"{pair.image} is {image[0]}x{image[1]}, but its mask {pair.mask} is {mask[0]}x{mask[1]} (height x "
            "width). Use the mask of this image; do not resize one of them blindly.",
            cause=f"sizes {tuple(image)} and {tuple(mask)}",
            where=pair.mask,
        )
