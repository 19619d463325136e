"""`segpipe doctor`: all problems of a data set in one pass, or the content of its splits if there are none."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segpipe.cli.commands import COMMANDS
from segpipe.data.catalog import table_path
from segpipe.data.division import shared_sequences
from segpipe.data.folders import no_split, split_lists
from segpipe.data.overlap import check_overlap
from segpipe.data.pairs import scan, scan_undivided
from segpipe.data.problems import open_readable, problems
from segpipe.data.proposal import blended, propose
from segpipe.data.samples import (
    Samples,
    class_pixels,
    file_samples,
    image_files,
    image_sizes,
    one_by_one,
    open_samples,
    single_class,
)
from segpipe.errors import DataError, listed
from segpipe.files import write_atomically
from segpipe.run.console import CONSOLE, progress, share_table
from segpipe.run.preflight import size_warnings, worker_problems
from segpipe.settings.arguments import parse
from segpipe.settings.check import check
from segpipe.settings.compose import compose
from segpipe.settings.config import Config
from segpipe.settings.groups import FILE_SETS, DataConfig

KEYS = COMMANDS["doctor"].keys


def find_problems(data: DataConfig, splits: list[str], lines: int = 0) -> list[str]:
    """All problems; prints each one as it is found, at most `lines` of them, and a line per cause rather than file."""
    found: list[str] = []
    with progress("checking files") as show:
        for problem in problems(data, splits, progress=show, grouped=bool(lines)):
            found.append(problem)
            if len(found) <= lines or not lines:
                CONSOLE.print(problem, markup=False)
    if len(found) > lines > 0:
        CONSOLE.print(f"... and {len(found) - lines} more; lines=0 prints all")
    return found


def offer_table(data: DataConfig, splits: list[str], *, write: bool) -> bool:
    """Whether there is a class table now: if there was none, prints the one that the masks suggest, or writes it."""
    path = table_path(data)
    if (
        data.name != "folder"
        or data.classes
        or path.exists()
        or not Path(data.root).is_dir()
    ):
        return True
    pairs = (
        sorted({pair for split in splits for pair in scan(data, split)[0]})
        or scan_undivided(data)[0]
    )
    if not pairs:  # of a folder without images or masks no table can be proposed: say so, not that there is no table
        faults = [fault for split in splits for fault in scan(data, split)[1]]
        if faults:
            CONSOLE.print(faults[0], markup=False)
        return not faults
    with progress("reading masks") as show:
        text = propose([pair.mask for pair in pairs], show)
    CONSOLE.print(text, markup=False)
    if not write:
        CONSOLE.print(
            f"{path} does not exist. This would fit its masks: write=true writes it.",
            markup=False,
        )
        return False
    path.write_text(text)
    CONSOLE.print(
        f"This table is written to {path}. Give the classes their names before training.",
        markup=False,
    )
    return True


def not_divided(data: DataConfig, splits: list[str]) -> str:
    """What to do with a folder that has all but its splits; empty for any other."""
    root = Path(data.root)
    if data.name != "folder" or data.mix or split_lists(root):
        return ""
    if any(scan(data, split) != ([], [no_split(root, split)]) for split in splits):
        return ""
    return (
        f"{root} is not divided into {' and '.join(splits)} yet, so no more was checked. Next: `segpipe split "
        f"data.root={root} val=0.2`, then `segpipe doctor data=folder data.root={root}` again."
    )


def warn_of_shared_sequences(train: list[str], val: list[str], pattern: str) -> None:
    """Print the sequences that are in training and validation."""
    shared = shared_sequences(train, val, pattern)
    if not shared:
        return
    shown = listed(
        [
            f"{name} ({counts[0]} and {counts[1]} images)"
            for name, counts in shared.items()
        ]
    )
    CONSOLE.print(
        f"Warning: {len(shared)} sequence{'s' * (len(shared) > 1)} in both training and validation: {shown}. If "
        "they are frames of videos, validation flatters the network. `segpipe split` divides by sequence.",
        markup=False,
    )


def by_set(opened: dict[str, Samples]) -> dict[str, Samples]:
    """The splits, and in place of one that is a mixture its data sets, with the classes of the shared table."""
    found: dict[str, Samples] = {}
    for split, samples in opened.items():
        sets = one_by_one(samples)
        found |= (
            {f"{split}: {name}": one for name, one in sets.items()}
            if sets
            else {split: samples}
        )
    return found


def example(data: DataConfig, split: str) -> str:
    """The first pair of a split in files, which shows how images and masks were found."""
    if data.name not in FILE_SETS or data.mix:
        return ""
    first = scan(data, split)[0][0]
    image, mask = (
        os.path.relpath(path, data.root) for path in (first.image, first.mask)
    )
    return f"; {image} with {mask}"


def examine(
    config: Config, opened: dict[str, Samples], counts: dict[str, NDArray[np.int64]]
) -> tuple[list[str], list[str]]:
    """Problems and warnings of files that can all be read, with the pixels of each class by data set."""
    if not opened:
        return [], []
    found, warnings = [], list(size_warnings(config, train := opened["train"]))
    present = np.flatnonzero(sum(counts[name] for name in by_set({"train": train})))
    if len(present) == 1:
        found.append(single_class(train, int(present[0])))
    sets = [one for samples in opened.values() for one in file_samples(samples)]
    if sets and config.data.name == "folder" and not config.data.mix:
        said, certain = blended(
            [pair.mask for one in sets for pair in one.pairs], sets[0].table
        )
        (found if certain else warnings).extend([said] if said else [])
    return found, warnings


def write_page(
    config: Config, splits: list[str], found: list[str], warnings: list[str], out: Path
) -> None:
    """Write the page with pictures: of all that can be read, if there are problems."""
    from segpipe.data.census import take
    from segpipe.run.doctor_page import Checkup, render

    opened = {
        split: one
        for split in splits
        if (one := open_readable(config.data, split, config.seed)) is not None
    }
    census = {}
    for split, samples in opened.items():
        with progress(f"reading {split}") as show:
            census[split] = take(samples, show)
    if not opened:
        CONSOLE.print(
            f"{out} is not written: no split has a pair of image and mask.",
            markup=False,
        )
        return
    write_atomically(
        out, render(Checkup(config, found, warnings, opened, census)).encode()
    )
    CONSOLE.print(f"page: {out}", markup=False)


def main(overrides: list[str]) -> int:
    """Exit code."""
    own = [
        text
        for text in overrides
        if text.partition("=")[0] in [key.key for key in KEYS]
    ]
    given = parse(own, KEYS)
    config = compose([text for text in overrides if text not in own])
    check(config, world_size=1)
    splits = list(dict.fromkeys(["train", config.data.split]))
    if not offer_table(config.data, splits, write=given["write"]):
        return DataError.exit_code
    if todo := not_divided(config.data, splits):
        CONSOLE.print(todo, markup=False)
        if given["out"]:
            write_page(config, splits, [todo], [], Path(given["out"]))
        return DataError.exit_code
    found = find_problems(config.data, splits, given["lines"])
    opened = (
        {}
        if found
        else {split: open_samples(config.data, split, config.seed) for split in splits}
    )
    sets = by_set(opened)
    counts = {name: class_pixels(one) for name, one in sets.items()}
    more, warnings = examine(config, opened, counts)
    for problem in more:
        CONSOLE.print(problem, markup=False)
    found += more
    if given["out"]:
        write_page(config, splits, found, warnings, Path(given["out"]))
    if found:
        CONSOLE.print(
            f"{len(found)} problem{'s' * (len(found) > 1)} in {config.data.root or 'data.mix'}"
        )
        return DataError.exit_code
    if len(opened) > 1 and not config.data.allow_overlap:
        check_overlap(
            image_files(opened["train"]),
            image_files(opened[config.data.split]),
            config.data.split,
        )
    for split, samples in sets.items():
        sizes = [
            f"{height}x{width} ({times})"
            for (height, width), times in image_sizes(samples).most_common(8)
        ]
        CONSOLE.print(
            f"{split}: {len(samples)} images of {', '.join(sizes)}{example(config.data, split)}",
            markup=False,
        )
    CONSOLE.print(share_table(opened["train"].classes, counts))
    if empty := [name for name, pixels in counts.items() if not pixels.sum()]:
        CONSOLE.print(
            f"{', '.join(empty)}: every pixel is ignored. Check the masks, and the ids in the class table."
        )
        return DataError.exit_code
    for problem in [*warnings, *worker_problems(config, opened["train"])]:
        CONSOLE.print(f"Warning: {problem}", markup=False)
    if len(opened) == 2 and config.data.name != "synthetic":
        train, val = (
            [samples.name(i) for i in range(len(samples))]
            for samples in opened.values()
        )
        warn_of_shared_sequences(train, val, config.data.sequence)
    return 0
