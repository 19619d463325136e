"""`segpipe verify`: all gates once more, on an exported folder as it is now and the run that it claims to come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from segpipe.export import (
    NOT_VERIFIED,
    every_tensor_used,
    gather,
    image_size,
    origin_of,
    read_manifest,
    training_images,
    validation_samples,
    verify_folder,
)
from segpipe.export.artifact.summary import table
from segpipe.settings.arguments import with_settings
from segpipe.train.checkpoint import load_network


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    run, which, folder = Path(given["run"]), given["which"], Path(given["artifact"])
    with every_tensor_used(NOT_VERIFIED):
        trained = load_network(run, which)
    config = with_settings(trained.config, given)
    found = gather(validation_samples(config, trained.classes), config, image_size(read_manifest(folder)))
    report = verify_folder(
        trained,
        folder,
        found.images,
        names=found.names,
        labelled=found.labelled,
        settings=config.export,
        origin=origin_of(run, which, trained),
        train_images=training_images(config),
    )
    Console().print(table(report))
    print(report.line("ARTIFACT"))
    return 0
