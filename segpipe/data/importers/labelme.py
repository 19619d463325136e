"""labelme: a JSON file per image with polygons, rectangles, circles and small masks."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial
from math import hypot
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from segpipe.data.importers.coco import load_json
from segpipe.data.importers.imported import (
    INCOMPLETE,
    Drawing,
    ImportPlan,
    plan_of_drawings,
)
from segpipe.data.importers.outlines import (
    Area,
    Size,
    ellipse,
    pasted,
    polygon,
    rectangle,
)
from segpipe.errors import DataError
from segpipe.files import files_below

WITHOUT_AREA = ("line", "linestrip", "point", "points")


def labelme(source: Path, names: Sequence[str], background: str) -> ImportPlan:
    """Plan for a folder of JSON files with their images, subfolders included; later shapes are painted over earlier.

    labelme turns photos upright as EXIF says, so the class table gets `exif: apply`. Raises DataError without files.
    """
    files = sorted(
        p
        for p in files_below(source)
        if p.suffix == ".json" and not p.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"{source} has no JSON files. Set source to the folder where labelme saved them."
        )
    drawings, faults = [], list[str]()
    for path in files:
        try:
            drawings.append(
                _drawing(path, path.relative_to(source).with_suffix("").as_posix())
            )
        except DataError as error:
            faults.append(str(error))
        except INCOMPLETE as error:
            faults.append(
                f"{path} is not complete ({error!r}). Save it with labelme again."
            )
    plan = plan_of_drawings(drawings, (), names, background, faults)
    plan.exif = "apply"
    return plan


def _drawing(path: Path, name: str) -> Drawing:
    """Content of one file. Raises DataError when it is not of labelme, or its image is missing."""
    content = load_json(path, ("shapes", "imagePath", "imageHeight", "imageWidth"))
    listed = Path(str(content["imagePath"]).replace("\\", "/"))
    image = next(
        (
            each
            for each in (path.parent / listed, path.parent / listed.name)
            if each.is_file()
        ),
        None,
    )
    if image is None:
        raise DataError(
            f"{path} belongs to {listed}, which is not there. Copy the images beside the JSON files."
        )
    areas, unread = [], []
    for shape in content["shapes"]:
        kind = str(shape.get("shape_type") or "polygon")
        if kind in WITHOUT_AREA:
            unread.append(
                f"{path} has a {kind} of {shape['label']}, which has no area. Draw a polygon instead."
            )
        else:
            areas.append((str(shape["label"]), _area(kind, shape)))
    return Drawing(
        "",
        name,
        image,
        (int(content["imageHeight"]), int(content["imageWidth"])),
        areas,
        unread,
    )


def _area(kind: str, shape: dict[str, Any]) -> Callable[[Size], Area]:
    points = np.array([(x, y) for x, y in shape["points"]], np.float64).reshape(-1, 2)
    if kind == "polygon" and len(points) > 2:
        return partial(polygon, points)
    if kind == "rectangle" and len(points) > 1:
        (left, top), (right, bottom) = points.min(axis=0), points.max(axis=0)
        return partial(rectangle, left, top, right, bottom)
    if kind == "circle" and len(points) == 2:
        (x, y), (edge_x, edge_y) = points.tolist()
        radius = hypot(edge_x - x, edge_y - y)
        return partial(ellipse, x, y, radius, radius)
    if kind == "mask" and shape.get("mask"):
        left, top = (round(value) for value in points.min(axis=0).tolist())
        return partial(_pasted, str(shape["mask"]), left, top)

    def wrong(size: Size) -> Area:
        raise ValueError(f"is a {kind} of {len(points)} points, which is not read")

    return wrong


def _pasted(text: str, left: int, top: int, size: Size) -> Area:
    """A mask of part of the image: a PNG in base64 whose pixels are not 0."""
    try:
        part = cv2.imdecode(
            np.frombuffer(base64.b64decode(text), np.uint8), cv2.IMREAD_GRAYSCALE
        )
    except (ValueError, cv2.error):  # no base64, or empty
        part = None
    if part is None:
        raise ValueError("has a mask that is not a PNG")
    return pasted(np.asarray(part > 0), left, top, size)
