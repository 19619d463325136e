"""Samples: the image and the train ids of a place in a split, read when asked for.

Layouts on disk, below `data.root`:

    camvid   {split}/*.png with {split}annot/*.png
    folder   images/{split}/ with masks/{split}/, or images/ with masks/ and a list of stems in {split}.txt

Images are PNG or JPEG, masks single-channel 8-bit PNG of raw ids; a pair has the same path but for the suffix. The
class table of a folder is described in catalog.py.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import CAMVID, STREET, ClassTable, load_table
from segpipe.data.decode import check_mask, read_header, read_image, read_mask
from segpipe.data.pairs import Pair, missing, scan
from segpipe.data.synthetic.scenes import paint_scene
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key
from segpipe.settings.config import DataConfig

FULL_VERIFY_PIXELS = 300_000_000  # about 6 s of decoding on two cores
T = TypeVar("T")
R = TypeVar("R")


class Samples(Protocol):
    """A split: small to pickle, read one sample at a time, the same for every reader."""

    @property
    def classes(self) -> ClassTable:
        """The table of the train ids that `read` returns."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """File stem or scene id, for messages and reports."""

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Image uint8 (H, W, 3) RGB and target uint8 (H, W) of train ids. Raises DataError naming the file."""


@dataclass(frozen=True)
class FileSamples:
    """Samples that lie in files."""

    classes: ClassTable
    pairs: tuple[Pair, ...]

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs[index].name

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        pair = self.pairs[index]
        image, target = read_image(pair.image), self.target(index)
        _check_sizes(pair, image.shape[:2], target.shape)
        return image, target

    def target(self, index: int) -> NDArray[np.uint8]:
        """Train ids alone, for counts."""
        path = self.pairs[index].mask
        return self.classes.target(read_mask(path), path)


@dataclass(frozen=True)
class SyntheticSamples:
    """Procedural street scenes, painted when they are read; scene i is a pure function of (seed, split, i) and size."""

    seed: int
    split: str
    num: int
    size: tuple[int, int]  # (height, width) in pixels
    classes: ClassTable = STREET

    def __len__(self) -> int:
        return self.num

    def name(self, index: int) -> str:
        return f"{self.split}_{index:06d}"

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        if not 0 <= index < self.num:
            raise IndexError(f"scene {index} of {self.num}")
        return paint_scene(generator(sample_key(self.seed, 0, index, f"scene/{self.split}")), self.size)


