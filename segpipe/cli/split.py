"""`segpipe split`: divides a folder of images into training and validation, whole sequences at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from segpipe.data.catalog import table_path
from segpipe.data.pairs import scan_undivided
from segpipe.data.samples import file_samples, image_pixels, sequence
from segpipe.datasets.division import divide
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
    replaced = {".txt"} if given["replace"] else set()
    for path in (
        root / f"{split}{end}" for split in SPLITS for end in (".txt", ".csv")
    ):
        if path.exists() and path.suffix not in replaced:
            raise ConfigError(
                f"{path} already divides the images. Set replace=true to write train.txt and val.txt anew."
            )
    pairs, faults = scan_undivided(data)
    if faults:
        more = f" ({len(faults)} problems in all)" if len(faults) > 1 else ""
        raise DataError(f"{faults[0]}{more}")
    names, pixels = [pair.name for pair in pairs], None
    if table_path(data).is_file():
        samples = file_samples(data, pairs)
        rows = []
        with progress("reading masks", len(pairs)) as show:
            for row in image_pixels(samples, range(len(samples))):
                rows.append(row)
                show(len(rows))
        pixels = np.stack(rows)
    ways = {key: given[key] for key in ("val", "by", "seed", "pattern")}
    chosen = np.array(divide(names, **ways, pixels=pixels))
    for split, side in zip(SPLITS, (~chosen, chosen), strict=True):
        own = [names[place] for place in np.flatnonzero(side)]
        path = root / f"{split}.txt"
        write_atomically(path, "".join(f"{name}\n" for name in own).encode())
        counts = Counter(sequence(name, given["pattern"]) for name in own)
        shown = [f"{name} ({count})" for name, count in counts.most_common()]
        CONSOLE.print(
            f"{path}: {len(own)} images ({len(own) / len(names):.1%}) of {len(counts)} "
            f"sequence{'s' * (len(counts) != 1)}: {listed(shown, 10)}",
            markup=False,
        )
    if pixels is None:
        CONSOLE.print(
            f"{table_path(data)} does not exist, so classes did not count: see segpipe doctor.",
            markup=False,
        )
    else:
        shares = {
            "train": pixels[~chosen].sum(axis=0),
            "val": pixels[chosen].sum(axis=0),
        }
        CONSOLE.print(share_table(samples.classes, shares))
    return 0
