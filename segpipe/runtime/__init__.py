"""Runs an exported network on a robot: takes a frame, returns a mask or why there is none. Needs numpy, onnxruntime.

Imports are relative, so the folder also works under another package name.
"""

from .artifact import Artifact, ArtifactError, SelfTestError, read_artifact, read_sums
from .engines import EngineError, make_session
from .frames import NO_ANSWER, Result, Status
from .segmenter import Segmenter

__all__ = [
    "NO_ANSWER",
    "Artifact",
    "ArtifactError",
    "EngineError",
    "Result",
    "Segmenter",
    "SelfTestError",
    "Status",
    "make_session",
    "read_artifact",
    "read_sums",
]