@dataclass(frozen=True)
class ForeignTargets:
    """The control experiment: every image comes with the target of another one, half the split away."""

    samples: Samples

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples.name(index)

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        other = (index + len(self) // 2) % len(self)
        image, target = self.samples.read(index)[0], self.samples.read(other)[1]
        if image.shape[:2] != target.shape:
            raise DataError(
                f"data.shuffle_labels = True, but {self.name(index)} is {_size(image.shape)} and {self.name(other)} is "
                f"{_size(target.shape)}: the control needs images of one size."
            )
        return image, target


def open_samples(data: DataConfig, split: str, seed: int) -> Samples:
    """Samples of a split, in the order of their names. Raises DataError for the first thing missing.

    With `data.shuffle_labels` the split "train" has the targets of other images; other splits keep their own.
    """
    samples = _open(data, split, seed)
    if not (data.shuffle_labels and split == "train"):
        return samples
    if len(samples) < 2:
        raise DataError("data.shuffle_labels = True needs at least two training images.")
    return ForeignTargets(samples)


def _open(data: DataConfig, split: str, seed: int) -> Samples:
    if data.name == "synthetic":
        num = data.num_train if split == "train" else data.num_val
        return SyntheticSamples(seed=seed, split=split, num=num, size=(data.size[0], data.size[1]))
    classes = class_table(data)
    pairs, faults = scan(data, split)
    if faults:
        raise DataError(faults[0])
    return FileSamples(classes, tuple(pairs))


def class_table(data: DataConfig) -> ClassTable:
    """Class table of a data set that lies in files."""
    if not Path(data.root).is_dir():
        raise DataError(missing(Path(data.root)))
    if data.name == "camvid":
        return CAMVID
    return load_table(Path(data.classes) if data.classes else Path(data.root) / "classes.yaml")


def image_sizes(samples: Samples) -> Counter[tuple[int, int]]:
    """Number of images of each (height, width) in a split; files are asked by their headers."""
    inner = samples.samples if isinstance(samples, ForeignTargets) else samples
    if isinstance(inner, FileSamples):
        return Counter(read_header(pair.image)[:2] for pair in inner.pairs)
    return Counter({inner.read(0)[1].shape: len(inner)})


def class_pixels(samples: Samples) -> NDArray[np.int64]:
    """Pixels of each train id over a split, int64 (C,); ignored pixels are not counted.

    Reads every mask of a split that lies in files, and at most 64 scenes of any other.
    """
    inner = samples.samples if isinstance(samples, ForeignTargets) else samples
    indices = range(len(inner) if isinstance(inner, FileSamples) else min(64, len(inner)))

    def count(index: int) -> NDArray[np.int64]:
        target = inner.target(index) if isinstance(inner, FileSamples) else inner.read(index)[1]
        return np.bincount(target.ravel(), minlength=IGNORE_INDEX + 1)

    total = np.zeros(IGNORE_INDEX + 1, np.int64)
    for counts in _threaded(count, indices):
        total += counts
    return total[: samples.classes.num_classes]


def verify(data: DataConfig, splits: Iterable[str]) -> None:
    """Raise DataError for the first problem of the data, before the first step rather than hours into a run.

    `data.verify`: "headers" sees pairs, sizes and the ends of files, "full" decodes everything, "auto" is full below
    300 million pixels.
    """
    for problem in problems(data, splits):
        raise DataError(problem)


def problems(
    data: DataConfig, splits: Iterable[str], *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[str]:
    """Every problem of the data as a sentence; `progress(done, total)` is called after each step of the work."""
    if data.name == "synthetic":
        return
    try:
        classes = class_table(data)
    except DataError as error:
        yield str(error)
        return
    pairs: list[Pair] = []
    for split in splits:
        found, faults = scan(data, split)
        pairs += found
        yield from faults
    torn: set[str] = set()
    num_pixels = 0
    for done, (pixels, header_faults) in enumerate(_threaded(_check_headers, pairs)):
        yield from header_faults.values()
        torn |= header_faults.keys()
        num_pixels += pixels
        progress(done + 1, 2 * len(pairs))
    if data.verify == "full" or (data.verify == "auto" and num_pixels < FULL_VERIFY_PIXELS):
        for done, faults in enumerate(_threaded(lambda pair: _check_pixels(classes, pair, torn), pairs)):
            yield from faults
            progress(len(pairs) + done + 1, 2 * len(pairs))
    progress(1, 1)


def _check_headers(pair: Pair) -> tuple[int, dict[str, str]]:
    """Pixels of a pair, and what its headers tell to be wrong by the path (both sizes: by the name) at fault."""
    faults: dict[str, str] = {}
    sizes: list[tuple[int, int]] = []
    for path in (pair.image, pair.mask):
        try:
            header = read_header(path)
            sizes.append((header.height, header.width))
            if path == pair.mask:
                check_mask(header, path)
        except DataError as error:
            faults[path] = str(error)
    if len(sizes) == 2:
        try:
            _check_sizes(pair, *sizes)
        except DataError as error:
            faults[pair.name] = str(error)
    return (sizes[0][0] * sizes[0][1] if sizes else 0), faults


def _check_pixels(classes: ClassTable, pair: Pair, torn: set[str]) -> list[str]:
    """What decoding tells to be wrong with the files of a pair that are not known to be `torn`."""
    faults: list[str] = []
    for path in {pair.image, pair.mask} - torn:
        try:
            if path == pair.mask:
                classes.target(read_mask(path), path)
            else:
                read_image(path)
        except DataError as error:
            faults.append(str(error))
    return sorted(faults)


def _check_sizes(pair: Pair, image: Sequence[int], mask: Sequence[int]) -> None:
    if tuple(image) != tuple(mask):
        raise DataError(
            f"{pair.image} is {_size(image)}, but its mask {pair.mask} is {_size(mask)} (height x width). "
            "Take the mask of this image; do not resize one of them blindly."
        )


def _size(shape: Sequence[int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _threaded(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in the order of `items`; OpenCV decodes outside Python's lock."""
    threads: list[int] = []
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), initializer=lambda: threads.append(get_native_id()))
    try:
        yield from pool.map(work, items)
    finally:  # a caller that stops at the first problem does not wait for the rest
        pool.shutdown(cancel_futures=True)
        _await_end(threads)


def _await_end(threads: Iterable[int], patience_s: float = 5.0) -> None:
    """Return once the system has ended threads that Python has ended.

    In between they give back what OpenCV keeps for each thread, under a lock. A loader process that is forked in that
    moment gets the lock in its locked state and waits for ever.
    """
    tasks = [Path(f"/proc/self/task/{number}") for number in threads]
    deadline = time.monotonic() + patience_s
    while any(task.exists() for task in tasks) and time.monotonic() < deadline:
        time.sleep(0.0005)
