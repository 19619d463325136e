"""A class table for masks that come without one, from the ids or colors that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import Color, MaskTable
from segpipe.data.readers import Pixels, RawMask, read_mask, threaded
from segpipe.errors import DataError, listed

MOST_CLASSES = 254
BINARY = [0, 255]  # the ids of black and white masks
EDGE_SHARE = 0.03  # of all pixels, at most, that one blended value covers
BLENDED_SHARE = 0.5  # of the pixels of a blended value lie between two others; of a class of CamVid, at most 0.2
MOSTLY = 0.25  # of all pixels between two others are of blended values; fewer are slivers of rare classes
MOST_BLENDED = 15  # values; more are surely no classes
NO_CLASSES = (
    "the masks hold {}. Masks that were resized with interpolation or stored as JPEG have blended values, and instance "
    "masks number objects instead of classes. Export class masks as PNG."
)


class Tally(NamedTuple):
    """Pixels and files of each id or color."""

    pixels: Counter[int | Color]
    files: Counter[int | Color]
    palette: dict[int, Color]  # colors that the files give to ids
    between: Counter[int | Color]  # pixels on an edge, see `_between`


def propose(
    masks: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Text of a classes.yaml for mask files. Raises DataError when they hold no classes, or ids and colors."""
    kind, tally = _tally(masks, progress)
    if len(tally.pixels) > MOST_CLASSES:
        raise DataError(
            NO_CLASSES.format(
                f"{len(tally.pixels)} different {kind}, too many for classes"
            )
        )
    if len(_classes(tally)) < 2:
        raise DataError(
            f"all {len(masks)} masks hold nothing but {' and '.join(map(str, sorted(tally.pixels)))}, and one class is "
            "nothing to learn. Check that they were exported with their objects: many tools write black masks if not "
            "told otherwise. (255 counts as ignored. If it is a class, write classes.yaml by hand, see docs/data.md.)"
        )
    odd = _blended(tally)
    if len(odd) > MOST_BLENDED:
        raise DataError(_refused(kind, tally, odd))
    return _text(kind, tally, len(masks), odd)


def blended(masks: Sequence[str], table: MaskTable) -> tuple[str, bool]:
    """Message about classes of a table that come from interpolation or JPEG, and whether that is certain.

    Empty if there are none.
    """
    try:
        kind, tally = _tally(masks, lambda done, total: None)
    except DataError:  # of two kinds, which the table explains
        return "", False
    trained: list[tuple[int | Color, int]] = [
        *table.classes.train_ids.items(),
        *table.colors.items(),
    ]
    ignored = {value for value, train in trained if train == IGNORE_INDEX}
    odd = [value for value in _blended(tally) if value not in ignored]
    if len(odd) > MOST_BLENDED:
        return _refused(kind, tally, odd), True
    return (_doubt(kind, odd), False) if len(odd) > 1 else ("", False)


def _tally(
    masks: Sequence[str], progress: Callable[[int, int], None]
) -> tuple[str, Tally]:
    """Whether masks hold ids or colors, and which."""
    found: dict[str, Tally] = {}
    example: dict[str, str] = {}
    for done, (path, mask) in enumerate(
        zip(masks, threaded(read_mask, masks), strict=True), 1
    ):
        kind, counts = count_values(mask)
        tally = found.setdefault(kind, Tally(Counter(), Counter(), {}, Counter()))
        example.setdefault(kind, path)
        tally.pixels.update(counts)
        tally.files.update(counts.keys())
        tally.between.update(_between(mask))
        if mask.palette is not None:
            known = (
                (index, mask.palette[index].tolist())
                for index in counts
                if isinstance(index, int)
            )
            for index, color in (
                (index, (color[0], color[1], color[2])) for index, color in known
            ):
                if (other := tally.palette.setdefault(index, color)) != color:
                    raise DataError(
                        f"index {index} of the palette of {path} has the color {color}, but {other} in masks before "
                        "it: a tool has reordered palettes. Write classes.yaml by hand with `masks: colors` and a "
                        "palette if the colors count, or `masks: ids` if the indices do."
                    )
        progress(done, len(masks))
    if "colors" in found and all(
        len(set(color)) == 1
        for color in found["colors"].pixels
        if isinstance(color, tuple)
    ):
        found["ids"] = _as_ids(found.pop("colors"), found.get("ids"))
    if len(found) != 1:
        kinds = " and ".join(
            f"{kind} ({path})" for kind, path in sorted(example.items())
        )
        raise DataError(
            f"the masks hold {kinds or 'nothing'}, but one kind was needed. Convert the others."
        )
    ((kind, tally),) = found.items()
    return kind, tally


def count_values(mask: RawMask) -> tuple[str, dict[int | Color, int]]:
    """Whether a mask holds ids or colors, and the number of pixels of each."""
    if mask.ids is None:
        assert mask.rgba is not None
        values, counts = np.unique(mask.rgba.view("<u4"), return_counts=True)
        rows = zip(values.tolist(), counts.tolist(), strict=True)
        return "colors", {
            (value & 255, value >> 8 & 255, value >> 16 & 255): count
            for value, count in rows
        }
    counts = np.bincount(mask.ids.ravel())
    return "ids", {int(value): int(counts[value]) for value in np.flatnonzero(counts)}


