"""The data set protocol, for folders, published sets, packs, mixtures, synthetic and plug-in sets."""

from __future__ import annotations

import os
import pickle
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from random import SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cv2
import numpy as np

from segpipe import IGNORE_INDEX, plugins
from segpipe.data import Int64, Sample, Size, Uint8
from segpipe.data.catalog import STREET, ClassTable, MaskTable, mask_table_of
from segpipe.data.masks import check_sizes, counted, counts_of, read_target
from segpipe.data.readers import Progress, read_image, silent
from segpipe.errors import DataError
from segpipe.files import sha256_of
from segpipe.keys import generator, sample_key

if TYPE_CHECKING:
    from segpipe.data.facts import Facts
    from segpipe.data.pack import Pack
    from segpipe.data.pairs import Pair
    from segpipe.settings.groups import DataConfig

NEEDED = ("__len__", "name", "read", "classes")  # optional: files(index), size(index)
SHAPES = (
    ("image", 3, "uint8 (H, W, 3) in RGB order"),
    ("target", 2, "uint8 (H, W) of class ids"),
)
# Path of a file; or, for a sample without files, a function that reads it and returns its SHA-256.
Input = str | Callable[[], str]
SOME_PACKED = 16  # samples to read when checking a pack
SOME = 64  # scenes that represent all: each is drawn alike, and takes 20 ms


class SubSet(NamedTuple):
    """One set of a mixture, with the classes of the shared table; or a whole data set."""

    label: str  # empty: not a mixture
    samples: DataSet
    weight: float
    key: str = ""  # data.mix[n]
    ids: Uint8 = np.arange(256, dtype=np.uint8)  # shared id per own train id


class Samples(Protocol):
    """Source of training samples: small to pickle, one sample at a time, the same for every reader."""

    if TYPE_CHECKING:  # a dataclass would treat an inherited property as a default

        @property
        def classes(self) -> ClassTable:
            """The table of the train ids that `read` returns."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """File stem or scene id, for messages and reports."""

    def read(self, index: int) -> Sample:
        """Image uint8 (H, W, 3) RGB and target uint8 (H, W) of train ids. Raises DataError naming the file."""


@dataclass
class CachedSamples:
    """`samples` with a cache per process of up to `budget_mib`; changes no bits.

    Decoding a PNG costs more than all of its augmentation. The first samples stay cached:
    with random access, replacing one by another gains nothing. Arrays are read-only, so no
    user can change them for the next one. A copy for another process starts empty.
    """

    samples: Samples
    budget_mib: int
    _kept: dict[int, Sample] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}, "_bytes": 0}

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples.name(index)

    def __contains__(self, index: int) -> bool:
        return index in self._kept

    def read(self, index: int) -> Sample:
        if index in self._kept:
            return self._kept[index]
        return self.keep(index, *self.samples.read(index))

    def keep(self, index: int, image: Uint8, target: Uint8) -> Sample:
        """The sample; caches it if it fits."""
        size = self._bytes + image.nbytes + target.nbytes
        if size <= self.budget_mib * 2**20:
            image.flags.writeable = target.flags.writeable = False
            self._kept[index] = (image, target)
            self._bytes = size
        return image, target


class DataSet(Samples, Protocol):
    """An opened split, with everything that checks and reports need.

    The defaults here read samples; a kind of data set may define cheaper ways.
    """

    def thread_safe(self) -> bool:
        """Whether several threads may read at once."""
        return True

    def file_sets(self) -> Sequence[FileSamples]:
        """The data sets in files that it consists of: none, itself, or those of a mixture."""
        return ()

    def inputs(self) -> dict[str, Input]:
        """Sources of the samples by their names in inputs.json, the paths below the root of the data set."""
        return {}

    def size(self, index: int) -> Size:
        """(height, width) of a sample."""
        height, width = self.read(index)[1].shape
        return height, width

    def counts(self, index: int) -> Int64:
        """Pixels of each class, int64 (C,); ignored pixels are not counted."""
        return self.content(index)[:-1]

    def content(self, index: int) -> Int64:
        """Pixels of each class, and of ignored ones, int64 (C + 1,)."""
        return counts_of(self.read(index)[1], self.classes.num_classes)

    def countable(self) -> list[int]:
        """Indices, in order, of the samples whose pixels give the class frequencies: all, as they may be sorted."""
        return list(range(len(self)))

    def parts(self) -> list[SubSet]:
        """The sets of a mixture, or this one."""
        return [SubSet("", self, float(len(self)))]

    def problems(
        self, indices: Sequence[int], progress: Progress = silent
    ) -> Iterator[str]:
        """A message for every sample among these that cannot be read or repeats the name of another."""
        first: dict[str, int] = {}
        for done, index in enumerate(indices, 1):
            progress(done, len(indices))
            try:
                self.read(index)
                name = self.name(index)
            except DataError as error:
                yield str(error)
                continue
            other = first.setdefault(name, index)
            if other != index:
                yield f"samples {other} and {index} are both named {name}. Give each its own name."


@dataclass(frozen=True)
class FileSamples(DataSet):
    """Samples in files, and the pack of those already decoded, if there is one."""

    table: MaskTable
    pairs: tuple[Pair, ...]
    facts: Facts = field(repr=False, compare=False)
    pack: Pack | None = None
    sources: tuple[str, ...] = ()  # class table and list of pairs, if they are files
    notes: tuple[str, ...] = ()  # about skipped files

    @property
    def classes(self) -> ClassTable:
        return self.table.classes

    def file_sets(self) -> Sequence[FileSamples]:
        return (self,)

    def inputs(self) -> dict[str, Input]:
        paths = [path for pair in self.pairs for path in pair[1:]]
        return {**self.facts.named((*self.sources, *paths))}

    def check_pack(self) -> None:
        """Raise DataError if packed pixels differ from the files. Each start compares other random samples."""
        some = SystemRandom().sample(range(len(self)), min(SOME_PACKED, len(self)))
        for index in some:
            pair = self.pairs[index]
            if self.pack is None or not self.pack.holds(pair):
                continue
            if not all(map(np.array_equal, self.read(index), self.decode(index))):
                raise DataError(
                    f"{self.pack.folder} has different pixels for {pair.name} than {pair.image} and its mask. Delete "
                    "the pack, then build it again with `segpipe pack`."
                )

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs[index].name

    def read(self, index: int) -> Sample:
        if self.pack is None:
            return self.decode(index)
        return self.pack.read(self.pairs[index], partial(self.decode, index))

    def decode(self, index: int) -> Sample:
        """The sample from its two files."""
        pair = self.pairs[index]
        target = read_target(self.table, pair.mask)
        image = read_image(pair.image, exif=self.table.exif, size=target.shape)
        check_sizes(pair, image.shape[:2], target.shape)
        return image, target

    def size(self, index: int) -> Size:
        """(height, width) of the mask, which is the upright image's. Reads at most a header."""
        return self.facts.header(self.pairs[index].mask)[:2]

    def content(self, index: int) -> Int64:
        count = partial(counted, self.table)
        mask = self.pairs[index].mask
        known = self.facts.whole(mask, key=self.table.key, read=count)
        return np.array(known.content)


