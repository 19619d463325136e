"""Class tables: names, colors, and which raw mask id or color is which class.

A `folder` data set has its own table, a YAML file (`data.classes`, by default ROOT/classes.yaml):

    name: warehouse                      # optional; the name of the folder otherwise
    names: [floor, shelf, person]        # the classes; their position is the train id 0, 1, 2
    palette: [[128, 64, 128], [70, 70, 70], [220, 20, 60]]   # RGB, one per class; without it, colors are made up
    masks: ids                           # ids or colors; without it, the first mask decides
    ids: {7: floor, 8: floor, 11: shelf, 24: person}         # mask id: class; without it, ids are train ids
    colors: {shelf: [[0, 70, 70]]}       # further colors of a class, for masks of colors
    ignore: [0, 255, [0, 0, 0]]          # ids and colors of unlabelled pixels; without it, id 255 and no color
    exif: apply                          # apply or ignore; without it, the mask's size decides

A mask id that is in neither `ids` nor `ignore` is an error and never silently ignored; so is a color.

The tables of published data sets are in sets/NAME.yaml, with a row `class: [id, R, G, B]` for each class.
"""

from __future__ import annotations

import stat
from colorsys import hsv_to_rgb
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.folders import SetLayout, missing
from segpipe.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

KEYS = ("name", "names", "palette", "masks", "ids", "colors", "ignore", "exif")
SETS = Path(__file__).parent / "sets"
PUBLISHED = tuple(sorted(path.stem for path in SETS.glob("*.yaml")))
MOST_BYTES = 1 << 20
LARGEST_ID = 65535  # of a mask with 16 bits
Color = tuple[int, int, int]


