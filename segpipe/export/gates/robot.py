"""An exported folder through the eyes of the robot that will load it; a refusal is one of G1."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from segpipe.export.artifact.outcome import ExportReport
from segpipe.export.gates.limits import gate_integrity
from segpipe.export.graph.profiles import ROBOT
from segpipe.export.graph.shapes import further_sizes
from segpipe.runtime import Segmenter


def load_as_robot(result: ExportReport, files: Path) -> None:
    """Loads every ONNX file of the folder with segpipe.runtime, which repeats the golden answers.

    Where sizes are free, a frame of each further one that was tried must get an answer, of the shape that the manifest
    has for it. The runtime is for the profile robot; others are left alone.
    """
    if result.manifest["profile"] != ROBOT.name:
        return
    for name, entry in result.files.items():
        if entry["format"] == "onnx":
            try:
                segmenter = Segmenter.load(files, precision=entry["precision"])
                for size in further_sizes(result.free):
                    segmenter.session.run(np.zeros((*size, 3), dtype=np.uint8))
            except Exception as error:  # besides its own ArtifactError, onnxruntime has a type per status code
                told = str(error).replace(str(files), result.folder.name)  # the folder of now is gone in a moment
                result.gates[name][0] = gate_integrity([told])
