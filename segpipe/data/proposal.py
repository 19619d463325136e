"""A class table for masks that come without one, from the ids or colors that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import Color
from segpipe.data.readers import RawMask, read_mask, threaded
from segpipe.errors import DataError

MOST_CLASSES = 254
BINARY = [0, 255]  # the ids of black and white masks
EDGE_SHARE = 0.03  # of all pixels, at most, that one value of a smoothed edge covers
OFTEN = 0.9  # of the masks hold at least one value of smoothed edges


class Tally(NamedTuple):
    """Pixels and files of each id or color."""

    pixels: Counter[int | Color]
    files: Counter[int | Color]
    palette: dict[int, Color]  # colors that the files give to ids


def propose(masks: Sequence[str], progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """Text of a classes.yaml for mask files. Raises DataError when they hold no classes, or ids and colors."""
    found: dict[str, Tally] = {}
    example: dict[str, str] = {}
    for done, (path, mask) in enumerate(zip(masks, threaded(read_mask, masks), strict=True), 1):
        kind, counts = count_values(mask)
        tally = found.setdefault(kind, Tally(Counter(), Counter(), {}))
        example.setdefault(kind, path)
        tally.pixels.update(counts)
        tally.files.update(counts.keys())
        if mask.palette is not None:
            known = ((index, mask.palette[index].tolist()) for index in counts if isinstance(index, int))
            for index, color in ((index, (color[0], color[1], color[2])) for index, color in known):
                if (other := tally.palette.setdefault(index, color)) != color:
                    raise DataError(
                        f"index {index} of the palette of {path} has the color {color}, but {other} in masks before "
                        "it: a tool has reordered palettes. Write classes.yaml by hand with `masks: colors` and a "
                        "palette if the colors count, or `masks: ids` if the indices do."
                    )
        progress(done, len(masks))
    if "colors" in found and all(len(set(color)) == 1 for color in found["colors"].pixels if isinstance(color, tuple)):
        found["ids"] = _as_ids(found.pop("colors"), found.get("ids"))
    if len(found) != 1:
        kinds = " and ".join(f"{kind} ({path})" for kind, path in sorted(example.items()))
        raise DataError(f"the masks hold {kinds or 'nothing'}, but one kind was needed. Convert the others.")
    ((kind, tally),) = found.items()
    if len(tally.pixels) > MOST_CLASSES:
        raise DataError(
            f"the masks hold {len(tally.pixels)} different {kind}, too many for classes. Masks that were resized with "
            "interpolation or stored as JPEG have blended values, and instance masks number objects instead of "
            "classes. Export class masks as PNG."
        )
    return _text(kind, tally, len(masks))


def count_values(mask: RawMask) -> tuple[str, dict[int | Color, int]]:
    """Whether a mask holds ids or colors, and the number of pixels of each."""
    if mask.ids is None:
        assert mask.rgba is not None
        values, counts = np.unique(mask.rgba.view("<u4"), return_counts=True)
        rows = zip(values.tolist(), counts.tolist(), strict=True)
        return "colors", {(value & 255, value >> 8 & 255, value >> 16 & 255): count for value, count in rows}
    counts = np.bincount(mask.ids.ravel())
    return "ids", {int(value): int(counts[value]) for value in np.flatnonzero(counts)}


def _as_ids(colors: Tally, ids: Tally | None) -> Tally:
    """Colors with three equal channels as ids, together with `ids`."""
    merged = ids or Tally(Counter(), Counter(), {})
    for kept, more in ((merged.pixels, colors.pixels), (merged.files, colors.files)):
        for color, count in more.items():
            kept[color[0] if isinstance(color, tuple) else color] += count
    return merged


def _blended(tally: Tally, num: int) -> list[str]:
    """A warning if the ids between 0 and 255 look like smoothed edges of black and white masks."""
    between = [value for value in sorted(tally.pixels) if isinstance(value, int) and value not in BINARY]
    total = sum(tally.pixels.values())
    rare = all(tally.pixels[value] < EDGE_SHARE * total for value in between)
    usual = max((tally.files[value] for value in between), default=0) >= OFTEN * num
    counted = between == list(range(1, len(between) + 1))  # as people number classes
    if not (set(BINARY) <= tally.pixels.keys() and len(between) > 1 and rare and usual and not counted):
        return []
    shown = f"{', '.join(map(str, between[:6]))}{', ...' if len(between) > 6 else ''}"
    return [
        f"# Warning: blended values? Besides 0 and 255, nearly all masks hold a few pixels of {shown}: so do black and",
        "# white masks with smoothed edges. If they are no classes, export masks without smoothing (anti-aliasing).",
    ]


def _text(kind: str, tally: Tally, num: int) -> str:
    total = sum(tally.pixels.values())
    values = sorted(tally.pixels)
    ignored = [value for value in values if value == IGNORE_INDEX and values != BINARY]
    classes = [value for value in values if value not in ignored]
    names = {value: f"class{place if kind == 'colors' else value}" for place, value in enumerate(classes)}
    lines = [f"# Proposed from {num} masks. Give the classes their names."]
    lines += [*_blended(tally, num), "names:"]
    for value, name in names.items():
        share = f"{100 * tally.pixels[value] / total:.2f} % of the pixels, in {tally.files[value]} masks"
        lines.append(f"  - {name}  # {kind.removesuffix('s')} {value}: {share}")
    lines.append(f"masks: {kind}")
    if kind == "colors":
        lines += ["palette:", *(f"  - {list(value) if isinstance(value, tuple) else value}" for value in classes)]
        lines.append("ignore: [255]  # move the color of unlabelled pixels here, as in [[0, 0, 0]], with its name")
        return "\n".join(lines) + "\n"
    colors = [tally.palette[value] for value in classes if isinstance(value, int) and value in tally.palette]
    if len(set(colors)) == len(classes):
        lines += ["palette:", *(f"  - {list(color)}" for color in colors)]
    if classes != list(range(len(classes))):
        lines += ["ids:", *(f"  {value}: {name}" for value, name in names.items())]
    share = (
        f"  # {100 * tally.pixels[IGNORE_INDEX] / total:.2f} % of the pixels: a class, if this is not 0"
        if ignored
        else ""
    )
    lines.append(f"ignore: [255]{share}" if values != BINARY else "ignore: []")
    return "\n".join(lines) + "\n"
