"""The data sets of `data.mix`: where each lies, how its classes become those of the shared table, and their samples.

The shared table is that of the main set: of data.root if it is given, else of the first entry. Training reads all
entries, validation the main set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable, near
from segpipe.errors import DataError
from segpipe.settings.setting import nearest

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

IGNORE = "ignore"  # in a map: pixels of the class enter neither loss nor score


@dataclass(frozen=True)
class DataPart:
    """One data set: how to open it, and its place in a mixture."""

    data: DataConfig  # without a mixture
    split: str
    key: str = ""  # data.mix[n]; empty if it is not part of a mixture
    label: str = ""  # for names of samples: that of its folder
    weight: float | None = None
    # Class of this set: class of the shared table, or IGNORE.
    names: Mapping[str, str] | None = None


def main_set(data: DataConfig) -> DataConfig:
    """The set that has the shared class table and the validation split."""
    if data.root or not data.mix:
        return replace(data, mix=[])
    return _entry(data, data.mix[0])


def parts(data: DataConfig, split: str) -> list[DataPart]:
    """The sets that a split consists of: all entries of data.mix for "train", the main set for another split."""
    if not data.mix or split != "train":
        return [DataPart(main_set(data), split)]

    found: list[DataPart] = []
    for number, entry in enumerate(data.mix):
        one = _entry(data, entry)
        label = one.name if one.name == "synthetic" else Path(one.root).resolve().name
        if any(part.label == label for part in found):
            label = f"{label}#{number}"
        part = DataPart(
            one,
            str(entry.get("split", split)),
            f"data.mix[{number}]",
            label,
            entry.get("weight"),
            {str(key): str(value) for key, value in entry.get("map", {}).items()},
        )
        found.append(part)

    return found


def _entry(data: DataConfig, entry: Mapping[str, Any]) -> DataConfig:
    """Settings of one set. One that names neither folder nor kind is the set of data.root itself."""
    own = "root" in entry or "name" in entry
    kind = "folder" if "root" in entry and data.name == "synthetic" else data.name
    return replace(
        data,
        name=str(entry.get("name", kind)),
        root=str(entry.get("root", "" if own else data.root)),
        classes=str(entry.get("classes", "" if own else data.classes)),
        mix=[],
    )


def all_parts(data: DataConfig, splits: Iterable[str]) -> list[DataPart]:
    """The sets of all splits."""
    return [part for split in splits for part in parts(data, split)]


def absent_root(data: DataConfig) -> str:
    """The first folder of the data that does not exist here; empty if all do, or there is none."""
    for part in all_parts(data, ("train", data.split)):
        root = part.data.root
        if part.data.name != "synthetic" and not Path(root).is_dir():
            return root
    return ""


def shared_ids(
    part: DataPart, own: ClassTable, shared: ClassTable
) -> NDArray[np.uint8]:
    """Train id of the shared table for each train id of a set, uint8 (256,); 255 stays.

    Classes of one name are one class. Raises DataError for classes that are neither shared nor in the map, and for
    names in the map that do not exist.
    """
    given = part.names or {}
    where = f"{part.key}.map"
    choices = (*shared.names, IGNORE)
    for name, wanted in given.items():
        if name not in own.names:
            raise DataError(
                f"{where} names the class {name!r}, but {part.label} has no such class.{nearest(name, own.names)}"
            )
        if wanted not in choices:
            raise DataError(
                f"{where} maps {name} to {wanted!r}, which is no class of the shared table "
                f"{shared.name}.{nearest(wanted, choices)}"
            )

    known = {*given, *shared.names}
    lost = [name for name in own.names if name not in known]
    if lost:
        proposed = [
            f"{name}: {near(name, shared.names, 0.7) or IGNORE}" for name in lost
        ]
        raise DataError(
            f"{part.key} ({part.label}) has classes that the shared table {shared.name} lacks: {', '.join(lost)}. Map "
            f"each to a class of it or to {IGNORE}, such as map: {{{', '.join(proposed)}}}. The table has "
            f"{', '.join(shared.names)}."
        )

    lut = np.full(256, IGNORE_INDEX, np.uint8)
    for train, name in enumerate(own.names):
        wanted = given.get(name, name)
        lut[train] = IGNORE_INDEX if wanted == IGNORE else shared.names.index(wanted)

    return lut
