"""Opens the splits of a data set, and gathers statistics of their samples.

pairs.py finds the files, masks.py converts mask pixels to train ids, pack.py stores decoded
samples, facts.py stores facts about files.

A mixture (`data.mix`) has the classes of its main set: data.root if it is given, else the first entry.
Training reads all entries, validation the main set.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segpipe import IGNORE_INDEX
from segpipe.data import Int64, Size, Uint8
from segpipe.data.catalog import ClassTable, mask_table, table_path
from segpipe.data.data_set import (
    DataSet,
    FileSamples,
    MixedSamples,
    SubSet,
    SyntheticSamples,
    open_plugin,
)
from segpipe.data.facts import facts_of
from segpipe.data.masks import settled
from segpipe.data.pack import AUTO, Pack
from segpipe.data.pairs import IMAGE_FOLDERS, SPLITS, Scan, scan
from segpipe.data.readers import Progress, R, silent, threaded
from segpipe.errors import DataError
from segpipe.plugins import is_path
from segpipe.settings.config import Config
from segpipe.settings.groups import FILE_SETS, DataConfig
from segpipe.settings.setting import nearest

# In the map of a mixture: exclude the class's pixels from loss and score.
IGNORE = "ignore"
LEAST_SIDE = 4  # pixels; Fast-SCNN convolves without padding at stride 2

# A word of a name that is a number, optionally with a short prefix: 08640, f00930, frame0012.
_NUMBER = re.compile(r"(?<![0-9A-Za-z])([A-Za-z]{0,6})([0-9]+)(?![0-9A-Za-z])")
_END = re.compile(r"[\W_]+$")
# Paths in a CSV start at the root of the data set.
NO_SEQUENCE = {*IMAGE_FOLDERS, *SPLITS}


def main_set(data: DataConfig) -> DataConfig:
    """The set with the shared class table and the validation split."""
    if data.root or not data.mix:
        return replace(data, mix=[])
    return _entry(data, data.mix[0])


def parts(data: DataConfig, splits: Iterable[str]) -> list[tuple[DataConfig, str]]:
    """The single data sets that splits consist of, and the split of each.

    All entries of data.mix for "train", the main set for another split.
    """
    found: list[tuple[DataConfig, str]] = []
    for split in splits:
        if data.mix and split == "train":
            found += [
                (_entry(data, entry), entry.get("split", split)) for entry in data.mix
            ]
        else:
            found.append((main_set(data), split))
    return found


def _entry(data: DataConfig, entry: Mapping[str, Any]) -> DataConfig:
    """Settings of one entry. An entry with neither root nor name is the set of data.root itself."""
    own = "root" in entry or "name" in entry
    kind = "folder" if "root" in entry and data.name == "synthetic" else data.name
    return replace(
        data,
        name=entry.get("name", kind),
        root=entry.get("root", "" if own else data.root),
        classes=entry.get("classes", "" if own else data.classes),
        mix=[],
    )


def absent_root(data: DataConfig) -> str:
    """The first data folder that does not exist here; empty if all exist or none is needed."""
    for part, _ in parts(data, ("train", data.split)):
        if part.name != "synthetic" and not Path(part.root).is_dir():
            return part.root
    return ""


def open_samples(
    data: DataConfig, split: str, seed: int, *, packed: bool = True
) -> DataSet:
    """Samples of a split, in the order of their names. Raises DataError for the first problem.

    With `data.hold_out`, the split "train" lacks that sequence, and any other split is the
    sequence itself, from "train" and that split. Without `packed`, every sample is read
    from its own files, as an audit of a run should.
    """
    if not packed:
        data = replace(data, pack="off")

    if data.hold_out:
        return _held_out(data, split)
    if data.mix and split == "train":
        return _open_mixture(data, seed)
    data = main_set(data)
    if data.name == "synthetic":
        num = data.num_train if split == "train" else data.num_val
        return SyntheticSamples(seed, split, num, (data.size[0], data.size[1]))
    if is_path(data.name):
        return open_plugin(data, split)
    return _open_files(data, split)


class Splits(NamedTuple):
    """The opened splits of a run."""

    train: DataSet
    val: DataSet  # `data.split`


def open_splits(config: Config, *, packed: bool = True) -> Splits:
    """Both splits of a configuration, opened by `open_samples`."""
    data, seed = config.data, config.seed
    train = open_samples(data, "train", seed, packed=packed)
    if data.split == "train":
        return Splits(train, train)
    return Splits(train, open_samples(data, data.split, seed, packed=packed))


def open_readable(
    data: DataConfig, split: str, seed: int
) -> tuple[DataSet | None, list[str]]:
    """Samples of a split, or of its complete pairs, or None; and a message for each fault."""
    try:
        return open_samples(data, split, seed), []
    except DataError as error:
        faults = [str(error)]
    with suppress(DataError):
        if data.name in FILE_SETS and not data.mix and mask_table(data):
            found = scan(data, split)
            samples = file_samples(data, found) if found.pairs else None
            return samples, found.faults or faults

    return None, faults


def _open_files(data: DataConfig, split: str) -> FileSamples:
    """The samples of a split in files. Raises DataError for the first incomplete pair."""
    mask_table(data)  # reports a missing root before a missing split
    found = scan(data, split)
    if found.faults:
        raise DataError(found.faults[0])
    return file_samples(data, found)


def file_samples(data: DataConfig, found: Scan) -> FileSamples:
    """The samples of the given pairs of a data set in files."""
    facts = facts_of(data.root)
    table = settled(mask_table(data), [pair.mask for pair in found.pairs], facts.header)
    sources = [*found.lists]
    if data.classes or data.name == "folder":
        sources.append(table_path(data))
    pack = None
    if data.pack != "off":
        folder = f"{data.root}/{AUTO}" if data.pack == "auto" else data.pack
        pack = Pack(folder, table.meaning)
    return FileSamples(
        table,
        tuple(found.pairs),
        facts,
        pack,
        tuple(map(str, sources)),
        tuple(found.notes),
    )


def _open_mixture(data: DataConfig, seed: int) -> DataSet:
    """The samples of all sets of data.mix."""
    main = main_set(data)
    found = [
        (part, open_samples(part, split, seed))
        for part, split in parts(data, ["train"])
    ]
    own = [one for part, one in found if part == main]
    shared = (own[0] if own else open_samples(main, data.split, seed)).classes
    sets: list[SubSet] = []
    for number, (entry, (part, one)) in enumerate(zip(data.mix, found, strict=True)):
        label = part.name
        if label != "synthetic":
            label = Path(part.root).resolve().name
        if any(other.label == label for other in sets):
            label = f"{label}#{number}"
        weight = float(entry.get("weight", len(one)))
        subset = SubSet(label, one, weight, f"data.mix[{number}]")
        ids = _shared_ids(subset, entry.get("map", {}), shared)
        sets.append(subset._replace(ids=ids))
    return MixedSamples(shared, tuple(sets))


def _bare(name: str) -> str:
    """The name without case, separators and a plural s."""
    return re.sub(r"[\s_-]+", "", name).casefold().removesuffix("s")


def _shared_ids(part: SubSet, names: Mapping[str, str], shared: ClassTable) -> Uint8:
    """Train id of the shared table for each train id of a set, uint8 (256,); 255 stays.

    Classes with the same name are the same class. Raises DataError for classes that are neither shared nor in the map,
    and for unknown names in the map.
    """
    given = {str(name): wanted for name, wanted in names.items()}
    own = part.samples.classes
    choices = (*shared.names, IGNORE)
    for name, wanted in given.items():
        if name not in own.names:
            raise DataError(
                f"{part.key}.map names the class {name!r}, but {part.label} has no such class."
                f"{nearest(name, own.names)}"
            )
        if wanted not in choices:
            raise DataError(
                f"{part.key}.map maps {name} to {wanted!r}, which is not a class of the shared table "
                f"{shared.name}.{nearest(wanted, choices)}"
            )

    known = {*given, *shared.names}
    lost = [name for name in own.names if name not in known]
    if lost:
        proposed = []
        for name in lost:
            same = [one for one in shared.names if _bare(one) == _bare(name)]
            proposed.append(f"{name}: {same[0] if len(same) == 1 else IGNORE}")
        raise DataError(
            f"{part.key} ({part.label}) has {len(lost)} classes that the shared table {shared.name} lacks. Map each to "
            f"a class of it or to {IGNORE}, such as map: {{{', '.join(proposed)}}}. The table has "
            f"{', '.join(shared.names)}."
        )

    lut = np.full(256, IGNORE_INDEX, np.uint8)
    for train, name in enumerate(own.names):
        wanted = given.get(name, name)
        if wanted != IGNORE:
            lut[train] = shared.names.index(wanted)

    return lut


def _held_out(data: DataConfig, split: str) -> DataSet:
    """The samples on one side of `data.hold_out`; checks both sides, so that a run fails before it starts."""
    train = _open_files(data, "train")
    other = _open_files(data, data.split if split == "train" else split)
    pairs = sorted({*train.pairs, *other.pairs})
    sequence_of = {pair: sequence(pair.name, data.sequence) for pair in pairs}
    held = [pair for pair in pairs if sequence_of[pair] == data.hold_out]
    left = [pair for pair in train.pairs if sequence_of[pair] != data.hold_out]
    if not held or not left:
        counts = Counter(sequence_of.values())
        shown = [f"{name}: {number}" for name, number in sorted(counts.items())[:12]]
        fault = "training would have no image left"
        if not held:
            fault = "no image belongs to that sequence"
        raise DataError(
            f"data.hold_out = {data.hold_out}, but {fault}. Images by sequence: {', '.join(shown)}."
        )

    return replace(
        train,
        pairs=tuple(left if split == "train" else held),
        sources=tuple(dict.fromkeys((*train.sources, *other.sources))),
    )


def sequence(name: str, pattern: str = "") -> str:
    """Sequence of the image `name`, a path below the split's folder without suffix (`Samples.name`).

    The folder, if the name has one besides `images`, `train` and the like; otherwise the part before the last number.
    A name without a number is its own sequence:

    `0016E5_08640` -> `0016E5`, `Seq05VD_f00030` -> `Seq05VD`, `lindau/lindau_000003_000019_leftImg8bit` -> `lindau`,
    `lindau_000003_000019` -> `lindau_000003`, `frame0012` -> `frame`, `000012` -> `unnamed`, `kitchen` -> `kitchen`.

    With `pattern`, a regular expression: its first group, or without groups its whole match. Raises DataError for a
    name that does not match.
    """
    if not pattern:
        return frame(name)[0]

    found = re.search(pattern, name)
    if found is None or not (text := found[1] if found.re.groups else found[0]):
        raise DataError(
            f"data.sequence = {pattern!r} does not match {name}. Correct it, or leave it empty."
        )

    return text


def frame(name: str) -> tuple[str, int | None]:
    """Sequence of an image by the rule above, and its frame number, or None if the name has no number."""
    *folders, stem = name.split("/")
    folder = "/".join(each for each in folders if each not in NO_SEQUENCE)
    numbers = list(_NUMBER.finditer(stem))
    if not numbers:
        return folder or stem, None
    last = numbers[-1]
    before = _END.sub("", stem[: last.start()]) or last[1]
    return folder or before or "unnamed", int(last[2])


def bare_names(samples: DataSet) -> list[str]:
    """Name of each image of a split, by index, without the label of its set in a mixture."""
    return [
        part.samples.name(index).removeprefix(part.label and f"{part.label}/")
        for part in samples.parts()
        for index in range(len(part.samples))
    ]


def sequences(samples: DataSet, pattern: str = "") -> list[str]:
    """Sequence of each image of a split, by index; `pattern` is `data.sequence`."""
    return [sequence(name, pattern) for name in bare_names(samples)]


def image_sizes(samples: DataSet) -> Counter[Size]:
    """Number of images of each (height, width) in a split."""
    return Counter(map(samples.size, range(len(samples))))


def over(
    samples: DataSet,
    work: Callable[[int], R],
    indices: Sequence[int],
    progress: Progress = silent,
) -> list[R]:
    """Results of `work` for each index, in threads if the samples allow it; stores new facts about files."""
    found = threaded(work, indices, progress, allowed=samples.thread_safe())
    keep_facts(samples)
    return found


def keep_facts(samples: DataSet) -> None:
    """Store facts about the samples' files for the next start."""
    for files in samples.file_sets():
        files.facts.keep()


