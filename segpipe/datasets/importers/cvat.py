"""CVAT for images 1.1: one annotations.xml with polygons, masks, boxes and ellipses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from segpipe.datasets.importers.areas import (
    Area,
    Shape,
    Size,
    check_inside,
    ellipse,
    pasted,
    polygon,
    rectangle,
    runs,
    wrong,
)
from segpipe.datasets.importers.exported import Export, find_image, split_name
from segpipe.errors import DataError


def cvat(source: Path, names: Sequence[str] = ()) -> Export:
    """Labels of annotations.xml with its images beside it or in images/; a higher z_order covers a lower one."""
    path = source if source.is_file() else source / "annotations.xml"
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Export from CVAT as `CVAT for images 1.1`."
        ) from None
    if root.find("track") is not None:
        raise DataError(
            f"{path} is of a video. Export from CVAT as `CVAT for images 1.1`, with the images."
        )
    export = Export()
    export.declared += [label.text or "" for label in root.findall("meta//label/name")]
    for image in root.findall("image"):
        file_name, subset = image.get("name", ""), image.get("subset", "")
        with export.part(f"{path}: {file_name}"):
            split = split_name(subset)
            folders = [
                path.parent / part for part in (f"images/{subset}", "images", "")
            ]
            size = int(image.attrib["height"]), int(image.attrib["width"])
            shapes = sorted(image, key=lambda shape: float(shape.get("z_order", 0)))
            drawn = [_labelled(shape) for shape in shapes if shape.tag != "tag"]
            picture = find_image(folders, file_name)
            export.add(split, file_name, picture, size, drawn)
    return export


def _labelled(element: ElementTree.Element) -> tuple[str, Shape]:
    """Label and shape of an element."""
    label, kind = element.attrib["label"], element.tag

    def numbers(*keys: str) -> list[float]:
        return [float(element.attrib[key]) for key in keys]

    if float(element.get("rotation", 0)):
        return label, wrong(
            f"is a rotated {kind}, which is not read. Convert it to a polygon in CVAT"
        )
    if kind == "polygon":
        points = [point.split(",") for point in element.attrib["points"].split(";")]
        return label, polygon([(float(x), float(y)) for x, y in points])
    if kind == "box":
        return label, rectangle(*numbers("xtl", "ytl", "xbr", "ybr"))
    if kind == "ellipse":
        return label, ellipse(*numbers("cx", "cy", "rx", "ry"))
    if kind == "mask":
        left, top, width, height = map(int, numbers("left", "top", "width", "height"))
        counts = [int(count) for count in element.attrib["rle"].split(",")]
        return label, partial(_mask, counts, left, top, (height, width))
    return "", wrong(f"a {kind} of {label} has no area. Draw a polygon")


def _mask(counts: list[int], left: int, top: int, part: Size, size: Size) -> Area:
    """The pixels of a mask of part of the image."""
    check_inside(part, left, top, size)  # before run lengths take memory
    return pasted(runs(counts, part), left, top, size)
