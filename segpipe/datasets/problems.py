"""Checks a data set before the first step, rather than hours into a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from segpipe.data.catalog import MaskTable, mask_table
from segpipe.data.facts import Facts, facts_of
from segpipe.data.masks import (
    check_kind,
    check_sizes,
    counts_of,
    settled,
)
from segpipe.data.mix import all_parts
from segpipe.data.pairs import Pair, left_out, scan
from segpipe.data.plugin_samples import open_plugin
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
from segpipe.data.samples import check_scorable, image_pixels
from segpipe.errors import DataError, listed
from segpipe.settings.groups import FILE_SETS

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.settings.groups import DataConfig

FULL_VERIFY_PIXELS = 300_000_000  # about 6 s of decoding on two cores
BLOCK = 1024  # pairs that are checked before the pixels so far are looked at
SOME = 16  # samples of a user's class that are read to check it


def verify(data: DataConfig, sets: Mapping[str, DataSet]) -> None:
    """Raise DataError for the first problem of splits that were opened.

    `data.verify`: "headers" checks pairs, sizes and the ends of files, "full" decodes everything, "auto" the first 300
    million pixels of a split.
    """
    for problem in problems(data, sets):
        raise DataError(problem)

    for part in all_parts(data, sets):
        if part.data.name in FILE_SETS:
            for note in left_out(part.data, part.split):
                print(note, file=sys.stderr)

    for split, samples in sets.items():
        samples.check_pack()
        if split != "train":
            check_scorable(samples, split)


def problems(
    data: DataConfig,
    splits: Iterable[str],
    *,
    progress: Progress = silent,
    grouped: bool = False,
) -> Iterator[str]:
    """Message for every problem of the data; calls `progress(done, total)` after each block of pairs.

    With `grouped`, files with the same fault have one message, with their number and the
    first names.
    """
    errors = _errors(data, list(splits), progress)
    yield from _grouped(errors) if grouped else map(str, errors)


def _errors(
    data: DataConfig, splits: list[str], progress: Progress
) -> Iterator[DataError]:
    """Each problem of the data; what concerns all splits comes once."""
    of_all_splits = set[str]()
    for part in all_parts(data, splits):
        try:
            if part.data.name in FILE_SETS:
                yield from _file_errors(part.data, part.split, progress)
            elif part.data.name != "synthetic":
                yield from _plugin_errors(part.data, part.split, progress)
        except DataError as error:
            if str(error) not in of_all_splits:
                yield error
            of_all_splits.add(str(error))

    for root in {part.data.root for part in all_parts(data, splits)}:
        facts_of(root).keep()


def _file_errors(
    data: DataConfig, split: str, progress: Progress
) -> Iterator[DataError]:
    """Problems of a split in files. Raises DataError for one that concerns all of them."""
    facts, table = facts_of(data.root), mask_table(data)
    pairs, messages = scan(data, split)
    yield from map(DataError, messages)
    for pair in pairs:  # the first mask that can be read says of which kind all are
        with suppress(DataError):
            table = settled(table, [pair.mask], facts.header)
            break

    num_pixels = 0
    for start in range(0, len(pairs), BLOCK):
        decode = data.verify == "full"
        if data.verify == "auto":
            decode = num_pixels < FULL_VERIFY_PIXELS
        check = _Check(facts, table, data.max_pixels, decode)
        with decoders_heard() as written:
            block = pairs[start : start + BLOCK]
            num_pixels += sum(threaded(check.pair, block))
            damage = JPEG_DAMAGE.search(written())
        for path in check.decoded if damage else ():
            if message := jpeg_damage(path):
                facts.forget(path)
                check.faults[path] = DataError(message)
        progress(start + len(block), len(pairs))
        for pair in block:
            for place in (pair.image, pair.mask, pair.name):
                if place in check.faults:
                    yield check.faults[place]


@dataclass
class _Check:
    """What is wrong with pairs of files: by file, or by the name of the pair if the two do not agree."""

    facts: Facts
    table: MaskTable
    most_pixels: int
    decode: bool  # whether to read all of each file, not only its header
    faults: dict[str, DataError] = field(default_factory=dict)
    decoded: list[str] = field(default_factory=list)  # images

    def pair(self, pair: Pair) -> int:
        """Pixels of a pair that was checked."""
        image = self._header(pair.image, mask=False)
        mask = self._header(pair.mask, mask=True)
        if image is None:
            return 0
        if mask is not None:
            try:
                turned = is_turned(image, mask[:2], self.table.exif, pair.image)
                check_sizes(pair, image.upright if turned else image[:2], mask[:2])
            except DataError as error:
                self.faults[pair.name] = error

        return image.height * image.width

    def _header(self, path: str, *, mask: bool) -> Header | None:
        """Header of a file without a fault."""
        check = partial(self._check, path, mask)
        try:
            if not self.decode:
                header = self.facts.header(path)
                check(header)
            elif mask:
                header, values = self.facts.mask(path, check)
                counts_of(self.table, header, values, path)
            else:
                header, fresh = self.facts.image(path, check)
                if fresh:
                    self.decoded.append(path)
        except DataError as error:
            self.faults[path] = error
            return None

        return header

    def _check(self, path: str, mask: bool, header: Header) -> None:
        """Raise DataError for a file that should not be decoded."""
        area = header.height * header.width
        if area > self.most_pixels:
            raise DataError(
                f"{path} is {header.height}x{header.width}, {area} pixels, but data.max_pixels = {self.most_pixels}. "
                "Cut it into tiles, or raise data.max_pixels."
            )

        if mask:
            check_mask(header, path)
            check_kind(self.table, header, path)


def _grouped(errors: Iterable[DataError]) -> Iterator[str]:
    """A message for each cause."""
    same: dict[str, list[DataError]] = {}
    for error in errors:
        same.setdefault(error.cause or f"fault {len(same)}", []).append(error)

    for first, *others in same.values():
        more = ""
        if others:
            names = listed([error.where for error in others], 3)
            more = f" The same in {len(others)} more: {names}."
        yield f"{first}{more}"


def _plugin_errors(
    data: DataConfig, split: str, progress: Progress
) -> Iterator[DataError]:
    """Problems of a data set of the user: of all samples with data.verify=full, else of some."""
    samples = open_plugin(data, split)
    total = number = len(samples)
    if data.verify != "full":
        number = min(total, SOME)
    chosen = [place * total // number for place in range(number)]
    yield from map(DataError, samples.problems(chosen, progress))


def missing_labels(split: str, samples: DataSet) -> Iterator[str]:
    """A warning about images without a labelled pixel, and one about classes that no image has."""
    indices = samples.countable()
    counts = np.array(image_pixels(samples, indices))
    empty = np.flatnonzero(counts.sum(1) == 0)
    if empty.size:
        yield (
            f"{empty.size} of the {len(indices)} images of {split} have no labelled pixel, such as "
            f"{samples.name(indices[empty[0]])}: check their masks, and which ids the class table ignores."
        )

    names = samples.classes.names
    absent = [names[train] for train in np.flatnonzero(counts.sum(0) == 0)]
    if absent and len(indices) == len(samples):
        result = "have no IoU and do not enter the mean"
        if split == "train":
            result = "cannot be learned"
        yield (
            f"no image of {split} has a pixel of {listed(absent)}: such classes {result}. Check the ids of the class "
            f"table, or remove the class."
        )
