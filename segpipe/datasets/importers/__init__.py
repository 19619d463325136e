"""Importers: a function per format from a source to an Export."""

from collections.abc import Callable, Sequence
from pathlib import Path

from segpipe.datasets.importers.drawn import coco, cvat, labelme
from segpipe.datasets.importers.exported import Export
from segpipe.datasets.importers.voc import voc

# Arguments: source, and the names that the user gave, in their order. Raises DataError for a source of another format.
IMPORTERS: dict[str, Callable[[Path, Sequence[str]], Export]] = {
    "voc": voc,
    "coco": coco,
    "labelme": labelme,
    "cvat": cvat,
    "roboflow": coco,
}
