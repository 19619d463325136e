"""Checks a data set before the first step, rather than hours into a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from segpipe.data.catalog import MaskTable, mask_table
from segpipe.data.facts import Facts, facts_of
from segpipe.data.masks import (
    check_kind,
    check_sizes,
    is_sound,
    read_target,
    settled,
)
from segpipe.data.mix import all_parts
from segpipe.data.pairs import Pair, left_out, scan
from segpipe.data.plugin_samples import open_plugin
from segpipe.data.readers import (
    JPEG_DAMAGE,
    check_mask,
    decoders_heard,
    jpeg_damage,
    orientation,
    threaded,
)
from segpipe.data.samples import check_scorable
from segpipe.errors import DataError, listed
from segpipe.settings.groups import FILE_SETS

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.settings.groups import DataConfig

FULL_VERIFY_PIXELS = 300_000_000  # about 6 s of decoding on two cores
SOME = 16  # samples of a user's class that are read to check it
Progress = Callable[[int, int], None]
Faults = dict[str, DataError]  # by file; a difference in size by the name of the pair


def _silent(done: int, total: int) -> None:
    pass


def verify(data: DataConfig, sets: Mapping[str, DataSet]) -> None:
    """Raise DataError for the first problem of splits that were opened.

    `data.verify`: "headers" checks pairs, sizes and the ends of files, "full" decodes
    everything, "auto" decodes everything below 300 million pixels of a split.
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
    progress: Progress = _silent,
    grouped: bool = False,
) -> Iterator[str]:
    """Message for every problem of the data; calls `progress(done, total)` after each file pair.

    With `grouped`, files with the same fault have one message, with their number and the
    first names.
    """
    errors = _errors(data, list(splits), progress)
    yield from _grouped(errors) if grouped else map(str, errors)


def _errors(
    data: DataConfig, splits: list[str], progress: Progress
) -> Iterator[DataError]:
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
    checked = threaded(
        lambda pair: _check_headers(pair, facts, table, data.max_pixels), pairs
    )
    num_pixels, faulty = 0, set[str]()
    for done, (area, faults) in enumerate(checked, 1):
        num_pixels += area
        faulty |= faults.keys()
        yield from faults.values()
        progress(done, 2 * len(pairs))
    if data.verify == "full" or (
        data.verify == "auto" and num_pixels < FULL_VERIFY_PIXELS
    ):
        yield from _decode(pairs, facts, table, faulty, progress)
    facts.keep()
    progress(1, 1)


@contextmanager
def _noted(faults: Faults, where: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        faults[where] = error


def _check_headers(
    pair: Pair, facts: Facts, table: MaskTable, most_pixels: int
) -> tuple[int, Faults]:
    """Pixels of a pair, and what is wrong with its headers."""
    faults: Faults = {}
    area = 0
    with _noted(faults, pair.image):
        image = facts.header(pair.image)
        area = image.height * image.width
        if area > most_pixels:
            raise DataError(
                f"{pair.image} is {image.height}x{image.width}, {area} pixels, but data.max_pixels = {most_pixels}. "
                "Cut it into tiles, or raise data.max_pixels."
            )
    with _noted(faults, pair.mask):
        mask = facts.header(pair.mask)
        check_mask(mask, pair.mask)
        check_kind(table, mask, pair.mask)
    if not faults:
        with _noted(faults, pair.name):
            turn = orientation(image, mask[:2], table.exif, pair.image)
            check_sizes(pair, image.upright if turn != 1 else image[:2], mask[:2])
    return area, faults


def _decode(
    pairs: list[Pair],
    facts: Facts,
    table: MaskTable,
    faulty: set[str],
    progress: Progress,
) -> Iterator[DataError]:
    """Faults found by decoding the files that are not `faulty` already."""
    decoded: list[str] = []

    def examine(pair: Pair) -> Faults:
        faults: Faults = {}
        if pair.image not in faulty:
            with _noted(faults, pair.image):
                if facts.check_image(pair.image):
                    decoded.append(pair.image)
        if pair.mask not in faulty:
            with _noted(faults, pair.mask):
                values = facts.values(pair.mask)
                if not is_sound(table, facts.header(pair.mask), values):
                    read_target(table, pair.mask)  # says what is wrong
        return faults

    errors: list[DataError] = []
    with decoders_heard() as written:
        for done, faults in enumerate(threaded(examine, pairs), 1):
            errors += faults.values()
            progress(len(pairs) + done, 2 * len(pairs))
        damage = JPEG_DAMAGE.search(written())
    yield from errors
    for path in sorted(decoded):
        if damage and (message := jpeg_damage(path)):
            yield DataError(message)
        else:
            facts.decodes(path)


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
    number = len(samples)
    if data.verify != "full":
        number = min(number, SOME)
    chosen = [place * len(samples) // number for place in range(number)]
    yield from map(DataError, samples.problems(chosen, progress))
