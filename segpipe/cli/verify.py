"""`segpipe verify`: all gates once more, on an exported folder as it is now and the run that it claims to come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from segpipe.errors import CHECKED_IN_PART, DataError, ExportMismatch
from segpipe.export.artifact.origin import every_tensor_used, origin_of
from segpipe.export.artifact.place import sums_line
from segpipe.export.dataset import gather, training_images, validation_samples
from segpipe.export.verify import image_size, read_manifest, verify_folder
from segpipe.export.verify_report import (
    ANSWERS_ONLY,
    FOLDER,
    NOT_VERIFIED,
    ExportReport,
)
from segpipe.ledger.inputs import changed_since
from segpipe.settings.arguments import with_settings
from segpipe.train.checkpoint import load_network


def main(given: dict[str, Any]) -> int:
    """Exit code: 0, or that of a check in part where only answers could be compared."""
    report = verify(given)
    Console(emoji=False).print(report.table())
    print(sums_line(report.folder))
    print(report.line("ARTIFACT"))
    return CHECKED_IN_PART if report.status == ANSWERS_ONLY else 0


def verify(given: dict[str, Any], *, engines: Sequence[str] = ()) -> ExportReport:
    """Report of all gates. Raises the error of the first that fails.

    engines: besides those of `export.engines`, names that the caller put into `segpipe.runtime.engines.ENGINES`.
    """
    run, which, folder = Path(given["run"]), given["which"], Path(given["artifact"])
    with every_tensor_used(NOT_VERIFIED):
        trained = load_network(run, which)
    config = with_settings(trained.config, given)
    config.export.engines = [*config.export.engines, *engines]
    manifest = read_manifest(folder)
    samples = validation_samples(config, trained.classes)
    changed = ""
    if samples is not None:
        changed = changed_since(run, trained.config.data, config.data)
    try:
        report = verify_folder(
            trained,
            folder,
            gather(samples, config, image_size(manifest)),
            origin=origin_of(run, which, trained),
            train_images=training_images(config),
        )
    except ExportMismatch as error:
        # What the folder says, and quality, depend on the images; whether the files are the checkpoint's does not.
        of_images = all(
            name == FOLDER or gate.gate == "G5" for name, gate in error.failed
        )
        if not changed or not of_images:
            raise
        raise DataError(
            f"{changed}. So {folder} cannot be compared on these images ({error}). Restore the images, or export again."
        ) from error
    if changed:
        print(f"warning: {changed}.", file=sys.stderr)
    return report
