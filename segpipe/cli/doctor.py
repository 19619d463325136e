"""`segpipe doctor`: reports all problems of a data set in one pass, or the content of its splits if it has none."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.cli.commands import Given
from segpipe.data import PHOTOS
from segpipe.data.catalog import PUBLISHED, published, table_path, typed
from segpipe.data.data_set import DataSet
from segpipe.data.order import spaced
from segpipe.data.pairs import Scan, no_split, scan, scan_undivided, split_lists
from segpipe.data.samples import (
    bare_names,
    class_pixels,
    file_samples,
    image_sizes,
    open_readable,
    open_splits,
)
from segpipe.datasets.division import shared_sequences
from segpipe.datasets.problems import Census, missing_labels, problems, take
from segpipe.datasets.proposal import propose
from segpipe.errors import DataError, SegpipeError, listed
from segpipe.files import write_atomically
from segpipe.run.console import CONSOLE, print_problems, progress, share_table
from segpipe.run.launch import check_crop, check_workers, checks, refusals, with_crop
from segpipe.run.pages import overlay, write_page
from segpipe.run.report import densest
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, check
from segpipe.settings.groups import DataConfig

SHOWN_PROBLEMS = 200
SHOWN = 8  # images per kind
WIDTH = 360  # of a picture, in pixels
Shown = tuple[str, list[NDArray[np.uint8]]]  # name; image and overlay, or an empty list


def main(given: Given) -> int:
    """Exit code; `given` holds the values of the command's keys, and the overrides of the settings."""
    config = compose(given["overrides"])
    data = config.data
    if data.name in PUBLISHED and not (data.root or data.mix):
        entry = published(data.name)
        files = [entry.listing, entry.images, *entry.labels]
        CONSOLE.print(
            f"{data.name}: {entry.title}\npage: {entry.page}, {', '.join(entry.downloads)}\n"
            f"data.root: {entry.root}: {', '.join(filter(None, files))}\n{entry.note}"
        )
        return 0
    check(config)
    splits = list(dict.fromkeys(["train", data.split]))
    own = data.name == "folder" and data.root and not data.classes
    is_new = own and Path(data.root).is_dir() and not table_path(data).exists()
    if is_new and not _offer_table(data, splits, write=given["write"]):
        if given["out"]:
            CONSOLE.print(f"{given['out']} was not written: it needs classes.yaml.")
        return DataError.exit_code
    warnings: list[str] = []
    if todo := _not_divided(data, splits):
        whole = scan_undivided(data)
        found = whole.faults  # `segpipe split` refuses these
        print_problems(found, given["lines"])
        CONSOLE.print(f"{'Correct these first. ' * bool(found)}{todo}")
        _write_page(config, ["all"], [*found, todo], warnings, given["out"], whole)
        return 0 if is_new and not found else DataError.exit_code
    with progress("checking files") as show:
        found = list(
            problems(data, splits, progress=show, grouped=bool(given["lines"]))
        )
    opened: dict[str, DataSet] = {}
    if not found:
        both = open_splits(config)
        config = with_crop(config, both.train)
        found = refusals(checks(config, both))
        opened = dict(zip(splits, both, strict=False))
        warnings = _warnings(config, opened)
    print_problems(found, given["lines"])
    _write_page(config, splits, found, warnings, given["out"])
    if found:
        CONSOLE.print(
            f"{len(found)} problem{'s' * (len(found) > 1)} in {data.root or 'data.mix'}"
        )
        return DataError.exit_code
    _show_content(opened)
    for warning in warnings:
        CONSOLE.print(f"Warning: {warning}")
    return 0


def _offer_table(data: DataConfig, splits: list[str], *, write: bool) -> bool:
    """Print a class table proposed from the masks, and write it if `write` is set; returns whether one exists now."""
    path = table_path(data)
    scans = [scan(data, split) for split in splits]
    whole = scan_undivided(data)
    if _not_divided(data, splits):
        scans = [whole]
    pairs = sorted({pair for found in scans for pair in found.pairs}) or whole.pairs
    try:
        if not pairs:
            faults = (fault for found in scans for fault in found.faults)
            raise DataError(next(faults, f"{data.root} has no image with a mask."))
        with progress("reading masks") as show:
            text = propose([pair.mask for pair in pairs], show)
    except DataError as error:
        CONSOLE.print(str(error))
        return False
    CONSOLE.print(text)
    said = f"{path} does not exist. The table above fits its masks: add write=true to write it."
    if write:
        write_atomically(path, text.encode())
        said = f"Wrote this table to {path}. Name the classes before training."
    CONSOLE.print(said)
    return write


def _not_divided(data: DataConfig, splits: list[str]) -> str:
    """What to do with a folder that lacks only its splits; empty for any other."""
    if data.name != "folder" or data.mix or split_lists(Path(data.root)):
        return ""
    if any(scan(data, split)[:2] != ([], [no_split(data, split)]) for split in splits):
        return ""
    return (
        f"{data.root} is not divided into {' and '.join(splits)} yet, so nothing else was checked. Next: `segpipe "
        f"split {typed(data)} val=0.2` (independent photos: by=image, frames of one video: by=tail), then `segpipe "
        f"doctor data=folder {typed(data)}` again."
    )


