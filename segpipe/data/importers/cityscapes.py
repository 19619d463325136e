"""Cityscapes: leftImg8bit and gtFine with the 19 classes of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable, Color, MaskTable
from segpipe.data.importers.imported import ImportEntry, ImportPlan, refuse_names
from segpipe.data.masks import read_target
from segpipe.errors import DataError

# Name, id in *_labelIds.png, RGB. Source: labels.py of cityscapesScripts; all other ids are not evaluated.
CITYSCAPES: tuple[tuple[str, int, Color], ...] = (
    ("road", 7, (128, 64, 128)), ("sidewalk", 8, (244, 35, 232)), ("building", 11, (70, 70, 70)),
    ("wall", 12, (102, 102, 156)), ("fence", 13, (190, 153, 153)), ("pole", 17, (153, 153, 153)),
    ("traffic light", 19, (250, 170, 30)), ("traffic sign", 20, (220, 220, 0)), ("vegetation", 21, (107, 142, 35)),
    ("terrain", 22, (152, 251, 152)), ("sky", 23, (70, 130, 180)), ("person", 24, (220, 20, 60)),
    ("rider", 25, (255, 0, 0)), ("car", 26, (0, 0, 142)), ("truck", 27, (0, 0, 70)), ("bus", 28, (0, 60, 100)),
    ("train", 31, (0, 80, 100)), ("motorcycle", 32, (0, 0, 230)), ("bicycle", 33, (119, 11, 32)),
)  # fmt: skip
LAST_CITYSCAPES_ID = 33


def cityscapes(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for leftImg8bit and gtFine (or gtCoarse) with the 19 classes of the benchmark; all other ids are ignored.

    The test split is left out: its masks are empty.
    """
    known = tuple(name for name, _, _ in CITYSCAPES)
    refuse_names(names, known)
    train_ids = dict.fromkeys([*range(LAST_CITYSCAPES_ID + 1), IGNORE_INDEX], IGNORE_INDEX)
    train_ids |= {number: place for place, (_, number, _) in enumerate(CITYSCAPES)}
    palette = tuple(color for _, _, color in CITYSCAPES)
    table = MaskTable(ClassTable("cityscapes", known, palette, train_ids), kind="ids")
    kind = next((kind for kind in ("gtFine", "gtCoarse") if (source / kind).is_dir()), None)
    if kind is None or not (source / "leftImg8bit").is_dir():
        raise DataError(f"{source} has no folders leftImg8bit and gtFine. Set source to the folder above them.")
    entries, faults = [], list[str]()
    for mask in sorted((source / kind).glob(f"*/*/*_{kind}_labelIds.png")):
        split, city = mask.parts[-3:-1]
        stem = mask.name.removesuffix(f"_{kind}_labelIds.png")
        image = source / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png"
        if split == "test":
            continue
        if image.is_file():
            entries.append(ImportEntry(split, f"{city}/{stem}", image, partial(read_target, table, str(mask))))
        else:
            faults.append(f"{mask} has no image {image}.")
    return ImportPlan(known, entries, palette, faults)
