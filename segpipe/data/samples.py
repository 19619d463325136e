"""Samples: image and train ids at a place in a split, read on demand.

Layouts on disk, below `data.root`:

    camvid   {split}/*.png with {split}annot/*.png
    folder   images/{split}/ with masks/{split}/, or images/ with masks/ and a list of stems in {split}.txt

Images are PNG or JPEG, masks single-channel 8-bit PNG of raw ids. The files of a pair have the same path except for
the suffix. catalog.py describes the class table of a folder.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import STREET, ClassTable, class_table
from segpipe.data.pairs import Pair, check_sizes, scan
from segpipe.data.readers import read_header, read_image, read_mask, threaded
from segpipe.data.sequence import sequence
from segpipe.data.synthetic.scenes import paint_scene
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key
from segpipe.settings.setting import nearest

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

Sample = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # image (H, W, 3) RGB and target (H, W)


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
    """Pairs of image and mask files."""

    classes: ClassTable
    pairs: tuple[Pair, ...]

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs[index].name

    def read(self, index: int) -> Sample:
        image, target = read_image(self.pairs[index].image), self.target(index)
        check_sizes(self.pairs[index], image.shape[:2], target.shape)
        return image, target

    def target(self, index: int) -> NDArray[np.uint8]:
        """Train ids alone."""
        path = self.pairs[index].mask
        return self.classes.target(read_mask(path), path)


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
        return paint_scene(generator(sample_key(self.seed, 0, index, f"scene/{self.split}")), self.size)


@dataclass
class _Wrapper:
    samples: Samples

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples.name(index)


@dataclass
class ShuffledTargets(_Wrapper):
    """The control experiment: every image comes with the target of the image half a split away."""

    def read(self, index: int) -> Sample:
        other = (index + len(self) // 2) % len(self)
        image, target = self.samples.read(index)[0], self.samples.read(other)[1]
        if image.shape[:2] != target.shape:
            (height, width), (other_height, other_width) = image.shape[:2], target.shape
            raise DataError(
                f"data.shuffle_labels = True, but {self.name(index)} is {height}x{width} and {self.name(other)} is "
                f"{other_height}x{other_width}: the control needs images of one size."
            )
        return image, target


@dataclass
class CachedSamples(_Wrapper):
    """`samples`, of which each process keeps those it read until `budget_mib` is full; no bit changes.

    Decoding a PNG costs more than all of its augmentation. The first samples stay: with random access, replacing one
    by another gains nothing. Arrays are read-only, so that no user can change what the next one sees. A copy for
    another process starts empty.
    """

    budget_mib: int
    _kept: dict[int, Sample] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def __getstate__(self) -> dict[str, object]:
        return {"samples": self.samples, "budget_mib": self.budget_mib, "_kept": {}, "_bytes": 0}

    def read(self, index: int) -> Sample:
        if index in self._kept:
            return self._kept[index]
        image, target = self.samples.read(index)
        size = image.nbytes + target.nbytes
        if self._bytes + size <= self.budget_mib * 2**20:
            image.flags.writeable = target.flags.writeable = False
            self._kept[index] = (image, target)
            self._bytes += size
        return image, target


def open_samples(data: DataConfig, split: str, seed: int) -> Samples:
    """Samples of a split, in the order of their names. Raises DataError for the first problem.

    With `data.shuffle_labels` the split "train" has the targets of other images. With `data.hold_out` it lacks that
    sequence, and any other split is the sequence itself, from "train" and from that split.
    """
    samples = _held_out(data, split) if data.hold_out else _open(data, split, seed)
    if not (data.shuffle_labels and split == "train"):
        return samples
    if len(samples) < 2:
        raise DataError("data.shuffle_labels = True needs at least two training images.")
    return ShuffledTargets(samples)


def sequences(samples: Samples, pattern: str = "") -> list[str]:
    """Sequence of each image of a split, by index; `pattern` is `data.sequence`."""
    return [sequence(samples.name(index), pattern) for index in range(len(samples))]


def _held_out(data: DataConfig, split: str) -> Samples:
    """The part of the files on one side of `data.hold_out`; checks both sides, so that a run fails before it starts."""
    splits = list(dict.fromkeys(("train", data.split if split == "train" else split)))
    found = {each: _files(data, each) for each in splits}
    where = {pair: sequence(pair.name, data.sequence) for each in splits for pair in found[each].pairs}
    inside = sorted(pair for pair, name in where.items() if name == data.hold_out)
    outside = [pair for pair in found["train"].pairs if where[pair] != data.hold_out]
    if not inside or not outside:
        counts = ", ".join(f"{name}: {times}" for name, times in sorted(Counter(where.values()).items())[:12])
        fault = "training would have no image left" if inside else "no image is of that sequence"
        raise DataError(
            f"data.hold_out = {data.hold_out}, but {fault}. Images by sequence: {counts}."
            f"{'' if inside else nearest(data.hold_out, sorted(set(where.values())))}"
        )
    return replace(found["train"], pairs=tuple(outside if split == "train" else inside))


def _open(data: DataConfig, split: str, seed: int) -> Samples:
    if data.name == "synthetic":
        num = data.num_train if split == "train" else data.num_val
        return SyntheticSamples(seed=seed, split=split, num=num, size=(data.size[0], data.size[1]))
    return _files(data, split)


def _files(data: DataConfig, split: str) -> FileSamples:
    classes = class_table(data)
    pairs, faults = scan(data, split)
    if faults:
        raise DataError(faults[0])
    return FileSamples(classes, tuple(pairs))


def _unwrapped(samples: Samples) -> Samples:
    return _unwrapped(samples.samples) if isinstance(samples, _Wrapper) else samples


def image_sizes(samples: Samples) -> Counter[tuple[int, int]]:
    """Number of images of each (height, width) in a split; of files, only the headers are read."""
    source = _unwrapped(samples)
    if isinstance(source, FileSamples):
        return Counter(read_header(pair.image)[:2] for pair in source.pairs)
    return Counter({source.read(0)[1].shape: len(source)})


def class_pixels(samples: Samples) -> NDArray[np.int64]:
    """Pixels of each train id over a split, int64 (C,); ignored pixels are not counted.

    Reads every mask of a split that lies in files, and at most 64 scenes of any other.
    """
    source = _unwrapped(samples)

    def count(index: int) -> NDArray[np.int64]:
        target = source.target(index) if isinstance(source, FileSamples) else source.read(index)[1]
        return np.bincount(target.ravel(), minlength=IGNORE_INDEX + 1)

    num = len(source) if isinstance(source, FileSamples) else min(64, len(source))
    total = np.zeros(IGNORE_INDEX + 1, np.int64)
    for counts in threaded(count, range(num)):
        total += counts
    return total[: samples.classes.num_classes]
