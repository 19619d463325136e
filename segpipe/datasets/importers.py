"""Importers: one function per format that reads a source into an Export.

COCO, Roboflow and CVAT write COCO's instances and stuff as JSON; labelme writes a JSON file per image, CVAT one
annotations.xml. Pascal VOC and CVAT's `Segmentation mask 1.1` have mask images and lists.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
from numpy.typing import ArrayLike

from segpipe import IGNORE_INDEX
from segpipe.data import Size, Uint8
from segpipe.data.catalog import MaskTable, mask_table_of
from segpipe.data.masks import read_target
from segpipe.data.pairs import SUFFIXES
from segpipe.datasets.exported import (
    Area,
    Export,
    Item,
    Shape,
    check_size,
    find_image,
    load_json,
    split_name,
)
from segpipe.errors import DataError
from segpipe.files import files_below

COCO_FILES = (
    "_annotations.coco.json",
    "annotations/instances_*.json",
    "annotations/stuff_*.json",
)
Corners = list[tuple[float, float]]  # (x, y)


def polygon(points: ArrayLike, size: Size) -> Area:
    """Pixels whose center lies inside a polygon of (x, y) points. Raises ValueError.

    The pixel in row r and column c covers [c, c + 1) x [r, r + 1), as in COCO: neighbors that share an edge neither
    overlap nor leave a gap, unlike with cv2.fillPoly, which draws the edge into both.
    """
    corners = np.asarray(points, np.float64)
    if corners.size < 6 or corners.size % 2:
        raise ValueError(
            f"has a polygon of {corners.size} numbers, but x and y of three points were needed"
        )

    if not np.isfinite(corners).all():
        raise ValueError("has a corner that is not a finite number")

    corners = corners.reshape(-1, 2)
    following = np.roll(corners, -1, axis=0)
    # All edges point downwards, so that the shapes on both sides of one round it equally.
    downward = (corners[:, 1] <= following[:, 1])[:, None]
    x, y = np.where(downward, corners, following).T
    next_x, next_y = np.where(downward, following, corners).T
    height, width = size
    # Only edges that cross the middle of a row count.
    middles = np.arange(height) + 0.5
    crosses = (y <= middles[:, None]) != (next_y <= middles[:, None])
    rows, edges = np.nonzero(crosses)
    # At a crossing, inside and outside swap from this column on.
    slope = (next_x - x)[edges] / (next_y - y)[edges]
    at = x[edges] + (middles[rows] - y[edges]) * slope
    columns = np.clip(np.ceil(at - 0.5), 0, width).astype(np.int64)
    flips = np.zeros((height, width + 1), np.bool_)
    np.logical_xor.at(flips, (rows, columns), True)
    return np.logical_xor.accumulate(flips[:, :width], axis=1)


def rectangle(left: float, top: float, right: float, bottom: float) -> Corners:
    """Corners of a rectangle."""
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def runs(counts: Sequence[int], size: Size) -> Area:
    """Area from the lengths `counts` of alternating runs in row order, starting outside.

    Raises ValueError if they do not add up to the area.
    """
    height, width = size
    if sum(counts) != height * width or min(counts) < 0:
        raise ValueError(
            f"has run lengths for {sum(counts)} pixels, but {height}x{width} were needed"
        )

    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(size)


def coco_counts(text: str) -> list[int]:
    """Run lengths from COCO's compressed text of 5 bits per character; the fourth and later are stored as differences.

    Source: rleFrString in cocoapi/common/maskApi.c.
    """
    counts: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        number |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:  # more of this number follows
            continue
        if bits & 0x10:  # it is negative
            number -= 1 << shift
        if len(counts) > 2:
            number += counts[-2]
        counts.append(number)
        number = shift = 0

    return counts


def _pasted(shape: Shape, part: Size, left: int, top: int, size: Size) -> Area:
    """Area of a mask of part of the image. Raises ValueError if it lies outside, before allocating memory."""
    height, width = part
    if min(left, top) < 0 or top + height > size[0] or left + width > size[1]:
        raise ValueError(
            f"has a mask of {height}x{width} at row {top}, column {left}, outside the image"
        )
    area = np.zeros(size, np.bool_)
    area[top : top + height, left : left + width] = shape(part)
    return area


def coco(source: Path, names: Sequence[str]) -> Export:
    """Labels of a JSON file next to or above its images, or of a folder with annotations/ or a JSON file per split.

    Larger areas are painted first, so that smaller objects on top stay visible.
    """
    files = [source]
    if source.is_dir():
        patterns = [*COCO_FILES, *(f"*/{name}" for name in COCO_FILES)]
        files = sorted({path for each in patterns for path in source.glob(each)})
    if not files:
        raise DataError(
            f"{source} has none of {', '.join(COCO_FILES)}. Export as COCO with segmentation, and set source to that "
            "file, or to the folder above."
        )

    export = Export(smaller_on_top=True)
    for path in files:
        with export.part(path):
            _read_coco(path, source, export)

    return export


def _read_coco(path: Path, source: Path, export: Export) -> None:
    """Add the images of a JSON file and their areas."""
    content = load_json(path, "images", "annotations", "categories")
    labels = {int(each["id"]): str(each["name"]) for each in content["categories"]}
    export.declared += [labels[number] for number in sorted(labels)]
    shapes: dict[int, list[tuple[str, Shape | str]]] = {}  # of each image
    for each in content["annotations"]:
        category = int(each.get("category_id", -1))
        label = labels.get(category, "")
        shape: Shape | str = partial(_coco_area, each.get("segmentation"))
        if not label:
            shape = f"annotation {each.get('id')} of {path} has the category {category}, which categories does not list"
        shapes.setdefault(int(each["image_id"]), []).append((label, shape))

    folders, split = _coco_places(path, source)
    for each in content["images"]:
        drawn = shapes.pop(int(each["id"]), [])
        with export.part(path):
            name = str(each["file_name"])
            image = find_image(folders, name)
            size = int(each["height"]), int(each["width"])
            export.add(split_name(split), name, image, size, drawn)

    if shapes:
        export.faults.append(
            f"{path} has labels of the image_id {min(shapes)}, which images does not list."
        )


def _coco_places(path: Path, source: Path) -> tuple[list[Path], str]:
    """Folders that may hold a JSON file's images, and its split.

    Images lie next to it or, for annotations/instances_val2017.json, in val2017/ or images/val2017/.
    """
    name = path.stem.partition("_")[2]
    root = source if source.is_dir() else path.parent
    parts = (name, f"images/{name}", "images/default", "images", "")
    folders = [path.parent]
    for folder in (root, path.parent.parent):
        folders += [folder / part for part in parts]

    split = ""
    if path.stem.startswith(("instances_", "stuff_")):
        split = name.rstrip("0123456789")
    elif path.parent != root:
        split = path.parent.name

    return folders, split


def _coco_area(segmentation: Any, size: Size) -> Area:
    """Area of the union of polygons, or of run lengths in column order, compressed or not."""
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
                "has a segmentation that is not a list of polygons [[x, y, x, y, x, y]]"
            )
        covered |= polygon(points, size)

    return covered


def labelme(source: Path, names: Sequence[str]) -> Export:
    """Labels of a folder of JSON files with their images, subfolders included; later shapes cover earlier ones.

    labelme rotates photos upright by their EXIF data, so the class table gets `exif: apply`.
    """
    files = [
        path
        for path in map(Path, files_below(source))
        if path.suffix == ".json" and not path.name.startswith(".")
    ]
    if not files:
        raise DataError(
            f"{source} has no JSON files. Set source to the folder where labelme saved its files."
        )

    export = Export(exif="apply")
    for path in sorted(files):
        with export.part(path):
            _read_labelme(path, path.relative_to(source), export)

    return export


def _read_labelme(path: Path, name: Path, export: Export) -> None:
    """Add the image of a JSON file and its shapes."""
    content = load_json(path, "shapes", "imagePath", "imageHeight", "imageWidth")
    size = int(content["imageHeight"]), int(content["imageWidth"])
    listed = str(content["imagePath"])
    try:
        image = find_image([path.parent], listed)
    except DataError:  # the path is from another machine
        image = find_image([path.parent], PureWindowsPath(listed).name)
    export.add("", str(name), image, size, [*map(_labelme_shape, content["shapes"])])


def _labelme_shape(shape: dict[str, Any]) -> tuple[str, Shape | str]:
    """Label and shape of a JSON entry."""
    label, kind = str(shape["label"]), str(shape.get("shape_type") or "polygon")
    points = [(float(x), float(y)) for x, y in shape["points"]]
    if kind == "polygon":
        return label, partial(polygon, points)
    if kind == "rectangle" and len(points) > 1:
        corners = rectangle(*np.min(points, axis=0), *np.max(points, axis=0))
        return label, partial(polygon, corners)

    if kind == "mask" and points:
        left, top = np.min(points, axis=0)
        return label, partial(_png, str(shape.get("mask")), round(left), round(top))

    return (
        "",
        f"a {kind} of {label} ({len(points)} points) is not supported. Draw a polygon",
    )


def _png(text: str, left: int, top: int, size: Size) -> Area:
    """Area of the nonzero pixels of a base64 PNG that covers part of the image."""
    part = None
    with suppress(ValueError, cv2.error):  # not base64, or empty
        data = np.frombuffer(base64.b64decode(text), np.uint8)
        part = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)

    if part is None:
        raise ValueError("has a mask that is not a PNG")

    return _pasted(lambda _: part > 0, part.shape, left, top, size)


def cvat(source: Path, names: Sequence[str]) -> Export:
    """Labels of annotations.xml, with images next to it or in images/; a higher z_order covers a lower one."""
    path = source if source.is_file() else source / "annotations.xml"
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Export from CVAT as `CVAT for images 1.1`, and unpack the archive."
        ) from None

    if root.find("track") is not None:
        raise DataError(
            f"{path} is for a video. Export from CVAT as `CVAT for images 1.1`, with the images."
        )

    export = Export()
    export.declared += [one.text or "" for one in root.findall("meta//label/name")]
    for image in root.findall("image"):
        name = image.get("name", "")
        with export.part(f"{path}: {name}"):
            _read_cvat(image, name, path.parent, export)

    return export


def _read_cvat(
    image: ElementTree.Element, name: str, folder: Path, export: Export
) -> None:
    """Add an image and its shapes."""
    subset = image.get("subset", "")
    folders = [folder / place for place in (f"images/{subset}", "images", "")]
    path = find_image(folders, name)
    size = int(image.attrib["height"]), int(image.attrib["width"])
    shapes = [shape for shape in image if shape.tag != "tag"]
    shapes.sort(key=lambda shape: float(shape.get("z_order", 0)))
    export.add(split_name(subset), name, path, size, [*map(_cvat_shape, shapes)])


def _cvat_shape(element: ElementTree.Element) -> tuple[str, Shape | str]:
    """Label and shape of an XML element."""
    label, kind = element.attrib["label"], element.tag

    def numbers(*keys: str) -> list[float]:
        """The values of these attributes."""
        return [float(element.attrib[key]) for key in keys]

    if float(element.get("rotation", 0)):
        return (
            "",
            f"a rotated {kind} of {label} is not supported. Convert it to a polygon in CVAT",
        )
    if kind == "mask":
        height, width, left, top = map(int, numbers("height", "width", "left", "top"))
        counts = list(map(int, element.attrib["rle"].split(",")))
        area = partial(runs, counts)
        return label, partial(_pasted, area, (height, width), left, top)

    if kind == "polygon":
        points = [point.split(",") for point in element.attrib["points"].split(";")]
        corners = [(float(x), float(y)) for x, y in points]
    elif kind == "box":
        corners = rectangle(*numbers("xtl", "ytl", "xbr", "ybr"))
    else:
        return "", f"a {kind} of {label} is not supported. Draw a polygon"
    return label, partial(polygon, corners)


def voc(source: Path, names: Sequence[str]) -> Export:
    """Labels of JPEGImages, SegmentationClass and ImageSets/Segmentation.

    labelmap.txt names the colors; without it, `names` are the classes of the ids 0, 1, 2, ...
    """
    roots = [
        path
        for path in (source, *sorted(source.glob("**/VOC20*")))
        if (path / "SegmentationClass").is_dir()
    ]
    if not roots:
        raise DataError(
            f"{source} has no folder SegmentationClass. Set source to the folder above it."
        )

    root, export = roots[0], Export()
    table = _voc_table(root / "labelmap.txt", names)
    export.declared += table.classes.names
    export.drawn |= set(export.declared)
    export.colors |= {
        color: table.classes.names[train] for color, train in table.colors.items()
    }
    pictures = root / "JPEGImages"
    images = {
        path.relative_to(pictures).with_suffix("").as_posix(): path
        for path in map(Path, files_below(pictures))
        if path.suffix.lower() in SUFFIXES
    }
    lists = sorted(root.glob("ImageSets/Segmentation/*.txt"))
    if {"train", "val"} & {path.stem for path in lists}:  # trainval is their union
        lists = [path for path in lists if path.stem != "trainval"]
    if not lists:
        export.faults.append(
            f"{root} has no list in ImageSets/Segmentation. Without lists, data=folder can read the two folders."
        )

    for path in lists:
        split = split_name(path.stem)
        for line in path.read_text(encoding="utf-8-sig").splitlines():
            name = line.strip()
            mask = root / "SegmentationClass" / f"{name}.png"
            picture = images.get(name)
            if picture and mask.is_file():
                paint = partial(_voc_target, picture, mask, table)
                export.items.append(Item(split, name, picture, paint))
            elif name:
                export.faults.append(
                    f"{path} lists {name}, which has no {mask if picture else 'image in JPEGImages'}."
                )

    return export


def _voc_target(
    image: Path, mask: Path, table: MaskTable, ids: Mapping[str, int]
) -> Uint8:
    """Train ids of a mask that holds ids or colors of `table`."""
    lut = np.full(256, IGNORE_INDEX, np.uint8)
    names = table.classes.names
    lut[: len(names)] = [ids.get(name, IGNORE_INDEX) for name in names]
    target = lut[read_target(table, str(mask))]
    check_size(image, target.shape)
    return target


def _voc_table(path: Path, names: Sequence[str]) -> MaskTable:
    """Table of the colors in CVAT's labelmap.txt (lines `name:r,g,b:parts:actions`), or else of the ids of `names`."""
    table: dict[str, Any] = {"names": [*names], "masks": "ids"}
    if path.is_file():
        lines = path.read_text().splitlines()
        rows = [line.split(":") for line in lines if line.strip()[:1] not in ("", "#")]
        colors = [[*map(int, row[1].split(","))] for row in rows]
        own = [row[0].strip() for row in rows]
        table = {"names": own, "palette": colors, "masks": "colors"}
    elif not names:
        raise DataError(
            f"{path} does not exist, so the classes in the masks are unknown. Set names=[...] to the names of the ids "
            "0, 1, 2, ... If this is Pascal VOC itself, use data=voc without an import."
        )
    try:
        return mask_table_of(table, "voc")
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


# Arguments: source, and the user's names, in their order. Raises DataError for a source of another format.
IMPORTERS: dict[str, Callable[[Path, Sequence[str]], Export]] = {
    "voc": voc,
    "coco": coco,
    "labelme": labelme,
    "cvat": cvat,
    "roboflow": coco,
}
