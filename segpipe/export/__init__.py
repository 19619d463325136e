"""From a trained network to files that provably compute what it computes, or to no file at all."""

from segpipe.export.artifact.origin import Origin, every_tensor_used, origin_of
from segpipe.export.artifact.outcome import NOT_EXPORTED, NOT_VERIFIED, ExportReport
from segpipe.export.artifact.statistics import spread
from segpipe.export.evidence import Material, gather, training_images, validation_samples
from segpipe.export.gates.checks import Labelled, check_images
from segpipe.export.graph.deploy import DeployModel, deploy_model
from segpipe.export.publish import export_checkpoint, export_run
from segpipe.export.verify import image_size, read_manifest, verify_folder

__all__ = [
    "NOT_EXPORTED",
    "NOT_VERIFIED",
    "DeployModel",
    "ExportReport",
    "Labelled",
    "Material",
    "Origin",
    "check_images",
    "deploy_model",
    "every_tensor_used",
    "export_checkpoint",
    "export_run",
    "gather",
    "image_size",
    "origin_of",
    "read_manifest",
    "spread",
    "training_images",
    "validation_samples",
    "verify_folder",
]
