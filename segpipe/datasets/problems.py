"""Checks of a data set before the first step, rather than hours into a run."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from segpipe.data import Int64, Size
from segpipe.data.data_set import DataSet, FileSamples
from segpipe.data.masks import check_kind, check_sizes, counted
from segpipe.data.order import spaced
from segpipe.data.pairs import Pair
from segpipe.data.readers import (
    JPEG_DAMAGE,
    Header,
    Progress,
    check_mask,
    decoders_heard,
    is_turned,
    jpeg_damage,
    silent,
    threaded,
)
from segpipe.data.samples import keep_facts, open_readable, over, parts
from segpipe.errors import DataError, listed
from segpipe.files import file_sha256
from segpipe.settings.groups import DataConfig

FULL_VERIFY_PIXELS = 300_000_000  # about 6 s of decoding on two cores
BLOCK = 1024  # pairs to check between comparisons with FULL_VERIFY_PIXELS
SCARCE = 0.001  # share of the labelled pixels
RARE = 0.05  # up to this share of a split's masks, another kind is probably a mistake
SOME = 16  # samples to read when checking a user's data set class


def verify(data: DataConfig, sets: Mapping[str, DataSet]) -> None:
    """Raise DataError for the first problem of the opened splits.

    `data.verify`: "headers" checks pairs, sizes and the ends of files, "full" decodes everything, "auto" the first 300
    million pixels of a split.
    """
    try:
        for samples in sets.values():
            for part in samples.parts():
                for error in _errors(data, part.samples, silent):
                    raise error
                for files in part.samples.file_sets():
                    files.check_pack()
                    for note in files.notes:
                        print(note, file=sys.stderr)
    finally:  # once, since splits of one folder share their facts
        for samples in sets.values():
            keep_facts(samples)


def problems(
    data: DataConfig,
    splits: Iterable[str],
    *,
    progress: Progress = silent,
    grouped: bool = False,
) -> Iterator[str]:
    """A message for every problem of the data; calls `progress(done, total)` after each block of pairs.

    With `grouped`, files with the same fault share one message, with their number and the first names.
    """
    found: dict[str, DataError] = {}  # by message: problems of all splits appear once
    for part, split in parts(data, splits):
        samples, faults = open_readable(part, split, 0)
        errors = [DataError(fault) for fault in faults]
        if samples is not None:
            errors += _errors(part, samples, progress)
            keep_facts(samples)
        found |= {str(error): error for error in errors}
    yield from _grouped(found.values()) if grouped else found


def _errors(
    data: DataConfig, samples: DataSet, progress: Progress
) -> Iterator[DataError]:
    """Every problem of the samples of one data set."""
    for files in samples.file_sets():
        yield from _file_errors(data, files, progress)

    if not samples.file_sets():
        total = len(samples)
        chosen = spaced(range(total), total if data.verify == "full" else SOME)
        yield from map(DataError, samples.problems(chosen, progress))


def _file_errors(
    data: DataConfig, files: FileSamples, progress: Progress
) -> Iterator[DataError]:
    """Every problem of image and mask files."""
    num_pixels, total = 0, len(files)
    for start in range(0, total, BLOCK):
        decode = data.verify == "full"
        if data.verify == "auto":
            decode = num_pixels < FULL_VERIFY_PIXELS
        block = files.pairs[start : start + BLOCK]
        with decoders_heard() as written:
            try:
                checked = threaded(
                    partial(_checked, files, data.max_pixels, decode), block
                )
            finally:  # also if interrupted: the saved facts must not call a damaged file intact
                damaged = JPEG_DAMAGE.search(written())
                for pair in block if damaged else ():
                    files.facts.forget(pair.image)
        progress(start + len(block), total)
        for pair, (pixels, errors) in zip(block, checked, strict=True):
            num_pixels += pixels
            if damaged and (message := jpeg_damage(pair.image)):
                yield DataError(message)
            yield from errors


def _checked(
    files: FileSamples, most_pixels: int, decode: bool, pair: Pair
) -> tuple[int, list[DataError]]:
    """Number of pixels of a pair, and its problems; with `decode`, reads whole files, not only their headers."""
    facts, table = files.facts, files.table
    errors: list[DataError] = []
    headers: list[Header] = []

    def check(path: str, is_mask: bool, header: Header) -> None:
        """Raise DataError for a file that must not be decoded."""
        area = header.height * header.width
        if area > most_pixels:
            raise DataError(
                f"{path} is {header.height}x{header.width}, {area} pixels, but data.max_pixels = {most_pixels}. "
                "Cut it into tiles, or raise data.max_pixels."
            )
        if is_mask:
            check_mask(header, path)
            check_kind(table, header, path)

    for path in pair[1:]:
        is_mask = path == pair.mask
        own = partial(check, path, is_mask)
        try:
            if decode:
                counting = (table.key, partial(counted, table)) if is_mask else ()
                header = facts.whole(path, own, *counting).header
            else:
                header = facts.header(path)
                own(header)
            headers.append(header)
        except DataError as error:
            errors.append(error)

    if errors:
        return 0, errors
    image, mask = headers
    try:
        turned = is_turned(image, mask[:2], table.exif, pair.image)
        check_sizes(pair, image.upright if turned else image[:2], mask[:2])
    except DataError as error:
        errors.append(error)
    return image.height * image.width, errors


def _grouped(errors: Iterable[DataError]) -> Iterator[str]:
    """One message per cause."""
    same: dict[str, list[DataError]] = {}
    for error in errors:
        same.setdefault(error.cause or f"fault {len(same)}", []).append(error)

    for first, *others in same.values():
        more = ""
        if others:
            more = f" The same in {len(others)} more: {listed([error.where for error in others], 3)}."
        yield f"{first}{more}"


def missing_labels(split: str, samples: DataSet) -> Iterator[str]:
    """Warnings about images without labelled pixels, rare and absent classes, and a few black-and-white masks."""
    indices = samples.countable()
    content = np.array(over(samples, samples.content, indices))
    counts, ignored = content[:, :-1], content[:, -1]
    empty = np.flatnonzero(counts.sum(1) == 0)
    if empty.size:
        yield (
            f"{empty.size} of the {len(indices)} images of {split} have no labelled pixel, such as "
            f"{samples.name(indices[empty[0]])}. Check their masks, and which ids the class table ignores."
        )

    binary = (np.count_nonzero(counts, axis=1) == 1) & (ignored > 0)
    if 0 < binary.sum() <= RARE * len(indices) and not ignored[~binary].any():
        yield (
            f"{binary.sum()} of the {len(indices)} masks of {split}, such as that of "
            f"{samples.name(indices[binary.argmax()])}, hold one class and ignored pixels, unlike all other masks. "
            "Are they black-and-white masks (0 and 255) among masks of ids?"
        )

    names, shares = samples.classes.names, counts.sum(0) / max(counts.sum(), 1)
    rare = [names[train] for train in np.flatnonzero((shares > 0) & (shares < SCARCE))]
    if rare and split == "train" and len(indices) == len(samples):
        yield (
            f"less than {SCARCE:.1%} of the labelled pixels of train are {listed(rare)}. Networks tend to leave out "
            "such classes: augment.rare_crop, data.balance and loss.class_weights help, see docs/sampling.md."
        )
    absent = [names[train] for train in np.flatnonzero(counts.sum(0) == 0)]
    if absent and len(indices) == len(samples):
        result = "have no IoU and are left out of the mean"
        if split == "train":
            result = "cannot be learned"
        yield (
            f"no image of {split} has a pixel of {listed(absent)}: such classes {result}. Check the ids of the class "
            f"table, or remove the class."
        )


def check_overlap(train: DataSet, val: DataSet, split: str) -> None:
    """Raise DataError if validation images are also training images; only for data sets in files.

    Reads only files whose size occurs in both splits and whose SHA-256 is not known.
    """
    sides = [
        {
            pair.image: (os.stat(pair.image).st_size, files.facts)
            for files in samples.file_sets()
            for pair in files.pairs
        }
        for samples in (train, val)
    ]
    common = set.intersection(*({size for size, _ in side.values()} for side in sides))
    one, two = (
        [
            (facts.hashes([path]).get(path) or file_sha256(path), path)
            for path, (size, facts) in side.items()
            if size in common
        ]
        for side in sides
    )
    others = dict(one)
    found = [(others[digest], path) for digest, path in two if digest in others]
    if found:
        raise DataError(
            f"{len(found)} of the images of split {split} are training images, byte for byte (the first: "
            f"{' = '.join(found[0])}): the score would be too high. Remove them from one of the two, or set "
            "data.allow_overlap=true."
        )


class CensusRow(NamedTuple):
    """One sample: its index in the split, and the content of its target, as in `DataSet.content`."""

    place: int
    content: Int64
    size: Size


class Census(NamedTuple):
    """An opened split, and a row for each readable sample, in order."""

    split: str
    samples: DataSet
    rows: list[CensusRow]

    @property
    def table(self) -> Int64:
        """Pixels per sample of each class, and of ignored ones, int64 (n, C + 1)."""
        shape = (len(self.rows), self.samples.classes.num_classes + 1)
        return np.array([row.content for row in self.rows]).reshape(shape)


def take(split: str, samples: DataSet, progress: Progress) -> Census:
    """The census of a split: all its samples, but some scenes of a synthetic set.

    Skips unreadable files, which `problems` reports.
    """

    def examine(index: int) -> CensusRow | None:
        """The row of a sample; None for an unreadable one."""
        with suppress(DataError):
            return CensusRow(index, samples.content(index), samples.size(index))
        return None

    rows = over(samples, examine, samples.countable(), progress)
    return Census(split, samples, [row for row in rows if row])
