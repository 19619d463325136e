"""`segpipe doctor`: all problems of a data set in one pass, or the content of its splits if there are none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segpipe.data.catalog import table_path
from segpipe.data.data_set import DataSet
from segpipe.data.facts import facts_of
from segpipe.data.folders import no_split, split_lists
from segpipe.data.mix import all_parts
from segpipe.data.pairs import left_out, scan, scan_undivided
from segpipe.data.samples import (
    check_labelled,
    check_scorable,
    class_pixels,
    image_files,
    image_sizes,
    open_readable,
    open_samples,
)
from segpipe.datasets.division import shared_sequences
from segpipe.datasets.overlap import check_overlap
from segpipe.datasets.problems import problems
from segpipe.datasets.proposal import propose
from segpipe.errors import DataError, listed
from segpipe.files import write_atomically
from segpipe.run.console import CONSOLE, progress, share_table
from segpipe.run.preflight import size_warnings, worker_problems
from segpipe.settings.check import check
from segpipe.settings.compose import compose
from segpipe.settings.config import Config
from segpipe.settings.groups import FILE_SETS, DataConfig


def main(given: dict[str, Any]) -> int:
    """Exit code; `given` are the values of the command's keys, and the overrides of the settings."""
    config = compose(given["overrides"])
    check(config, world_size=1)
    data = config.data
    splits = list(dict.fromkeys(["train", data.split]))
    written = False
    if _lacks_table(data):
        if not _offer_table(data, splits, write=given["write"]):
            return DataError.exit_code
        written = True
    if todo := _not_divided(data, splits):
        CONSOLE.print(todo, markup=False)
        _write_page(config, splits, [todo], [], given["out"])
        return 0 if written else DataError.exit_code
    with progress("checking files") as show:
        found = list(
            problems(data, splits, progress=show, grouped=bool(given["lines"]))
        )
    print_problems(found, given["lines"])
    opened: dict[str, DataSet] = {}
    warnings: list[str] = []
    if not found:
        opened = {split: open_samples(data, split, config.seed) for split in splits}
        more, warnings = _examine(config, opened)
        print_problems(more, 0)
        found += more
    _write_page(config, splits, found, warnings, given["out"])
    if found:
        plural = "s" * (len(found) > 1)
        CONSOLE.print(f"{len(found)} problem{plural} in {data.root or 'data.mix'}")
        return DataError.exit_code
    train, val = opened["train"], opened[data.split]
    if train is not val and not data.allow_overlap:
        check_overlap(image_files(train), image_files(val), data.split)
    _show_content(config, opened)
    for problem in [*warnings, *worker_problems(config, train)]:
        CONSOLE.print(f"Warning: {problem}", markup=False)
    return 0


def print_problems(found: Sequence[str], lines: int) -> None:
    """Print the first `lines` problems and how many more there are; 0: all."""
    for problem in found[: lines or None]:
        CONSOLE.print(problem, markup=False)
    if len(found) > lines > 0:
        CONSOLE.print(f"... and {len(found) - lines} more; lines=0 prints all")


def _lacks_table(data: DataConfig) -> bool:
    own = data.name == "folder" and not data.classes and Path(data.root).is_dir()
    return own and not table_path(data).exists()


def _offer_table(data: DataConfig, splits: list[str], *, write: bool) -> bool:
    """Print the class table that the masks suggest, and write it if asked for; returns whether there is one now."""
    path = table_path(data)
    scans = [scan(data, split) for split in splits]
    pairs = sorted({pair for own, _ in scans for pair in own})
    pairs = pairs or scan_undivided(data)[0]
    if not pairs:
        faults = [fault for _, own in scans for fault in own]
        print_problems([*faults, f"{data.root} has no image with a mask."][:1], 0)
        return False
    with progress("reading masks") as show:
        text = propose([pair.mask for pair in pairs], facts_of(data.root), show)
    CONSOLE.print(text, markup=False)
    said = f"{path} does not exist. This would fit its masks: write=true writes it."
    if write:
        path.write_text(text)
        said = f"This table is written to {path}. Give the classes their names before training."
    CONSOLE.print(said, markup=False)
    return write


def _not_divided(data: DataConfig, splits: list[str]) -> str:
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


def _examine(
    config: Config, opened: Mapping[str, DataSet]
) -> tuple[list[str], list[str]]:
    """Problems and warnings of files that can all be read."""
    data, train = config.data, opened["train"]
    found: list[str] = []
    warnings = list(size_warnings(config, train))
    for part in all_parts(data, opened):
        if part.data.name in FILE_SETS:
            warnings += left_out(part.data, part.split)
    try:
        check_labelled(train)
        for split in opened.keys() - {"train"}:
            check_scorable(opened[split], split)
    except DataError as error:
        found.append(str(error))
    if data.name != "synthetic" and len(opened) > 1:
        first, second = (
            [samples.name(index) for index in range(len(samples))]
            for samples in opened.values()
        )
        if shared := shared_sequences(first, second, data.sequence):
            counts = [f"{name} ({a} and {b} images)" for name, (a, b) in shared.items()]
            warnings.append(
                f"{len(shared)} sequence{'s' * (len(shared) > 1)} in both training and validation: {listed(counts)}. "
                "If they are frames of videos, validation flatters the network. `segpipe split` divides by sequence."
            )
    return found, warnings


def _write_page(
    config: Config, splits: list[str], found: list[str], warnings: list[str], out: str
) -> None:
    """Write the page with pictures, if asked for: of all that can be read, if there are problems."""
    from segpipe.datasets.census import take
    from segpipe.run.doctor_page import render

    if not out:
        return
    census = []
    for split in splits:
        samples = open_readable(config.data, split, config.seed)
        if samples is not None:
            with progress(f"reading {split}") as show:
                census.append(take(split, samples, show))
    if not census:
        CONSOLE.print(
            f"{out} is not written: no split has a pair of image and mask.",
            markup=False,
        )
        return
    write_atomically(Path(out), render(config, found, warnings, census).encode())
    CONSOLE.print(f"page: {out}", markup=False)


def _show_content(config: Config, opened: Mapping[str, DataSet]) -> None:
    """Print sizes and an example of each set, and the share of pixels of each class; the sets of a mixture apart."""
    sets = {
        f"{split}: {part.label}" if part.label else split: part.samples
        for split, samples in opened.items()
        for part in samples.parts()
    }
    for name, samples in sets.items():
        counts = image_sizes(samples).most_common(8)
        sizes = [f"{size[0]}x{size[1]} ({times})" for size, times in counts]
        line = f"{name}: {len(samples)} images of {', '.join(sizes)}"
        if (pairs := samples.file_pairs()) and not config.data.mix:
            root = config.data.root
            image, mask = (os.path.relpath(path, root) for path in pairs[0][1:])
            line += f"; {image} with {mask}"
        CONSOLE.print(line, markup=False)
    shares = {name: class_pixels(samples) for name, samples in sets.items()}
    CONSOLE.print(share_table(opened["train"].classes, shares))
