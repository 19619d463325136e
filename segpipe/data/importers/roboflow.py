"""Roboflow: COCO segmentation or semantic masks, in a folder per split."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable, MaskTable
from segpipe.data.folders import SUFFIXES
from segpipe.data.importers.coco import NAMES as COCO_FILES
from segpipe.data.importers.coco import coco
from segpipe.data.importers.imported import ImportEntry, ImportPlan, refuse_names, split_name
from segpipe.data.masks import read_target
from segpipe.errors import DataError


def roboflow(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for an export of Roboflow: COCO segmentation, or semantic masks with a _classes.csv per split."""
    if any(path for folder in ("", "*/") for path in source.glob(f"{folder}{COCO_FILES[0]}")):
        return coco(source, names, background)
    tables = sorted([*source.glob("_classes.csv"), *source.glob("*/_classes.csv")])
    if not tables:
        raise DataError(
            f"{source} has neither _annotations.coco.json nor _classes.csv. Export from Roboflow as COCO Segmentation "
            "or as Semantic Segmentation Masks."
        )
    classes: dict[Path, dict[int, str]] = {path: _roboflow_classes(path) for path in tables}
    known = tuple(dict.fromkeys(name for each in classes.values() for name in each.values()))
    refuse_names(names, known)
    entries, faults = [], list[str]()
    known_images = set[Path]()
    for path, ids in classes.items():
        train_ids = {IGNORE_INDEX: IGNORE_INDEX} | {number: known.index(name) for number, name in ids.items()}
        table = MaskTable(ClassTable("roboflow", known, (), train_ids), kind="ids")
        split = "" if path.parent == source else split_name(path.parent.name)
        for mask in sorted(path.parent.glob("*_mask.png")):
            stem = mask.name.removesuffix("_mask.png")
            image = next((each for s in SUFFIXES if (each := path.parent / f"{stem}{s}").is_file()), None)
            if image is None:
                faults.append(f"{mask} has no image {stem}.jpg.")
                continue
            known_images.add(image)
            entries.append(ImportEntry(split, stem, image, partial(read_target, table, str(mask))))
        others = {each for each in path.parent.iterdir() if each.suffix.lower() in SUFFIXES} - known_images
        faults += [
            f"{each} has no mask {each.stem}_mask.png." for each in sorted(others) if not each.stem.endswith("_mask")
        ]
    return ImportPlan(known, entries, faults=faults)


def _roboflow_classes(path: Path) -> dict[int, str]:
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), skipinitialspace=True))[1:]
        return {int(row[0]): row[1].strip() for row in rows if row}
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} ({error}) needs rows such as `0, background` below its header.") from None
