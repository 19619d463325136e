"""Checks a data set before the first step, rather than hours into a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from segpipe.data.catalog import ClassTable, class_table
from segpipe.data.pairs import Pair, check_sizes, scan
from segpipe.data.readers import check_mask, read_header, read_image, read_mask, threaded
from segpipe.data.samples import open_plugin
from segpipe.errors import DataError
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


def problems(
    data: DataConfig, splits: Iterable[str], *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[str]:
    """Message for every problem of the data; calls `progress(done, total)` after each file pair."""
    if data.name == "synthetic":
        return
    if is_path(data.name):
        yield from _plugin_problems(data, splits, progress)
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
    unreadable: set[str] = set()
    num_pixels = 0
    for done, (pixels, header_faults) in enumerate(threaded(_check_headers, pairs), 1):
        yield from header_faults.values()
        unreadable |= header_faults.keys()
        num_pixels += pixels
        progress(done, 2 * len(pairs))
    if data.verify == "full" or (data.verify == "auto" and num_pixels < FULL_VERIFY_PIXELS):
        for done, faults in enumerate(threaded(lambda pair: _check_pixels(classes, pair, unreadable), pairs), 1):
            yield from faults
            progress(len(pairs) + done, 2 * len(pairs))
    progress(1, 1)


def _plugin_problems(data: DataConfig, splits: Iterable[str], progress: Callable[[int, int], None]) -> Iterator[str]:
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


def _check_headers(pair: Pair) -> tuple[int, dict[str, str]]:
    """Pixels of a pair, and the faults of its headers by path; a difference in size by the name of the pair."""
    faults: dict[str, str] = {}
    image = _collect(faults, pair.image, lambda: read_header(pair.image))
    mask = _collect(faults, pair.mask, lambda: read_header(pair.mask))
    if mask:
        _collect(faults, pair.mask, lambda: check_mask(mask, pair.mask))
    if image and mask:
        _collect(faults, pair.name, lambda: check_sizes(pair, image[:2], mask[:2]))
    return (image.height * image.width if image else 0), faults


def _check_pixels(classes: ClassTable, pair: Pair, unreadable: set[str]) -> list[str]:
    """Faults found by decoding the files of a pair, except those that are `unreadable` already."""
    faults: dict[str, str] = {}
    if pair.image not in unreadable:
        _collect(faults, pair.image, lambda: read_image(pair.image))
    if pair.mask not in unreadable:
        _collect(faults, pair.mask, lambda: classes.target(read_mask(pair.mask), pair.mask))
    return list(faults.values())


def _collect(faults: dict[str, str], where: str, check: Callable[[], T]) -> T | None:
    try:
        return check()
    except DataError as error:
        faults[where] = str(error)
        return None
