"""Importers: one module per format, each a function from a source to an Export."""

from collections.abc import Callable, Sequence
from pathlib import Path

from segpipe.datasets.importers.coco import coco
from segpipe.datasets.importers.cvat import cvat
from segpipe.datasets.importers.exported import Export
from segpipe.datasets.importers.labelme import labelme
from segpipe.datasets.importers.voc import voc

# Arguments: source, and the names that the user gave, in their order. Raises DataError for a source of another format.
IMPORTERS: dict[str, Callable[[Path, Sequence[str]], Export]] = {
    "voc": voc,
    "coco": coco,
    "labelme": labelme,
    "cvat": cvat,
    "roboflow": coco,
}
