"""A data set of the user by import path: its samples, each checked when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX, plugins
from segpipe.errors import DataError

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable

KEY = "data.name"


@dataclass(frozen=True)
class PluginSamples:
    """A split as the user's class has it. Raises DataError for whatever is not as docs/plugins.md says."""

    source: Any  # has __len__, name(index), read(index), classes; may have files(index) and size(index)
    classes: ClassTable
    path: str  # import path of the class
    split: str

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        found = self.source.name(index)
        if not isinstance(found, str) or not found:
            raise DataError(
                f"{self._where}: name({index}) is {found!r}, but a text that is not empty was needed."
            )
        return found

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Image and target, checked."""
        try:
            image, target = self.source.read(index)
        except Exception as error:
            raise DataError(
                f"{self._where}: read({index}) failed: {plugins.located(error)}."
            ) from error
        if problem := self._problem(image, target):
            raise DataError(f"{self._where}: sample {self.name(index)} has {problem}")
        return np.ascontiguousarray(image), np.ascontiguousarray(target)

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of a sample."""
        if hasattr(self.source, "size"):
            height, width = self.source.size(index)
            return int(height), int(width)
        height, width = self.read(index)[1].shape
        return height, width

    def files(self, index: int) -> Sequence[Path]:
        """Files that a sample is made from; empty if the class does not say."""
        return (
            [Path(path) for path in self.source.files(index)]
            if hasattr(self.source, "files")
            else []
        )

    def content(self, index: int) -> str:
        """SHA-256 of a sample's arrays and their shape."""
        image, target = self.read(index)
        found = hashlib.sha256(repr(image.shape).encode())
        found.update(image.tobytes())
        found.update(target.tobytes())
        return found.hexdigest()

    def problems(
        self,
        indices: Sequence[int],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[str]:
        """Message for every sample among these that is not as it must be, and for names that occur twice."""
        first: dict[str, int] = {}
        for done, index in enumerate(indices, 1):
            progress(done, len(indices))
            try:
                self.read(index)
                name = self.name(index)
            except DataError as error:
                yield str(error)
                continue
            if (other := first.setdefault(name, index)) != index:
                yield f"{self._where}: samples {other} and {index} are both named {name}. Give each a name of its own."

    @property
    def _where(self) -> str:
        return f"{KEY} = {self.path}, split {self.split}"

    def _problem(self, image: Any, target: Any) -> str:
        for what, array, ndim in (("image", image, 3), ("target", target, 2)):
            found = (
                f"{array.dtype} {array.shape}"
                if isinstance(array, np.ndarray)
                else f"a {type(array).__name__}"
            )
            if (
                not isinstance(array, np.ndarray)
                or array.dtype != np.uint8
                or array.ndim != ndim
            ):
                needed = (
                    "uint8 (H, W, 3) in RGB order"
                    if what == "image"
                    else "uint8 (H, W) of class ids"
                )
                return f"the {what} {found}, but a numpy array {needed} was needed."
        if image.shape != (*target.shape, 3):
            return f"an image {image.shape} and a target {target.shape}, but (H, W, 3) and (H, W) were needed."
        present = np.flatnonzero(
            np.bincount(target.ravel(), minlength=IGNORE_INDEX + 1)
        )
        high = [
            label
            for label in present.tolist()
            if self.classes.num_classes <= label < IGNORE_INDEX
        ]
        if high:
            last = self.classes.num_classes - 1
            return f"class id {high[0]}, but the classes end at {last}; {IGNORE_INDEX} means ignored."
        return ""


def open_source(path: str, args: dict[str, Any], root: str, split: str) -> Any:
    """An object of the user's class for a split, with all that it must have.

    Raises ConfigError when it cannot be made, DataError when it lacks something or has no sample.
    """
    source = plugins.call(KEY, path, plugins.load(KEY, path), args, root, split)
    lacking = [
        name
        for name in ("__len__", "name", "read", "classes")
        if not hasattr(source, name)
    ]
    if lacking:
        raise DataError(
            f"{KEY} = {path}: the object has no {', '.join(lacking)}. See docs/plugins.md."
        )
    if not len(source):
        raise DataError(f"{KEY} = {path}: split {split} has no sample.")
    return source
