"""Pascal VOC and CVAT's `Segmentation mask 1.1`: masks that are drawn as pictures, with lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable, MaskTable
from segpipe.data.folders import SUFFIXES
from segpipe.data.masks import read_target
from segpipe.datasets.importers.exported import Export, Item, Target, split_name
from segpipe.errors import DataError
from segpipe.files import files_below


def voc(source: Path, names: Sequence[str]) -> Export:
    """Labels of JPEGImages, SegmentationClass and ImageSets/Segmentation.

    labelmap.txt names the colors; without it, `names` are those of the ids 0, 1, 2, ...
    """
    roots = [source, *sorted(source.glob("**/VOC20*"))]
    roots = [path for path in roots if (path / "SegmentationClass").is_dir()]
    if not roots:
        raise DataError(
            f"{source} has no folder SegmentationClass. Set source to the folder above it."
        )
    root, export = roots[0], Export()
    table = _table(root / "labelmap.txt", names)
    export.declared += table.classes.names
    export.drawn |= set(export.declared)
    pictures = root / "JPEGImages"
    images = {
        path.relative_to(pictures).with_suffix("").as_posix(): path
        for path in files_below(pictures)
        if path.suffix.lower() in SUFFIXES
    }
    lists = sorted(root.glob("ImageSets/Segmentation/*.txt"))
    if {"train", "val"} & {path.stem for path in lists}:  # trainval is their union
        lists = [path for path in lists if path.stem != "trainval"]
    if not lists:
        export.faults.append(
            f"{root} has no list in ImageSets/Segmentation. Without lists, data=folder reads the two folders."
        )
    for path in lists:
        for stem in path.read_text(encoding="utf-8-sig").splitlines():
            mask = root / "SegmentationClass" / f"{stem.strip()}.png"
            image = images.get(stem.strip())
            if image and mask.is_file():
                paint = partial(_paint, mask, table)
                item = Item(split_name(path.stem), stem.strip(), image, paint)
                export.items.append(item)
            elif stem.strip():
                missing = mask if image else "image in JPEGImages"
                export.faults.append(f"{path} lists {stem}, which has no {missing}.")
    return export


def _paint(path: Path, table: MaskTable, ids: Mapping[str, int]) -> Target:
    trains = [ids.get(name, IGNORE_INDEX) for name in table.classes.names]
    lut = np.array(trains + [IGNORE_INDEX] * (256 - len(trains)), np.uint8)
    return lut[read_target(table, str(path))]


def _table(path: Path, names: Sequence[str]) -> MaskTable:
    """The colors in CVAT's labelmap.txt, whose lines are `name:r,g,b:parts:actions`, or else the ids of `names`."""
    if not path.is_file():
        if not names:
            raise DataError(
                f"{path} does not exist, so nothing says what the masks hold. Set names=[...] to the names of the ids "
                "0, 1, 2, ... If this is Pascal VOC itself, data=voc reads it as it is."
            )
        ids = {place: place for place in [*range(len(names)), IGNORE_INDEX]}
        return MaskTable(ClassTable("voc", tuple(names), (), ids), kind="ids")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    rows = [line.split(":") for line in lines if not line.startswith("#")]
    colors = {}
    for train, (_, color, *_) in enumerate(rows):
        red, green, blue = map(int, color.split(","))
        colors[red, green, blue] = train
    if len(colors) < len(rows):
        raise DataError(
            f"{path} gives two labels one color, so the masks cannot tell them apart. Export them again."
        )
    classes = ClassTable("voc", tuple(row[0] for row in rows), tuple(colors), {})
    return MaskTable(classes, kind="colors", colors=colors)
