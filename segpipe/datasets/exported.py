"""An export's images with their labelled areas, as importers read them, and the `folder` data set written from them.

classes.yaml is written last, so an interrupted import is not a data set yet, and the same command continues it.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX, files
from segpipe.data import Size, Uint8
from segpipe.data.catalog import Color, distinct_colors
from segpipe.data.pairs import SUFFIXES
from segpipe.data.readers import Progress, read_header, threaded
from segpipe.errors import ConfigError, DataError

Area = NDArray[np.bool_]
# Pixels of a shape in an image of this size; raises ValueError with the end of a sentence.
Shape = Callable[[Size], Area]
BACKGROUND, BACKGROUND_TOO = "background", "_background_"
IGNORED = ("ignore", "__ignore__", "void")
SPLIT_NAMES = {
    "training": "train", "valid": "val", "validation": "val", "default": "", "all": "",
}  # fmt: skip
# Errors raised by content of unexpected types.
INCOMPLETE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
    cv2.error,
)
Paint = Callable[[Mapping[str, int]], Uint8]  # train id of each label -> mask


class Item(NamedTuple):
    """One image, and the function that paints its mask."""

    split: str  # empty: the format has no splits
    name: str  # path below the folder of the split, without suffix
    image: Path
    paint: Paint  # raises DataError


@dataclass
class Export:
    """Everything that an importer found."""

    items: list[Item] = field(default_factory=list)
    declared: list[str] = field(default_factory=list)  # labels in their order
    drawn: set[str] = field(default_factory=set)  # labels that images have
    faults: list[str] = field(default_factory=list)
    exif: str = ""
    smaller_on_top: bool = False  # of shapes that overlap; otherwise the later one
    # Labels by their color in the format; black means outside all areas.
    colors: dict[Color, str] = field(default_factory=lambda: {(0, 0, 0): BACKGROUND})

    def classes(
        self, names: Sequence[str], ignored: Sequence[str]
    ) -> tuple[tuple[str, ...], dict[str, int]]:
        """Names of the classes, and the train id of each label.

        The classes are `names`, or else the drawn labels, declared ones in their order, then the others; without those
        that are `ignored`. The background, outside all areas, is the first class, unless it is in `names` or ignored.
        """
        ids = dict.fromkeys([*IGNORED, *ignored], IGNORE_INDEX)
        ordered = dict.fromkeys([*self.declared, *sorted(self.drawn)])
        own = {BACKGROUND_TOO: BACKGROUND}
        drawn = [own.get(each, each) for each in ordered if each in self.drawn]
        drawn = [each for each in drawn if each not in ids]
        first = [BACKGROUND] if BACKGROUND in drawn and BACKGROUND not in names else []
        wanted = dict.fromkeys([*first, *(names or drawn)])
        chosen = tuple(name for name in wanted if name not in ignored)
        ids |= {name: place for place, name in enumerate(chosen)}
        ids[BACKGROUND_TOO] = ids.get(BACKGROUND, IGNORE_INDEX)
        self.faults += [
            f"label {label} is not one of names = {', '.join(chosen)}. Add it to names or to ignore; with skip=true, "
            "these pixels are ignored."
            for label in drawn
            if label not in ids
        ]
        if self.drawn and not chosen:
            self.faults.append("all labels are ignored. Leave one out of ignore.")
        if len(chosen) > IGNORE_INDEX:
            self.faults.append(
                f"{len(chosen)} classes, but at most {IGNORE_INDEX} are possible. Select some with names=[...]."
            )
        return chosen, ids

    @contextmanager
    def part(self, what: object) -> Iterator[None]:
        """Collects the fault of a file, or of a part of one, so that the others can go on."""
        try:
            yield
        except DataError as error:
            self.faults.append(str(error))
        except INCOMPLETE as error:
            self.faults.append(f"{what} is not complete ({error!r}). Export it again.")

    def add(
        self,
        split: str,
        file_name: str,
        image: Path,
        size: Size,
        shapes: Sequence[tuple[str, Shape | str]],
    ) -> None:
        """Add an image with shapes; one without an area has the label "".

        A text in place of a shape says why it has no pixels.
        """
        self.drawn |= {BACKGROUND, *(label for label, _ in shapes if label)}

        def paint(ids: Mapping[str, int]) -> Uint8:
            # Check the declared size against the image first, since painting allocates memory.
            check_size(image, size)
            target = np.full(size, ids.get(BACKGROUND, IGNORE_INDEX), np.uint8)
            pixels = np.full(size, np.inf)  # of the shape that covers a pixel
            for label, shape in shapes:
                where = f" an area of {label}" if label else ""
                try:
                    if isinstance(shape, str):
                        raise ValueError(shape)
                    area = shape(size)
                    if self.smaller_on_top:
                        count = area.sum()
                        area = area & (pixels >= count)
                        pixels[area] = count
                    target[area] = ids.get(label, IGNORE_INDEX)
                except ValueError as error:
                    raise DataError(f"{image}:{where} {error}.") from None
                except INCOMPLETE as error:
                    raise DataError(
                        f"{image}:{where} cannot be read ({error!r})."
                    ) from None
            return target

        self.items.append(Item(split, entry_name(file_name), image, paint))


def find_image(folders: Sequence[Path], file_name: str) -> Path:
    """The file in the first folder that has it at its full path, since the same name elsewhere is another image.

    Raises DataError if no folder has it.
    """
    parts = PurePosixPath(file_name.replace("\\", "/")).parts
    for folder in folders:
        if (path := folder.joinpath(*parts)).is_file():
            return path
    raise DataError(
        f"{file_name} has labels, but is not in {' or '.join(dict.fromkeys(map(str, folders)))}. Include the images "
        "in the export."
    )


def entry_name(file_name: str) -> str:
    """Relative path of an image's files in the folder of its split, without suffix; never outside that folder."""
    parts = PurePosixPath(file_name.replace("\\", "/")).with_suffix("").parts
    return "/".join(part for part in parts if part not in ("/", ".."))


