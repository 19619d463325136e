"""Samples: image and train ids at a place in a split, read on demand.

pairs.py finds the files, masks.py says what the pixels of a mask mean, pack.py keeps what was decoded.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import STREET, ClassTable, MaskTable, mask_table
from segpipe.data.masks import orientation, read_target, settled
from segpipe.data.mix import DataPart, main_set, parts, shared_ids
from segpipe.data.pack import Pack, Sample, open_pack
from segpipe.data.pairs import Pair, check_sizes, scan
from segpipe.data.plugin_samples import PluginSamples, open_source
from segpipe.data.readers import read_header, read_image, threaded
from segpipe.data.sequence import sequence
from segpipe.data.synthetic.scenes import paint_scene
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key
from segpipe.plugins import is_path
from segpipe.settings.setting import nearest

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig


class Samples(Protocol):
    """A split: small to pickle, read one sample at a time, the same for every reader."""

    @property
    def classes(self) -> ClassTable:
        """The table of the train ids that `read` returns."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """File stem or scene id, for messages and reports."""

    def read(self, index: int) -> Sample:
        """Image uint8 (H, W, 3) RGB and target uint8 (H, W) of train ids. Raises DataError naming the file."""


@dataclass(frozen=True)
class FileSamples:
    """Pairs of image and mask files, and the pack that holds what was already decoded, if there is one."""

    table: MaskTable
    pairs: tuple[Pair, ...]
    pack: Pack | None = None

    @property
    def classes(self) -> ClassTable:
        return self.table.classes

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs[index].name

    def read(self, index: int) -> Sample:
        decode = partial(self.decode, index)
        return self.pack.read(self.pairs[index], decode) if self.pack else decode()

    def decode(
        self,
        index: int,
        data: bytes | None = None,
        target: NDArray[np.uint8] | None = None,
    ) -> Sample:
        """The sample from its two files, or from the content of the image's file and the target."""
        pair, target = (
            self.pairs[index],
            self.target(index) if target is None else target,
        )
        size = target.shape
        image = read_image(
            pair.image,
            lambda header: orientation(header, size, self.table.exif, pair.image),
            data,
        )
        check_sizes(pair, image.shape[:2], size)
        return image, target

    def target(self, index: int) -> NDArray[np.uint8]:
        """Train ids alone."""
        return read_target(self.table, self.pairs[index].mask)


@dataclass(frozen=True)
class SyntheticSamples:
    """Procedural street scenes, painted when read; scene i is a pure function of (seed, split, i) and the size."""

    seed: int
    split: str
    num: int
    size: tuple[int, int]  # (height, width) in pixels
    classes: ClassTable = STREET

    def __len__(self) -> int:
        return self.num

    def name(self, index: int) -> str:
        return f"{self.split}_{index:06d}"

    def read(self, index: int) -> Sample:
        if not 0 <= index < self.num:
            raise IndexError(f"scene {index} of {self.num}")
        return paint_scene(
            generator(sample_key(self.seed, 0, index, f"scene/{self.split}")), self.size
        )


@dataclass
class Wrapped:
    """Samples that are read through other ones."""

    samples: Samples

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples.name(index)

    def target(self, index: int) -> NDArray[np.uint8]:
        """Train ids alone."""
        return target_of(self.samples, index)


@dataclass(frozen=True)
class MixedSamples:
    """The samples of several data sets, one set after another, with the classes of the shared table."""

    classes: ClassTable
    parts: tuple[DataPart, ...]
    sets: tuple[Samples, ...]
    ids: tuple[
        NDArray[np.uint8], ...
    ]  # of each set, shared train id per own train id, (256,)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    @cached_property
    def firsts(self) -> list[int]:
        """Index of the first sample of each set."""
        return [0, *accumulate(map(len, self.sets))][:-1]

    def name(self, index: int) -> str:
        number, own = self.place(index)
        return f"{self.parts[number].label}/{self.sets[number].name(own)}"

    def read(self, index: int) -> Sample:
        number, own = self.place(index)
        image, target = self.sets[number].read(own)
        return image, np.asarray(cv2.LUT(target, self.ids[number]), np.uint8)

    def target(self, index: int) -> NDArray[np.uint8]:
        """Train ids alone."""
        number, own = self.place(index)
        return np.asarray(
            cv2.LUT(target_of(self.sets[number], own), self.ids[number]), np.uint8
        )

    def place(self, index: int) -> tuple[int, int]:
        """Number of the set, and index of the sample in it."""
        number = bisect(self.firsts, index) - 1
        return number, index - self.firsts[number]


