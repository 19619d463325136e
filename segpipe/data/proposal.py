"""A class table for masks that come without one, from the ids or colors that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import Color, MaskTable
from segpipe.data.facts import Facts
from segpipe.data.masks import train_id
from segpipe.data.readers import MaskValues, Value, threaded
from segpipe.errors import DataError, listed

MOST_CLASSES = 254
BINARY = [0, 255]  # the ids of black and white masks
EDGE_SHARE = 0.03  # of all pixels, at most, that one blended value covers
# Of the pixels of a blended value lie between two others; of a class of CamVid, at most 0.2.
BLENDED_SHARE = 0.5
# Of all pixels between two others are of blended values; fewer are slivers of rare classes.
MOSTLY = 0.25
MOST_BLENDED = 15  # values; more are surely no classes
NO_CLASSES = (
    "the masks hold {}. Masks that were resized with interpolation or stored as JPEG "
    "have blended values, and instance masks number objects instead of classes. Export "
    "class masks as PNG."
)
DOUBT = (
    "blended values? The {} {} are rare and lie along edges between two others, as in "
    "masks that were resized with interpolation, drawn with smoothing (anti-aliasing) or "
    "stored as JPEG. If they are no classes, export class masks as PNG."
)


@dataclass
class Tally:
    """What all masks of one kind hold."""

    kind: str  # ids or colors
    example: str = ""  # path of the first mask
    pixels: Counter[Value] = field(default_factory=Counter)
    files: Counter[Value] = field(default_factory=Counter)
    between: Counter[Value] = field(default_factory=Counter)  # pixels along edges
    palette: dict[Value, Color] = field(default_factory=dict)  # that files give to ids

    def add(self, mask: MaskValues, path: str) -> None:
        """Count one more mask."""
        self.example = self.example or path
        for number, count in mask.pixels.items():
            self.pixels[mask.value(number)] += count
            self.files[mask.value(number)] += 1
        for number, count in (mask.between or {}).items():
            self.between[mask.value(number)] += count
        for index, (red, green, blue, _) in mask.palette.items():
            color = (red, green, blue)
            other = self.palette.setdefault(index, color)
            if other != color:
                raise DataError(
                    f"index {index} of the palette of {path} has the color {color}, but "
                    f"{other} in masks before it: a tool has reordered palettes. Write "
                    "classes.yaml by hand with `masks: colors` and a palette if the "
                    "colors count, or `masks: ids` if the indices do."
                )

    def add_greys(self, colors: Tally) -> None:
        """Count colors with three equal channels as ids."""
        for own, more in (
            (self.pixels, colors.pixels),
            (self.files, colors.files),
            (self.between, colors.between),
        ):
            for color, count in more.items():
                own[color[0] if isinstance(color, tuple) else color] += count

    @property
    def classes(self) -> list[Value]:
        """The values that are classes: all but id 255, which is one only where there is none but 0 beside it."""
        values = sorted(self.pixels)
        return [value for value in values if value != IGNORE_INDEX or values == BINARY]

    def blended(self) -> list[Value]:
        """The rare values that lie on edges between two others; one alone may be a class of thin lines."""
        most = EDGE_SHARE * self.pixels.total()
        odd = [
            value
            for value, count in sorted(self.pixels.items())
            if count < most and self.between[value] >= BLENDED_SHARE * count
        ]
        pixels = sum(self.between[value] for value in odd)
        if len(odd) < 2 or pixels < MOSTLY * self.between.total():
            return []
        return odd

    def share(self, value: Value) -> str:
        """Percentage of the pixels."""
        return f"{100 * self.pixels[value] / self.pixels.total():.2f} % of the pixels"


def propose(
    masks: Sequence[str],
    facts: Facts,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Text of a classes.yaml for mask files. Raises DataError when they hold no classes, or ids and colors."""
    tally = _tally(masks, facts, progress)
    num = len(tally.pixels)
    if num > MOST_CLASSES:
        raise DataError(
            NO_CLASSES.format(f"{num} different {tally.kind}, too many for classes")
        )
    if len(tally.classes) < 2:
        held = " and ".join(map(str, sorted(tally.pixels)))
        raise DataError(
            f"all {len(masks)} masks hold nothing but {held}, and one class is nothing "
            "to learn. Check that they were exported with their objects: many tools "
            "write black masks if not told otherwise. (255 counts as ignored. If it is "
            "a class, write classes.yaml by hand, see docs/data.md.)"
        )
    odd = tally.blended()
    if len(odd) > MOST_BLENDED:
        raise DataError(_refusal(tally, odd))
    return _text(tally, len(masks), odd)


