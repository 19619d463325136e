"""An exported folder through the eyes of the robot that will load it; a refusal is one of G1."""

from __future__ import annotations

from pathlib import Path

from segpipe.export.gates import gate_integrity
from segpipe.export.outcome import ExportReport
from segpipe.export.profiles import ROBOT
from segpipe.runtime import ArtifactError, Segmenter


def load_as_robot(result: ExportReport, files: Path) -> None:
    """Loads every ONNX file of the folder with segpipe.runtime, which repeats the golden answers.

    The runtime is for the profile robot; others are left alone.
    """
    if result.manifest["profile"] != ROBOT.name:
        return
    for name, entry in result.files.items():
        if entry["format"] == "onnx":
            try:
                Segmenter.load(files, precision=entry["precision"])
            except ArtifactError as error:
                told = str(error).replace(str(files), result.folder.name)  # the folder of now is gone in a moment
                result.gates[name][0] = gate_integrity([told])
