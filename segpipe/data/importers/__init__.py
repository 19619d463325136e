"""Importers: one module per format, each a function from a source to an ImportPlan."""

from collections.abc import Callable, Sequence
from pathlib import Path

from segpipe.data.importers.coco import coco
from segpipe.data.importers.cvat import cvat
from segpipe.data.importers.imported import ImportPlan
from segpipe.data.importers.labelme import labelme
from segpipe.data.importers.panoptic import coco_panoptic
from segpipe.data.importers.roboflow import roboflow
from segpipe.data.importers.voc import voc

# Arguments: source, names of the classes or none, and what pixels outside all areas are: "class" or "ignore".
IMPORTERS: dict[str, Callable[[Path, Sequence[str], str], ImportPlan]] = {
    "voc": voc,
    "coco": coco,
    "coco_panoptic": coco_panoptic,
    "labelme": labelme,
    "cvat": cvat,
    "roboflow": roboflow,
}
