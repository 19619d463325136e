"""`segpipe predict`: class ids and overlays of images and videos, from a run or from an exported folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from segpipe.cli.commands import COMMANDS
from segpipe.determinism import flags
from segpipe.distributed.group import choose_device
from segpipe.errors import ConfigError
from segpipe.predict.inference import inference
from segpipe.predict.job import Predictions, PredictJob
from segpipe.predict.outputs import Outputs, unwritable
from segpipe.predict.predictor import (
    Predictor,
    load_exported,
    of_exported,
    of_network,
)
from segpipe.predict.sources import find
from segpipe.predict.tiles import parse_size
from segpipe.run.console import progress
from segpipe.settings.arguments import with_settings
from segpipe.settings.groups import ComputeConfig
from segpipe.train.checkpoint import load_network

# Keys that only one of the two can follow, and why the other cannot.
ONLY_RUN = {
    "which": "an exported folder holds one network",
    "tta": "an exported file gives class ids, and no probabilities that could be averaged",
    "ids": "an exported folder does not know the raw ids of the data set",
    "compute.device": "an exported file runs on the device of provider=",
}
ONLY_ARTIFACT = {
    "fit": "a run takes images of any size; cut them with tile=",
    "provider": "a run uses compute.device=",
}


def main(given: dict[str, Any]) -> int:
    """Exit code: 2 when a source could not be predicted; all others are."""
    out = Path(given["out"])
    if out.is_file():
        raise ConfigError(
            f"out = {out} is a file, but a folder was needed. Choose another out=."
        )
    left_out: list[str] = []
    sources = find(given["source"], out, say=left_out.append)
    check(given, has_video=any(source.is_video for source in sources))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    predictor = of_artifact(given) if given["artifact"] else of_run(given)
    outputs = Outputs(
        out,
        predictor,
        given["overlay"],
        given["alpha"],
        given["legend"],
        given["frames"],
        given["exif"] == "apply",
    )
    with progress("predict", console=Console(stderr=True)) as show:
        job = PredictJob(
            sources,
            outputs,
            batch=given["batch"],
            replace=given["exists"] == "replace",
            progress=show,
        )
        done = job.run()
    for line in [*done.problems, *filter(None, [predictor.note()]), *left_out]:
        print(line, file=sys.stderr)
    print(json.dumps(summary(done, outputs)))
    return 2 if done.problems else 0


def check(given: dict[str, Any], *, has_video: bool) -> None:
    """Raise ConfigError when keys contradict each other."""
    if bool(given["run"]) == bool(given["artifact"]):
        raise ConfigError(
            "run and artifact: set one of them, run=runs/NAME or artifact=runs/NAME/export."
        )
    defaults = {key.key: key.default for key in COMMANDS["predict"].keys}
    here, others = (
        ("artifact", ONLY_RUN) if given["artifact"] else ("run", ONLY_ARTIFACT)
    )
    for key, reason in others.items():
        if given.get(key, defaults.get(key)) != defaults.get(key):
            raise ConfigError(
                f"{key} = {given[key]}, but {here} is set: {reason}. Leave {key} out."
            )
    if has_video and not (given["overlay"] or given["frames"]):
        raise ConfigError(
            "overlay = false and frames = false leave nothing to write for a video. Set one of them."
        )


def of_run(given: dict[str, Any]) -> Predictor:
    """The predictor of `run`."""
    how = inference(given)
    trained = load_network(Path(given["run"]), given["which"])
    config = with_settings(trained.config, given)
    flags.apply(config.compute.threads)
    return of_network(
        trained, choose_device(config.compute.device, 0), how, raw=given["ids"] == "raw"
    )


def of_artifact(given: dict[str, Any]) -> Predictor:
    """The predictor of `artifact`."""
    exported = load_exported(
        Path(given["artifact"]),
        precision=given["precision"],
        provider=given["provider"],
        threads=int(given.get("compute.threads", ComputeConfig().threads)),
        tile=parse_size("tile", given["tile"]),
        overlap=given["overlap"],
        resize=given["fit"] == "resize",
    )
    return of_exported(exported, precision=given["precision"])


def summary(done: Predictions, outputs: Outputs) -> dict[str, Any]:
    """The line that the command prints."""
    return {
        "out": str(outputs.out),
        "predicted": len(done.entries) - done.kept,
        "kept": done.kept,
        "problems": len(done.problems),
        "images": done.answered,
        "images_per_second": round(done.answered / done.seconds, 2)
        if done.seconds
        else 0.0,
        "share": {
            name: round(share, 4) for name, share in outputs.shares(done.pixels).items()
        },
        **outputs.predictor.model,
        "ema_digest": outputs.predictor.model[
            "weights_digest"
        ],  # by the name that it has in result.json
    }
