"""`segpipe doctor`: all problems of a data set in one pass, or the content of its splits if there are none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from segpipe.data.catalog import table_path
from segpipe.data.data_set import DataSet
from segpipe.data.division import shared_sequences
from segpipe.data.facts import facts_of
from segpipe.data.folders import no_split, split_lists
from segpipe.data.mix import all_parts
from segpipe.data.overlap import check_overlap
from segpipe.data.pairs import left_out, scan, scan_undivided
from segpipe.data.problems import problems
from segpipe.data.proposal import blended, propose
from segpipe.data.samples import (
    check_labelled,
    check_scorable,
    class_pixels,
    image_files,
    image_sizes,
    open_readable,
    open_samples,
)
from segpipe.errors import DataError, listed
from segpipe.files import write_atomically
from segpipe.run.console import CONSOLE, progress, share_table
from segpipe.run.preflight import size_warnings, worker_problems
from segpipe.settings.check import check
from segpipe.settings.compose import compose
from segpipe.settings.config import Config
from segpipe.settings.groups import FILE_SETS, DataConfig


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
        text = propose([pair.mask for pair in pairs], facts_of(data.root), show)
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


def by_set(opened: dict[str, DataSet]) -> dict[str, DataSet]:
    """The splits, and in place of one that is a mixture its data sets, with the classes of the shared table."""
    return {
        f"{split}: {part.label}" if part.label else split: part.samples
        for split, samples in opened.items()
        for part in samples.parts()
    }


def examine(config: Config, opened: dict[str, DataSet]) -> tuple[list[str], list[str]]:
    """Problems and warnings of files that can all be read."""
    if not opened:
        return [], []
    train = opened["train"]
    found: list[str] = []
    warnings = list(size_warnings(config, train))
    data = config.data
    for part in all_parts(data, opened):
        if part.data.name in FILE_SETS:
            warnings += left_out(part.data, part.split)
    try:
        check_labelled(train)
        for split, samples in opened.items():
            if split != "train":
                check_scorable(samples, split)
    except DataError as error:
        found.append(str(error))
    if data.name == "folder" and (table := train.mask_table()):
        masks = [
            pair.mask for samples in opened.values() for pair in samples.file_pairs()
        ]
        message, certain = blended(masks, table, facts_of(data.root))
        if message:
            (found if certain else warnings).append(message)
    return found, warnings


def write_page(
    config: Config, splits: list[str], found: list[str], warnings: list[str], out: Path
) -> None:
    """Write the page with pictures: of all that can be read, if there are problems."""
    from segpipe.data.census import take
    from segpipe.run.doctor_page import Checkup, render

    opened, census = {}, {}
    for split in splits:
        samples = open_readable(config.data, split, config.seed)
        if samples is not None:
            opened[split] = samples
            with progress(f"reading {split}") as show:
                census[split] = take(samples, show)
    if not opened:
        CONSOLE.print(
            f"{out} is not written: no split has a pair of image and mask.",
            markup=False,
        )
        return
    page = render(Checkup(config, found, warnings, opened, census))
    write_atomically(out, page.encode())
    CONSOLE.print(f"page: {out}", markup=False)


def show_content(config: Config, opened: dict[str, DataSet]) -> None:
    """Print sizes and an example of each set, and the share of pixels of each class."""
    sets = by_set(opened)
    for name, samples in sets.items():
        sizes = [
            f"{height}x{width} ({times})"
            for (height, width), times in image_sizes(samples).most_common(8)
        ]
        example = ""
        pairs = samples.file_pairs()
        if pairs and not config.data.mix:
            image, mask = (
                os.path.relpath(path, config.data.root) for path in pairs[0][1:]
            )
            example = f"; {image} with {mask}"
        CONSOLE.print(
            f"{name}: {len(samples)} images of {', '.join(sizes)}{example}",
            markup=False,
        )
    counts = {name: class_pixels(samples) for name, samples in sets.items()}
    CONSOLE.print(share_table(opened["train"].classes, counts))


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    config = compose(given["overrides"])
    check(config, world_size=1)
    data = config.data
    out = Path(given["out"]) if given["out"] else None
    splits = list(dict.fromkeys(["train", data.split]))
    # Masks are read once, and proposals need what lies along their edges.
    facts_of(data.root).edges = data.name == "folder"
    if not offer_table(data, splits, write=given["write"]):
        return DataError.exit_code
    if todo := not_divided(data, splits):
        CONSOLE.print(todo, markup=False)
        if out:
            write_page(config, splits, [todo], [], out)
        return DataError.exit_code
    found = find_problems(data, splits, given["lines"])
    opened: dict[str, DataSet] = {}
    if not found:
        opened = {split: open_samples(data, split, config.seed) for split in splits}
    more, warnings = examine(config, opened)
    for problem in more:
        CONSOLE.print(problem, markup=False)
    found += more
    if out:
        write_page(config, splits, found, warnings, out)
    if found:
        plural = "s" * (len(found) > 1)
        where = data.root or "data.mix"
        CONSOLE.print(f"{len(found)} problem{plural} in {where}")
        return DataError.exit_code
    train, val = opened["train"], opened[data.split]
    if train is not val and not data.allow_overlap:
        check_overlap(image_files(train), image_files(val), data.split)
    show_content(config, opened)
    for problem in [*warnings, *worker_problems(config, train)]:
        CONSOLE.print(f"Warning: {problem}", markup=False)
    if train is not val and data.name != "synthetic":
        of_train, of_val = (
            [samples.name(index) for index in range(len(samples))]
            for samples in (train, val)
        )
        warn_of_shared_sequences(of_train, of_val, data.sequence)
    return 0
