"""What every importer makes, and the one place that writes it: a `folder` data set with masks of train ids.

classes.yaml is written last. So an import that was interrupted is no data set yet, and the same command continues it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX, files
from segpipe.data.catalog import Color, distinct_colors
from segpipe.data.folders import SUFFIXES
from segpipe.data.importers.outlines import Area, Size
from segpipe.data.readers import Header, read_header, threaded
from segpipe.errors import ConfigError, DataError, did_you_mean

MARK = ".import.json"
BACKGROUND = ("background", "_background_")
IGNORED = ("ignore", "__ignore__", "void")
SPLIT_NAMES = {"training": "train", "valid": "val", "validation": "val"}
INCOMPLETE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
)  # of content of other types
Target = NDArray[np.uint8]


class ImportEntry(NamedTuple):
    """One image and how to make its mask."""

    split: str  # empty: the format knows none
    name: str  # path below the folder of the split, without suffix
    image: Path
    target: Callable[[], Target]  # train ids; raises DataError
    size: Size | None = None  # that the labels are for, as far as it is declared


class Drawing(NamedTuple):
    """One image with the areas that were drawn on it; a later one covers those before."""

    split: str
    name: str
    image: Path
    size: Size
    areas: list[
        tuple[str, Callable[[Size], Area]]
    ]  # label and pixels; raises ValueError
    unread: Sequence[
        str
    ] = ()  # a message for each shape that is no area: the image is left out


@dataclass
class ImportPlan:
    """Everything that an importer found; nothing is written yet."""

    names: tuple[str, ...]
    entries: list[ImportEntry]
    palette: tuple[Color, ...] = ()
    faults: list[str] = field(default_factory=list)
    exif: str = ""


def entry_name(file_name: str) -> str:
    """Where the files of an image go below those of its split, without suffix: never outside, whatever its path is."""
    path = PurePosixPath(file_name.replace("\\", "/"))
    return "/".join(
        part for part in path.with_suffix("").parts if part not in ("/", "..")
    )


def split_name(name: str) -> str:
    """The name of a split here: train, val, or as it is. Raises DataError for a name that is no folder's."""
    if not re.fullmatch(r"(\w[\w .-]*)?", name):
        raise DataError(
            f"{name!r} is the name of a split, but letters, digits, _ and - were needed."
            " Rename it in the labelling tool."
        )
    return SPLIT_NAMES.get(name.lower(), name.lower())


