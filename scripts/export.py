"""Exports a finished run: model files that provably compute what the trained network computes, or none.

    python scripts/export.py run=runs/NAME [which=last|best] [export.dir=FOLDER] ['export.formats=[onnx,torchscript]']
                             ['export.precision=[fp32,int8]'] [export.profile=robot|isaac|logits]
                             [export.dynamic=none|batch|hw]
                             [export.latency_budget_ms=33] [export.images=16] [export.quality_images=100]
                             ['export.critical_classes=[person]'] [data.root=FOLDER] [data.split=val]
                             [export.allow_unverified=true export.height=H export.width=W]

Exit codes: 0 published, 2 usage, 3 not convertible, 4 other answers (G2, G3, G4) or blind gates (G6), 7 not whole
(G1), 11 worse on labelled images (G5), 12 too slow.
"""

import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.errors import SegpipeError
from segpipe.export.artifact.origin import every_tensor_used
from segpipe.export.artifact.outcome import NOT_EXPORTED
from segpipe.export.artifact.verify_report import table
from segpipe.export.dataset import training_images, validation_samples
from segpipe.export.publish import export_checkpoint
from segpipe.settings.arguments import parse, with_settings
from segpipe.settings.export_settings import EXPORT_KEYS
from segpipe.train.checkpoint import load_network

SETTINGS = ("run", "which", *EXPORT_KEYS[1:], "data.root", "data.split")  # without export.enabled


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        given = parse(arguments, SETTINGS)
        run = Path(given["run"])
        with every_tensor_used(NOT_EXPORTED):
            trained = load_network(run, given["which"])
        config = with_settings(trained.config, given)
        validation, training = validation_samples(config, trained.classes), training_images(config)
        report = export_checkpoint(run, given["which"], trained, config, validation=validation, training=training)
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    Console().print(table(report))
    print(report.line("EXPORT"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
