"""COCO instances and stuff (polygons and run lengths in JSON), as COCO, Roboflow and CVAT write them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segpipe.datasets.importers.areas import (
    Area,
    Shape,
    Size,
    coco_counts,
    polygon,
    runs,
    wrong,
)
from segpipe.datasets.importers.exported import (
    Export,
    find_image,
    load_json,
    split_name,
)
from segpipe.errors import DataError

NAMES = (
    "_annotations.coco.json",
    "annotations/instances_*.json",
    "annotations/stuff_*.json",
)


def coco(source: Path, names: Sequence[str] = ()) -> Export:
    """Labels of a JSON file beside or above its images, or of a folder with annotations/ or a JSON file per split.

    Larger areas are painted first, so that what lies on something else stays visible.
    """
    files = [source]
    if source.is_dir():
        patterns = [*NAMES, *(f"*/{name}" for name in NAMES)]
        files = sorted({path for each in patterns for path in source.glob(each)})
    if not files:
        raise DataError(
            f"{source} has none of {', '.join(NAMES)}. Export as COCO with segmentation, and set source to that file, "
            "or to the folder above."
        )
    export = Export()
    for path in files:
        with export.part(path):
            _read(path, source, export)
    return export


def _read(path: Path, source: Path, export: Export) -> None:
    content = load_json(path, "images", "annotations", "categories")
    labels = {int(each["id"]): str(each["name"]) for each in content["categories"]}
    export.declared += [labels[number] for number in sorted(labels)]
    shapes: dict[int, list[tuple[float, str, Shape]]] = {}
    for each in content["annotations"]:
        label = labels.get(int(each.get("category_id", -1)), "")
        shape: Shape = partial(_area, each.get("segmentation"))
        if not label:
            shape = wrong(
                f"annotation {each.get('id')} of {path} has the category {each.get('category_id')}, which categories "
                "does not list"
            )
        row = float(each.get("area", 0.0)), label, shape
        shapes.setdefault(int(each["image_id"]), []).append(row)
    # images beside the JSON, or as in val2017/ and images/val2017/ with annotations/instances_val2017.json
    name = path.stem.partition("_")[2]
    root = source if source.is_dir() else path.parent
    roots = dict.fromkeys([root, path.parent.parent])
    parts = (name, f"images/{name}", "images/default", "images", "")
    folders = [path.parent, *(folder / part for folder in roots for part in parts)]
    split = "" if path.parent == root else path.parent.name
    if path.stem.startswith(("instances_", "stuff_")):
        split = name.rstrip("0123456789")
    for each in content["images"]:
        rows = sorted(shapes.pop(int(each["id"]), []), key=lambda row: -row[0])
        with export.part(path):
            image = find_image(folders, str(each["file_name"]))
            size = int(each["height"]), int(each["width"])
            drawn = [(label, shape) for _, label, shape in rows]
            export.add(split_name(split), str(each["file_name"]), image, size, drawn)
    if shapes:
        export.faults.append(
            f"{path} has labels of the image_id {min(shapes)}, which images does not list."
        )


def _area(segmentation: Any, size: Size) -> Area:
    """Pixels of polygons, whose union it is, or of run lengths by column, compressed or not."""
    if not segmentation:
        raise ValueError(
            "is a box without a segmentation. Export instance or semantic segmentation"
        )
    if isinstance(segmentation, dict):
        counts = segmentation["counts"]
        if list(segmentation["size"]) != list(size):
            raise ValueError(
                f"has run lengths for the size {segmentation['size']}, not {list(size)}"
            )
        if isinstance(counts, str):
            counts = coco_counts(counts)
        return runs(counts, (size[1], size[0])).T
    covered = np.zeros(size, np.bool_)
    for points in segmentation:
        if not isinstance(points, list):
            raise ValueError(
                "has a segmentation that is no list of polygons [[x, y, x, y, x, y]]"
            )
        covered |= polygon(points)(size)
    return covered
