"""labelme: a JSON file per image with polygons, rectangles, circles and small masks."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from math import dist
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np

from segpipe.datasets.importers.areas import (
    Area,
    Shape,
    Size,
    ellipse,
    pasted,
    polygon,
    rectangle,
    wrong,
)
from segpipe.datasets.importers.exported import Export, find_image, load_json
from segpipe.errors import DataError
from segpipe.files import files_below

WITHOUT_AREA = ("line", "linestrip", "point", "points")


def labelme(source: Path, names: Sequence[str] = ()) -> Export:
    """Labels of a folder of JSON files with their images, subfolders included; later shapes cover earlier ones.

    labelme turns photos upright as EXIF says, so the class table gets `exif: apply`.
    """
    files = [
        path
        for path in files_below(source)
        if path.suffix == ".json" and path.name[0] != "."
    ]
    if not files:
        raise DataError(
            f"{source} has no JSON files. Set source to the folder where labelme saved them."
        )
    export = Export(exif="apply")
    for path in sorted(files):
        with export.part(path):
            _read(path, path.relative_to(source), export)
    return export


def _read(path: Path, name: Path, export: Export) -> None:
    content = load_json(path, "shapes", "imagePath", "imageHeight", "imageWidth")
    size = int(content["imageHeight"]), int(content["imageWidth"])
    shapes = [_labelled(shape) for shape in content["shapes"]]
    listed = str(content["imagePath"]).replace("\\", "/")
    try:
        image = find_image([path.parent], listed)
    except DataError:  # it was labelled elsewhere
        image = find_image([path.parent], PurePosixPath(listed).name)
    export.add("", str(name), image, size, shapes)


def _labelled(shape: dict[str, Any]) -> tuple[str, Shape]:
    """Label and shape of an entry."""
    label, kind = str(shape["label"]), str(shape.get("shape_type") or "polygon")
    if kind in WITHOUT_AREA:
        return "", wrong(f"a {kind} of {label} has no area. Draw a polygon")
    points = [(float(x), float(y)) for x, y in shape["points"]]
    if kind == "polygon":
        return label, polygon(points)
    if kind == "rectangle" and len(points) > 1:
        xs, ys = zip(*points, strict=True)
        return label, rectangle(min(xs), min(ys), max(xs), max(ys))
    if kind == "circle" and len(points) == 2:
        radius = dist(*points)
        return label, ellipse(*points[0], radius, radius)
    if kind == "mask" and points:
        (left, top), *_ = sorted(points)
        return label, _pasted(str(shape.get("mask")), round(left), round(top))
    return label, wrong(f"is a {kind} of {len(points)} points, which is not read")


def _pasted(text: str, left: int, top: int) -> Shape:
    """A mask of part of the image: a PNG in base64 whose pixels are not 0."""

    def shape(size: Size) -> Area:
        try:
            data = np.frombuffer(base64.b64decode(text), np.uint8)
            part = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)
        except (ValueError, cv2.error):  # no base64, or empty
            part = None
        if part is None:
            raise ValueError("has a mask that is not a PNG")
        return pasted(part > 0, left, top, size)

    return shape