def class_pixels(samples: DataSet) -> Int64:
    """Pixels of each train id over a split, int64 (C,); ignored pixels are not counted.

    Reads every mask, but only some scenes of a synthetic set.
    """
    return np.asarray(sum(over(samples, samples.counts, samples.countable())))


def check_labelled(samples: DataSet) -> None:
    """Raise DataError if one of the data sets has no labelled pixel, or all together have only one class.

    Reads masks until it has seen two classes.
    """
    seen: set[int] = set()
    for part in samples.parts():
        here = _classes_of(part.samples, seen, 2)
        if not here:
            raise DataError(_unlabelled(part.samples, "training images", "learn"))
        seen |= here

    if len(seen) == 1:
        names = samples.classes.names
        hint = ""
        if len(names) == 2 and samples.content(0)[-1]:
            hint = f" If 255 is a class: `ids: {{0: {names[0]}, 255: {names[1]}}}` and `ignore: []` in classes.yaml."
        raise DataError(
            f"{names[seen.pop()]} is the only class that occurs in the masks of the {len(samples)} training images: "
            "a network that always predicts it scores 100 %. Check that the masks were exported with their objects "
            "(many tools write black masks by default), and that the rest of the image is a class, such as "
            f"background, and not ignored.{hint}"
        )


def _classes_of(samples: DataSet, seen: set[int], enough: int) -> set[int]:
    """Classes that occur in the samples; reads masks until these and `seen` together are `enough`."""
    found: set[int] = set()
    for index in range(len(samples)):
        found |= set(np.flatnonzero(samples.counts(index)).tolist())
        if found and len(seen | found) >= enough:
            break
    return found


def check_scorable(samples: DataSet, split: str, names: Sequence[str]) -> None:
    """Raise DataError for other classes than the network's `names`, images without labels, and too small images."""
    own = samples.classes
    if own.names != names:
        raise DataError(
            f"split {split} of {own.name} has the classes {', '.join(own.names)}, but the network has "
            f"{', '.join(names)}, in this order. Give the data set that class table."
        )
    for files in samples.file_sets():
        for pair in files.pairs:
            height, width, *_ = files.facts.header(pair.mask)
            if min(height, width) < LEAST_SIDE:
                raise DataError(
                    f"{pair.image} of split {split} is {height}x{width}, "
                    f"but networks need at least {LEAST_SIDE} pixels on each side. Remove it."
                )

    if not _classes_of(samples, set(), 1):
        raise DataError(_unlabelled(samples, f"images of split {split}", "measure"))


def _unlabelled(samples: DataSet, which: str, purpose: str) -> str:
    """Message about images without any labelled pixel."""
    return (
        f"none of the {len(samples)} {which} has a labelled pixel (the first is {samples.name(0)}): there is nothing "
        f"to {purpose}. Check the masks, and which ids the class table ignores."
    )
