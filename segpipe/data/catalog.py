"""Class tables: names, colors, and the class of each raw mask id or color.

A `folder` data set has its own table, a YAML file (`data.classes`, by default ROOT/classes.yaml):

    name: warehouse                      # optional; the name of the folder otherwise
    names: [floor, shelf, person]        # the classes; their position is the train id 0, 1, 2
    palette: [[128, 64, 128], [70, 70, 70], [220, 20, 60]]   # RGB, one per class; without it, generated
    masks: ids                           # ids or colors; without it, the first mask decides
    ids: {7: floor, 8: floor, 11: shelf, 24: person}         # mask id: class; without it, ids are train ids
    colors: {shelf: [[0, 70, 70]]}       # further colors of a class, for masks of colors
    ignore: [0, 255, [0, 0, 0]]          # ids and colors of unlabelled pixels; without it, id 255 and no color
    exif: apply                          # apply or ignore; without it, the mask's size decides

A mask id in neither `ids` nor `ignore` is an error, never silently ignored; likewise a color.

The tables of published data sets are in sets/NAME.yaml, with a row `class: [id, R, G, B]` for each class.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import filterfalse
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data import Pixels, Uint8
from segpipe.errors import DataError, did_you_mean, listed
from segpipe.files import sha256_of

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

KEYS = ("name", "names", "palette", "masks", "ids", "colors", "ignore", "exif")
SETS = Path(__file__).parent / "sets"
PUBLISHED = tuple(sorted(path.stem for path in SETS.glob("*.yaml")))
MOST_BYTES = 1 << 20
LARGEST_ID = 65535  # in a 16-bit mask
Color = tuple[int, int, int]


@dataclass(frozen=True)
class ClassTable:
    """The classes of a data set, and the exact map from raw mask ids to train ids."""

    name: str
    names: tuple[str, ...]
    palette: tuple[Color, ...]  # RGB
    # Train id of each raw id, 255 = ignore; every other raw id is an error.
    train_ids: dict[int, int]

    @property
    def num_classes(self) -> int:
        """Number of trained classes; ignore is not one of them."""
        return len(self.names)

    @cached_property
    def lut(self) -> Uint8:
        """Train id of each 16-bit raw id, uint8 (65536,); ids that are not `known` map to ignore."""
        lut = np.full(LARGEST_ID + 1, IGNORE_INDEX, np.uint8)
        lut[list(self.train_ids)] = list(self.train_ids.values())
        return lut

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Whether the table has each 16-bit raw id, bool (65536,)."""
        known = np.zeros(LARGEST_ID + 1, np.bool_)
        known[list(self.train_ids)] = True
        return known

    def unknown(self, mask: Pixels, where: str) -> DataError:
        """The error for a mask with ids that are not `known`."""
        counts = np.bincount(mask.ravel(), minlength=LARGEST_ID + 1) * ~self.known
        found = np.flatnonzero(counts).tolist()
        row, column = np.argwhere(mask == found[0])[0]
        return DataError(
            f"{where} has id{'s' * (len(found) > 1)} {listed(list(map(str, found)), 8)} ({counts.sum()} pixels, the "
            f"first at row {row}, column {column}); the {self.name} table has {_ranges(sorted(self.train_ids))}. "
            "Correct the mask, or extend the table (ids and ignore in classes.yaml, names= of an import), see "
            f"docs/data.md.{self._hint(found)}",
            cause=f"unknown {found}",
            where=where,
        )

    def _hint(self, unknown: list[int]) -> str:
        """A likely fix for the unknown ids of a mask; empty if there is none."""
        number = self.num_classes
        if unknown == [number] and all(raw in self.train_ids for raw in range(number)):
            ids = ", ".join(f"{raw}: {name}" for raw, name in enumerate(self.names, 1))
            return f" If 0 is not a class and ids start at 1: `ids: {{{ids}}}` and `ignore: [0, 255]`."
        if len(unknown) == 1 and (unknown[0] == 0 or 250 < unknown[0] < 256):
            return f" If {unknown[0]} means unlabelled: `ignore: [{unknown[0]}, 255]`."
        return ""


