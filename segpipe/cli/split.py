"""`segpipe split`: divides a folder of images into training and validation, whole sequences at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe.data.catalog import table_path
from segpipe.data.division import divide
from segpipe.data.pairs import Pair, scan_undivided
from segpipe.data.samples import (
    class_pixels,
    file_samples,
    image_pixels,
    open_samples,
    sequence,
)
from segpipe.errors import ConfigError, DataError, listed
from segpipe.files import write_atomically
from segpipe.run.console import CONSOLE, progress, share_table
from segpipe.settings.arguments import read
from segpipe.settings.config import SETTINGS
from segpipe.settings.groups import DataConfig

SPLITS = ("train", "val")


def main(given: dict[str, Any]) -> int:
    """Exit code; `given` are the values of the command's keys."""
    values = {
        key.removeprefix("data."): read(SETTINGS[key], given[key])
        for key in given
        if key.startswith("data.")
    }
    data = DataConfig(name="folder", **values)
    root = Path(data.root)
    if not data.root or not root.is_dir():
        raise ConfigError(
            f"data.root = {data.root!r} is not a folder. Set data.root=FOLDER."
        )
    listings = [root / f"{split}.txt" for split in SPLITS]
    for path in [*listings, *(path.with_suffix(".csv") for path in listings)]:
        if path.exists() and not (given["replace"] and path.suffix == ".txt"):
            raise ConfigError(
                f"{path} already divides the images. Set replace=true to write train.txt and val.txt anew."
            )
    pairs, faults = scan_undivided(data)
    if faults:
        raise DataError(
            f"{faults[0]}{f' ({len(faults)} problems in all)' if len(faults) > 1 else ''}"
        )
    names = [pair.name for pair in pairs]
    pixels = class_pixels_of(data, pairs) if table_path(data).is_file() else None
    chosen = divide(
        names,
        val=given["val"],
        by=given["by"],
        seed=given["seed"],
        pattern=given["pattern"],
        pixels=pixels,
    )
    for path, side in zip(listings, (False, True), strict=True):
        stems = [
            name for name, of_val in zip(names, chosen, strict=True) if of_val == side
        ]
        write_atomically(path, "".join(f"{stem}\n" for stem in stems).encode())
        CONSOLE.print(summary(path, stems, len(names), given["pattern"]), markup=False)
    if pixels is None:
        CONSOLE.print(
            f"{table_path(data)} does not exist, so classes did not count: see segpipe doctor.",
            markup=False,
        )
    else:
        opened = {split: open_samples(data, split, 0) for split in SPLITS}
        shares = {split: class_pixels(samples) for split, samples in opened.items()}
        CONSOLE.print(share_table(opened["train"].classes, shares))
    return 0


def class_pixels_of(data: DataConfig, pairs: list[Pair]) -> NDArray[np.int64]:
    """Pixels of each class in each mask, int64 (N, C)."""
    samples = file_samples(data, pairs)
    counts = []
    with progress("reading masks", len(pairs)) as show:
        for row in image_pixels(samples, range(len(samples))):
            counts.append(row)
            show(len(counts))
    return np.stack(counts)


def summary(path: Path, stems: list[str], num: int, pattern: str) -> str:
    """What a list holds: share of the images, and sequences with their number of images."""
    counts = Counter(sequence(stem, pattern) for stem in stems)
    shown = listed([f"{name} ({count})" for name, count in counts.most_common()], 10)
    plural = "sequence" if len(counts) == 1 else "sequences"
    return f"{path}: {len(stems)} images ({len(stems) / num:.1%}) of {len(counts)} {plural}: {shown}"
