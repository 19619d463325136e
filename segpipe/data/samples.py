"""Opens the splits of a data set, and sums up what their samples say.

pairs.py finds the files, masks.py says what the pixels of a mask mean, pack.py keeps what
was decoded, facts.py what was found out about files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import STREET, ClassTable, MaskTable, mask_table
from segpipe.data.data_set import Content, DataSet, Image, Sample, Samples, Target
from segpipe.data.facts import Facts, facts_of
from segpipe.data.masks import (
    UNKNOWN,
    ambiguous,
    check_sizes,
    is_sound,
    meant,
    orientation,
    read_target,
    settled,
    train_id,
)
from segpipe.data.mix import MixedSamples, main_set, parts, shared_ids
from segpipe.data.pack import Pack, open_pack
from segpipe.data.pairs import Pair, scan
from segpipe.data.plugin_samples import open_plugin
from segpipe.data.readers import read_image, threaded
from segpipe.data.sequence import sequence
from segpipe.data.synthetic.scenes import paint_scene
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key
from segpipe.plugins import is_path
from segpipe.settings.setting import nearest

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

LEAST_SIDE = 4  # pixels; Fast-SCNN convolves without padding at stride 2


@dataclass(frozen=True)
class FileSamples(DataSet):
    """Samples in files, and the pack that holds what was already decoded, if there is one."""

    table: MaskTable
    pairs: tuple[Pair, ...]
    pack: Pack | None = None
    facts: Facts = field(default_factory=lambda: Facts("/"), repr=False, compare=False)

    @property
    def classes(self) -> ClassTable:
        return self.table.classes

    def file_pairs(self) -> Sequence[Pair]:
        return self.pairs

    def mask_table(self) -> MaskTable:
        return self.table

    def pack_use(self) -> Counter[tuple[str, str]]:
        if self.pack is None:
            return Counter()
        use = self.pack.use()._asdict().items()
        return Counter({(self.pack.folder, kind): count for kind, count in use})

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
        target: Target | None = None,
    ) -> Sample:
        """The sample from its two files, or from the content of the image's file and the target."""
        pair = self.pairs[index]
        if target is None:
            target = self.target(index)
        image = self._image(pair, target.shape, data)
        check_sizes(pair, image.shape[:2], target.shape)
        return image, target

    def image(self, index: int) -> Image:
        pair = self.pairs[index]
        return self._image(pair, self.facts.header(pair.mask)[:2])

    def _image(
        self, pair: Pair, size: Sequence[int], data: bytes | None = None
    ) -> Image:
        return read_image(
            pair.image,
            lambda header: orientation(header, size, self.table.exif, pair.image),
            data,
        )

    def target(self, index: int) -> Target:
        return read_target(self.table, self.pairs[index].mask)

    def size(self, index: int) -> tuple[int, int]:
        """Of the mask, which is that of the image when it is upright. Reads a header at most."""
        header = self.facts.header(self.pairs[index].mask)
        return header.height, header.width

    def counts(self, index: int) -> NDArray[np.int64]:
        path = self.pairs[index].mask
        values = self.facts.values(path)
        if not is_sound(self.table, self.facts.header(path), values):
            read_target(self.table, path)  # raises
        return self.content(index).pixels[: self.classes.num_classes]

    def content(self, index: int) -> Content:
        path = self.pairs[index].mask
        mask = self.facts.values(path)
        header = self.facts.header(path)
        values = meant(self.table, mask)
        pixels = np.zeros(self.classes.num_classes + 2, np.int64)
        for value, count in values.items():
            train = train_id(self.table, value)
            pixels[{IGNORE_INDEX: -2, UNKNOWN: -1}.get(train, train)] += count
        odd = ambiguous(self.table, mask)
        return Content(pixels, values, f"{header.layout}, {header.bits} bits", odd)

    def countable(self) -> list[int]:
        return list(range(len(self)))

    def keep_facts(self) -> None:
        self.facts.keep()