def split_name(name: str) -> str:
    """Our name of a split: train, val, or its own in lower case. Raises DataError for a name that is no folder name."""
    if not re.fullmatch(r"(\w[\w .-]*)?", name):
        raise DataError(
            f"{name!r} is the name of a split, but only letters, digits, _ and - are allowed."
            " Rename it in the labelling tool."
        )
    return SPLIT_NAMES.get(name.lower(), name.lower())


def load_json(path: Path, *keys: str) -> dict[str, Any]:
    """Content of a JSON file with these `keys`. Raises DataError for any other file."""
    try:
        content = files.read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from None
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            raise DataError(f"{path} has no {key!r}, so it does not have this format.")
    return dict(content)


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
    progress: Progress,
) -> tuple[list[str], Counter[str]]:
    """Write masks, links to the images (or copies) and classes.yaml; returns faults, and images written per split.

    With faults, and unless `skip` is set and a class is left, the import is not finished: without classes.yaml and with
    empty counts.
    `origin` identifies the import: raises ConfigError for a folder `out` that holds another import or anything else.
    """
    _claim(out, json.dumps(origin, sort_keys=True).encode())
    (out / "classes.yaml").unlink(missing_ok=True)
    counts = Counter((item.split, item.name) for item in export.items)
    found = threaded(
        lambda item: _put(item, ids, out, copy, counts[item.split, item.name]),
        export.items,
        progress,
    )
    faults = export.faults + list(dict.fromkeys(filter(None, found)))
    if not export.items and not faults:
        faults.append("no image with labels was found.")
    if faults and not (skip and names):
        return faults, Counter()
    written = Counter(
        item.split for item, fault in zip(export.items, found, strict=True) if not fault
    )
    if written:
        table = {
            "name": out.resolve().name,
            "names": list(names),
            "palette": distinct_colors(len(names)),
            "masks": "ids",
            "ignore": [IGNORE_INDEX],
        }
        if export.exif:
            table["exif"] = export.exif
        rows = [
            f"{key}: {json.dumps(value, ensure_ascii=False)}\n"
            for key, value in table.items()
        ]
        files.put(out / "classes.yaml", "".join(rows).encode())
    return faults, written


def _claim(out: Path, origin: bytes) -> None:
    mark = out / MARK
    if mark.is_file():
        if mark.read_bytes() != origin:
            raise ConfigError(
                f"out = {out} holds another import, with a different source, names or ignored labels. Remove "
                "it, or choose another folder."
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out = {out} is not empty. Choose a new folder.")
    files.put(mark, origin)


def _put(item: Item, ids: Mapping[str, int], out: Path, copy: bool, times: int) -> str:
    """Write the files of an image whose name occurs `times` times; returns its fault, or an empty text."""
    suffix = item.image.suffix.lower()
    image = out / "images" / item.split / f"{item.name}{suffix}"
    mask = out / "masks" / item.split / f"{item.name}.png"
    for earlier in (mask, image):
        earlier.unlink(missing_ok=True)
    if times > 1:  # the mask could belong to either image
        return f"{item.split or 'the set'} has {item.name} {times} times."
    if suffix not in SUFFIXES:
        return f"{item.image} has an unsupported format. Convert it to PNG or JPEG."
    try:
        target = item.paint(ids)
    except DataError as error:
        return str(error)
    image.parent.mkdir(parents=True, exist_ok=True)
    if copy:
        shutil.copyfile(item.image, image)
    else:
        image.symlink_to(item.image.resolve())
    files.put(mask, cv2.imencode(".png", target)[1].tobytes())
    return ""


def check_size(image: Path, size: tuple[int, ...]) -> None:
    """Raise DataError unless the labels are for an image of this (height, width)."""
    header = read_header(str(image))
    if size not in (header[:2], header.upright):
        raise DataError(
            f"{image} is {header.height}x{header.width}, but its labels are for {size[0]}x{size[1]} (height x "
            "width). Was the image resized after it was labelled?"
        )