@dataclass(frozen=True)
class MaskTable:
    """How mask files encode classes: a class table, and its ids or colors in the files."""

    classes: ClassTable
    kind: str = ""  # ids or colors; empty: not specified
    # Train id of each color; empty if no colors are given.
    colors: dict[Color, int] = field(default_factory=dict)
    exif: str = ""  # apply or ignore; empty: the size of the mask decides
    first: str = ""  # the mask that decided the kind, if the table does not name it

    @cached_property
    def meaning(self) -> str:
        """What decides the train ids of a mask, and whether its image is turned."""
        ids, colors = (
            sorted(self.classes.train_ids.items()),
            sorted(self.colors.items()),
        )
        return repr((ids, self.kind, colors, self.exif))

    @cached_property
    def key(self) -> str:
        """Digest of what decides whether a mask is refused, and its train ids otherwise."""
        return sha256_of(f"{self.meaning} {bool(self.first)}".encode())[:16]

    @cached_property
    def color_keys(self) -> tuple[NDArray[np.uint32], Uint8]:
        """The colors as little-endian RGBA numbers, uint32 (n,) in ascending order, and their train ids."""
        rgba = np.array([[*color, 255] for color in self.colors], np.uint8)
        keys = rgba.view("<u4").ravel()
        order = np.argsort(keys)
        return keys[order], np.array([*self.colors.values()], np.uint8)[order]


@dataclass(frozen=True)
class PublishedSet:
    """A published data set: its origin, where its files lie, and what its masks mean, as in sets/NAME.yaml."""

    title: str
    source: str  # source of ids and colors
    page: str  # download page
    downloads: list[str]
    splits: dict[str, int]  # number of images; 0: not published
    table: MaskTable
    images: str = ""  # in the form of data.images
    labels: Sequence[str] = ()  # mask folders of each release, newest first
    folders: Mapping[str, str] = field(
        default_factory=dict
    )  # for SPLIT, if named otherwise
    sequences: Mapping[str, list[str]] = field(
        default_factory=dict
    )  # subfolders of a split
    listing: str = ""  # file with the stems of a split
    pairs: str = ""  # file with the pairs of a split
    root: str = "the folder that holds the following"  # what data.root is
    note: str = ""


def _ranges(ids: list[int]) -> str:
    """Sorted ids as text: `0-11, 255`."""
    starts = [raw for raw in ids if raw - 1 not in ids]
    ends = [raw for raw in ids if raw + 1 not in ids]
    runs = zip(starts, ends, strict=True)
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def mask_table(data: DataConfig) -> MaskTable:
    """Mask table of a data set in files.

    Raises DataError if its root or its table is missing or invalid.
    """
    if not Path(data.root).is_dir():
        raise DataError(missing(Path(data.root)))
    if data.name in PUBLISHED and not data.classes:
        return published(data.name).table
    path = table_path(data)
    if not path.exists():
        raise DataError(
            f"{path} does not exist. A folder data set needs a class table: `segpipe doctor data=folder {typed(data)}` "
            "proposes one from the masks. If it lies elsewhere, set data.classes=FILE."
        )
    return load_masks(path)


def typed(data: DataConfig) -> str:
    """The settings that name the folders of a data set, as typed in a shell."""
    return shlex.join(
        f"data.{key}={value}"
        for key in ("root", "images", "masks")
        if (value := getattr(data, key))
    )


@cache
def published(name: str) -> PublishedSet:
    """The published data set with this name, one of PUBLISHED."""
    entries = _entries(name)
    keys = entries.keys() & {"classes", "more", "masks", "ids", "ignore"}
    table = _rows({key: entries.pop(key) for key in keys})
    return PublishedSet(**entries, table=mask_table_of(table, name))


def _entries(name: str) -> dict[str, Any]:
    """Keys of a set's file, completed by the keys of the set that it is `like`."""
    entries = dict(_yaml(SETS / f"{name}.yaml"))
    like = entries.pop("like", "")
    return {**_entries(like), **entries} if like else entries


def _rows(entries: dict[str, Any]) -> dict[str, Any]:
    """Keys of a classes.yaml, from rows `class: [id, R, G, B]` or `[id]`, or `[R, G, B]` for masks of colors."""
    rows, more = entries.pop("classes"), entries.pop("more", {})
    table: dict[str, Any] = {"names": list(rows)}
    if entries["masks"] == "ids":
        table["ids"] = {row[0]: name for name, row in rows.items()} | more
    colors = [row[-3:] for row in rows.values()]
    if len(colors[0]) == 3:
        table["palette"] = colors
    return table | entries


def table_path(data: DataConfig) -> Path:
    """Path of the class table of a folder data set; the file may be missing."""
    return Path(data.classes) if data.classes else Path(data.root) / "classes.yaml"