@dataclass(frozen=True)
class SyntheticSamples(DataSet):
    """Procedural street scenes, painted when read; scene i is a pure function of (seed, split, i) and the size."""

    seed: int
    split: str
    num: int
    scene_size: Size  # (height, width) in pixels
    classes: ClassTable = STREET

    def __len__(self) -> int:
        return self.num

    def name(self, index: int) -> str:
        return f"{self.split}_{index:06d}"

    def read(self, index: int) -> Sample:
        if not 0 <= index < self.num:
            raise IndexError(f"scene {index} of {self.num}")
        from segpipe.data.scenes import paint_scene

        key = sample_key(self.seed, 0, index, f"scene/{self.split}")
        return paint_scene(generator(key), self.scene_size)

    def size(self, index: int) -> Size:
        return self.scene_size

    def countable(self) -> list[int]:
        return list(range(min(SOME, self.num)))

    def problems(
        self, indices: Sequence[int], progress: Progress = silent
    ) -> Iterator[str]:
        """None: synthetic samples have no problems."""
        return iter(())


@dataclass(frozen=True)
class MixedSamples(DataSet):
    """The samples of several data sets, one set after another, with the classes of the shared table."""

    classes: ClassTable
    sets: tuple[SubSet, ...]

    def thread_safe(self) -> bool:
        return all(one.samples.thread_safe() for one in self.sets)

    def file_sets(self) -> Sequence[FileSamples]:
        return [files for one in self.sets for files in one.samples.file_sets()]

    def inputs(self) -> dict[str, Input]:
        return {
            f"{one.key}/{name}": source
            for one in self.sets
            for name, source in one.samples.inputs().items()
        }

    @cached_property
    def ends(self) -> list[int]:
        """End index of each set."""
        return list(accumulate(len(one.samples) for one in self.sets))

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, index: int) -> tuple[SubSet, int]:
        """The set of a sample, and its index there."""
        number = bisect(self.ends, index)
        one = self.sets[number]
        return one, index - self.ends[number] + len(one.samples)

    def name(self, index: int) -> str:
        one, own = self.place(index)
        return f"{one.label}/{one.samples.name(own)}"

    def read(self, index: int) -> Sample:
        one, own = self.place(index)
        image, target = one.samples.read(own)
        return image, np.asarray(cv2.LUT(target, one.ids), np.uint8)

    def size(self, index: int) -> Size:
        one, own = self.place(index)
        return one.samples.size(own)

    def content(self, index: int) -> Int64:
        one, own = self.place(index)
        *counts, ignored = one.samples.content(own)
        shared = np.zeros(self.classes.num_classes + 1, np.int64)
        # Ignored pixels are the last ones.
        np.add.at(shared, np.minimum(one.ids[: len(counts)], len(shared) - 1), counts)
        shared[-1] += ignored
        return shared

    def countable(self) -> list[int]:
        return [
            end - len(one.samples) + index
            for end, one in zip(self.ends, self.sets, strict=True)
            for index in one.samples.countable()
        ]

    def parts(self) -> list[SubSet]:
        return [
            one._replace(samples=MixedSamples(self.classes, (one,)))
            for one in self.sets
        ]


