"""A data set of the user by import path: its samples, each checked when it is read."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from segpipe import IGNORE_INDEX, plugins
from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import DataSet, Input, Sample
from segpipe.errors import DataError

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

KEY = "data.name"
NEEDED = ("__len__", "name", "read", "classes")  # files(index), size(index): if it can
SHAPES = {
    "image": "uint8 (H, W, 3) in RGB order",
    "target": "uint8 (H, W) of class ids",
}


@dataclass(frozen=True)
class PluginSamples(DataSet):
    """A split as the user's class has it. Raises DataError for whatever is not as docs/plugins.md says."""

    source: Any
    classes: ClassTable
    path: str  # import path of the class
    split: str
    root: str = "."

    def __len__(self) -> int:
        return len(self.source)

    def thread_safe(self) -> bool:
        """The user's class need not be."""
        return False

    def name(self, index: int) -> str:
        name = self.source.name(index)
        if not isinstance(name, str) or not name:
            raise DataError(
                f"{self._where}: name({index}) is {name!r}, but a text that is not "
                "empty was needed."
            )
        return name

    def read(self, index: int) -> Sample:
        """Image and target, checked."""
        try:
            image, target = self.source.read(index)
        except Exception as error:
            raise DataError(
                f"{self._where}: read({index}) of {len(self)} samples failed: {plugins.located(error)}."
            ) from error
        if problem := self._problem(image, target):
            raise DataError(f"{self._where}: sample {self.name(index)} has {problem}")
        return np.ascontiguousarray(image), np.ascontiguousarray(target)

    def size(self, index: int) -> tuple[int, int]:
        if not hasattr(self.source, "size"):
            return super().size(index)
        height, width = self.source.size(index)
        return int(height), int(width)

    def inputs(self) -> dict[str, Input]:
        """The files that the samples name; of a sample that names none, its arrays."""
        found: dict[str, Input] = {}
        for index in range(len(self)):
            files = self.source.files(index) if hasattr(self.source, "files") else ()
            for path in map(Path, files):
                found[Path(os.path.relpath(path, self.root)).as_posix()] = path
            if not files:
                found[f"{self.split}/{self.name(index)}"] = partial(self.sha256, index)
        return found

    def sha256(self, index: int) -> str:
        """SHA-256 of a sample's arrays and their shape."""
        image, target = self.read(index)
        digest = hashlib.sha256(repr(image.shape).encode())
        digest.update(image.tobytes())
        digest.update(target.tobytes())
        return digest.hexdigest()

    @property
    def _where(self) -> str:
        return f"{KEY} = {self.path}, split {self.split}"

    def _problem(self, image: Any, target: Any) -> str:
        for (what, needed), array, ndim in zip(
            SHAPES.items(), (image, target), (3, 2), strict=True
        ):
            if not isinstance(array, np.ndarray):
                found = f"a {type(array).__name__}"
            elif array.dtype != np.uint8 or array.ndim != ndim:
                found = f"{array.dtype} {array.shape}"
            else:
                continue
            return f"the {what} {found}, but a numpy array {needed} was needed."
        if image.shape != (*target.shape, 3):
            return (
                f"an image {image.shape} and a target {target.shape}, but (H, W, 3) "
                "and (H, W) were needed."
            )
        last = self.classes.num_classes - 1
        wrong = target[(target > last) & (target != IGNORE_INDEX)]
        if wrong.size:
            return (
                f"class id {wrong.min()}, but the classes end at {last}; "
                f"{IGNORE_INDEX} means ignored."
            )
        return ""


def open_plugin(data: DataConfig, split: str) -> PluginSamples:
    """Samples of a data set of the user.

    Raises ConfigError if its object cannot be made, and DataError for what is wrong with it.
    """
    path = data.name
    loaded = plugins.load(KEY, path)
    source = plugins.call(KEY, path, loaded, data.args, data.root, split)
    lacking = [name for name in NEEDED if not hasattr(source, name)]
    if lacking:
        raise DataError(
            f"{KEY} = {path}: the object has no {', '.join(lacking)}. See docs/plugins.md."
        )
    if not len(source):
        raise DataError(f"{KEY} = {path}: split {split} has no sample.")
    table = _table(source, path)
    return PluginSamples(source, table, path, split, data.root or ".")


def _table(source: Any, path: str) -> ClassTable:
    """Class table of the user's object, which may give names and colors instead."""
    if isinstance(source.classes, ClassTable):
        return source.classes
    names = tuple(map(str, source.classes))
    palette = tuple(
        (int(red), int(green), int(blue))
        for red, green, blue in getattr(source, "palette", ())
    )
    distinct = 1 <= len(set(names)) == len(names) < IGNORE_INDEX
    if len(palette) != len(names) or not distinct:
        raise DataError(
            f"{KEY} = {path}: classes has {len(names)} names and palette "
            f"{len(palette)} colors, but a ClassTable, or different names with one RGB "
            "color each, were needed."
        )
    ids = {train: train for train in range(len(names))} | {IGNORE_INDEX: IGNORE_INDEX}
    return ClassTable(path.rpartition(":")[2], names, palette, ids)
