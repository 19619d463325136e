"""`segpipe evaluate`: mIoU and IoU per class of a run on a split."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from segpipe.data.problems import verify
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group, choose_device
from segpipe.errors import ConfigError
from segpipe.files import plain
from segpipe.predict.inference import inference, segment
from segpipe.settings.arguments import with_settings
from segpipe.train.checkpoint import load_network
from segpipe.train.metrics import summary
from segpipe.train.validate import validate


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    print(json.dumps(plain(evaluate(given)), allow_nan=False))
    return 0


def evaluate(given: dict[str, Any]) -> dict[str, object]:
    """What the command prints."""
    how = inference(given)
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
    found = validate(
        model,
        preprocess,
        samples,
        group,
        answer=partial(segment, how=how) if how.described else None,
        precision=how.precision,
        workers=workers,
        start_method=method,
    )
    figures = summary(found.total, samples.classes.names) | how.described
    return {"run": given["run"], "split": config.data.split, "images": len(samples), "step": trained.step, **figures}