def blended(masks: Sequence[str], table: MaskTable, facts: Facts) -> tuple[str, bool]:
    """Message about classes of a table that come from interpolation or JPEG, and whether that is certain.

    Empty if there are none.
    """
    try:
        tally = _tally(masks, facts)
    except DataError:  # of two kinds, which the table explains
        return "", False
    odd = [value for value in tally.blended() if train_id(table, value) != IGNORE_INDEX]
    if len(odd) > MOST_BLENDED:
        return _refusal(tally, odd), True
    if len(odd) > 1:
        return DOUBT.format(tally.kind, _shown(odd)), False
    return "", False


def _tally(
    masks: Sequence[str],
    facts: Facts,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tally:
    """What the masks hold: ids or colors."""
    facts.edges = True
    tallies: dict[str, Tally] = {}
    found = zip(masks, threaded(facts.values, masks), strict=True)
    for done, (path, mask) in enumerate(found, 1):
        tallies.setdefault(mask.kind, Tally(mask.kind)).add(mask, path)
        progress(done, len(masks))
    facts.keep()
    colors = tallies.get("colors")
    if colors and all(
        isinstance(color, tuple) and len(set(color)) == 1 for color in colors.pixels
    ):
        tallies.setdefault("ids", Tally("ids")).add_greys(tallies.pop("colors"))
    if len(tallies) != 1:
        kinds = [f"{kind} ({one.example})" for kind, one in sorted(tallies.items())]
        raise DataError(
            f"the masks hold {' and '.join(kinds) or 'nothing'}, but one kind was "
            "needed. Convert the others."
        )
    return next(iter(tallies.values()))


def _shown(values: Sequence[Value]) -> str:
    return listed([str(value) for value in values], 6)


def _refusal(tally: Tally, odd: Sequence[Value]) -> str:
    return NO_CLASSES.format(
        f"{len(tally.pixels)} different {tally.kind}, {len(odd)} of them rare and along "
        f"edges ({_shown(odd)})"
    )


def _text(tally: Tally, num: int, odd: Sequence[Value]) -> str:
    """The class table."""
    lines = [f"# Proposed from {num} masks. Give the classes their names."]
    if odd:
        doubt = f"Warning: {DOUBT.format(tally.kind, _shown(odd))}"
        lines += wrap(doubt, 118, initial_indent="# ", subsequent_indent="# ")
    lines.append("names:")
    names = {}
    colored = tally.kind == "colors"
    for place, value in enumerate(tally.classes):
        names[value] = f"class{place if colored else value}"
        share = f"{tally.share(value)}, in {tally.files[value]} masks"
        kind = tally.kind.removesuffix("s")
        lines.append(f"  - {names[value]}  # {kind} {value}: {share}")
    lines.append(f"masks: {tally.kind}")
    if colored:
        colors = [color for color in tally.classes if isinstance(color, tuple)]
        lines += ["palette:", *(f"  - {list(color)}" for color in colors)]
        lines.append(
            "ignore: [255]  # move the color of unlabelled pixels here, as in "
            "[[0, 0, 0]], with its name"
        )
        return "\n".join(lines) + "\n"
    colors = [tally.palette[value] for value in names if value in tally.palette]
    if len(set(colors)) == len(names):
        lines += ["palette:", *(f"  - {list(color)}" for color in colors)]
    if list(names) != list(range(len(names))):
        lines += ["ids:", *(f"  {value}: {name}" for value, name in names.items())]
    if sorted(tally.pixels) == BINARY:
        lines.append("ignore: []")
    elif IGNORE_INDEX in tally.pixels:
        share = f"{tally.share(IGNORE_INDEX)}: a class, if this is not 0"
        lines.append(f"ignore: [255]  # {share}")
    else:
        lines.append("ignore: [255]")
    return "\n".join(lines) + "\n"
