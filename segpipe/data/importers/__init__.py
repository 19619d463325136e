"""Importers: one module per format, each a function from a source to an ImportPlan."""

from collections.abc import Callable, Sequence
from pathlib import Path

from segpipe.data.importers.coco import coco, coco_panoptic
from segpipe.data.importers.cvat import cvat
from segpipe.data.importers.drawn import roboflow, voc
from segpipe.data.importers.imported import ImportPlan
from segpipe.data.importers.labelme import labelme

# Arguments: source, names of the classes or none, and what pixels outside all areas are: "class" or "ignore".
IMPORTERS: dict[str, Callable[[Path, Sequence[str], str], ImportPlan]] = {
    "voc": voc,
    "coco": coco,
    "coco_panoptic": coco_panoptic,
    "labelme": labelme,
    "cvat": cvat,
    "roboflow": roboflow,
}