def _warnings(config: Config, opened: Mapping[str, DataSet]) -> list[str]:
    """What may be intended, or would spoil a training."""
    data = config.data
    tests = [
        partial(check_workers, config, *opened.values()),
        partial(check_crop, config, opened["train"]),
    ]
    warnings = [f"training would refuse this: {reason}" for reason in refusals(tests)]
    whole = published(data.name).splits if data.name in PUBLISHED else {}
    for split, samples in opened.items():
        warnings += missing_labels(split, samples)
        if len(samples) < whole.get(split, 0) and not data.hold_out:
            warnings.append(
                f"{split} has {len(samples)} of {whole[split]} images: is an archive missing?"
            )
    if data.name == "synthetic" or len(opened) == 1:
        return warnings
    first, second = map(bare_names, opened.values())
    if shared := shared_sequences(first, second, data.sequence):
        counts = [f"{name} ({a} and {b} images)" for name, (a, b) in shared.items()]
        warnings.append(
            f"{len(shared)} sequence{'s' * (len(shared) > 1)} in both training and validation: {listed(counts)}. "
            "If they are video frames, validation scores are too high: divide with `segpipe split`, one video with "
            f"by=tail. If they are independent photos, set {PHOTOS}."
        )
    return warnings


def _write_page(
    config: Config,
    splits: Sequence[str],
    problems: Sequence[str],
    warnings: Sequence[str],
    out: str,
    whole: Scan | None = None,
) -> None:
    """Write the page with pictures if `out` is set; with problems, it shows everything that can be read.

    whole: for a folder without splits, all its images, shown instead.
    """
    if not out:
        return
    census = []
    for split in splits:
        if not (whole and whole.pairs):
            samples, _ = open_readable(config.data, split, config.seed)
        else:
            samples = file_samples(config.data, whole)
        if samples is not None:
            with progress(f"reading {split}") as show:
                census.append(take(split, samples, show))
    if not census:
        CONSOLE.print(f"{out} was not written: no split has a pair of image and mask.")
        return
    data, train = config.data, census[0].samples
    batch, fault = ([], []) if problems else _first_batch(config, train)
    write_page(
        "doctor.html.j2",
        Path(out),
        data=data,
        root=Path(data.root).resolve(),
        problems=problems,
        shown_problems=SHOWN_PROBLEMS,
        warnings=[*warnings, *fault],
        splits=[_split(each) for each in census],
        classes=train.classes,
        examples=_examples(census[0]),
        batch=batch,
    )
    CONSOLE.print(f"page: {out}")


def _show_content(opened: Mapping[str, DataSet]) -> None:
    """Print sizes and an example of each set, and the pixel share of each class; sets of a mixture separately."""
    sets = {
        f"{split}: {part.label}" if part.label else split: part.samples
        for split, samples in opened.items()
        for part in samples.parts()
    }
    for name, samples in sets.items():
        example = ""
        for files in samples.file_sets():
            example = f"; {files.pairs[0].image} with {files.pairs[0].mask}"
        CONSOLE.print(
            f"{name}: {len(samples)} images of {listed(_sizes(image_sizes(samples)), 8)}{example}"
        )
    shares = {name: class_pixels(samples) for name, samples in sets.items()}
    CONSOLE.print(share_table(opened["train"].classes, shares))


def _sizes(counts: Counter[tuple[int, int]]) -> list[str]:
    return [f"{size[0]}x{size[1]} ({times})" for size, times in counts.most_common()]


def _split(census: Census) -> dict[str, Any]:
    """Figures of a split, with pictures of images without labels, and of evenly spaced samples."""
    rows, counts = census.rows, census.table
    bare = np.flatnonzero(counts[:, -1] == counts.sum(1))
    return {
        "census": census,
        "sizes": listed(_sizes(Counter(row.size for row in rows)), 4),
        "pixels": counts.sum(0),
        "holders": (counts > 0).sum(0),
        "unlabelled": len(bare),
        "bare": _shown(census, bare[:SHOWN]),
        "grid": _shown(census, spaced(range(len(rows)), SHOWN)),
    }


def _shown(census: Census, places: Iterable[int]) -> list[Shown]:
    """Names and pictures of rows; no pictures for a row with a problem, such as an id without a class."""
    samples = census.samples
    found: list[Shown] = []
    for place in places:
        index, pictures = census.rows[place].place, []
        with suppress(DataError):
            pictures = overlay(*samples.read(index), samples.classes.palette, WIDTH)
        found.append((samples.name(index), pictures))
    return found


def _examples(census: Census) -> list[Shown]:
    """An image crop per class, where most of its pixels lie, so that one can recognize the class."""
    samples = census.samples
    found: list[Shown] = []
    for k, name in enumerate(samples.classes.names):
        pixels = census.table[:, k]
        with suppress(DataError):  # a damaged file
            if pixels.any():
                image, target = samples.read(census.rows[int(pixels.argmax())].place)
                part = densest(target == k)
                own = np.where(target == k, target, IGNORE_INDEX)[part]
                found.append(
                    (name, overlay(image[part], own, samples.classes.palette, WIDTH))
                )
    return found


def _first_batch(config: Config, samples: DataSet) -> tuple[list[Shown], list[str]]:
    """Pictures of the first training shard, loaded by one loader process, or a message why there are none."""
    from segpipe.train.batches import Sampling

    plain = replace(config, data=replace(config.data, balance=0.0))
    try:
        shard = Sampling(plain, samples).first_shard(min(config.data.workers, 1))
    except SegpipeError as error:
        return [], [str(error)]
    rows = zip(
        map(samples.name, shard.index.tolist()),
        shard.image.numpy(),
        shard.target.numpy(),
        strict=True,
    )
    return [
        (name, overlay(image, target, samples.classes.palette, WIDTH))
        for name, image, target in rows
    ], []
