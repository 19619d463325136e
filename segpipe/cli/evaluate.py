"""`segpipe evaluate`: scores of a run on a split, in total, by class and by sequence."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from segpipe.data.data_set import Samples
from segpipe.data.samples import open_samples, sequences
from segpipe.datasets.problems import verify
from segpipe.determinism import flags
from segpipe.distributed.group import Group, choose_device
from segpipe.errors import ConfigError, DataError
from segpipe.files import plain
from segpipe.ledger.inputs import changed_since
from segpipe.losses.total import backend
from segpipe.predict.inference import Inference, inference, segment
from segpipe.run.console import ERRORS, iou_table, sequence_table
from segpipe.run.report import ReportData, page_data, predictor, write_report
from segpipe.settings.compose import with_settings
from segpipe.settings.config import Config
from segpipe.train.checkpoint import TrainedNetwork, load_network
from segpipe.train.metrics import (
    Validation,
    flattering,
    scores,
)
from segpipe.train.validate import validate


@dataclass(frozen=True)
class Evaluation:
    """A run scored on a split."""

    config: Config
    trained: TrainedNetwork
    samples: Samples
    found: Validation
    how: Inference
    figures: dict[str, Any]


def main(given: dict[str, Any]) -> int:
    """Exit code. The line of JSON is all that stdout gets; tables go to stderr."""
    page = Path(given["out"]) if given["out"] else None
    done = evaluate(given)
    figures = done.figures
    pixels = done.found.total.sum(1).double()
    ERRORS.print(iou_table(figures, (pixels / pixels.sum().clamp_min(1)).tolist()))
    if figures["sequences"]:
        ERRORS.print(sequence_table(figures["sequences"]))
    if figures["note"]:
        ERRORS.print(figures["note"])
    if page:
        write_report(page, _page(done))
        ERRORS.print(f"report {page}")
    sys.stderr.flush()
    print(json.dumps(plain(figures), allow_nan=False))
    return 0


def evaluate(given: dict[str, Any]) -> Evaluation:
    """What the command prints, and what it is made from."""
    how = inference(given)
    trained = load_network(Path(given["run"]), given["which"])
    config = _config(trained.config, given)
    flags.apply(config.compute.threads)
    samples = open_samples(config.data, config.data.split, config.seed)
    verify(config.data, {config.data.split: samples})
    if samples.classes.names != trained.classes.names:
        raise ConfigError(
            f"data.root = {config.data.root} has other classes than the network: {samples.classes.names}"
        )
    group = Group(0, 0, 1, choose_device(config.compute.device, 0))
    found = validate(
        trained.model.to(group.device),
        trained.preprocess.to(group.device),
        samples,
        group,
        config.data,
        answer=partial(segment, how=how) if how.described else None,
        precision=how.precision,
        backend=backend(config.loss, group.device.type),
    )
    figures = {
        "run": given["run"],
        "split": config.data.split,
        "images": len(samples),
        "step": trained.step,
    }
    names, where = samples.classes.names, sequences(samples, config.data.sequence)
    figures |= scores(found, names, where, _seen(trained.config, config))
    figures |= how.described
    changed = changed_since(Path(given["run"]), trained.config.data, config.data)
    notes = [
        f"T{changed[1:]}: this is not the score of that day." if changed else "",
        flattering(figures["sequences"]),
    ]
    figures["note"] = " ".join(filter(None, notes))
    return Evaluation(config, trained, samples, found, how, figures)


def _config(trained: Config, given: dict[str, Any]) -> Config:
    """The configuration of the run with the settings that are given. A split that is named is scored whole."""
    whole = {"data.hold_out": ""} if "data.split" in given else {}
    return with_settings(trained, whole | given)


def _seen(trained: Config, config: Config) -> set[str] | None:
    """Sequences of the run's training images; None if these are not on this machine."""
    for data in (trained.data, config.data):
        try:
            return set(
                sequences(
                    open_samples(data, "train", trained.seed), config.data.sequence
                )
            )
        except DataError:
            continue
    return None


def _page(done: Evaluation) -> ReportData:
    trained = done.trained
    device = next(trained.model.parameters()).device
    result = {
        **done.figures,
        "device": str(device),
        "ema_digest": trained.ema_digest,
    }
    seer = predictor(
        partial(segment, trained.model, trained.preprocess, how=done.how), device
    )
    return page_data(done.config, done.samples, done.found, result, seer)