@dataclass
class CachedSamples(Wrapped):
    """`samples`, of which each process keeps those it read until `budget_mib` is full; no bit changes.

    Decoding a PNG costs more than all of its augmentation. The first samples stay: with random access, replacing one
    by another gains nothing. Arrays are read-only, so that no user can change what the next one sees. A copy for
    another process starts empty.
    """

    budget_mib: int
    _kept: dict[int, Sample] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def __getstate__(self) -> dict[str, object]:
        return {
            "samples": self.samples,
            "budget_mib": self.budget_mib,
            "_kept": {},
            "_bytes": 0,
        }

    def __contains__(self, index: int) -> bool:
        return index in self._kept

    def read(self, index: int) -> Sample:
        return (
            self._kept[index]
            if index in self
            else self.keep(index, *self.samples.read(index))
        )

    def keep(
        self, index: int, image: NDArray[np.uint8], target: NDArray[np.uint8]
    ) -> Sample:
        """The sample, which is kept if it fits."""
        if (
            size := self._bytes + image.nbytes + target.nbytes
        ) <= self.budget_mib * 2**20:
            image.flags.writeable = target.flags.writeable = False
            self._kept[index], self._bytes = (image, target), size
        return image, target


def open_samples(data: DataConfig, split: str, seed: int) -> Samples:
    """Samples of a split, in the order of their names. Raises DataError for the first problem.

    With `data.hold_out` the split "train" lacks that sequence, and any other split is the sequence itself, from "train"
    and from that split.
    """
    return _held_out(data, split) if data.hold_out else _open(data, split, seed)


def sequences(samples: Samples, pattern: str = "") -> list[str]:
    """Sequence of each image of a split, by index; `pattern` is `data.sequence`."""
    return [sequence(samples.name(index), pattern) for index in range(len(samples))]


def _held_out(data: DataConfig, split: str) -> Samples:
    """The part of the files on one side of `data.hold_out`; checks both sides, so that a run fails before it starts."""
    splits = list(dict.fromkeys(("train", data.split if split == "train" else split)))
    found = {each: _files(data, each) for each in splits}
    where = {
        pair: sequence(pair.name, data.sequence)
        for each in splits
        for pair in found[each].pairs
    }
    inside = sorted(pair for pair, name in where.items() if name == data.hold_out)
    outside = [pair for pair in found["train"].pairs if where[pair] != data.hold_out]
    if not inside or not outside:
        counts = ", ".join(
            f"{name}: {times}"
            for name, times in sorted(Counter(where.values()).items())[:12]
        )
        fault = (
            "training would have no image left"
            if inside
            else "no image is of that sequence"
        )
        raise DataError(
            f"data.hold_out = {data.hold_out}, but {fault}. Images by sequence: {counts}."
            f"{'' if inside else nearest(data.hold_out, sorted(set(where.values())))}"
        )
    return replace(found["train"], pairs=tuple(outside if split == "train" else inside))


def _open(data: DataConfig, split: str, seed: int) -> Samples:
    if data.mix:
        return _open_parts(parts(data, split), main_set(data), data.split, seed)
    if data.name == "synthetic":
        num = data.num_train if split == "train" else data.num_val
        return SyntheticSamples(
            seed=seed, split=split, num=num, size=(data.size[0], data.size[1])
        )
    if is_path(data.name):
        return open_plugin(data, split)
    return _files(data, split)


def _files(data: DataConfig, split: str) -> FileSamples:
    table = mask_table(data)
    pairs, faults = scan(data, split)
    if faults:
        raise DataError(faults[0])
    table = settled(table, [pair.mask for pair in pairs])
    return FileSamples(table, tuple(pairs), open_pack(data, table))


def _open_parts(
    found: Sequence[DataPart], main: DataConfig, split: str, seed: int
) -> Samples:
    sets = [_open(part.data, part.split, seed) for part in found]
    if not found[0].key:
        return sets[0]
    own = next(
        (one for part, one in zip(found, sets, strict=True) if part.data == main), None
    )
    shared = (own or _open(main, split, seed)).classes
    ids = (
        shared_ids(part, one.classes, shared)
        for part, one in zip(found, sets, strict=True)
    )
    return MixedSamples(shared, tuple(found), tuple(sets), tuple(ids))


def open_plugin(data: DataConfig, split: str) -> PluginSamples:
    """Samples of a data set of the user. Raises ConfigError and DataError for what is wrong with its class."""
    source = open_source(data.name, data.args, data.root, split)
    table = source.classes
    if not isinstance(table, ClassTable):
        names, colors = tuple(map(str, table)), getattr(source, "palette", ())
        palette = tuple(
            (int(red), int(green), int(blue)) for red, green, blue in colors
        )
        if (
            len(palette) != len(names)
            or not 1 <= len(set(names)) == len(names) < IGNORE_INDEX
        ):
            raise DataError(
                f"data.name = {data.name}: classes has {len(names)} names and palette {len(palette)} colors, but a "
                f"ClassTable, or different names with one RGB color each, were needed."
            )
        ids = {train: train for train in range(len(names))} | {
            IGNORE_INDEX: IGNORE_INDEX
        }
        table = ClassTable(data.name.rpartition(":")[2], names, palette, ids)
    return PluginSamples(source, table, data.name, split)


def target_of(samples: Samples, index: int) -> NDArray[np.uint8]:
    """Train ids of a sample, uint8 (H, W); without decoding the image, where a data set can."""
    read = getattr(samples, "target", None)
    return np.asarray(read(index)) if read is not None else samples.read(index)[1]


