"""From a trained network to files that provably compute what it computes, or to no file at all."""

from segpipe.export.deploy import DeployModel, deploy_model
from segpipe.export.publish import ExportReport, export_run
from segpipe.export.verify import check_images

__all__ = ["DeployModel", "ExportReport", "check_images", "deploy_model", "export_run"]
