"""A data set on object storage, read sample by sample through fsspec and kept on a local disk.

    segpipe train data.name=bucket:Bucket data.root=s3://bucket/warehouse data.args.cache=/scratch/cache

A plug-in: copy this file to the folder in which you run the command.

Below the root: SPLIT.csv with the columns image and mask (paths below the root), classes.yaml, and the files. Samples
are addressed by index, so order and keys are those of the same files on a disk. Objects are assumed immutable: a cached
object is not requested again.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from itertools import pairwise
from pathlib import Path
from threading import get_native_id
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from segpipe.data.catalog import load_masks
from segpipe.data.data_set import FileSamples
from segpipe.data.facts import Facts
from segpipe.data.masks import settled
from segpipe.data.pairs import Pair
from segpipe.data.readers import read_header
from segpipe.errors import DataError


class Bucket:
    """A split of a data set at an fsspec URL; `cache` is a local folder for the objects that were read."""

    def __init__(self, root: str, split: str, cache: str) -> None:
        self.root = root.rstrip("/")
        digest = hashlib.sha256(self.root.encode()).hexdigest()[
            :8
        ]  # s3://a-b and s3://a_b are different data sets
        self.cache = Path(cache).expanduser() / "-".join(
            [re.sub(r"\W+", "_", self.root), digest]
        )
        self._own: tuple[int, Any] = (0, None)  # process and file system
        with self._fetched(f"{split}.csv").open(
            encoding="utf-8-sig", newline=""
        ) as listing:
            rows = list(csv.DictReader(listing))
        if not rows or not {"image", "mask"} <= rows[0].keys():
            raise DataError(
                f"{self.root}/{split}.csv has no rows below a header with image and mask."
            )
        table = load_masks(self._fetched("classes.yaml"))
        if lacking := [row for row in rows if not (row["image"] and row["mask"])]:
            raise DataError(
                f"{self.root}/{split}.csv: {list(lacking[0].values())} is not an image and its mask."
            )
        rows.sort(key=lambda row: _name(row["image"]))
        for before, row in pairwise(rows):
            if _name(before["image"]) == _name(row["image"]):
                raise DataError(
                    f"{self.root}/{split}.csv has {_name(row['image'])} twice. Keep one of them."
                )
        self.objects = [(row["image"], row["mask"]) for row in rows]
        pairs = (
            Pair(_name(i), str(self._local(i)), str(self._local(m)))
            for i, m in self.objects
        )
        first = str(self._fetched(self.objects[0][1]))
        self.samples = FileSamples(
            settled(table, [first]), tuple(pairs), Facts(str(self.cache))
        )
        self.classes = self.samples.classes
        self.sizes = [
            (int(row["height"]), int(row["width"]))
            for row in rows
            if row.get("height") and row.get("width")
        ]
        self.sizes = (
            self.sizes
            if len(self.sizes) == len(rows)
            else [read_header(first)[:2]] * len(rows)
        )

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples.name(index)

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Image and train ids, as from files on a disk. Raises DataError that names the object."""
        for name in self.objects[index]:
            self._fetched(name)
        return self.samples.read(index)

    def size(self, index: int) -> tuple[int, int]:
        """Height and width from the columns of SPLIT.csv; without them, those of the first sample."""
        return self.sizes[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": (0, None)}

    def _local(self, name: str) -> Path:
        path = (self.cache / name).resolve()
        if not path.is_relative_to(self.cache.resolve()):
            raise DataError(f"{self.root}: {name} leads outside the data set.")
        return path

    def _fetched(self, name: str) -> Path:
        """Path of the local copy of an object, complete or absent: many processes may read it at once."""
        path = self._local(name)
        if path.is_file():
            return path
        try:
            content = self._files().cat_file(f"{self.root}/{name}")
        except Exception as error:  # each file system has its own errors
            raise DataError(
                f"{self.root}/{name} cannot be read: {type(error).__name__}: {error}."
            ) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{get_native_id()}")
        try:
            aside.write_bytes(content)
            os.replace(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise DataError(
                f"{path} cannot be written: {error.strerror}. Free some space, or set another data.args.cache."
            ) from None
        return path

    def _files(self) -> Any:
        """The file system of this process: one from before a fork has lost its threads."""
        if self._own[0] != os.getpid():
            protocol = fsspec.utils.get_protocol(self.root)
            self._own = (
                os.getpid(),
                fsspec.filesystem(protocol, skip_instance_cache=True),
            )
        return self._own[1]


def _name(image: str) -> str:
    """Name of a sample; sorts as files on a disk: `a.png` before `a-1.png`."""
    return Path(image).with_suffix("").as_posix()
