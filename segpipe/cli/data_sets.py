"""`segpipe pack`, `split` and `import`: prepare a data set for training."""

import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from segpipe.cli.commands import COMMANDS, Given
from segpipe.data.catalog import table_path
from segpipe.data.data_set import DataSet
from segpipe.data.pairs import Scan, scan, scan_undivided, split_lists
from segpipe.data.readers import threaded
from segpipe.data.samples import file_samples, open_samples, over, sequence
from segpipe.datasets.division import divide
from segpipe.datasets.exported import (
    BACKGROUND,
    BACKGROUND_TOO,
    IGNORED,
    INCOMPLETE,
    Export,
    write_import,
)
from segpipe.datasets.importers import IMPORTERS
from segpipe.errors import ConfigError, DataError, did_you_mean, listed
from segpipe.files import write_atomically
from segpipe.run.console import CONSOLE, print_problems, progress, share_table
from segpipe.settings.compose import complete, compose, with_settings
from segpipe.settings.config import Config, check


def pack(given: Given) -> int:
    """Exit code. Reads every sample once, which adds missing ones to the pack."""
    config = compose(given["overrides"])
    if config.data.pack == "off":
        config.data.pack = "auto"
    check(config)
    found = [
        files
        for split in dict.fromkeys(("train", config.data.split))
        for files in open_samples(config.data, split, config.seed).file_sets()
    ]
    if not found:
        raise ConfigError(
            "data.mix has no data set in files, so there is nothing to pack."
        )
    work = [(samples, index) for samples in found for index in range(len(samples))]
    with progress("packing", len(work)) as show:
        threaded(_read, work, show)
    use: dict[str, Counter[str]] = defaultdict(Counter)
    for samples in found:
        if samples.pack is not None:
            use[samples.pack.folder] += samples.pack.use()
    for folder, counts in use.items():
        CONSOLE.print(
            f"{folder}: {counts['intact']} samples intact, {counts['replaced']} replaced, {counts['added']} added"
        )
    return 0


def _read(place: tuple[DataSet, int]) -> None:
    samples, index = place
    samples.read(index)


def split(given: Given) -> int:
    """Exit code. Divides a folder of images into training and validation, whole sequences at a time."""
    data = with_settings(Config(), {"data.name": "folder", **given}).data
    try:
        re.compile(given["pattern"])
    except re.error as error:
        raise ConfigError(
            f"pattern = {given['pattern']!r} is not a regular expression: {error}."
        ) from error
    root = Path(data.root)
    if not root.is_dir():
        raise ConfigError(
            f"data.root = {data.root!r} is not a folder. Set data.root=FOLDER."
        )
    lists = split_lists(root)
    rewritten = ("train.txt", "val.txt") if given["replace"] else ()
    for name in lists:
        if name.startswith(("train.", "val.")) and name not in rewritten:
            raise ConfigError(
                f"{root / name} already divides the images. Set replace=true to overwrite train.txt and val.txt."
            )
    found, test = scan_undivided(data), Scan([], [], [], [])
    if {"test.csv", "test.txt"} & {*lists}:
        test = scan(data, "test")
    if faults := found.faults + test.faults:
        more = f" ({len(faults)} problems in all)" if len(faults) > 1 else ""
        raise DataError(f"{faults[0]}{more}")
    kept = {os.path.realpath(pair.image) for pair in test.pairs}
    pairs = [p for p in found.pairs if os.path.realpath(p.image) not in kept]
    if left_out := len(found.pairs) - len(pairs):
        CONSOLE.print(f"{left_out} images of the test split are left out.")
    names, pixels = [pair.name for pair in pairs], None
    if table_path(data).is_file():
        samples = file_samples(data, found._replace(pairs=pairs))
        with progress("reading masks", len(names)) as show:
            pixels = np.stack(over(samples, samples.counts, range(len(samples)), show))
    ways = {key: given[key] for key in ("val", "by", "seed", "pattern")}
    chosen = np.array(divide(names, **ways, pixels=pixels))
    sides = {"train": ~chosen, "val": chosen}
    for side, places in sides.items():
        own = [*compress(names, places)]
        path = root / f"{side}.txt"
        write_atomically(path, "".join(f"{name}\n" for name in own).encode())
        counts = Counter(sequence(name, given["pattern"]) for name in own)
        shown = [f"{name} ({count})" for name, count in counts.most_common()]
        CONSOLE.print(
            f"{path}: {len(own)} images ({len(own) / len(names):.1%}) of {len(counts)} "
            f"sequence{'s' * (len(counts) != 1)}: {listed(shown, 10)}"
        )
    if given["by"] == "sequence" and abs(chosen.mean() - given["val"]) > 0.05:
        CONSOLE.print(
            f"val has {chosen.mean():.0%} of the images, not {given['val']:.0%}: sequences stay whole, and both sides "
            "should have each class of classes.yaml. To get closer, repeat with replace=true and by=tail (the last "
            "frames of each sequence), by=image (independent photos), or pattern=REGEX for shorter sequences."
        )
    if pixels is None:
        CONSOLE.print(
            f"{table_path(data)} does not exist, so the division ignores classes: see segpipe doctor."
        )
    else:
        shares = {side: pixels[places].sum(axis=0) for side, places in sides.items()}
        CONSOLE.print(share_table(samples.classes, shares))
    return 0


