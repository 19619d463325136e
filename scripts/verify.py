"""Repeats every gate on an exported folder as it lies there, against the run it claims to come from.

    python scripts/verify.py artifact=DIR run=runs/NAME [which=last|best] [data.root=FOLDER] [data.split=val]
                             [export.images=16] [export.quality_images=100] [export.latency_budget_ms=33]
                             ['export.critical_classes=[person]'] [export.allow_unverified=true]

Exit codes: 0 verified, 2 usage, 4 other answers (G2, G3, G4) or blind gates (G6), 7 altered, not whole, or
of another checkpoint (G1), 11 worse on labelled images (G5), 12 too slow. The last line says which.
"""

import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.errors import ConfigError, SegpipeError
from segpipe.export.artifact.origin import every_tensor_used, origin_of
from segpipe.export.artifact.outcome import NOT_VERIFIED
from segpipe.export.artifact.verify_report import table
from segpipe.export.dataset import gather, training_images, validation_samples
from segpipe.export.verify import image_size, read_manifest, verify_folder
from segpipe.settings.arguments import parse, with_settings
from segpipe.train.checkpoint import load_network

SETTINGS = (
    "artifact", "run", "which", "data.root", "data.split", "export.images", "export.quality_images",
    "export.latency_budget_ms", "export.critical_classes", "export.allow_unverified",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        given = parse(arguments, SETTINGS)
        if not given.get("artifact"):
            raise ConfigError(f"{' '.join(arguments)!r} names no artifact. Set artifact=runs/NAME/export.")
        folder = Path(given["artifact"])
        with every_tensor_used(NOT_VERIFIED):
            trained = load_network(Path(given["run"]), given["which"])
        config = with_settings(trained.config, given)
        size = image_size(read_manifest(folder))
        found = gather(validation_samples(config, trained.classes), config, size)
        report = verify_folder(
            trained,
            folder,
            found.images,
            names=found.names,
            labelled=found.labelled,
            settings=config.export,
            origin=origin_of(Path(given["run"]), given["which"], trained),
            train_images=training_images(config),
        )
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    Console().print(table(report))
    print(report.line("ARTIFACT"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
