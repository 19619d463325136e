"""CVAT for images 1.1: one annotations.xml with polygons, masks, boxes and ellipses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from segpipe.data.importers.coco import find_image
from segpipe.data.importers.imported import (
    INCOMPLETE,
    Drawing,
    ImportPlan,
    entry_name,
    plan_of_drawings,
    split_name,
)
from segpipe.data.importers.outlines import (
    Area,
    Size,
    check_inside,
    ellipse,
    pasted,
    polygon,
    rectangle,
    runs,
)
from segpipe.errors import DataError

WITHOUT_AREA = ("polyline", "points", "cuboid", "skeleton")


def cvat(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for annotations.xml with its images beside it or in images/; a higher z_order is painted over a lower one.

    Raises DataError for a source without such a file.
    """
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
    labels = [element.text or "" for element in root.findall("meta//label/name")]
    drawings, faults = [], list[str]()
    for element in root.findall("image"):
        file_name, subset = element.attrib["name"], element.get("subset", "")
        folders = [path.parent / part for part in (f"images/{subset}", "images", "")]
        image = find_image(folders, file_name)
        if image is None:
            faults.append(
                f"{path} lists {file_name}, which is neither in images nor beside it. Export with the images."
            )
            continue
        try:
            split = "" if subset.lower() in ("", "default") else split_name(subset)
            areas, unread = _shapes(element, f"{path}: {file_name}")
            size = (int(element.attrib["height"]), int(element.attrib["width"]))
            drawings.append(
                Drawing(split, entry_name(file_name), image, size, areas, unread)
            )
        except DataError as error:
            faults.append(f"{path}: {file_name}: {error}")
        except INCOMPLETE as error:
            faults.append(
                f"{path}: {file_name} is not complete ({error!r}). Export it again."
            )
    return plan_of_drawings(drawings, labels, names, background, faults)


def _shapes(
    image: ElementTree.Element, where: str
) -> tuple[list[tuple[str, Callable[[Size], Area]]], list[str]]:
    """Areas of an image by z_order, and a message for each shape that has none."""
    areas, unread = [], []
    for shape in sorted(image, key=lambda shape: number_or(shape, "z_order")):
        if shape.tag in WITHOUT_AREA:
            unread.append(
                f"{where} has {shape.tag} of {shape.get('label')}, which has no area. Draw a polygon."
            )
        elif shape.tag != "tag":
            areas.append((shape.attrib["label"], _area(shape)))
    return areas, unread


def _area(shape: ElementTree.Element) -> Callable[[Size], Area]:
    def number(key: str) -> float:
        return float(shape.attrib[key])

    if shape.tag == "polygon":
        corners = (point.split(",") for point in shape.attrib["points"].split(";"))
        points = [(float(x), float(y)) for x, y in corners]
        return partial(polygon, np.array(points, np.float64))
    if shape.tag == "box" and number_or(shape, "rotation") == 0:
        return partial(
            rectangle, number("xtl"), number("ytl"), number("xbr"), number("ybr")
        )
    if shape.tag == "ellipse" and number_or(shape, "rotation") == 0:
        return partial(ellipse, number("cx"), number("cy"), number("rx"), number("ry"))
    if shape.tag == "mask":
        counts = [int(count) for count in shape.attrib["rle"].split(",")]
        left, top, width, height = (
            int(number(key)) for key in ("left", "top", "width", "height")
        )
        return partial(_mask, counts, left, top, (height, width))

    def wrong(size: Size) -> Area:
        turned = "rotated " if number_or(shape, "rotation") else ""
        raise ValueError(
            f"is a {turned}{shape.tag}, which is not read. Convert it to a polygon in CVAT"
        )

    return wrong


def _mask(counts: list[int], left: int, top: int, part: Size, size: Size) -> Area:
    """The pixels of a mask of part of the image."""
    check_inside(part, left, top, size)
    return pasted(runs(counts, part, by_column=False), left, top, size)


def number_or(shape: ElementTree.Element, key: str) -> float:
    """An attribute as a number; 0 if it is absent."""
    return float(shape.get(key, 0))
