"""Proposes a class table for masks without one, from the ids or colors that they hold."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from segpipe import IGNORE_INDEX
from segpipe.data.readers import Progress, packed, read_mask, silent, threaded
from segpipe.errors import DataError

MOST_CLASSES = 254
MANY = 40  # ids or colors; blended values soon exceed this
MANY_CLASSES = (
    "# Warning: many classes. If the rare ones are not classes, masks were resized with interpolation,\n"
    "# smoothed or stored as JPEG: export class masks as PNG."
)
BINARY = [0, 255]  # the ids of black and white masks
Value = int | tuple[int, ...]  # an id, or red, green and blue


class Values(NamedTuple):
    """What a mask holds."""

    kind: str  # ids or colors
    pixels: Mapping[Value, int]
    palette: Mapping[Value, tuple[int, ...]]  # color of each id, in a palette file


def _values(path: str) -> Values | None:
    """What a mask file holds; None if it cannot be read."""
    try:
        mask = read_mask(path)
    except DataError:
        return None
    if mask.pixels.ndim == 3:
        opaque = packed(mask.pixels) & 0xFFFFFF
        found, counts = np.unique(opaque, return_counts=True)
        colors = found.view(np.uint8).reshape(-1, 4)[:, :3].tolist()
        return Values(
            "colors", dict(zip(map(tuple, colors), counts.tolist(), strict=True)), {}
        )

    pixels = np.bincount(mask.pixels.ravel())
    counts = {int(value): int(pixels[value]) for value in np.flatnonzero(pixels)}
    palette: dict[Value, tuple[int, ...]] = {}
    if mask.palette is not None:
        palette = {value: tuple(mask.palette[value, :3].tolist()) for value in counts}
    return Values("ids", counts, palette)


@dataclass
class Tally:
    """Content of all masks."""

    kind: str  # ids or colors
    pixels: Counter[Value] = field(default_factory=Counter)
    files: Counter[Value] = field(default_factory=Counter)
    # Colors of ids in the files' palettes.
    palette: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    richest: tuple[int, str] = (0, "")  # most values of one mask, and its path

    def share(self, value: Value) -> str:
        """A value's percentage of the pixels, as text."""
        return f"{100 * self.pixels[value] / self.pixels.total():.2f} % of the pixels"


def propose(masks: Sequence[str], progress: Progress = silent) -> str:
    """Text of a classes.yaml for the mask files that can be read.

    Raises DataError if there are none, and if they hold no classes, or both ids and colors.
    """
    read = zip(masks, threaded(_values, masks, progress), strict=True)
    found = [(path, values) for path, values in read if values]
    if not found:
        read_mask(masks[0])  # raises what the other masks have, too
    tally = _tally(found)
    values = sorted(tally.pixels)
    if len(values) > MOST_CLASSES:
        raise DataError(
            f"the masks hold {len(values)} different {tally.kind}, too many for classes: {tally.richest[1]} alone "
            f"holds {tally.richest[0]}. Masks that were resized with interpolation or stored as JPEG have blended "
            "values, and instance masks number objects instead of classes. Export class masks as PNG."
        )

    # Id 255 is a class only if 0 is the only other id.
    classes = [value for value in values if value != IGNORE_INDEX or values == BINARY]
    if len(classes) < 2:
        raise DataError(
            f"all {len(found)} masks hold only {' and '.join(map(str, values))}, but training needs at least two "
            "classes. Check that they were exported with their objects: many tools write black masks by default. (255 "
            "counts as ignored. If it is a class, write classes.yaml by hand, see docs/data.md.)"
        )

    lines = [f"# Proposed from {len(found)} masks. Name the classes."]
    if len(found) < len(masks):
        lines.append(
            f"# {len(masks) - len(found)} more cannot be read: the next doctor names them."
        )
    if len(classes) > MANY:
        lines.append(MANY_CLASSES)

    return "\n".join([*lines, *_table(tally, classes), ""])


def _table(tally: Tally, classes: Sequence[Value]) -> list[str]:
    """Lines of the class table."""
    colored = tally.kind == "colors"
    numbers = range(len(classes)) if colored else classes
    names = [f"class{number}" for number in numbers]
    lines = ["names:"]
    for name, value in zip(names, classes, strict=True):
        share = f"{tally.share(value)}, in {tally.files[value]} masks"
        lines.append(f"  - {name}  # {tally.kind[:-1]} {value}: {share}")

    lines.append(f"masks: {tally.kind}")
    colors: Sequence[Any] = classes
    if not colored:
        colors = [tally.palette.get(value) for value in classes]
    if None not in colors and len(set(colors)) == len(classes):
        lines.append("palette:")
        lines += [f"  - {list(color)}" for color in colors]
    if not colored and list(classes) != list(range(len(classes))):
        lines.append("ids:")
        for value, name in zip(classes, names, strict=True):
            lines.append(f"  {value}: {name}")

    ignored = f"ignore: [{IGNORE_INDEX}]"
    if IGNORE_INDEX in classes:
        ignored = "ignore: []"
    elif colored:
        ignored += "  # if a color means unlabelled, move it here, as in [255, [0, 0, 0]], and delete its name"
    elif IGNORE_INDEX in tally.pixels:
        ignored += (
            f"  # {tally.share(IGNORE_INDEX)}. If 255 is a class: add it to names (and palette), list all ids, as in "
            "ids: {0: class0, 255: class255}, and write ignore: []"
        )
    return [*lines, ignored]


def _tally(masks: Sequence[tuple[str, Values]]) -> Tally:
    """Content of the masks: ids or colors. Colors with three equal channels count as ids if there are no others."""
    examples = {mask.kind: path for path, mask in masks}
    values = {value for _, mask in masks for value in mask.pixels}
    if all(isinstance(value, int) or len(set(value)) == 1 for value in values):
        examples = {"ids": ""}
    if len(examples) != 1:
        kinds = [f"{kind} ({path})" for kind, path in sorted(examples.items())]
        raise DataError(
            f"the masks hold {' and '.join(kinds)}, but one kind was needed. Convert the others."
        )

    (kind,) = examples
    tally = Tally(kind)
    for path, mask in masks:
        tally.richest = max(tally.richest, (len(mask.pixels), path))
        for value, count in mask.pixels.items():
            if kind == "ids" and isinstance(value, tuple):
                value = value[0]
            tally.pixels[value] += count
            tally.files[value] += 1
        for value, color in mask.palette.items():
            if tally.palette.setdefault(value, color) != color:
                raise DataError(
                    f"index {value} of the palette of {path} has the color {color}, but {tally.palette[value]} in "
                    "earlier masks: a tool has reordered palettes. Write classes.yaml by hand, with `masks: colors` "
                    "and a palette if the colors are right, or `masks: ids` if the indices are."
                )

    return tally
