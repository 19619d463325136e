"""COCO instances and stuff (polygons and run lengths in JSON), as COCO, Roboflow and CVAT write them; COCO panoptic."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segpipe import IGNORE_INDEX
from segpipe.data.importers.imported import (
    INCOMPLETE,
    Drawing,
    ImportEntry,
    ImportPlan,
    Target,
    entry_name,
    plan_of_drawings,
    split_name,
)
from segpipe.data.importers.outlines import Area, Size, coco_counts, polygon, runs
from segpipe.data.readers import read_mask
from segpipe.errors import DataError

NAMES = (
    "_annotations.coco.json",
    "annotations/instances_*.json",
    "annotations/stuff_*.json",
)
OTHER = "other"  # the category of stuff_*.json that stands for all things


def coco(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for a JSON file beside or above its images, or for a folder with annotations/ or a JSON file per split.

    Larger areas are painted first, so that what lies on something else stays visible. Raises DataError for a source
    without such files.
    """
    files = [source] if source.is_file() else _files(source)
    drawings, labels, faults = [], dict[str, None](), list[str]()
    for path in files:
        try:
            found, categories = _drawings(
                path, source if source.is_dir() else source.parent, faults
            )
        except INCOMPLETE as error:
            raise DataError(
                f"{path} is not a complete COCO file ({error!r}). Export it again."
            ) from error
        drawings += found
        labels |= dict.fromkeys(categories)
    return plan_of_drawings(drawings, list(labels), names, background, faults)


def _files(source: Path) -> list[Path]:
    found = sorted(
        {
            path
            for name in NAMES
            for path in (*source.glob(name), *source.glob(f"*/{name}"))
        }
    )
    if not found:
        raise DataError(
            f"{source} has none of {', '.join(NAMES)}. Set source to a JSON file, or to the folder above."
        )
    return found


def _split(path: Path, source: Path) -> str:
    """Split of a JSON file: what its name has behind instances_, or its folder, as in train/_annotations.coco.json."""
    if path.stem.startswith(("instances_", "stuff_")):
        name = path.stem.partition("_")[2].rstrip("0123456789")
        return "" if name == "default" else split_name(name)
    return "" if path.parent == source else split_name(path.parent.name)


