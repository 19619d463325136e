"""A class table for masks that come without one, from the ids or colors that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import Color
from segpipe.data.facts import Facts
from segpipe.data.readers import Value, threaded
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
Progress = Callable[[int, int], None]


@dataclass
class Tally:
    """What all masks hold."""

    kind: str  # ids or colors
    pixels: Counter[Value] = field(default_factory=Counter)
    files: Counter[Value] = field(default_factory=Counter)
    between: Counter[Value] = field(default_factory=Counter)  # pixels along edges
    palette: dict[Value, Color] = field(default_factory=dict)  # that files give to ids

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
    masks: Sequence[str], facts: Facts, progress: Progress = lambda done, total: None
) -> str:
    """Text of a classes.yaml for mask files. Raises DataError when they hold no classes, or ids and colors."""
    tally = _tally(masks, facts, progress)
    values = sorted(tally.pixels)
    if len(values) > MOST_CLASSES:
        raise DataError(
            NO_CLASSES.format(
                f"{len(values)} different {tally.kind}, too many for classes"
            )
        )
    # Id 255 is a class only where there is none but 0 beside it.
    classes = [value for value in values if value != IGNORE_INDEX or values == BINARY]
    if len(classes) < 2:
        held = " and ".join(map(str, values))
        raise DataError(
            f"all {len(masks)} masks hold nothing but {held}, and one class is nothing "
            "to learn. Check that they were exported with their objects: many tools "
            "write black masks if not told otherwise. (255 counts as ignored. If it is "
            "a class, write classes.yaml by hand, see docs/data.md.)"
        )
    odd = tally.blended()
    if len(odd) > MOST_BLENDED:
        held = f"{len(values)} different {tally.kind}, {len(odd)} of them rare and along edges ({_shown(odd)})"
        raise DataError(NO_CLASSES.format(held))
    lines = [f"# Proposed from {len(masks)} masks. Give the classes their names."]
    if odd:
        doubt = f"Warning: {DOUBT.format(tally.kind, _shown(odd))}"
        lines += wrap(doubt, 118, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, *_table(tally, classes), ""])


def _table(tally: Tally, classes: Sequence[Value]) -> list[str]:
    """Lines of the class table."""
    colored = tally.kind == "colors"
    names = [f"class{place if colored else each}" for place, each in enumerate(classes)]
    lines = ["names:"]
    for name, value in zip(names, classes, strict=True):
        share = f"{tally.share(value)}, in {tally.files[value]} masks"
        lines.append(f"  - {name}  # {tally.kind[:-1]} {value}: {share}")
    lines.append(f"masks: {tally.kind}")
    given = tally.palette
    colors = [each if isinstance(each, tuple) else given.get(each) for each in classes]
    if None not in colors and len(set(colors)) == len(classes):
        lines += ["palette:", *(f"  - {[*color]}" for color in colors if color)]
    if not colored and list(classes) != list(range(len(classes))):
        rows = zip(classes, names, strict=True)
        lines += ["ids:", *(f"  {value}: {name}" for value, name in rows)]
    note = ""
    if colored:
        note = "  # move the color of unlabelled pixels here, as in [[0, 0, 0]], with its name"
    elif IGNORE_INDEX in tally.pixels:
        note = f"  # {tally.share(IGNORE_INDEX)}: a class, if this is not 0"
    ignored = [] if IGNORE_INDEX in classes else [IGNORE_INDEX]
    return [*lines, f"ignore: {ignored}{note if ignored else ''}"]


def _tally(masks: Sequence[str], facts: Facts, progress: Progress) -> Tally:
    """What the masks hold: ids or colors. Colors with three equal channels are ids, if there are no others."""
    facts.edges = True
    examples: dict[str, str] = {}
    tally = Tally("")
    found = zip(masks, threaded(facts.values, masks), strict=True)
    for done, (path, mask) in enumerate(found, 1):
        examples.setdefault(mask.kind, path)
        for number, count in mask.pixels.items():
            value = mask.value(number)
            tally.pixels[value] += count
            tally.files[value] += 1
            tally.between[value] += (mask.between or {}).get(number, 0)
        for index, (red, green, blue, _) in mask.palette.items():
            color = (red, green, blue)
            if tally.palette.setdefault(index, color) != color:
                raise DataError(
                    f"index {index} of the palette of {path} has the color {color}, but {tally.palette[index]} in "
                    "masks before it: a tool has reordered palettes. Write classes.yaml by hand with `masks: colors` "
                    "and a palette if the colors count, or `masks: ids` if the indices do."
                )
        progress(done, len(masks))
    facts.keep()
    if all(isinstance(value, int) or len(set(value)) == 1 for value in tally.pixels):
        examples = {"ids": ""}
        tally.pixels, tally.files, tally.between = (
            _greys(each) for each in (tally.pixels, tally.files, tally.between)
        )
    if len(examples) != 1 or not masks:
        kinds = [f"{kind} ({path})" for kind, path in sorted(examples.items())]
        raise DataError(
            f"the masks hold {' and '.join(kinds)}, but one kind was needed. Convert the others."
        )
    (tally.kind,) = examples
    return tally


def _greys(counts: Counter[Value]) -> Counter[Value]:
    ids: Counter[Value] = Counter()
    for value, count in counts.items():
        ids[value if isinstance(value, int) else value[0]] += count
    return ids


def _shown(values: Sequence[Value]) -> str:
    return listed([str(value) for value in values], 6)
