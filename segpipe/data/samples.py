"""Samples: image and train ids at a place in a split, read on demand.

Layouts on disk, below `data.root`:

    camvid   {split}/*.png with {split}annot/*.png
    folder   images/{split}/ with masks/{split}/, or images/ with masks/ and a list of stems in {split}.txt

Images are PNG or JPEG, masks single-channel 8-bit PNG of raw ids. The files of a pair have the same path except for
the suffix. catalog.py describes the class table of a folder.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import STREET, ClassTable, class_table
from segpipe.data.pairs import Pair, check_sizes, scan
from segpipe.data.plugin_samples import PluginSamples, open_source
from segpipe.data.readers import read_header, read_image, read_mask, threaded
from segpipe.data.synthetic.scenes import paint_scene
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key
from segpipe.plugins import is_path

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

    With `data.shuffle_labels` the split "train" has the targets of other images.
    """
    samples = _open(data, split, seed)
    if not (data.shuffle_labels and split == "train"):
        return samples
    if len(samples) < 2:
        raise DataError("data.shuffle_labels = True needs at least two training images.")
    return ShuffledTargets(samples)


def _open(data: DataConfig, split: str, seed: int) -> Samples:
    if data.name == "synthetic":
        num = data.num_train if split == "train" else data.num_val
        return SyntheticSamples(seed=seed, split=split, num=num, size=(data.size[0], data.size[1]))
    if is_path(data.name):
        return open_plugin(data, split)
    classes = class_table(data)
    pairs, faults = scan(data, split)
    if faults:
        raise DataError(faults[0])
    return FileSamples(classes, tuple(pairs))


def open_plugin(data: DataConfig, split: str) -> PluginSamples:
    """Samples of a data set of the user. Raises ConfigError and DataError for what is wrong with its class."""
    source = open_source(data.name, data.args, data.root, split)
    table = source.classes
    if not isinstance(table, ClassTable):
        names, colors = tuple(map(str, table)), getattr(source, "palette", ())
        palette = tuple((int(red), int(green), int(blue)) for red, green, blue in colors)
        if len(palette) != len(names) or not 1 <= len(set(names)) == len(names) < IGNORE_INDEX:
            raise DataError(
                f"data.name = {data.name}: classes has {len(names)} names and palette {len(palette)} colours, but a "
                f"ClassTable, or different names with one RGB colour each, were needed."
            )
        ids = {train: train for train in range(len(names))} | {IGNORE_INDEX: IGNORE_INDEX}
        table = ClassTable(data.name.rpartition(":")[2], names, palette, ids)
    return PluginSamples(source, table, data.name, split)


def _unwrapped(samples: Samples) -> Samples:
    return _unwrapped(samples.samples) if isinstance(samples, _Wrapper) else samples


def image_sizes(samples: Samples) -> Counter[tuple[int, int]]:
    """Number of images of each (height, width) in a split; of files, only the headers are read.

    Samples of the user's class are read if it has no method `size`.
    """
    source = _unwrapped(samples)
    if isinstance(source, FileSamples):
        return Counter(read_header(pair.image)[:2] for pair in source.pairs)
    if isinstance(source, PluginSamples):
        return Counter(source.size(index) for index in range(len(source)))
    return Counter({source.read(0)[1].shape: len(source)})


def class_pixels(samples: Samples) -> NDArray[np.int64]:
    """Pixels of each train id over a split, int64 (C,); ignored pixels are not counted.

    Reads every mask of a split that lies in files, every sample of the user's class, and at most 64 synthetic scenes.
    """
    source = _unwrapped(samples)

    def count(index: int) -> NDArray[np.int64]:
        target = source.target(index) if isinstance(source, FileSamples) else source.read(index)[1]
        return np.bincount(target.ravel(), minlength=IGNORE_INDEX + 1)

    num = min(64, len(source)) if isinstance(source, SyntheticSamples) else len(source)
    total = np.zeros(IGNORE_INDEX + 1, np.int64)
    # The user's class need not be safe to use from several threads.
    for counts in map(count, range(num)) if isinstance(source, PluginSamples) else threaded(count, range(num)):
        total += counts
    return total[: samples.classes.num_classes]