def load_masks(path: Path) -> MaskTable:
    """Mask table from a YAML file of the form above. Raises DataError naming file and key."""
    try:
        entries = _yaml(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise DataError(
            f"{path} cannot be read as YAML: {reason}{'. Save it as UTF-8.' * isinstance(error, UnicodeError)}"
        ) from None

    if not isinstance(entries, dict):
        raise DataError(f"{path} has no keys, but names was needed.")

    try:
        return mask_table_of(entries, path.resolve().parent.name)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses duplicate keys, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """A dict. Raises ValueError for a duplicate key."""
        keys = [str(key.value) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                line = node.value[place][0].start_mark.line + 1
                raise ValueError(f"line {line} repeats {key}. Remove one of them.")
        return super().construct_mapping(node, deep)


def _yaml(path: Path) -> Any:
    """Content of a YAML file. Raises OSError, YAMLError, and ValueError for valid YAML that cannot be a table."""
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError("it is not a regular file.")
    if size > MOST_BYTES:
        raise ValueError(f"it has {size} bytes, but a class table has a few hundred.")
    return yaml.load(path.read_bytes().decode("utf-8-sig"), _Loader)


def _needed(key: str, value: Any, needed: str) -> ValueError:
    """The error for a value of the wrong kind."""
    return ValueError(f"{key} = {value!r}, but {needed} was needed.")


def mask_table_of(entries: dict[str, Any], name: str) -> MaskTable:
    """Mask table from the keys of a classes.yaml. Raises ValueError with the rest of a message."""
    for key in entries:
        _one_of("key", str(key), KEYS)

    names = _names(entries.get("names"))
    ignore = entries.get("ignore", [IGNORE_INDEX])
    if not isinstance(ignore, list):
        raise _needed("ignore", ignore, "a list such as [255, [0, 0, 0]]")
    kind = _one_of("masks", entries.get("masks", ""), ("", "ids", "colors"))
    exif = _one_of("exif", entries.get("exif", ""), ("", "apply", "ignore"))
    given = entries.get("palette", [])
    if not isinstance(given, list) or len(given) not in (0, len(names)):
        found = f"{len(given)} colors" if isinstance(given, list) else given
        raise ValueError(
            f"palette = {found}, but {len(names)} colors [R, G, B] were needed, one per name."
        )

    palette = tuple(_color("palette", color) for color in given)
    more = entries.get("colors", {})
    colors = {}
    if palette or more:
        colors = _colors(names, palette, more, filter(_is_color, ignore))
    elif kind == "colors":
        raise ValueError(
            "masks = colors, but there is no palette. Give one color [R, G, B] per name."
        )
    for color, trains in colors.items():
        if kind == "colors" and len(trains) > 1:
            named = dict(enumerate(names)) | {IGNORE_INDEX: "ignore"}
            both = " and of ".join(named[train] for train in trains[:2])
            raise ValueError(
                f"{list(color)} is the color of {both}. Give each its own color."
            )

    classes = ClassTable(
        str(entries.get("name", name)),
        names,
        palette or distinct_colors(len(names)),
        _train_ids(names, entries.get("ids"), filterfalse(_is_color, ignore)),
    )
    clear = {color: trains[0] for color, trains in colors.items() if len(trains) == 1}
    return MaskTable(classes, kind, clear, exif)


def _one_of(key: str, value: Any, choices: Sequence[str]) -> str:
    """The value as text. Raises ValueError unless it is one of the choices."""
    if value not in choices:
        valid = ", ".join(filter(None, choices))
        hint = did_you_mean(str(value), choices)
        raise ValueError(f"{key} = {value} is not one of {valid}.{hint}")
    return str(value)


def distinct_colors(num: int) -> tuple[Color, ...]:
    """Colors for classes without any: of 40, no two are closer than 35 in RGB, and of 255 than 18."""
    colors = []
    for place in range(num):
        # These steps had the largest distances of 6,000 that were tried.
        hue, paler, darker = (place * step % 1 for step in (0.618034, 0.8, 0.08))
        rgb = hsv_to_rgb(hue, 1 - 0.6 * paler, 1 - 0.5 * darker)
        colors.append(_color("", [round(255 * part) for part in rgb]))
    return tuple(colors)


def _names(value: Any) -> tuple[str, ...]:
    """The names of the classes. Raises ValueError for one that is invalid or repeated."""
    names = value if isinstance(value, list) else []
    if not 1 <= len(names) <= IGNORE_INDEX:
        raise ValueError(
            f"names has {len(names) or repr(value)}, but a list of 1 to {IGNORE_INDEX} class names was needed."
        )

    for name in names:
        text = str(name)
        fault = ""
        if isinstance(name, list | dict):
            fault = "a list or a map, but words were needed"
        elif isinstance(name, bool) or name is None:
            fault = f'{name}, to which YAML converts words such as yes, no, on and null: quote it, as in ["no"]'
        elif not text.isprintable() or not text or text != text.strip():
            fault = f"{text!r}, but printable characters without surrounding spaces were needed"
        elif list(map(str, names)).count(text) > 1:
            fault = f"{name} twice"
        if fault:
            raise ValueError(f"names has {fault}.")
    return tuple(map(str, names))


def _color(key: str, value: Any) -> Color:
    """A color as three numbers from 0 to 255. Raises ValueError for anything else."""
    try:
        red, green, blue = bytes(value)
        return red, green, blue
    except (TypeError, ValueError):
        raise _needed(key, value, "integers [R, G, B] from 0 to 255") from None


def _is_color(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3


def _colors(
    names: tuple[str, ...], palette: Iterable[Color], more: Any, ignore: Iterable[Any]
) -> dict[Color, list[int]]:
    """Train ids of each color, in ascending order; several if the color is ambiguous."""
    meanings = [(color, train) for train, color in enumerate(palette)]
    try:
        for name, values in more.items():
            train = _train_id("colors", name, names)
            meanings += [(_color(f"colors.{name}", value), train) for value in values]
    except (AttributeError, TypeError):
        example = f"a map such as {{{names[0]}: [[0, 70, 70]]}}"
        raise _needed("colors", more, example) from None
    meanings += [(_color("ignore", value), IGNORE_INDEX) for value in ignore]

    found: dict[Color, list[int]] = {}
    for color, train in sorted(dict.fromkeys(meanings), key=itemgetter(1)):
        found.setdefault(color, []).append(train)
    return found


def _train_ids(
    names: tuple[str, ...], ids: Any, ignore: Iterable[Any]
) -> dict[int, int]:
    """Train id of each raw id. Raises ValueError for an id with two meanings, or a class without one."""
    implied = ids is None
    ids = dict(enumerate(names)) if ids is None else ids
    if not isinstance(ids, dict):
        raise _needed("ids", ids, f"a map such as {{7: {names[0]}}}")

    meanings = [
        (raw, _train_id(f"ids[{raw}]", name, names)) for raw, name in ids.items()
    ]
    meanings += [(raw, IGNORE_INDEX) for raw in ignore]
    table: dict[int, int] = {}
    for raw, train in meanings:
        if type(raw) is not int or not 0 <= raw <= LARGEST_ID:
            raise ValueError(
                f"ids or ignore has {raw!r}, but mask ids are whole numbers from 0 to {LARGEST_ID}."
            )
        if raw in table:
            if implied and raw < len(names):
                raise ValueError(
                    f"id {raw} is in ignore, but without ids it is that of {names[raw]}. For masks of colors, write "
                    f"the color: {[raw] * 3}. If ids start at 1, add ids: {{1: {names[0]}, ...}} with all names."
                )
            raise ValueError(f"id {raw} is in both ids and ignore, or twice in one.")
        table[raw] = train

    for train in set(range(len(names))).difference(table.values()):
        raise ValueError(
            f"no id in ids maps to {names[train]}, so it cannot be learned. Add an id or remove the name."
        )
    return table


def _train_id(where: str, name: Any, names: tuple[str, ...]) -> int:
    """Index of a class among the names, compared as text: 7 is "7". Raises ValueError with the nearest name."""
    name = str(name)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ValueError(f"{where}: {name!r} is not one of names.{hint}")
    return names.index(name)


def missing(folder: Path) -> str:
    """Message about a missing folder, with the nearest existing one."""
    parent, absent = folder, folder
    while not parent.is_dir():
        parent, absent = parent.parent, parent
    siblings = sorted(path.name for path in parent.glob("[!.]*") if path.is_dir())
    hint = f"{parent if parent.name else parent.absolute()} holds {', '.join(siblings[:8]) or 'no folders'}"
    for other in get_close_matches(absent.name, siblings, 1):
        hint = f"Nearest: {parent / other}"
    state = "is a file, not a folder" if absent.exists() else "does not exist"
    return f"{absent} {state}. {hint}. Set data.root, data.split, or both data.images and data.masks accordingly."


STREET = load_masks(
    Path(__file__).with_name("street.yaml")
).classes  # classes of synthetic scenes