def unwrapped(samples: Samples) -> Samples:
    """The samples as they lie on disk, behind caches."""
    return unwrapped(samples.samples) if isinstance(samples, Wrapped) else samples


def image_sizes(samples: Samples) -> Counter[tuple[int, int]]:
    """Number of images of each (height, width) in a split; of files, only the headers are read.

    Samples of the user's class are read if it has no method `size`.
    """
    source = unwrapped(samples)
    if isinstance(source, MixedSamples):
        return sum(map(image_sizes, source.sets), Counter())
    if isinstance(source, FileSamples):
        return Counter(
            read_header(pair.mask)[:2] for pair in source.pairs
        )  # as its image, if that is turned upright
    if isinstance(source, PluginSamples):
        return Counter(source.size(index) for index in range(len(source)))
    return Counter({source.read(0)[1].shape: len(source)})


def class_pixels(samples: Samples) -> NDArray[np.int64]:
    """Pixels of each train id over a split, int64 (C,); ignored pixels are not counted.

    Reads every mask of a split that lies in files, every sample of the user's class, and at most 64 synthetic scenes.
    """
    counts = image_pixels(unwrapped(samples), countable(samples))
    return sum(counts, np.zeros(samples.classes.num_classes, np.int64))


def one_by_one(samples: Samples) -> dict[str, MixedSamples]:
    """The data sets of a mixture, with the shared classes, by their labels; empty if it is none."""
    whole = unwrapped(samples)
    if not isinstance(whole, MixedSamples):
        return {}
    each = zip(whole.parts, whole.sets, whole.ids, strict=True)
    return {
        part.label: MixedSamples(whole.classes, (part,), (one,), (ids,))
        for part, one, ids in each
    }


def file_samples(samples: Samples) -> list[FileSamples]:
    """The data sets in files that these samples come from."""
    whole = unwrapped(samples)
    if isinstance(whole, MixedSamples):
        return [found for one in whole.sets for found in file_samples(one)]
    return [whole] if isinstance(whole, FileSamples) else []


def image_files(samples: Samples) -> list[str]:
    """Paths of the images, as far as they lie in files."""
    return [pair.image for one in file_samples(samples) for pair in one.pairs]


def set_weights(samples: Samples) -> list[tuple[int, float]]:
    """Of each data set of a mixture, number of samples and weight: the given one, or else that number."""
    whole = unwrapped(samples)
    if not isinstance(whole, MixedSamples):
        return [(len(samples), 1.0)]
    each = zip(whole.sets, whole.parts, strict=True)
    return [
        (len(one), float(len(one)) if part.weight is None else part.weight)
        for one, part in each
    ]


def check_labelled(samples: Samples) -> None:
    """Raise DataError if a data set of these samples has no pixel of any class, or if all have only one.

    Reads masks until two classes have been seen.
    """
    seen: set[int] = set()
    for one in one_by_one(samples).values() or [samples]:
        here: set[int] = set()
        for index in range(len(one)):
            here |= set(
                np.flatnonzero(np.bincount(target_of(one, index).ravel())).tolist()
            ) - {IGNORE_INDEX}
            if here and len(seen | here) > 1:
                break
        if not here:
            raise DataError(
                f"none of the {len(one)} training images has a labelled pixel (the first is {one.name(0)}): there is "
                f"nothing to learn. Check the masks, and which ids the class table ignores."
            )
        seen |= here
    if len(seen) == 1:
        raise DataError(single_class(samples, seen.pop()))


def single_class(samples: Samples, train: int) -> str:
    """Message about training images whose masks hold one class only."""
    names = samples.classes.names
    found = (
        "is the only class of the class table"
        if len(names) == 1
        else "is the only class that occurs"
    )
    return (
        f"{names[train]} {found} in the masks of the {len(samples)} training images: every network that says nothing "
        "else scores 100 %. Check that the masks were exported with their objects (many tools write black ones if not "
        "told otherwise), and that the rest of the image is a class, such as background, and not ignored."
    )


def countable(samples: Samples) -> list[int]:
    """Indices of the samples whose masks tell the frequencies of classes at a bounded cost, in their order.

    All that lie in files, and at most 64 of any other set.
    """
    source = unwrapped(samples)
    if isinstance(source, MixedSamples):
        found = zip(source.firsts, map(countable, source.sets), strict=True)
        return [first + index for first, indices in found for index in indices]
    return list(
        range(len(source) if isinstance(source, FileSamples) else min(64, len(source)))
    )


def image_pixels(
    samples: Samples, indices: Iterable[int]
) -> Iterator[NDArray[np.int64]]:
    """Pixels of each train id in each of the samples, int64 (C,); ignored pixels are not counted."""
    num_classes = samples.classes.num_classes

    def count(index: int) -> NDArray[np.int64]:
        return np.bincount(
            target_of(samples, index).ravel(), minlength=IGNORE_INDEX + 1
        )[:num_classes]

    # The user's class need not be safe to use from several threads.
    return (
        map(count, indices)
        if isinstance(unwrapped(samples), PluginSamples)
        else threaded(count, indices)
    )