@dataclass(frozen=True)
class SyntheticSamples(DataSet):
    """Procedural street scenes, painted when read; scene i is a pure function of (seed, split, i) and the size."""

    seed: int
    split: str
    num: int
    scene_size: tuple[int, int]  # (height, width) in pixels
    classes: ClassTable = STREET

    def __len__(self) -> int:
        return self.num

    def name(self, index: int) -> str:
        return f"{self.split}_{index:06d}"

    def read(self, index: int) -> Sample:
        if not 0 <= index < self.num:
            raise IndexError(f"scene {index} of {self.num}")
        key = sample_key(self.seed, 0, index, f"scene/{self.split}")
        return paint_scene(generator(key), self.scene_size)

    def size(self, index: int) -> tuple[int, int]:
        return self.scene_size


@dataclass
class CachedSamples:
    """`samples`, of which each process keeps those it read until `budget_mib` is full; no bit changes.

    Decoding a PNG costs more than all of its augmentation. The first samples stay: with
    random access, replacing one by another gains nothing. Arrays are read-only, so that
    no user can change what the next one sees. A copy for another process starts empty.
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

    def keep(self, index: int, image: Image, target: Target) -> Sample:
        """The sample, which is kept if it fits."""
        size = self._bytes + image.nbytes + target.nbytes
        if size <= self.budget_mib * 2**20:
            image.flags.writeable = target.flags.writeable = False
            self._kept[index] = (image, target)
            self._bytes = size
        return image, target


def open_samples(
    data: DataConfig, split: str, seed: int, *, packed: bool = True
) -> DataSet:
    """Samples of a split, in the order of their names. Raises DataError for the first problem.

    With `data.hold_out` the split "train" lacks that sequence, and any other split is the
    sequence itself, from "train" and from that split. Without `packed`, every sample is
    read from its own files, as whoever checks a run should.

    Opening a split again is cheap: the folders are listed again only after a change.
    """
    if not packed:
        data = replace(data, pack="off")
    return _held_out(data, split) if data.hold_out else _open(data, split, seed)


def open_readable(data: DataConfig, split: str, seed: int) -> DataSet | None:
    """Samples of a split, of its complete pairs if there are other files too; None if there are none."""
    try:
        return open_samples(data, split, seed)
    except DataError:
        if data.mix or is_path(data.name):
            return None
    try:
        pairs = scan(data, split)[0]
        return file_samples(data, pairs) if pairs else None
    except DataError:
        return None


def _open(data: DataConfig, split: str, seed: int) -> DataSet:
    if data.mix:
        return _open_mixture(data, split, seed)
    if data.name == "synthetic":
        num = data.num_train if split == "train" else data.num_val
        return SyntheticSamples(seed, split, num, (data.size[0], data.size[1]))
    if is_path(data.name):
        return open_plugin(data, split)
    return _open_files(data, split)


def _open_files(data: DataConfig, split: str) -> FileSamples:
    mask_table(data)  # a missing root is named before a missing split
    pairs, faults = scan(data, split)
    if faults:
        raise DataError(faults[0])
    return file_samples(data, pairs)


def file_samples(data: DataConfig, pairs: list[Pair]) -> FileSamples:
    """The samples of some pairs of a data set in files."""
    facts = facts_of(data.root)
    table = settled(mask_table(data), [pair.mask for pair in pairs], facts.header)
    return FileSamples(table, tuple(pairs), open_pack(data, table), facts)


def _open_mixture(data: DataConfig, split: str, seed: int) -> DataSet:
    found = parts(data, split)
    sets = [_open(part.data, part.split, seed) for part in found]
    if not found[0].key:
        return sets[0]
    main = main_set(data)
    own = [one for part, one in zip(found, sets, strict=True) if part.data == main]
    shared = (own[0] if own else _open(main, data.split, seed)).classes
    ids = [
        shared_ids(part, one.classes, shared)
        for part, one in zip(found, sets, strict=True)
    ]
    return MixedSamples(shared, tuple(found), tuple(sets), tuple(ids))


def _held_out(data: DataConfig, split: str) -> DataSet:
    """The files on one side of `data.hold_out`; checks both sides, so that a run fails before it starts."""
    other = data.split if split == "train" else split
    opened = {each: _open_files(data, each) for each in dict.fromkeys(("train", other))}
    sequence_of = {
        pair: sequence(pair.name, data.sequence)
        for samples in opened.values()
        for pair in samples.pairs
    }
    held = sorted(pair for pair, name in sequence_of.items() if name == data.hold_out)
    left = [
        pair for pair in opened["train"].pairs if sequence_of[pair] != data.hold_out
    ]
    if not held or not left:
        counts = Counter(sequence_of.values())
        shown = [f"{name}: {number}" for name, number in sorted(counts.items())[:12]]
        fault = "training would have no image left"
        hint = ""
        if not held:
            fault = "no image is of that sequence"
            hint = nearest(data.hold_out, sorted(counts))
        raise DataError(
            f"data.hold_out = {data.hold_out}, but {fault}. Images by sequence: "
            f"{', '.join(shown)}.{hint}"
        )
    return replace(opened["train"], pairs=tuple(left if split == "train" else held))


def sequences(samples: Samples, pattern: str = "") -> list[str]:
    """Sequence of each image of a split, by index; `pattern` is `data.sequence`."""
    return [sequence(samples.name(index), pattern) for index in range(len(samples))]


def image_sizes(samples: DataSet) -> Counter[tuple[int, int]]:
    """Number of images of each (height, width) in a split."""
    return Counter(samples.size(index) for index in range(len(samples)))


def image_files(samples: DataSet) -> list[str]:
    """Paths of the images, as far as they lie in files."""
    return [pair.image for pair in samples.file_pairs()]


def image_pixels(
    samples: DataSet, indices: Iterable[int]
) -> Iterator[NDArray[np.int64]]:
    """Pixels of each train id in each of the samples, int64 (C,); ignored pixels are not counted."""
    yield from (threaded if samples.thread_safe() else map)(samples.counts, indices)
    samples.keep_facts()


def class_pixels(samples: DataSet) -> NDArray[np.int64]:
    """Pixels of each train id over a split, int64 (C,); ignored pixels are not counted.

    Reads every mask of a split that lies in files, and at most 64 samples of another set.
    """
    counts = image_pixels(samples, samples.countable())
    return sum(counts, np.zeros(samples.classes.num_classes, np.int64))


def check_labelled(samples: DataSet) -> None:
    """Raise DataError if a data set of these samples has no pixel of any class, or if all have only one.

    Reads masks until two classes have been seen.
    """
    seen: set[int] = set()
    for part in samples.parts():
        here = _classes_of(part.samples, lambda found: len(seen | found) > 1)  # noqa: B023
        if not here:
            raise DataError(
                f"none of the {len(part.samples)} training images has a labelled pixel "
                f"(the first is {part.samples.name(0)}): there is nothing to learn. "
                "Check the masks, and which ids the class table ignores."
            )
        seen |= here
    if len(seen) == 1:
        raise DataError(single_class(samples, seen.pop()))


def _classes_of(samples: DataSet, enough: Callable[[set[int]], bool]) -> set[int]:
    """Classes that occur in the samples; reads masks until they are `enough`."""
    found: set[int] = set()
    for index in range(len(samples)):
        found |= set(np.flatnonzero(samples.counts(index)).tolist())
        if found and enough(found):
            break
    return found


def check_scorable(samples: DataSet, split: str) -> None:
    """Raise DataError if no image of validation has a labelled pixel, or one in a file is too small for a network."""
    for index, pair in enumerate(samples.file_pairs()):
        height, width = samples.size(index)
        if min(height, width) < LEAST_SIDE:
            raise DataError(
                f"{pair.image} of split {split} is {height}x{width}, "
                f"but networks need at least {LEAST_SIDE} pixels on each side. Remove it."
            )
    if not _classes_of(samples, bool):
        raise DataError(
            f"none of the {len(samples)} images of split {split} has a labelled pixel "
            f"(the first is {samples.name(0)}): there is nothing to measure. Check the "
            "masks, and which ids the class table ignores."
        )


def single_class(samples: Samples, train: int) -> str:
    """Message about training images whose masks hold one class only."""
    names = samples.classes.names
    fault = "is the only class that occurs"
    if len(names) == 1:
        fault = "is the only class of the class table"
    return (
        f"{names[train]} {fault} in the masks of the {len(samples)} training images: "
        "every network that says nothing else scores 100 %. Check that the masks were "
        "exported with their objects (many tools write black ones if not told "
        "otherwise), and that the rest of the image is a class, such as background, "
        "and not ignored."
    )
