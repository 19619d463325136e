"""Writes what an importer read as a `folder` data set with masks of train ids.

classes.yaml is written last. So an import that was interrupted is no data set yet, and the same command continues it.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2

from segpipe import IGNORE_INDEX, files
from segpipe.data.catalog import distinct_colors
from segpipe.data.folders import SUFFIXES
from segpipe.data.readers import read_header, threaded
from segpipe.datasets.importers.exported import Export, Item
from segpipe.errors import ConfigError, DataError

MARK = ".import.json"


def write_import(
    export: Export,
    names: Sequence[str],
    ids: Mapping[str, int],
    out: Path,
    origin: Mapping[str, Any],
    *,
    copy: bool,
    skip: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write masks, links to the images (or copies) and classes.yaml; returns what could not be imported.

    If there is anything of that, classes.yaml is not written, unless `skip`. `origin` says what is imported: a folder
    `out` with another origin, or with anything else in it, is refused by ConfigError.
    """
    _claim(out, json.dumps(origin, sort_keys=True).encode())
    (out / "classes.yaml").unlink(missing_ok=True)
    counts = Counter((item.split, item.name) for item in export.items)
    faults = export.faults + [
        f"{split or 'the set'} has {name} {times} times."
        for (split, name), times in counts.items()
        if times > 1
    ]
    written = threaded(lambda item: _put(item, ids, out, copy), export.items)
    for done, fault in enumerate(written, 1):
        faults += [fault] if fault else []
        progress(done, len(export.items))
    if not export.items and not faults:
        faults.append("no image with labels was found.")
    left = any(mask_path(out, item).is_file() for item in export.items)
    if not faults or (skip and left):
        table = {
            "name": out.resolve().name,
            "names": list(names),
            "palette": distinct_colors(len(names)),
            "masks": "ids",
            "ignore": [IGNORE_INDEX],
            **({"exif": export.exif} if export.exif else {}),
        }
        rows = [
            f"{key}: {json.dumps(value, ensure_ascii=False)}\n"
            for key, value in table.items()
        ]
        files.put(out / "classes.yaml", "".join(rows).encode())
    return faults


def mask_path(out: Path, item: Item) -> Path:
    """Where the mask of an image is written."""
    return out / "masks" / item.split / f"{item.name}.png"


def _claim(out: Path, origin: bytes) -> None:
    mark = out / MARK
    if mark.is_file():
        if mark.read_bytes() != origin:
            raise ConfigError(
                f"out = {out} holds another import. Choose another folder, or remove it."
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out = {out} is not empty. Choose a new folder.")
    files.put(mark, origin)


def _put(item: Item, ids: Mapping[str, int], out: Path, copy: bool) -> str:
    """Write the files of an image; returns what was wrong with it."""
    suffix = item.image.suffix.lower()
    image = out / "images" / item.split / f"{item.name}{suffix}"
    mask = mask_path(out, item)
    for earlier in (mask, image):
        earlier.unlink(missing_ok=True)
    if suffix not in SUFFIXES:
        return (
            f"{item.image} is of a format that is not read. Convert it to PNG or JPEG."
        )
    try:
        # Declared sizes are believed only if the image has them: painting takes memory.
        if item.size is not None:
            _check_size(item, item.size)
        target = item.paint(ids)
        _check_size(item, target.shape)
    except DataError as error:
        return str(error)
    image.parent.mkdir(parents=True, exist_ok=True)
    if copy:
        shutil.copyfile(item.image, image)
    else:
        image.symlink_to(item.image.resolve())
    files.put(mask, cv2.imencode(".png", target)[1].tobytes())
    return ""


def _check_size(item: Item, size: tuple[int, ...]) -> None:
    header = read_header(str(item.image))
    if size not in (header[:2], header.upright):
        raise DataError(
            f"{item.image} is {header.height}x{header.width}, but its labels are for {size[0]}x{size[1]} (height x "
            "width). Was the image resized after it was labelled?"
        )