def import_labels(given: Given) -> int:
    """Exit code. Converts labels of another format to a folder data set."""
    source, out, name = Path(given["source"]), Path(given["out"]), given["format"]
    wanted = _known_as(given["names"])
    if not source.exists():
        raise ConfigError(
            f"source = {source} does not exist. Set source to the folder of the labels."
        )
    try:
        export = IMPORTERS[name](source, wanted)
    except (*INCOMPLETE, OSError) as error:
        raise DataError(
            f"{source} is not a complete {name} export ({error!r}). Export it again."
        ) from error
    divided = sorted({item.split for item in export.items} - {""})
    if given["val"] and divided:
        raise ConfigError(
            f"val = {given['val']}, but {source} has the splits {', '.join(divided)}. Leave val out."
        )
    ignored = _ignored(given["ignore"], export)
    if given["background"] == "ignore":
        ignored.append(BACKGROUND)
    labels = {BACKGROUND, *export.declared, *export.drawn} - {BACKGROUND_TOO, *IGNORED}
    for label in ignored:
        if label not in {*labels, *IGNORED}:
            raise ConfigError(
                f"ignore = {label}, but the labels are {listed(sorted(labels))}.{did_you_mean(label, labels)}"
            )
    names, ids = export.classes(wanted, ignored)
    origin = {
        "format": name,
        "source": str(source.resolve()),
        "names": wanted,
        "ignored": ignored,
    }
    with progress("writing masks") as show:
        try:
            faults, written = write_import(
                export,
                names,
                ids,
                out,
                origin,
                copy=given["copy"],
                skip=given["skip"],
                progress=show,
            )
        except OSError as error:  # a full disk, say
            raise DataError(
                f"out = {out} cannot be written: {error}. Run the same command again to continue."
            ) from error
    print_problems(faults, given["lines"])
    if not written:
        fix = "or set skip=true to skip them"
        if given["skip"]:
            fix = "no image is left without them"
        CONSOLE.print(
            f"{len(faults)} problem{'s' * (len(faults) > 1)}: {out} has no classes.yaml yet. Fix them and repeat the "
            f"command (remove {out} first if names or ignore change); {fix}."
        )
        return DataError.exit_code
    counts = [f"{side or 'no split'}: {count}" for side, count in written.items()]
    left_out = f"; skipped: the {len(faults)} above" if faults else ""
    CONSOLE.print(
        f"{out}: {len(names)} classes ({listed(names, 30)}); images: {', '.join(counts)}{left_out}"
    )
    here = shlex.quote(f"data.root={out}")
    if given["val"]:
        CONSOLE.print(f"segpipe split {here} val={given['val']}")
        own = {"data.root": out, "val": given["val"], "replace": True}
        split(complete(own, COMMANDS["split"].known))
    elif "" in written:
        CONSOLE.print(
            f"Next: segpipe split {here}  # photos: by=image; one video: by=tail"
        )
    CONSOLE.print(f"Then: segpipe doctor data=folder {here}")
    return 0


def _known_as(labels: Sequence[str]) -> list[str]:
    return [BACKGROUND if label == BACKGROUND_TOO else label for label in labels]


def _ignored(given: Sequence[str], export: Export) -> list[str]:
    """The labels to ignore, given by name or as one color: [0,0,0]."""
    if len(given) != 3 or not all(part.isdigit() for part in given):
        return _known_as(given)
    red, green, blue = map(int, given)
    if label := export.colors.get((red, green, blue)):
        return _known_as([label])
    known = [f"{[*color]} {label}" for color, label in export.colors.items()]
    raise ConfigError(
        f"ignore = {[red, green, blue]} is not the color of a label: {listed(known)}."
    )
