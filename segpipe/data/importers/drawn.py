"""Masks that are drawn as pictures: Pascal VOC, CVAT's `Segmentation mask 1.1` with lists, and Roboflow's folders."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable, MaskTable, published
from segpipe.data.folders import SUFFIXES
from segpipe.data.importers.coco import NAMES as COCO_FILES
from segpipe.data.importers.coco import coco
from segpipe.data.importers.imported import (
    IGNORED,
    ImportEntry,
    ImportPlan,
    refuse_names,
    split_name,
)
from segpipe.data.masks import read_target
from segpipe.errors import DataError
from segpipe.files import files_below


def voc(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for JPEGImages, SegmentationClass and ImageSets/Segmentation, with labelmap.txt for other classes.

    `names` and `background` cannot change masks that are drawn; other `names` are refused. Raises DataError.
    """
    root = next(
        (
            path
            for path in (source, *sorted(source.glob("**/VOC20*")))
            if (path / "SegmentationClass").is_dir()
        ),
        None,
    )
    if root is None:
        raise DataError(
            f"{source} has no folder SegmentationClass. Set source to the folder above it."
        )
    labelmap = root / "labelmap.txt"
    table = _labelmap(labelmap) if labelmap.is_file() else published("voc").table
    refuse_names(names, table.classes.names)
    lists = sorted(root.glob("ImageSets/Segmentation/*.txt"))
    whole = {path.stem for path in lists} & {
        "train",
        "val",
    }  # then trainval is their union
    pictures = root / "JPEGImages"
    images = {
        path.relative_to(pictures).with_suffix("").as_posix(): path
        for path in files_below(pictures)
        if path.suffix.lower() in SUFFIXES
    }
    entries, faults = [], list[str]()
    for path in lists:
        if whole and path.stem == "trainval":
            continue
        for stem in filter(
            None, map(str.strip, path.read_text(encoding="utf-8-sig").splitlines())
        ):
            image, mask = images.get(stem), root / "SegmentationClass" / f"{stem}.png"
            if image is None or not mask.is_file():
                faults.append(
                    f"{path} lists {stem}, which has no {'image in JPEGImages' if image is None else mask}."
                )
                continue
            split = "" if path.stem == "default" else split_name(path.stem)
            entries.append(
                ImportEntry(split, stem, image, partial(read_target, table, str(mask)))
            )
    if not lists:
        faults.append(
            f"{root} has no list in ImageSets/Segmentation. Without lists, data=folder reads the two folders."
        )
    return ImportPlan(table.classes.names, entries, table.classes.palette, faults)


def _labelmap(path: Path) -> MaskTable:
    """Table of the colors in CVAT's labelmap.txt, whose lines are `name:r,g,b:parts:actions`."""
    rows = [
        line.split(":")
        for line in path.read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    colors = {
        name: tuple(int(part) for part in color.split(",")) for name, color, *_ in rows
    }
    names = tuple(name for name in colors if name not in IGNORED)
    table = {
        (color[0], color[1], color[2]): names.index(name)
        if name in names
        else IGNORE_INDEX
        for name, color in colors.items()
    }
    if len(table) < len(colors):
        raise DataError(
            f"{path} gives two labels one color, so the masks cannot tell them apart. Export them again."
        )
    palette = tuple(
        color
        for name in names
        for color, train in table.items()
        if train == names.index(name)
    )
    return MaskTable(ClassTable("voc", names, palette, {}), kind="colors", colors=table)


def roboflow(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for an export of Roboflow: COCO segmentation, or semantic masks with a _classes.csv per split."""
    if any(
        path
        for folder in ("", "*/")
        for path in source.glob(f"{folder}{COCO_FILES[0]}")
    ):
        return coco(source, names, background)
    tables = sorted([*source.glob("_classes.csv"), *source.glob("*/_classes.csv")])
    if not tables:
        raise DataError(
            f"{source} has neither _annotations.coco.json nor _classes.csv. Export from Roboflow as COCO Segmentation "
            "or as Semantic Segmentation Masks."
        )
    classes: dict[Path, dict[int, str]] = {
        path: _roboflow_classes(path) for path in tables
    }
    known = tuple(
        dict.fromkeys(name for each in classes.values() for name in each.values())
    )
    refuse_names(names, known)
    entries, faults = [], list[str]()
    known_images = set[Path]()
    for path, ids in classes.items():
        train_ids = {IGNORE_INDEX: IGNORE_INDEX} | {
            number: known.index(name) for number, name in ids.items()
        }
        table = MaskTable(ClassTable("roboflow", known, (), train_ids), kind="ids")
        split = "" if path.parent == source else split_name(path.parent.name)
        for mask in sorted(path.parent.glob("*_mask.png")):
            stem = mask.name.removesuffix("_mask.png")
            image = next(
                (
                    each
                    for s in SUFFIXES
                    if (each := path.parent / f"{stem}{s}").is_file()
                ),
                None,
            )
            if image is None:
                faults.append(f"{mask} has no image {stem}.jpg.")
                continue
            known_images.add(image)
            entries.append(
                ImportEntry(split, stem, image, partial(read_target, table, str(mask)))
            )
        others = {
            each for each in path.parent.iterdir() if each.suffix.lower() in SUFFIXES
        } - known_images
        faults += [
            f"{each} has no mask {each.stem}_mask.png."
            for each in sorted(others)
            if not each.stem.endswith("_mask")
        ]
    return ImportPlan(known, entries, faults=faults)


def _roboflow_classes(path: Path) -> dict[int, str]:
    try:
        rows = list(
            csv.reader(
                path.read_text(encoding="utf-8-sig").splitlines(), skipinitialspace=True
            )
        )[1:]
        return {int(row[0]): row[1].strip() for row in rows if row}
    except (ValueError, IndexError) as error:
        raise DataError(
            f"{path} ({error}) needs rows such as `0, background` below its header."
        ) from None