@dataclass(frozen=True)
class ClassTable:
    """The classes of a data set, and the exact map from raw mask ids to train ids."""

    name: str
    names: tuple[str, ...]
    palette: tuple[Color, ...]  # RGB
    train_ids: dict[
        int, int
    ]  # raw id -> train id, 255 = ignore; every other raw id is an error

    @property
    def num_classes(self) -> int:
        """Number of trained classes; ignore is not one of them."""
        return len(self.names)

    @cached_property
    def lut(self) -> NDArray[np.uint8]:
        """Train id per raw id, uint8 (256,); ids that are not `known` map to ignore."""
        return np.array(
            [self.train_ids.get(raw, IGNORE_INDEX) for raw in range(256)], np.uint8
        )

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Whether the table has each raw id, bool (256,)."""
        return np.isin(np.arange(256), list(self.train_ids))

    @cached_property
    def _wide(self) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """`lut` and `known` for ids of 16 bits."""
        lut, known = (
            np.full(LARGEST_ID + 1, IGNORE_INDEX, np.uint8),
            np.zeros(LARGEST_ID + 1, np.bool_),
        )
        for raw, train in self.train_ids.items():
            lut[raw], known[raw] = train, True
        return lut, known

    def target(
        self, mask: NDArray[np.uint8] | NDArray[np.uint16], where: object
    ) -> NDArray[np.uint8]:
        """Train ids uint8 (H, W) of raw ids. Raises DataError naming the file `where` for ids that are not `known`."""
        if mask.dtype == np.uint16:
            lut, known = self._wide
            if not known[mask].all():
                raise self._unknown(mask, where)
            return lut[mask]
        if cv2.countNonZero(cv2.LUT(mask, (~self.known).view(np.uint8))):
            raise self._unknown(mask, where)
        return np.asarray(cv2.LUT(mask, self.lut), np.uint8)

    def _unknown(
        self, mask: NDArray[np.uint8] | NDArray[np.uint16], where: object
    ) -> DataError:
        known = self.known if mask.dtype == np.uint8 else self._wide[1]
        counts = np.bincount(mask.ravel(), minlength=len(known)) * ~known
        found = np.flatnonzero(counts).tolist()
        ids = (
            f"id {found[0]}"
            if len(found) == 1
            else f"ids {', '.join(map(str, found[:8]))}"
        )
        row, column = np.argwhere(mask == found[0])[0]
        return DataError(
            f"{where} has {ids} ({counts.sum()} pixels, the first at row {row}, column {column}); the {self.name} "
            f"table knows {_ranges(sorted(self.train_ids))}. Correct the mask, or extend the table: "
            "data=folder reads ids and ignore from its classes.yaml, see docs/data.md.",
            cause=f"unknown {found}",
            where=str(where),
        )


@dataclass(frozen=True)
class MaskTable:
    """What the pixels of mask files mean: a class table, and how it is written in the files."""

    classes: ClassTable
    kind: str = ""  # ids or colors; empty: not said
    colors: dict[Color, int] = field(
        default_factory=dict
    )  # RGB -> train id; empty if no colors are given
    exif: str = ""  # apply or ignore; empty: the size of the mask decides
    first: str = ""  # the mask that decided the kind, if the table does not name it


@dataclass(frozen=True)
class PublishedSet:
    """A published data set: where it comes from, where its files lie, and what its masks mean."""

    title: str
    source: str  # of ids and colors
    page: str  # with its downloads
    downloads: tuple[str, ...]
    splits: dict[str, int]  # number of images; 0: not published
    layout: SetLayout
    table: MaskTable
    root: str = "the folder that holds the following"
    note: str = ""


def _ranges(ids: list[int]) -> str:
    """`0-11, 255` for sorted ids."""
    position = count()
    runs = [
        list(run) for _, run in groupby(ids, key=lambda value: value - next(position))
    ]
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs
    )


def class_table(data: DataConfig) -> ClassTable:
    """Class table of a data set in files. Raises DataError when its root or its table is missing or wrong."""
    return mask_table(data).classes


def mask_table(data: DataConfig) -> MaskTable:
    """Class table of a data set in files, and how its masks are written. Raises DataError as `class_table` does."""
    if not Path(data.root).is_dir():
        raise DataError(missing(Path(data.root)))
    if data.name in PUBLISHED and not data.classes:
        return published(data.name).table
    return load_masks(table_path(data))


@cache
def published(name: str) -> PublishedSet:
    """The published data set of that name, one of PUBLISHED."""
    entries = _entries(name)
    labels = entries.pop("labels", "")
    layout = SetLayout(
        images=entries.pop("images", ""),
        masks=(labels,) if isinstance(labels, str) else tuple(labels),
        folders=entries.pop("folders", {}),
        sequences=entries.pop("sequences", {}),
        listing=entries.pop("listing", ""),
        table=entries.pop("table", ""),
    )
    splits = entries.pop(
        "splits", dict.fromkeys(layout.sequences or ("train", "val"), 0)
    )
    texts = {
        key: entries.pop(key)
        for key in ("title", "source", "page", "root", "note")
        if key in entries
    }
    downloads = tuple(entries.pop("downloads"))
    return PublishedSet(
        **texts,
        downloads=downloads,
        splits=splits,
        layout=layout,
        table=_mask_table(_rows(entries), name),
    )


def _entries(name: str) -> dict[str, Any]:
    """Keys of a set's file, and those of the set that it is `like` where it has none of its own."""
    own = _yaml(SETS / f"{name}.yaml")
    assert isinstance(own, dict)
    entries = {str(key): value for key, value in own.items()}
    return (
        {**_entries(like), **entries} if (like := entries.pop("like", "")) else entries
    )


def _rows(entries: dict[str, Any]) -> dict[str, Any]:
    """The keys of a classes.yaml, from rows `class: [id, R, G, B]` or `[id]`, for masks of colors `[R, G, B]`."""
    rows, more = entries.pop("classes"), entries.pop("more", {})
    numbered = entries["masks"] == "ids" and entries.pop("ids", "") != "positions"
    ids = {row[0]: name for name, row in rows.items()} | more
    colors = [row[-3:] for row in rows.values()]
    return {
        "names": list(rows),
        **({"ids": ids} if numbered else {}),
        **({"palette": colors} if len(colors[0]) == 3 else {}),
        **entries,
    }


def table_path(data: DataConfig) -> Path:
    """Where the class table of a folder data set is, or should be."""
    return Path(data.classes) if data.classes else Path(data.root) / "classes.yaml"


