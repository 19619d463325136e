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
    export.colors |= {
        color: table.classes.names[train] for color, train in table.colors.items()
    }
    pictures = root / "JPEGImages"
    images = {}
    for path in map(Path, files_below(pictures)):
        if path.suffix.lower() in SUFFIXES:
            stem = path.relative_to(pictures).with_suffix("")
            images[stem.as_posix()] = path

    lists = sorted(root.glob("ImageSets/Segmentation/*.txt"))
    if {"train", "val"} & {path.stem for path in lists}:  # trainval is their union
        lists = [path for path in lists if path.stem != "trainval"]
    if not lists:
        export.faults.append(
            f"{root} has no list in ImageSets/Segmentation. Without lists, data=folder reads the two folders."
        )

    for path in lists:
        split = split_name(path.stem)
        for line in path.read_text(encoding="utf-8-sig").splitlines():
            name = line.strip()
            mask = root / "SegmentationClass" / f"{name}.png"
            picture = images.get(name)
            if picture and mask.is_file():
                paint = partial(_paint, mask, table)
                export.items.append(Item(split, name, picture, paint))
            elif name:
                missing = mask if picture else "image in JPEGImages"
                export.faults.append(f"{path} lists {name}, which has no {missing}.")

    return export


def _paint(path: Path, table: MaskTable, ids: Mapping[str, int]) -> Target:
    """Train ids of a mask that is drawn in ids or colors of its own table."""
    lut = np.full(256, IGNORE_INDEX, np.uint8)
    for own, name in enumerate(table.classes.names):
        lut[own] = ids.get(name, IGNORE_INDEX)
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

    names = []
    colors = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, color, *_ = line.split(":")
            red, green, blue = map(int, color.split(","))
            colors[red, green, blue] = len(names)
            names.append(name)

    if len(colors) < len(names):
        raise DataError(
            f"{path} gives two labels one color, so the masks cannot tell them apart. Export them again."
        )

    classes = ClassTable("voc", tuple(names), tuple(colors), {})
    return MaskTable(classes, kind="colors", colors=colors)
