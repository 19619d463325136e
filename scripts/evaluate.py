"""Evaluates a run on a split and prints one line of JSON with `miou` and `iou` per class.

    python scripts/evaluate.py run=runs/NAME [which=last|best] [data.root=FOLDER] [data.split=test] [compute.device=cpu]

Whole images at their own size, fp32, the averaged weights. Exit codes: 0 done, 2 usage or data.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.data.problems import verify
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group, choose_device
from segpipe.errors import ConfigError, SegpipeError
from segpipe.run.tracking import plain
from segpipe.settings.arguments import parse, with_settings
from segpipe.train.checkpoint import load_network
from segpipe.train.metrics import summary
from segpipe.train.validate import validate

SETTINGS = ("run", "which", "data.root", "data.split", "data.workers", "compute.device", "compute.threads")


def evaluate(arguments: list[str]) -> dict[str, object]:
    """What the command prints."""
    given = parse(arguments, SETTINGS)
    trained = load_network(Path(given["run"]), given["which"])
    config = with_settings(trained.config, given)
    flags.apply(config.compute.threads)
    verify(config.data, [config.data.split])
    samples = open_samples(config.data, config.data.split, config.seed)
    if samples.classes.names != trained.classes.names:
        raise ConfigError(f"data.root = {config.data.root} has other classes than the network: {samples.classes.names}")
    group = Group(0, 0, 1, choose_device(config.compute.device, 0))
    model, preprocess = trained.model.to(group.device), trained.preprocess.to(group.device)
    workers = min(config.data.workers, 1)
    method = config.data.start_method
    found = validate(model, preprocess, samples, group, precision="fp32", workers=workers, start_method=method)
    figures = summary(found.total, samples.classes.names)
    return {"run": given["run"], "split": config.data.split, "images": len(samples), "step": trained.step, **figures}


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        print(json.dumps(plain(evaluate(arguments)), allow_nan=False))
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
