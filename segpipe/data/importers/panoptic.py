"""COCO panoptic: a PNG per image whose colors are numbers of segments, and JSON with the category of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from segpipe import IGNORE_INDEX
from segpipe.data.importers.coco import find_image, image_folder, load_json
from segpipe.data.importers.imported import ImportEntry, ImportPlan, Target, entry_name, split_name
from segpipe.data.readers import read_mask
from segpipe.errors import DataError


def coco_panoptic(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for a folder with annotations/panoptic_SPLIT.json and annotations/panoptic_SPLIT/*.png.

    Number 0 is unlabelled. `background` has no meaning here. Raises DataError for a source without such files.
    """
    files = sorted(source.glob("annotations/panoptic_*.json")) or sorted(source.glob("panoptic_*.json"))
    if not files:
        raise DataError(f"{source} has no annotations/panoptic_SPLIT.json. Set source to the folder above annotations.")
    contents = {path: load_json(path, ("images", "annotations", "categories")) for path in files}
    categories = {
        int(each["id"]): str(each["name"]) for each in (c for v in contents.values() for c in v["categories"])
    }
    classes = tuple(names) or tuple(categories[number] for number in sorted(categories))
    ids = {number: classes.index(name) for number, name in categories.items() if name in classes}
    faults = [f"{name} is not one of names." for name in sorted(set(categories.values()) - set(classes))]
    entries = []
    for path, content in contents.items():
        split = split_name(path.stem.partition("_")[2].rstrip("0123456789"))
        images = {int(each["id"]): str(each["file_name"]) for each in content["images"]}
        folders = image_folder(path, source)
        for each in content["annotations"]:
            file_name = images.get(int(each["image_id"]), str(each["file_name"]))
            image = find_image(folders, file_name)
            if image is None:
                faults.append(f"{path} lists {file_name}, which is not in {folders[1]}.")
                continue
            segments = {int(part["id"]): ids.get(int(part["category_id"]), -1) for part in each["segments_info"]}
            mask = path.with_suffix("") / str(each["file_name"])
            name = entry_name(file_name)
            entries.append(ImportEntry(split, name, image, partial(_target, mask, segments)))
    return ImportPlan(classes, entries, faults=faults)


def _target(path: Path, segments: dict[int, int]) -> Target:
    mask = read_mask(str(path))
    if mask.rgba is None:
        raise DataError(f"{path} is not RGB, but the numbers of panoptic segments are R + 256 G + 65536 B.")
    numbers = (np.ascontiguousarray(mask.rgba).view("<u4")[..., 0] & 0xFFFFFF).astype(np.int64)
    values, places = np.unique(numbers, return_inverse=True)
    trains = np.array([IGNORE_INDEX if value == 0 else segments.get(value, -1) for value in values.tolist()])
    if (trains < 0).any():
        value = int(values[trains < 0][0])
        raise DataError(f"{path} has the segment {value}, which its segments_info does not list with a known category.")
    return trains[places].reshape(numbers.shape).astype(np.uint8)
