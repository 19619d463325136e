"""Class tables: names, colours, and which raw mask id is which class.

A `folder` data set has its own table, a YAML file (`data.classes`, by default ROOT/classes.yaml):

    name: warehouse                      # optional; the name of the folder otherwise
    names: [floor, shelf, person]        # the classes; their position is the train id 0, 1, 2
    palette: [[128, 64, 128], [70, 70, 70], [220, 20, 60]]   # RGB, one colour per class
    ids: {7: floor, 8: floor, 11: shelf, 24: person}         # mask id: class; without it, ids are train ids
    ignore: [0, 255]                     # mask ids of unlabelled pixels; without it, 255 alone

A mask id that is in neither `ids` nor `ignore` is an error and never silently ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from segpipe import IGNORE_INDEX
from segpipe.data.pairs import missing
from segpipe.errors import DataError
from segpipe.settings.setting import nearest

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

KEYS = ("name", "names", "palette", "ids", "ignore")


@dataclass(frozen=True)
class ClassTable:
    """The classes of a data set, and the exact map from raw mask ids to train ids."""

    name: str
    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]  # RGB
    train_ids: dict[int, int]  # raw id -> train id, 255 = ignore; every other raw id is an error

    @property
    def num_classes(self) -> int:
        """Number of trained classes; ignore is not one of them."""
        return len(self.names)

    @cached_property
    def lut(self) -> NDArray[np.uint8]:
        """Train id per raw id, uint8 (256,); ids that are not `known` map to ignore."""
        return np.array([self.train_ids.get(raw, IGNORE_INDEX) for raw in range(256)], np.uint8)

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Whether the table has each raw id, bool (256,)."""
        return np.isin(np.arange(256), list(self.train_ids))

    def target(self, mask: NDArray[np.uint8], where: object) -> NDArray[np.uint8]:
        """Train ids of raw ids, both uint8 (H, W). Raises DataError naming the file `where` for unknown ids."""
        if cv2.countNonZero(cv2.LUT(mask, (~self.known).view(np.uint8))):
            raise DataError(self._unknown(mask, where))
        return np.asarray(cv2.LUT(mask, self.lut), np.uint8)

    def _unknown(self, mask: NDArray[np.uint8], where: object) -> str:
        counts = np.bincount(mask.ravel(), minlength=256) * ~self.known
        found = np.flatnonzero(counts).tolist()
        ids = f"id {found[0]}" if len(found) == 1 else f"ids {', '.join(map(str, found[:8]))}"
        row, column = np.argwhere(mask == found[0])[0]
        return (
            f"{where} has {ids} ({counts.sum()} pixels, the first at row {row}, column {column}); the {self.name} "
            f"table knows {_ranges(sorted(self.train_ids))}. Correct the mask, or extend the table: "
            "data=folder reads ids and ignore from its classes.yaml, see docs/data.md."
        )


def _ranges(ids: list[int]) -> str:
    """`0-11, 255` for sorted ids."""
    position = count()
    runs = [list(run) for _, run in groupby(ids, key=lambda value: value - next(position))]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def class_table(data: DataConfig) -> ClassTable:
    """Class table of a data set in files. Raises DataError when its root or its table is missing or wrong."""
    if not Path(data.root).is_dir():
        raise DataError(missing(Path(data.root)))
    if data.name == "camvid":
        return CAMVID
    return load_table(Path(data.classes) if data.classes else Path(data.root) / "classes.yaml")


def load_table(path: Path) -> ClassTable:
    """The table of a YAML file of the form shown above. Raises DataError naming file and key."""
    try:
        entries = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist. A folder data set needs a class table; set data.classes=FILE."
        ) from None
    except Exception as error:  # the YAML reader has many error types, all of them about this file
        raise DataError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(entries, dict):
        raise DataError(f"{path} holds no keys, but names and palette were needed.")
    try:
        for key in map(str, entries):
            if key not in KEYS:
                raise ValueError(f"{key} is not one of {', '.join(KEYS)}.{nearest(key, KEYS)}")
        names = _names(entries.get("names"))
        return ClassTable(
            name=str(entries.get("name", path.resolve().parent.name)),
            names=names,
            palette=_palette(entries.get("palette"), len(names)),
            train_ids=_train_ids(names, entries.get("ids"), entries.get("ignore", [IGNORE_INDEX])),
        )
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= IGNORE_INDEX:
        raise ValueError(f"names = {value!r}, but a list of 1 to {IGNORE_INDEX} class names was needed.")
    names = tuple(str(name) for name in value)
    if len(set(names)) < len(names):
        raise ValueError(f"names holds {next(n for n in names if names.count(n) > 1)} twice.")
    return names


def _palette(value: Any, num_classes: int) -> tuple[tuple[int, int, int], ...]:
    if not isinstance(value, list) or len(value) != num_classes:
        found = f"{len(value)} colours" if isinstance(value, list) else repr(value)
        raise ValueError(f"palette = {found}, but {num_classes} colours [R, G, B] were needed, one per name.")
    for place, colour in enumerate(value):
        fits = isinstance(colour, list) and len(colour) == 3
        if not fits or any(not isinstance(part, int) or not 0 <= part <= 255 for part in colour):
            raise ValueError(f"palette[{place}] = {colour!r}, but [R, G, B] from 0 to 255 was needed.")
    return tuple((red, green, blue) for red, green, blue in value)


def _train_ids(names: tuple[str, ...], ids: Any, ignore: Any) -> dict[int, int]:
    ids = dict(enumerate(names)) if ids is None else ids
    if not isinstance(ids, dict):
        raise ValueError(f"ids = {ids!r}, but a map such as {{7: {names[0]}}} was needed.")
    if not isinstance(ignore, list):
        raise ValueError(f"ignore = {ignore!r}, but a list of mask ids such as [255] was needed.")
    table: dict[int, int] = {}
    for raw, name in ids.items():
        if name not in names:
            raise ValueError(f"ids[{raw}] = {name!r} is not one of names.{nearest(str(name), names)}")
        table[_raw_id("ids", raw)] = names.index(name)
    for value in ignore:
        raw = _raw_id("ignore", value)
        if raw in table:
            raise ValueError(f"id {raw} is in ids and in ignore. Take it out of one of them.")
        table[raw] = IGNORE_INDEX
    for train, name in enumerate(names):
        if train not in table.values():
            raise ValueError(f"no id in ids maps to {name}, so it could not be learned. Add one or drop the name.")
    return table


def _raw_id(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ValueError(f"{key} holds {value!r}, but mask ids are whole numbers from 0 to 255.")
    return value


CAMVID = ClassTable(
    name="camvid",
    names=(
        "sky", "building", "pole", "road", "pavement", "tree", "sign_symbol", "fence", "car", "pedestrian", "bicyclist",
    ),
    palette=(
        (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0), (192, 128, 128),
        (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192),
    ),
    train_ids={**{train: train for train in range(11)}, 11: IGNORE_INDEX},
)  # fmt: skip

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