def _between(mask: RawMask) -> dict[int | Color, int]:
    """Pixels of each value with a smaller and a larger one among their 8 neighbors, in every channel that differs.

    Interpolation puts a line of them between any two classes. The pixels of a real class, if ever so small, have few.
    """
    if mask.ids is not None:
        low, high = _neighbors(mask.ids)
        return count_values(
            mask._replace(ids=mask.ids[(low < mask.ids) & (mask.ids < high)])
        )[1]
    assert mask.rgba is not None
    low, high = _neighbors(mask.rgba)
    flat = low == high
    inside = flat | ((low < mask.rgba) & (mask.rgba < high))
    return count_values(
        mask._replace(rgba=mask.rgba[inside.all(axis=2) & ~flat.all(axis=2)])
    )[1]


def _neighbors(pixels: Pixels) -> tuple[NDArray[Any], NDArray[Any]]:
    """The smallest and the largest value of each pixel and its 8 neighbors."""
    low, high = (
        np.asarray(change(pixels, np.ones((3, 3), np.uint8)))
        for change in (cv2.erode, cv2.dilate)
    )
    return low, high


def _as_ids(colors: Tally, ids: Tally | None) -> Tally:
    """Colors with three equal channels as ids, together with `ids`."""
    merged = ids or Tally(Counter(), Counter(), {}, Counter())
    pairs = (
        (merged.pixels, colors.pixels),
        (merged.files, colors.files),
        (merged.between, colors.between),
    )
    for kept, more in pairs:
        for color, count in more.items():
            kept[color[0] if isinstance(color, tuple) else color] += count
    return merged


def _blended(tally: Tally) -> list[int | Color]:
    """The rare values that lie on edges between two others; one alone may be a class of thin lines."""
    most = EDGE_SHARE * sum(tally.pixels.values())
    odd = [
        value
        for value, count in sorted(tally.pixels.items())
        if count < most and tally.between[value] >= BLENDED_SHARE * count
    ]
    pixels = sum(tally.between[value] for value in odd)
    return odd if len(odd) > 1 and pixels >= MOSTLY * tally.between.total() else []


def _refused(kind: str, tally: Tally, odd: Sequence[int | Color]) -> str:
    shown = listed([str(value) for value in odd], 6)
    return NO_CLASSES.format(
        f"{len(tally.pixels)} different {kind}, {len(odd)} of them rare and along edges ({shown})"
    )


def _doubt(kind: str, odd: Sequence[int | Color]) -> str:
    return (
        f"blended values? The {kind} {listed([str(value) for value in odd], 6)} are rare and lie along edges between "
        "two others, as in masks that were resized with interpolation, drawn with smoothing (anti-aliasing) or stored "
        "as JPEG. If they are no classes, export class masks as PNG."
    )


def _classes(tally: Tally) -> list[int | Color]:
    """The values that are classes: all but id 255, which is one only where there is none but 0 beside it."""
    values = sorted(tally.pixels)
    return [value for value in values if value != IGNORE_INDEX or values == BINARY]


def _text(kind: str, tally: Tally, num: int, odd: Sequence[int | Color]) -> str:
    total = sum(tally.pixels.values())
    values, classes = sorted(tally.pixels), _classes(tally)
    names = {
        value: f"class{place if kind == 'colors' else value}"
        for place, value in enumerate(classes)
    }
    lines = [f"# Proposed from {num} masks. Give the classes their names."]
    if odd:
        lines += wrap(
            f"Warning: {_doubt(kind, odd)}",
            118,
            initial_indent="# ",
            subsequent_indent="# ",
        )
    lines.append("names:")
    for value, name in names.items():
        share = f"{100 * tally.pixels[value] / total:.2f} % of the pixels, in {tally.files[value]} masks"
        lines.append(f"  - {name}  # {kind.removesuffix('s')} {value}: {share}")
    lines.append(f"masks: {kind}")
    if kind == "colors":
        lines += [
            "palette:",
            *(
                f"  - {list(value) if isinstance(value, tuple) else value}"
                for value in classes
            ),
        ]
        lines.append(
            "ignore: [255]  # move the color of unlabelled pixels here, as in [[0, 0, 0]], with its name"
        )
        return "\n".join(lines) + "\n"
    colors = [
        tally.palette[value]
        for value in classes
        if isinstance(value, int) and value in tally.palette
    ]
    if len(set(colors)) == len(classes):
        lines += ["palette:", *(f"  - {list(color)}" for color in colors)]
    if classes != list(range(len(classes))):
        lines += ["ids:", *(f"  {value}: {name}" for value, name in names.items())]
    share = (
        f"  # {100 * tally.pixels[IGNORE_INDEX] / total:.2f} % of the pixels: a class, if this is not 0"
        if len(classes) < len(values)
        else ""
    )
    lines.append(f"ignore: [255]{share}" if values != BINARY else "ignore: []")
    return "\n".join(lines) + "\n"