def load_json(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Content of a JSON file that has `keys`. Raises DataError for any other file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from None
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            raise DataError(f"{path} has no {key!r}, so it is not of this format.")
    return dict(content)


def image_folder(path: Path, source: Path) -> list[Path]:
    """Folders that may hold the images of a JSON file, which may lie in annotations/."""
    name = path.stem.partition("_")[2]
    parts = (name, f"images/{name}", "images/default", "images", "")
    above = [path.parent.parent] if path.parent.name == "annotations" else []
    return [
        path.parent,
        *(
            folder / part
            for folder in dict.fromkeys([source, *above])
            for part in parts
        ),
    ]


def find_image(folders: Sequence[Path], file_name: str) -> Path | None:
    """The first of `folders` that has the file at its whole path; a file of the same name elsewhere is another one."""
    parts = Path(file_name.replace("\\", "/")).parts
    return next(
        (path for folder in folders if (path := folder.joinpath(*parts)).is_file()),
        None,
    )


def _drawings(
    path: Path, source: Path, faults: list[str]
) -> tuple[list[Drawing], list[str]]:
    content = load_json(path, ("images", "annotations", "categories"))
    labels = {int(each["id"]): str(each["name"]) for each in content["categories"]}
    shapes: dict[int, list[tuple[float, str, Callable[[Size], Area]]]] = {
        int(each["id"]): [] for each in content["images"]
    }
    unread: dict[int, list[str]] = {number: [] for number in shapes}
    for number, each in enumerate(content["annotations"]):
        label, where = (
            labels.get(int(each.get("category_id", -1))),
            f"{path}: annotation {each.get('id', number)}",
        )
        segmentation, image_id = each.get("segmentation"), int(each["image_id"])
        if image_id not in shapes:
            faults.append(
                f"{where} has the image_id {image_id}, which images does not list."
            )
        elif label is None:
            unread[image_id].append(
                f"{where} has the category {each.get('category_id')}, which categories does not list."
            )
        elif not segmentation:
            unread[image_id].append(
                f"{where} is a box without a segmentation. Export instance or semantic segmentation."
            )
        elif label != OTHER or not path.stem.startswith("stuff_"):
            area = partial(_area, segmentation)
            shapes[image_id].append((-float(each.get("area", 0.0)), label, area))
    drawings = []
    folders, split = image_folder(path, source), _split(path, source)
    for each in content["images"]:
        image = find_image(folders, str(each["file_name"]))
        if image is None:
            faults.append(
                f"{path} lists {each['file_name']}, which is neither beside it nor in {folders[1]}."
            )
            continue
        number = int(each["id"])
        ordered = sorted(shapes[number], key=lambda shape: shape[0])
        size = (int(each["height"]), int(each["width"]))
        name = entry_name(str(each["file_name"]))
        areas = [(label, area) for _, label, area in ordered]
        drawings.append(Drawing(split, name, image, size, areas, unread[number]))
    return drawings, [labels[number] for number in sorted(labels)]


def _area(segmentation: Any, size: Size) -> Area:
    """Pixels of a segmentation: polygons, whose union it is, or run lengths, compressed or not."""
    if isinstance(segmentation, dict):
        counts = segmentation["counts"]
        if list(segmentation["size"]) != list(size):
            raise ValueError(
                f"has run lengths for the size {segmentation['size']}, not {list(size)}"
            )
        return runs(
            coco_counts(counts) if isinstance(counts, str) else counts,
            size,
            by_column=True,
        )
    covered = np.zeros(size, np.bool_)
    if not all(isinstance(points, list) for points in segmentation):
        raise ValueError(
            "has a segmentation that is no list of polygons [[x, y, x, y, x, y]]"
        )
    for points in segmentation:
        if len(points) < 6 or len(points) % 2:
            raise ValueError(
                f"has a polygon of {len(points)} numbers, but x and y of three points were needed"
            )
        covered |= polygon(np.array(points, np.float64).reshape(-1, 2), size)
    return covered


def coco_panoptic(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for a folder with annotations/panoptic_SPLIT.json and annotations/panoptic_SPLIT/*.png.

    Number 0 is unlabelled. `background` has no meaning here. Raises DataError for a source without such files.
    """
    files = sorted(source.glob("annotations/panoptic_*.json")) or sorted(
        source.glob("panoptic_*.json")
    )
    if not files:
        raise DataError(
            f"{source} has no annotations/panoptic_SPLIT.json. Set source to the folder above annotations."
        )
    contents = {
        path: load_json(path, ("images", "annotations", "categories")) for path in files
    }
    categories = {
        int(each["id"]): str(each["name"])
        for each in (c for v in contents.values() for c in v["categories"])
    }
    classes = tuple(names) or tuple(categories[number] for number in sorted(categories))
    ids = {
        number: classes.index(name)
        for number, name in categories.items()
        if name in classes
    }
    faults = [
        f"{name} is not one of names."
        for name in sorted(set(categories.values()) - set(classes))
    ]
    entries = []
    for path, content in contents.items():
        split = split_name(path.stem.partition("_")[2].rstrip("0123456789"))
        images = {int(each["id"]): str(each["file_name"]) for each in content["images"]}
        folders = image_folder(path, source)
        for each in content["annotations"]:
            file_name = images.get(int(each["image_id"]), str(each["file_name"]))
            image = find_image(folders, file_name)
            if image is None:
                faults.append(
                    f"{path} lists {file_name}, which is not in {folders[1]}."
                )
                continue
            segments = {
                int(part["id"]): ids.get(int(part["category_id"]), -1)
                for part in each["segments_info"]
            }
            mask = path.with_suffix("") / str(each["file_name"])
            name = entry_name(file_name)
            entries.append(
                ImportEntry(split, name, image, partial(_segments, mask, segments))
            )
    return ImportPlan(classes, entries, faults=faults)


def _segments(path: Path, segments: dict[int, int]) -> Target:
    mask = read_mask(str(path))
    if mask.rgba is None:
        raise DataError(
            f"{path} is not RGB, but the numbers of panoptic segments are R + 256 G + 65536 B."
        )
    numbers = (np.ascontiguousarray(mask.rgba).view("<u4")[..., 0] & 0xFFFFFF).astype(
        np.int64
    )
    values, places = np.unique(numbers, return_inverse=True)
    trains = np.array(
        [
            IGNORE_INDEX if value == 0 else segments.get(value, -1)
            for value in values.tolist()
        ]
    )
    if (trains < 0).any():
        value = int(values[trains < 0][0])
        raise DataError(
            f"{path} has the segment {value}, which its segments_info does not list with a known category."
        )
    return trains[places].reshape(numbers.shape).astype(np.uint8)
