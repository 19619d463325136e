"""Runs an exported network on a robot: a frame in, a mask or the reason for none out. Needs numpy and onnxruntime.

Imports are relative, so that the folder also works under another package name.
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
