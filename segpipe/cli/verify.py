"""`segpipe verify`: all gates once more, on an exported folder as it is now and the run that it claims to come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from segpipe.errors import CHECKED_IN_PART, DataError, IntegrityError, QualityError
from segpipe.export.artifact.origin import every_tensor_used, origin_of
from segpipe.export.artifact.outcome import ANSWERS_ONLY, NOT_VERIFIED, ExportReport
from segpipe.export.artifact.verify_report import table
from segpipe.export.dataset import gather, training_images, validation_samples
from segpipe.export.verify import image_size, read_manifest, verify_folder
from segpipe.ledger.inputs import changed_since
from segpipe.settings.arguments import with_settings
from segpipe.train.checkpoint import load_network


def main(given: dict[str, Any]) -> int:
    """Exit code: 0, or that of a check in part where only answers could be compared."""
    report = verify(given)
    Console(emoji=False).print(table(report))
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
    manifest, samples = (
        read_manifest(folder),
        validation_samples(config, trained.classes),
    )
    changed = (
        changed_since(run, trained.config.data, config.data)
        if samples is not None
        else ""
    )
    found = gather(samples, config, image_size(manifest))
    settings = replace(config.export, engines=[*config.export.engines, *engines])
    judged = partial(
        verify_folder, trained, folder, origin=origin_of(run, which, trained)
    )
    try:
        report = judged(
            found.images,
            names=found.names,
            labelled=found.labelled,
            settings=settings,
            train_images=training_images(config),
        )
    except (IntegrityError, QualityError) as error:
        if not changed:
            raise
        # Raises where the files are at fault and not the images.
        alone = replace(settings, allow_unverified=True)
        judged(
            [],
            names=[],
            labelled=None,
            settings=alone,
            train_images=training_images(config),
        )
        raise DataError(
            f"{changed}. The files of {folder} are what the checkpoint converts to, but cannot be compared on these "
            f"images ({error}). Restore the images, or export again."
        ) from error
    if changed:
        print(f"warning: {changed}.", file=sys.stderr)
    return report
