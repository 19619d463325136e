"""`segpipe predict`: class ids and overlays for images and videos, from a run or an exported folder."""

import json
from pathlib import Path
from typing import Any

from segpipe.cli.commands import COMMANDS, Given
from segpipe.determinism import flags
from segpipe.distributed.group import choose_device
from segpipe.errors import ConfigError
from segpipe.predict.inference import inference
from segpipe.predict.job import PredictJob, find
from segpipe.predict.outputs import unwritable
from segpipe.predict.predictor import Predictor, of_exported, of_network
from segpipe.run.console import ERRORS, progress
from segpipe.settings.compose import with_settings
from segpipe.settings.groups import ComputeConfig
from segpipe.train.checkpoint import load_network

# Keys that only a run or only an exported folder supports, and why the other does not.
ONLY = {
    "run": {
        "which": "an exported folder holds one network",
        "tta": "an exported file outputs class ids, not probabilities that could be averaged",
        "compute.device": "an exported file runs on the device of provider=",
    },
    "artifact": {"provider": "a run uses compute.device="},
}


def main(given: Given) -> int:
    """Exit code: 2 if a source could not be predicted; the others still are."""
    out = Path(given["out"])
    if out.is_file():
        raise ConfigError(
            f"out = {out} is a file, but a folder was needed. Choose another out=."
        )
    sources, left_out = find(given["source"], out)
    check(given, has_video=any(source.is_video for source in sources))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    network = predictor(given)
    with progress("predict") as show:
        job = PredictJob(
            sources,
            out,
            network,
            overlay=given["overlay"],
            alpha=given["alpha"],
            frames=given["frames"],
            seconds=given["seconds"],
            replace=given["exists"] == "replace",
            progress=show,
        )
        job.run()
    for line in filter(None, [*job.problems, left_out]):
        ERRORS.print(line)
    print(json.dumps(summary(job)))
    return 2 if job.problems else 0


def check(given: Given, *, has_video: bool) -> None:
    """Raise ConfigError when keys contradict each other."""
    if bool(given["run"]) == bool(given["artifact"]):
        raise ConfigError(
            "run and artifact: set exactly one, run=runs/NAME or artifact=runs/NAME/export."
        )
    here, other = ("run", "artifact") if given["run"] else ("artifact", "run")
    defaults = {key.key: key.default for key in COMMANDS["predict"].keys}
    for key, reason in ONLY[other].items():
        if given.get(key) not in (None, defaults.get(key)):
            raise ConfigError(
                f"{key} = {given[key]}, but {here} is set: {reason}. Remove {key}."
            )
    if has_video and not (given["overlay"] or given["frames"]):
        raise ConfigError(
            "overlay = false and frames = false leave nothing to write for a video. Set one of them."
        )


def predictor(given: Given) -> Predictor:
    """Predictor for the network of `run` or `artifact`."""
    if given["artifact"]:
        return of_exported(
            Path(given["artifact"]),
            precision=given["precision"],
            provider=given["provider"],
            threads=int(given.get("compute.threads", ComputeConfig().threads)),
        )
    how = inference(given)
    trained = load_network(Path(given["run"]), given["which"])
    config = with_settings(trained.config, given)
    flags.apply(config.compute.threads)
    return of_network(trained, choose_device(config.compute.device, 0), how)


def summary(done: PredictJob) -> dict[str, Any]:
    """Content of the JSON line that the command prints."""
    shares = done.shares(done.pixels) if done.entries else {}
    return {
        "out": str(done.out),
        "predicted": len(done.entries) - done.kept,
        "kept": done.kept,
        "problems": len(done.problems),
        "images": done.answered,
        "images_per_second": round(done.answered / max(done.took, 1e-9), 2),
        "share": {name: round(share, 4) for name, share in shares.items()},
        **done.predictor.model,
    }
