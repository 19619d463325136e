"""`segpipe export`: model files of a run that compute what the trained network computes, or none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from segpipe.export.artifact.origin import every_tensor_used
from segpipe.export.artifact.place import sums_line
from segpipe.export.dataset import training_images, validation_samples
from segpipe.export.publish import export_checkpoint
from segpipe.export.verify_report import NOT_EXPORTED, ExportReport
from segpipe.settings.arguments import with_settings
from segpipe.train.checkpoint import load_network


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    report = export(given)
    Console(emoji=False).print(report.table())
    for warning in report.manifest.get("warnings", []):
        print(f"warning: {warning}.", file=sys.stderr)
    print(sums_line(report.folder))
    print(report.line("EXPORT"))
    return 0


def export(given: dict[str, Any]) -> ExportReport:
    """The published folder, with the result of every gate."""
    run = Path(given["run"])
    with every_tensor_used(NOT_EXPORTED):
        trained = load_network(run, given["which"])
    config = with_settings(trained.config, given)
    return export_checkpoint(
        run,
        given["which"],
        trained,
        config,
        validation=validation_samples(config, trained.classes),
        training=training_images(config),
    )
