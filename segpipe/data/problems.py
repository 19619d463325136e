"""Checks a data set before the first step, rather than hours into a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

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
    Header,
    check_mask,
    decoders_heard,
    jpeg_damage,
    orientation,
    threaded,
)
from segpipe.data.samples import check_scorable
from segpipe.errors import DataError, listed
from segpipe.plugins import is_path

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.settings.groups import DataConfig

FULL_VERIFY_PIXELS = 300_000_000  # about 6 s of decoding on two cores
SOME = 16  # samples of a user's class that are read to check it
T = TypeVar("T")
Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    pass


def verify(data: DataConfig, sets: Mapping[str, DataSet]) -> None:
    """Raise DataError for the first problem of splits that were opened.

    `data.verify`: "headers" checks pairs, sizes and the ends of files, "full" decodes
    everything, "auto" decodes everything below 300 million pixels.
    """
    for problem in problems(data, sets):
        raise DataError(problem)
    for part in all_parts(data, sets):
        if not is_path(part.data.name) and part.data.name != "synthetic":
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
    splits = list(splits)
    if data.mix:
        for part in all_parts(data, splits):
            yield from problems(
                part.data, [part.split], progress=progress, grouped=grouped
            )
    elif is_path(data.name):
        yield from _plugin_problems(data, splits, progress)
    elif data.name != "synthetic":
        errors = _file_problems(data, splits, progress)
        yield from _grouped(errors) if grouped else map(str, errors)


def _file_problems(
    data: DataConfig, splits: list[str], progress: Progress
) -> Iterator[DataError]:
    """Problems of a data set in files."""
    try:
        table = mask_table(data)
    except DataError as error:
        yield error
        return
    pairs: list[Pair] = []
    for split in splits:
        found, faults = scan(data, split)
        pairs += found
        yield from map(DataError, faults)
    check = _PairCheck(facts_of(data.root), table, data.max_pixels)
    try:
        yield from _pair_problems(check, pairs, data.verify, progress)
    finally:
        check.facts.keep()
    progress(1, 1)


def _pair_problems(
    check: _PairCheck, pairs: list[Pair], mode: str, progress: Progress
) -> Iterator[DataError]:
    check.settle(pairs)
    num_pixels = 0
    faulty: set[str] = set()
    headers = threaded(check.headers, pairs)
    for done, (size, faults) in enumerate(headers, 1):
        num_pixels += size
        faulty |= faults.keys()
        yield from faults.values()
        progress(done, 2 * len(pairs))
    if mode == "full" or (mode == "auto" and num_pixels < FULL_VERIFY_PIXELS):
        yield from check.pixels(pairs, faulty, progress)


class _PairCheck:
    """The checks of one pair of files against a class table."""

    def __init__(self, facts: Facts, table: MaskTable, most_pixels: int) -> None:
        self.facts, self.table, self.most_pixels = facts, table, most_pixels

    def settle(self, pairs: list[Pair]) -> None:
        """Take the kind of masks from the first one that can be read."""
        for pair in pairs:
            with suppress(DataError):
                self.table = settled(self.table, [pair.mask], self.facts.header)
                return

    def headers(self, pair: Pair) -> tuple[int, dict[str, DataError]]:
        """Pixels of a pair, and the faults of its headers by path; a difference in size by the name of the pair."""
        faults: dict[str, DataError] = {}
        image = _collect(faults, pair.image, lambda: self._image_header(pair.image))
        mask = _collect(faults, pair.mask, lambda: self.facts.header(pair.mask))
        if mask:
            _collect(faults, pair.mask, lambda: self._check_mask(mask, pair.mask))
        if image and mask:
            _collect(faults, pair.name, lambda: self._check_sizes(pair, image, mask))
        return (image.height * image.width if image else 0), faults

    def _image_header(self, path: str) -> Header:
        header = self.facts.header(path)
        area = header.height * header.width
        if area > self.most_pixels:
            raise DataError(
                f"{path} is {header.height}x{header.width}, {area} pixels, but "
                f"data.max_pixels = {self.most_pixels}. Cut it into tiles, or raise "
                "data.max_pixels."
            )
        return header

    def _check_mask(self, header: Header, path: str) -> None:
        check_mask(header, path)
        check_kind(self.table, header, path)

    def _check_sizes(self, pair: Pair, image: Header, mask: Header) -> None:
        turn = orientation(image, mask[:2], self.table.exif, pair.image)
        check_sizes(pair, image.upright if turn != 1 else image[:2], mask[:2])

    def pixels(
        self, pairs: list[Pair], faulty: set[str], progress: Progress
    ) -> Iterator[DataError]:
        """Faults found by decoding the files that are not `faulty` already."""
        decoded: list[str] = []
        errors: list[DataError] = []

        def examine(pair: Pair) -> dict[str, DataError]:
            faults: dict[str, DataError] = {}
            if pair.image not in faulty and _collect(
                faults, pair.image, lambda: self.facts.check_image(pair.image)
            ):
                decoded.append(pair.image)
            if pair.mask not in faulty:
                _collect(faults, pair.mask, lambda: self._check_values(pair.mask))
            return faults

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
                self.facts.decodes(path)

    def _check_values(self, path: str) -> None:
        values = self.facts.values(path)
        if not is_sound(self.table, self.facts.header(path), values):
            read_target(self.table, path)  # says what is wrong


def _collect(
    faults: dict[str, DataError], where: str, check: Callable[[], T]
) -> T | None:
    try:
        return check()
    except DataError as error:
        faults[where] = error
        return None


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


def _plugin_problems(
    data: DataConfig, splits: Iterable[str], progress: Progress
) -> Iterator[str]:
    """Problems of a data set of the user: of all samples with data.verify=full, else of some of each split."""
    for split in splits:
        try:
            samples = open_plugin(data, split)
        except DataError as error:
            yield str(error)
            continue
        number = len(samples)
        if data.verify != "full":
            number = min(number, SOME)
        chosen = [place * len(samples) // number for place in range(number)]
        yield from samples.problems(chosen, progress)
