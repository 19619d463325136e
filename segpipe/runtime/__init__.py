"""The exported network on the robot: a frame in, an answer or a reason out. Needs numpy and onnxruntime only."""

from segpipe.runtime.artifact import Artifact, ArtifactError, SelfTestError, read_artifact
from segpipe.runtime.segmenter import Segmenter
from segpipe.runtime.status import NO_ANSWER, Result, Status

__all__ = [
    "NO_ANSWER",
    "Artifact",
    "ArtifactError",
    "Result",
    "Segmenter",
    "SelfTestError",
    "Status",
    "read_artifact",
]