class PerProcess:
    """A user's object. A forked process uses a copy of it: all that share an open file have one position in it.

    Arrays are not copied: they have no position, and may be the whole data set.
    """

    def __init__(self, value: Any) -> None:
        self._value, self._pid = value, os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._value,)

    @property
    def value(self) -> Any:
        """The object of this process. Raises whatever it raises when it is pickled."""
        if self._pid != os.getpid():
            arrays = list[pickle.PickleBuffer]()
            content = pickle.dumps(self._value, 5, buffer_callback=arrays.append)
            self.__init__(pickle.loads(content, buffers=arrays))  # type: ignore[misc]
        return self._value


@dataclass(frozen=True)
class PluginSamples(DataSet):
    """A split of the user's class. Raises DataError for anything that breaks the rules of docs/plugins.md."""

    own: PerProcess
    classes: ClassTable
    path: str  # import path of the class
    split: str
    root: str

    @property
    def source(self) -> Any:
        """The user's object."""
        return self.own.value

    def __len__(self) -> int:
        return len(self.source)

    def thread_safe(self) -> bool:
        """The user's class need not be."""
        return False

    def name(self, index: int) -> str:
        name = self.source.name(index)
        if not isinstance(name, str) or not name:
            raise DataError(
                f"{self._where}: name({index}) is {name!r}, but a non-empty text was needed."
            )
        return name

    def read(self, index: int) -> Sample:
        """Image and target, checked."""
        try:
            image, target = self.source.read(index)
        except Exception as error:
            raise DataError(
                f"{self._where}: read({index}) failed: {plugins.located(error)}."
            ) from error
        if problem := self._problem(image, target):
            raise DataError(f"{self._where}: sample {self.name(index)} has {problem}")
        # Copies, since the user's object may reuse its memory while a cache holds the sample.
        return image.copy(), target.copy()

    def size(self, index: int) -> Size:
        if not hasattr(self.source, "size"):
            return super().size(index)
        height, width = self.source.size(index)
        return int(height), int(width)

    def inputs(self) -> dict[str, Input]:
        """The files that the samples name; for a sample without files, its arrays."""
        found: dict[str, Input] = {}
        for index in range(len(self)):
            files = (hasattr(self.source, "files") and self.source.files(index)) or ()
            for path in map(os.fspath, files):
                found[os.path.relpath(path, self.root)] = path
            if not files:
                found[f"{self.split}/{self.name(index)}"] = partial(self.sha256, index)
        return found

    def sha256(self, index: int) -> str:
        """SHA-256 of a sample's arrays and their shape."""
        image, target = self.read(index)
        shape = repr(image.shape).encode()
        return sha256_of(shape + image.tobytes() + target.tobytes())

    @property
    def _where(self) -> str:
        return f"data.name = {self.path}, split {self.split}"

    def _problem(self, image: Any, target: Any) -> str:
        for array, (what, ndim, needed) in zip((image, target), SHAPES, strict=True):
            found = f"a {type(array).__name__}"
            if isinstance(array, np.ndarray):
                if array.dtype == np.uint8 and array.ndim == ndim:
                    continue
                found = f"{array.dtype} {array.shape}"
            return f"the {what} {found}, but a numpy array {needed} was needed."
        if image.shape != (*target.shape, 3):
            return f"an image {image.shape} and a target {target.shape}, but (H, W, 3) and (H, W) were needed."
        last = self.classes.num_classes - 1
        wrong = target[(target > last) & (target != IGNORE_INDEX)]
        if wrong.size:
            return f"class id {wrong.min()}, but the classes end at {last}; {IGNORE_INDEX} means ignored."
        return ""


def open_plugin(data: DataConfig, split: str) -> PluginSamples:
    """Samples of the user's data set class.

    Raises ConfigError if the object cannot be created, and DataError if it is invalid.
    """
    path = data.name
    loaded = plugins.load("data.name", path)
    source = plugins.call("data.name", path, loaded, data.args, data.root, split)
    lacking = [name for name in NEEDED if not hasattr(source, name)]
    if lacking:
        raise DataError(
            f"data.name = {path}: the object has no {', '.join(lacking)}. See docs/plugins.md."
        )
    if not len(source):
        raise DataError(f"data.name = {path}: split {split} has no sample.")
    classes = _table(source, path)
    return PluginSamples(PerProcess(source), classes, path, split, data.root or ".")


def _table(source: Any, path: str) -> ClassTable:
    """Class table of the user's object, which may have names and colors instead."""
    if isinstance(source.classes, ClassTable):
        return source.classes
    try:
        given = {"names": source.classes, "palette": getattr(source, "palette", ())}
        # Sequences become lists; mask_table_of refuses anything else.
        table = {key: np.array(value, object).tolist() for key, value in given.items()}
        return mask_table_of(table, path.rpartition(":")[2]).classes
    except ValueError as error:
        raise DataError(f"data.name = {path}: {error}") from None
