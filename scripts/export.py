"""Exports a finished run: model files that provably compute what the trained network computes, or none.

    python scripts/export.py run=runs/NAME [which=last|best] [export.dir=FOLDER] ['export.formats=[onnx]']
                             [export.images=16] [data.root=FOLDER] [data.split=val]

Exit codes: 0 published, 2 usage, 3 not convertible, 4 the exported file differs.
"""

import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.arguments import parse, with_settings
from segpipe.checkpoint import load_network
from segpipe.data.samples import open_samples
from segpipe.errors import SegpipeError
from segpipe.export import check_images, export_run
from segpipe.export.report import table

SETTINGS = ("run", "which", "export.dir", "export.formats", "export.images", "data.root", "data.split")


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        given = parse(arguments, SETTINGS)
        trained = load_network(Path(given["run"]), given["which"])
        config = with_settings(trained.config, given)
        names, images = check_images(open_samples(config.data, config.data.split, config.seed), config.export.images)
        out_dir = Path(config.export.dir or Path(given["run"]) / "export")
        report = export_run(trained, images, out_dir, config.export.formats, {}, names=names)
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    Console().print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