def load_masks(path: Path) -> MaskTable:
    """All that a YAML file of the form shown above says. Raises DataError naming file and key."""
    try:
        entries = _yaml(path)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist. A folder data set needs a class table: "
            f"`segpipe doctor data=folder data.root={path.parent}` proposes one from the masks. "
            "If it lies elsewhere, set data.classes=FILE."
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read as YAML: {_one_line(error)}") from None
    if not isinstance(entries, dict):
        raise DataError(f"{path} holds no keys, but names were needed.")
    try:
        return _mask_table(
            {str(key): value for key, value in entries.items()},
            path.resolve().parent.name,
        )
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).replace('in "<unicode string>", ', "").split())


def _yaml(path: Path) -> Any:
    """Content of a YAML file. Raises OSError, YAMLError, and ValueError for what YAML allows and a table never has."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file.")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(
            f"it has {path.stat().st_size} bytes, but a class table has a few hundred."
        )
    text = path.read_bytes().decode("utf-8-sig")
    for event in yaml.parse(text, yaml.SafeLoader):
        # A few lines of them can stand for millions.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"line {event.start_mark.line + 1} has the alias *{event.anchor}. Write its value instead."
            )
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        _check_once(node)
        return loader.construct_document(node) if node else None
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]


def _check_once(node: yaml.Node | None) -> None:
    """Raise ValueError for a key that a mapping has twice: YAML takes the last, without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ValueError(
                    f"line {key.start_mark.line + 1} has {key.value} a second time. Remove one of them."
                )
            seen.add(str(key.value))
            _check_once(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_once(item)


def _mask_table(entries: dict[str, Any], name: str) -> MaskTable:
    for key in entries:
        if key not in KEYS:
            raise ValueError(
                f"{key} is not one of {', '.join(KEYS)}.{did_you_mean(key, KEYS)}"
            )
    names, ignore = _names(entries.get("names")), entries.get("ignore", [IGNORE_INDEX])
    if not isinstance(ignore, list):
        raise ValueError(
            f"ignore = {ignore!r}, but a list of mask ids and colors such as [255, [0, 0, 0]] was needed."
        )
    colored = "palette" in entries or "colors" in entries
    palette = (
        _palette(entries["palette"], len(names))
        if "palette" in entries
        else distinct_colors(len(names))
    )
    ids = [
        value for value in ignore if not (isinstance(value, list) and len(value) == 3)
    ]
    kind = _one_of("masks", entries.get("masks", ""), ("ids", "colors"))
    if kind == "colors" and not colored:
        raise ValueError(
            "masks = colors, but there is no palette. Give one color [R, G, B] per name."
        )
    given, more = palette if "palette" in entries else (), entries.get("colors", {})
    return MaskTable(
        ClassTable(
            str(entries.get("name", name)),
            names,
            palette,
            _train_ids(names, entries.get("ids"), ids),
        ),
        kind,
        _colors(names, given, more, ignore, strict=kind == "colors") if colored else {},
        _one_of("exif", entries.get("exif", ""), ("apply", "ignore")),
    )


def _one_of(key: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in ("", *choices):
        raise ValueError(
            f"{key} = {value!r} is not one of {', '.join(choices)}.{did_you_mean(str(value), choices)}"
        )
    return str(value)


def distinct_colors(num: int) -> tuple[Color, ...]:
    """Colors for classes that come without: neighbours differ in hue, and no two of 255 are the same."""
    steps = ((0.65, 0.9), (0.9, 0.6), (0.4, 0.8))  # saturation and value
    return tuple(_rgb(place * 0.618034 % 1, *steps[place % 3]) for place in range(num))


def _rgb(hue: float, saturation: float, value: float) -> Color:
    red, green, blue = (
        round(255 * part) for part in hsv_to_rgb(hue, saturation, value)
    )
    return red, green, blue


def _names(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else []
    if not 1 <= len(names) <= IGNORE_INDEX:
        raise ValueError(
            f"names holds {len(names) or repr(value)}, but a list of 1 to {IGNORE_INDEX} class names was needed."
        )
    for name in names:
        if isinstance(name, bool) or name is None:
            raise ValueError(
                f'names holds {name}, which YAML makes of words such as yes, no, on and null: quote it, as in ["no"].'
            )
        text = str(name)
        if not text.isprintable() or not text or text != text.strip():
            raise ValueError(
                f"names holds {text!r}, but printable characters without a space around them were needed."
            )
        if names.count(name) > 1:
            raise ValueError(f"names holds {name} twice.")
    return tuple(map(str, names))


def _palette(value: Any, num_classes: int) -> tuple[Color, ...]:
    if not isinstance(value, list) or len(value) != num_classes:
        found = f"{len(value)} colors" if isinstance(value, list) else repr(value)
        raise ValueError(
            f"palette = {found}, but {num_classes} colors [R, G, B] were needed, one per name."
        )
    return tuple(_color("palette", color) for color in value)


def _color(key: str, value: Any) -> Color:
    try:
        red, green, blue = map(bytes, ([part] for part in value))
        return red[0], green[0], blue[0]
    except (TypeError, ValueError):
        raise ValueError(
            f"{key} = {value!r}, but [R, G, B] from 0 to 255 was needed."
        ) from None


def _colors(
    names: tuple[str, ...],
    palette: tuple[Color, ...],
    more: Any,
    ignore: list[Any],
    *,
    strict: bool,
) -> dict[Color, int]:
    """Train id of each color. One with two meanings is left out, or refused if `strict`."""
    if not isinstance(more, dict) or not all(
        isinstance(v, list) for v in more.values()
    ):
        raise ValueError(
            f"colors = {more!r}, but a map such as {{{names[0]}: [[0, 70, 70]]}} was needed."
        )
    pairs = [(color, train) for train, color in enumerate(palette)]
    for name, values in more.items():
        train = _train_id("colors", name, names)
        pairs += [(_color(f"colors.{name}", value), train) for value in values]
    for value in ignore:
        if isinstance(value, list):
            pairs.append((_color("ignore", value), IGNORE_INDEX))
    found: dict[Color, int] = {}
    twice: set[Color] = set()
    for color, train in pairs:
        if found.setdefault(color, train) != train:
            twice.add(color)
            if strict:
                meanings = sorted({train, found[color]})
                named = [names[i] if i < len(names) else "ignore" for i in meanings]
                raise ValueError(
                    f"{list(color)} is the color of {' and of '.join(named)}. Give each its own."
                )
    return {color: train for color, train in found.items() if color not in twice}


def _train_ids(names: tuple[str, ...], ids: Any, ignore: list[Any]) -> dict[int, int]:
    ids = dict(enumerate(names)) if ids is None else ids
    if not isinstance(ids, dict):
        raise ValueError(
            f"ids = {ids!r}, but a map such as {{7: {names[0]}}} was needed."
        )
    table: dict[int, int] = {}
    meanings = [
        *((raw, _train_id(f"ids[{raw}]", name, names)) for raw, name in ids.items()),
        *((raw, IGNORE_INDEX) for raw in ignore),
    ]
    for raw, train in meanings:
        whole = isinstance(raw, int) and not isinstance(raw, bool)
        if not whole or not 0 <= raw <= LARGEST_ID:
            raise ValueError(
                f"ids or ignore holds {raw!r}, but mask ids are whole numbers from 0 to {LARGEST_ID}."
            )
        if raw in table:
            raise ValueError(f"id {raw} is in ids and in ignore, or twice in one.")
        table[raw] = train
    for train, name in enumerate(names):
        if train not in table.values():
            raise ValueError(
                f"no id in ids maps to {name}, so it could not be learned. Add one or drop the name."
            )
    return table


def _train_id(where: str, name: Any, names: tuple[str, ...]) -> int:
    if name not in names:
        raise ValueError(
            f"{where}: {name!r} is not one of names.{did_you_mean(str(name), names)}"
        )
    return names.index(name)


STREET = ClassTable(
    name="street",
    names=(
        "road", "lane_mark", "sidewalk", "building", "vegetation", "vehicle", "pedestrian", "pole", "sign", "sky",
    ),
    palette=(
        (128, 64, 128), (240, 240, 200), (244, 35, 232), (90, 90, 100), (107, 142, 35), (0, 60, 160), (220, 20, 60),
        (190, 153, 110), (250, 200, 0), (70, 160, 220),
    ),
    train_ids={train: train for train in range(10)},
)  # fmt: skip

CAMVID = published("camvid").table.classes
