"""`segpipe doctor`: all problems of a data set in one pass, or the content of its splits if there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from segpipe.data.catalog import table_path
from segpipe.data.data_set import DataSet
from segpipe.data.folders import no_split, split_lists
from segpipe.data.pairs import scan, scan_undivided
from segpipe.data.samples import (
    class_pixels,
    image_sizes,
    open_readable,
    open_splits,
)
from segpipe.datasets.division import shared_sequences
from segpipe.datasets.problems import missing_labels, problems
from segpipe.datasets.proposal import propose
from segpipe.errors import DataError, listed
from segpipe.files import write_atomically
from segpipe.run.console import CONSOLE, print_problems, progress, share_table
from segpipe.run.preflight import check_crop, check_workers, checks, refusals
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, check
from segpipe.settings.groups import DataConfig


def main(given: dict[str, Any]) -> int:
    """Exit code; `given` are the values of the command's keys, and the overrides of the settings."""
    config = compose(given["overrides"])
    check(config, world_size=1)
    data = config.data
    splits = list(dict.fromkeys(["train", data.split]))
    is_new = _lacks_table(data)
    if is_new and not _offer_table(data, splits, write=given["write"]):
        return DataError.exit_code
    if todo := _not_divided(data, splits):
        unpaired = scan_undivided(data)[1]  # `segpipe split` refuses these
        print_problems(unpaired, given["lines"])
        CONSOLE.print(todo)
        _write_page(config, splits, [*unpaired, todo], [], given["out"])
        return 0 if is_new and not unpaired else DataError.exit_code
    grouped = bool(given["lines"])
    with progress("checking files") as show:
        found = list(problems(data, splits, progress=show, grouped=grouped))
    opened: dict[str, DataSet] = {}
    warnings: list[str] = []
    if not found:
        both = open_splits(config)
        found = refusals(checks(config, both))
        opened = dict(zip(splits, both, strict=False))
        warnings = _warnings(config, opened)
    print_problems(found, given["lines"])
    _write_page(config, splits, found, warnings, given["out"])
    if found:
        plural = "s" * (len(found) > 1)
        CONSOLE.print(f"{len(found)} problem{plural} in {data.root or 'data.mix'}")
        return DataError.exit_code
    _show_content(opened)
    for warning in warnings:
        CONSOLE.print(f"Warning: {warning}")
    return 0


def _lacks_table(data: DataConfig) -> bool:
    own = data.name == "folder" and not data.classes and Path(data.root).is_dir()
    return own and not table_path(data).exists()


def _offer_table(data: DataConfig, splits: list[str], *, write: bool) -> bool:
    """Print the class table that the masks suggest, and write it if asked for; returns whether there is one now."""
    path = table_path(data)
    scans = [scan(data, split) for split in splits]
    pairs = sorted({pair for found in scans for pair in found.pairs})
    pairs = pairs or scan_undivided(data).pairs
    if not pairs:
        faults = [fault for found in scans for fault in found.faults]
        CONSOLE.print([*faults, f"{data.root} has no image with a mask."][0])
        return False
    with progress("reading masks") as show:
        text = propose([pair.mask for pair in pairs], show)
    CONSOLE.print(text)
    said = f"{path} does not exist. This would fit its masks: write=true writes it."
    if write:
        path.write_text(text)
        said = f"This table is written to {path}. Give the classes their names before training."
    CONSOLE.print(said)
    return write


def _not_divided(data: DataConfig, splits: list[str]) -> str:
    """What to do with a folder that has all but its splits; empty for any other."""
    root = Path(data.root)
    if data.name != "folder" or data.mix or split_lists(root):
        return ""
    if any(scan(data, split)[:2] != ([], [no_split(root, split)]) for split in splits):
        return ""
    return (
        f"{root} is not divided into {' and '.join(splits)} yet, so no more was checked. Next: `segpipe split "
        f"data.root={root} val=0.2`, then `segpipe doctor data=folder data.root={root}` again."
    )


def _warnings(config: Config, opened: Mapping[str, DataSet]) -> list[str]:
    """What may be meant, or would spoil a training."""
    data, train = config.data, opened["train"]
    refused = refusals(
        partial(check, config, train) for check in (check_workers, check_crop)
    )
    warnings = [f"training would refuse this: {reason}" for reason in refused]
    for split, samples in opened.items():
        warnings += missing_labels(split, samples)
    if data.name == "synthetic" or len(opened) == 1:
        return warnings
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
    return warnings


def _write_page(
    config: Config,
    splits: Sequence[str],
    found: list[str],
    warnings: list[str],
    out: str,
) -> None:
    """Write the page with pictures, if asked for: of all that can be read, if there are problems."""
    from segpipe.datasets.census import take
    from segpipe.run.doctor_page import render

    if not out:
        return
    census = []
    for split in splits:
        samples, _ = open_readable(config.data, split, config.seed)
        if samples is not None:
            with progress(f"reading {split}") as show:
                census.append(take(split, samples, show))
    if not census:
        CONSOLE.print(f"{out} is not written: no split has a pair of image and mask.")
        return
    write_atomically(Path(out), render(config, found, warnings, census).encode())
    CONSOLE.print(f"page: {out}")


def _show_content(opened: Mapping[str, DataSet]) -> None:
    """Print sizes and an example of each set, and the share of pixels of each class; the sets of a mixture apart."""
    sets = {
        f"{split}: {part.label}" if part.label else split: part.samples
        for split, samples in opened.items()
        for part in samples.parts()
    }
    for name, samples in sets.items():
        counts = image_sizes(samples).most_common(8)
        sizes = [f"{size[0]}x{size[1]} ({times})" for size, times in counts]
        example = ""
        for files in samples.file_sets():
            example = f"; {files.pairs[0].image} with {files.pairs[0].mask}"
        CONSOLE.print(f"{name}: {len(samples)} images of {', '.join(sizes)}{example}")
    shares = {name: class_pixels(samples) for name, samples in sets.items()}
    CONSOLE.print(share_table(opened["train"].classes, shares))