def refuse_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise DataError for `names` of the user that differ from those the masks are drawn with."""
    if names and tuple(names) != tuple(known):
        raise DataError(
            f"names = {list(names)}, but the masks are drawn with {', '.join(known)}. Leave names out."
        )


def plan_of_drawings(
    drawings: Sequence[Drawing],
    labels: Sequence[str],
    names: Sequence[str],
    background: str,
    faults: list[str],
) -> ImportPlan:
    """Plan for formats with areas. `labels` are the classes of the format in its order, `names` those of the user.

    With `background` = "class", pixels outside all areas are the class background; with "ignore", they are unlabelled.
    Labels that nobody drew are left out, unless `names` has them. Areas of labels that `names` lacks are unlabelled.
    """
    counts = Counter(label for drawing in drawings for label, _ in drawing.areas)
    special = {*BACKGROUND, *IGNORED}
    found = [
        label
        for label in dict.fromkeys([*labels, *sorted(counts)])
        if counts[label] and label not in special
    ]
    first = (
        [BACKGROUND[0]] if background == "class" and BACKGROUND[0] not in names else []
    )
    classes = (*first, *(names or found))
    ids = dict.fromkeys(IGNORED, IGNORE_INDEX) | {
        name: place for place, name in enumerate(classes)
    }
    fill = (
        ids.get(BACKGROUND[0], IGNORE_INDEX) if background == "class" else IGNORE_INDEX
    )
    ids = dict.fromkeys(BACKGROUND, fill) | ids
    for label, count in counts.items():
        if label not in ids:
            hint = did_you_mean(label, classes)
            faults.append(
                f"label {label} ({count} areas) is not one of names = {', '.join(names)}.{hint} "
                "With skip=true, these pixels are ignored."
            )
    entries = [
        ImportEntry(
            drawing.split,
            drawing.name,
            drawing.image,
            _painter(drawing, ids, fill),
            drawing.size,
        )
        for drawing in drawings
    ]
    return ImportPlan(classes, entries, faults=faults)


def _painter(
    drawing: Drawing, ids: Mapping[str, int], fill: int
) -> Callable[[], Target]:
    def paint() -> Target:
        if drawing.unread:
            more = len(drawing.unread) - 1
            raise DataError(
                f"{drawing.unread[0]}{f' {more} more of {drawing.image} cannot be read.' if more else ''}"
            )
        target = np.full(drawing.size, fill, np.uint8)
        for label, area in drawing.areas:
            try:
                target[area(drawing.size)] = ids.get(label, IGNORE_INDEX)
            except ValueError as error:
                raise DataError(
                    f"{drawing.image}: an area of {label} {error}."
                ) from None
            except (*INCOMPLETE, cv2.error) as error:
                raise DataError(
                    f"{drawing.image}: an area of {label} cannot be read ({error!r})."
                ) from None
        return target

    return paint


def write_import(
    plan: ImportPlan,
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
    _claim(out, {**origin, "names": list(plan.names), "copy": copy})
    faults = [*plan.faults, *_twice(plan.entries)]
    for done, fault in enumerate(
        threaded(lambda entry: _put(entry, out, copy), plan.entries), 1
    ):
        faults += [fault] if fault else []
        progress(done, len(plan.entries))
    if not plan.entries and not faults:
        faults.append("no image with labels was found.")
    if len(plan.names) > IGNORE_INDEX:
        faults.append(
            f"{len(plan.names)} classes, but at most {IGNORE_INDEX} fit. Choose some with names=[...]."
        )
    if not faults or (
        skip and any(mask_path(out, entry).is_file() for entry in plan.entries)
    ):
        files.put(out / "classes.yaml", _table(plan, out.resolve().name).encode())
    return faults


def mask_path(out: Path, entry: ImportEntry) -> Path:
    """Where the mask of an entry is written."""
    return out / "masks" / entry.split / f"{entry.name}.png"


def _claim(out: Path, origin: Mapping[str, Any]) -> None:
    mark, content = out / MARK, json.dumps(origin, sort_keys=True).encode()
    if mark.is_file():
        if mark.read_bytes() != content:
            raise ConfigError(
                f"out = {out} holds another import. Choose another folder, or remove it."
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out = {out} is not empty. Choose a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    files.put(mark, content)


def _twice(entries: Iterable[ImportEntry]) -> list[str]:
    counts = Counter((entry.split, entry.name) for entry in entries)
    return [
        f"{split or 'the set'} has {name} {times} times."
        for (split, name), times in counts.items()
        if times > 1
    ]


def _put(entry: ImportEntry, out: Path, copy: bool) -> str:
    """Write the files of an entry, the mask only if it is new or was drawn anew; returns what was wrong with it."""
    suffix = entry.image.suffix.lower()
    image = out / "images" / entry.split / f"{entry.name}{suffix}"
    mask = mask_path(out, entry)
    if suffix not in SUFFIXES:
        return (
            f"{entry.image} is of a format that is not read. Convert it to PNG or JPEG."
        )
    try:
        header = read_header(str(entry.image))
        # Declared sizes are believed only if the image has them: painting takes memory.
        if entry.size is not None:
            _check_size(entry, header, entry.size)
        target = entry.target()
        _check_size(entry, header, target.shape)
    except DataError as error:
        for left in (mask, image):  # of an import before, when it could be read
            left.unlink(missing_ok=True)
        return str(error)
    content = cv2.imencode(".png", target)[1].tobytes()
    if not mask.is_file() or mask.read_bytes() != content:
        files.put(mask, content)
    if image.exists() and (copy or image.resolve() == entry.image.resolve()):
        return ""
    image.parent.mkdir(parents=True, exist_ok=True)
    aside = image.with_name(f".{image.name}.tmp")
    aside.unlink(missing_ok=True)
    if copy:
        shutil.copyfile(entry.image, aside)
    else:
        aside.symlink_to(entry.image.resolve())
    os.replace(aside, image)
    return ""


def _check_size(entry: ImportEntry, header: Header, size: tuple[int, ...]) -> None:
    if size not in (header[:2], header.upright):
        raise DataError(
            f"{entry.image} is {header.height}x{header.width}, but its labels are for "
            f"{size[0]}x{size[1]} (height x width). Was the image resized after it was "
            "labelled?"
        )


def _table(plan: ImportPlan, name: str) -> str:
    palette = plan.palette or distinct_colors(len(plan.names))
    lines = [
        f"name: {json.dumps(name)}",
        "names:",
        *(f"  - {json.dumps(each, ensure_ascii=False)}" for each in plan.names),
    ]
    lines += [
        "palette:",
        *(f"  - {list(color)}" for color in palette),
        "masks: ids",
        "ignore: [255]",
    ]
    return "\n".join([*lines, *([f"exif: {plan.exif}"] if plan.exif else [])]) + "\n"
