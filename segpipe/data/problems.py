"""Checks a data set before the first step, rather than hours into a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from segpipe.data.catalog import MaskTable, mask_table
from segpipe.data.headers import Header
from segpipe.data.masks import check_kind, orientation, read_target, settled
from segpipe.data.mix import all_parts
from segpipe.data.pairs import Pair, check_sizes, scan
from segpipe.data.readers import (
    JPEG_DAMAGE,
    check_mask,
    damaged_jpegs,
    decoders_heard,
    read_header,
    read_image,
    threaded,
)
from segpipe.data.samples import FileSamples, Samples, open_plugin, open_samples
from segpipe.errors import DataError, listed
from segpipe.plugins import is_path

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

FULL_VERIFY_PIXELS = 300_000_000  # about 6 s of decoding on two cores
SOME = 16  # samples of a user's class that are read to check it
T = TypeVar("T")


def verify(data: DataConfig, splits: Iterable[str]) -> None:
    """Raise DataError for the first problem of the data.

    `data.verify`: "headers" checks pairs, sizes and the ends of files, "full" decodes everything, "auto" decodes
    everything below 300 million pixels.
    """
    for problem in problems(data, splits):
        raise DataError(problem)


def open_readable(data: DataConfig, split: str, seed: int) -> Samples | None:
    """Samples of a split, of its complete pairs if there are other files too; None if there are none."""
    with suppress(DataError):
        return open_samples(data, split, seed)
    with suppress(DataError):
        pairs = scan(data, split)[0]
        return (
            FileSamples(_settled(mask_table(data), pairs), tuple(pairs))
            if pairs
            else None
        )
    return None


def problems(
    data: DataConfig,
    splits: Iterable[str],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    grouped: bool = False,
) -> Iterator[str]:
    """Message for every problem of the data; calls `progress(done, total)` after each file pair.

    With `grouped`, files with the same fault have one message, with their number and the first names.
    """
    if data.mix:
        for part in all_parts(data, splits):
            yield from problems(
                part.data, [part.split], progress=progress, grouped=grouped
            )
        return
    if data.name == "synthetic":
        return
    if is_path(data.name):
        yield from _plugin_problems(data, splits, progress)
        return
    yield from _file_problems(data, splits, progress, grouped=grouped)


def _file_problems(
    data: DataConfig,
    splits: Iterable[str],
    progress: Callable[[int, int], None],
    *,
    grouped: bool,
) -> Iterator[str]:
    """Problems of a data set in files."""
    try:
        table = mask_table(data)
    except DataError as error:
        yield str(error)
        return
    pairs: list[Pair] = []
    for split in splits:
        found, faults = scan(data, split)
        pairs += found
        yield from faults
    table = _settled(table, pairs)
    unreadable: set[str] = set()
    wrong: list[DataError] = []
    num_pixels = 0
    for done, (pixels, header_faults) in enumerate(
        threaded(lambda pair: _check_headers(table, pair, data.max_pixels), pairs), 1
    ):
        if grouped:
            wrong += header_faults.values()
        else:
            yield from map(str, header_faults.values())
        unreadable |= header_faults.keys()
        num_pixels += pixels
        progress(done, 2 * len(pairs))
    if data.verify == "full" or (
        data.verify == "auto" and num_pixels < FULL_VERIFY_PIXELS
    ):
        with decoders_heard() as words:
            for done, errors in enumerate(
                threaded(lambda pair: _check_pixels(table, pair, unreadable), pairs), 1
            ):
                wrong += errors
                progress(len(pairs) + done, 2 * len(pairs))
            said = words()
        yield from _grouped(wrong) if grouped else map(str, wrong)
        if JPEG_DAMAGE.search(said):
            yield from damaged_jpegs(pair.image for pair in pairs)
    elif grouped:
        yield from _grouped(wrong)
    progress(1, 1)


def _grouped(errors: Iterable[DataError]) -> Iterator[str]:
    """A message for each cause."""
    same: dict[str, list[DataError]] = {}
    for error in errors:
        same.setdefault(error.cause or f"fault {len(same)}", []).append(error)
    for first, *others in same.values():
        more = f" The same in {len(others)} more: {listed([error.where for error in others], 3)}."
        yield f"{first}{more if others else ''}"


def _plugin_problems(
    data: DataConfig, splits: Iterable[str], progress: Callable[[int, int], None]
) -> Iterator[str]:
    """Problems of a data set of the user: of all samples with data.verify=full, else of some of each split."""
    for split in splits:
        try:
            samples = open_plugin(data, split)
        except DataError as error:
            yield str(error)
            continue
        number = len(samples) if data.verify == "full" else min(len(samples), SOME)
        chosen = [place * len(samples) // number for place in range(number)]
        yield from samples.problems(chosen, progress)


def _settled(table: MaskTable, pairs: list[Pair]) -> MaskTable:
    """`table` with the kind of the first mask that can be read."""
    for pair in pairs:
        with suppress(DataError):
            return settled(table, [pair.mask])
    return table


def _check_headers(
    table: MaskTable, pair: Pair, most: int
) -> tuple[int, dict[str, DataError]]:
    """Pixels of a pair, and the faults of its headers by path; a difference in size by the name of the pair."""
    faults: dict[str, DataError] = {}
    image = _collect(
        faults,
        pair.image,
        lambda: _check_size(read_header(pair.image), pair.image, most),
    )
    mask = _collect(faults, pair.mask, lambda: read_header(pair.mask))
    if mask:
        _collect(faults, pair.mask, lambda: _check_mask(table, mask, pair.mask))
    if image and mask:
        _collect(faults, pair.name, lambda: _check_sizes(table, pair, image, mask))
    return (image.height * image.width if image else 0), faults


def _check_size(header: Header, path: str, most: int) -> Header:
    if header.height * header.width > most:
        raise DataError(
            f"{path} is {header.height}x{header.width}, {header.height * header.width} pixels, but data.max_pixels = "
            f"{most}. Cut it into tiles, or raise data.max_pixels."
        )
    return header


def _check_mask(table: MaskTable, header: Header, path: str) -> None:
    check_mask(header, path)
    check_kind(table, header, path)


def _check_sizes(table: MaskTable, pair: Pair, image: Header, mask: Header) -> None:
    turned = orientation(image, mask[:2], table.exif, pair.image) != 1
    check_sizes(pair, image.upright if turned else image[:2], mask[:2])


def _check_pixels(
    table: MaskTable, pair: Pair, unreadable: set[str]
) -> list[DataError]:
    """Faults found by decoding the files of a pair, except those that are `unreadable` already."""
    faults: dict[str, DataError] = {}
    if pair.image not in unreadable:
        _collect(faults, pair.image, lambda: read_image(pair.image))
    if pair.mask not in unreadable:
        _collect(faults, pair.mask, lambda: read_target(table, pair.mask))
    return list(faults.values())


def _collect(
    faults: dict[str, DataError], where: str, check: Callable[[], T]
) -> T | None:
    try:
        return check()
    except DataError as error:
        faults[where] = error
        return None
