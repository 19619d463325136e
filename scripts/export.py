"""Exports a finished run: model files that provably compute what the trained network computes, or none.

    python scripts/export.py run=runs/NAME [which=best] [export.dir=FOLDER] ['export.formats=[onnx]'] [data.root=FOLDER]

Exit codes: 0 published, 2 usage, 3 not convertible, 4 the exported file differs.
"""

import sys
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.checkpoint import load_network
from segpipe.config import Config, check, from_mapping, to_mapping
from segpipe.data.samples import open_samples
from segpipe.errors import ConfigError, SegpipeError
from segpipe.export import check_images, export_run
from segpipe.export.report import table

SETTINGS = ("run", "which", "export.dir", "export.formats", "export.images", "data.root", "data.split")


def parse(arguments: list[str]) -> dict[str, str]:
    """The arguments by key. Raises ConfigError for any that is not one of SETTINGS."""
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    for key in (key for key in given if key not in SETTINGS):
        needed = f"only {', '.join(SETTINGS)} can be given here"
        raise ConfigError(f"{key} = {given[key]!r}, but {needed}: the rest comes from the checkpoint. Leave it out.")
    if not given.get("run") or given.setdefault("which", "best") not in ("best", "last"):
        raise ConfigError(f"{' '.join(arguments)} does not name a run. Set run=runs/NAME, and which=best or last.")
    return given


def with_settings(config: Config, given: dict[str, str]) -> Config:
    """`config` of the run with the settings of the command line in place of its own."""
    settings = [f"{key}={value}" for key, value in given.items() if "." in key]
    merged = OmegaConf.merge(to_mapping(config), OmegaConf.from_dotlist(settings))
    changed = from_mapping(cast(dict[str, Any], OmegaConf.to_container(merged)))
    check(changed, world_size=1)
    return changed


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        given = parse(arguments)
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
