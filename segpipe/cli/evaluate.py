"""`segpipe evaluate`: scores of a run on a split, overall, by class and by sequence."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from segpipe.cli.commands import Given
from segpipe.data.samples import check_scorable, open_samples, sequences
from segpipe.datasets.problems import verify
from segpipe.determinism import flags
from segpipe.distributed.group import Group, choose_device
from segpipe.errors import DataError
from segpipe.files import plain
from segpipe.ledger.inputs import changed_since, were_read
from segpipe.losses.total import backend
from segpipe.predict.inference import inference, segment
from segpipe.run.console import ERRORS, iou_table, sequence_table
from segpipe.run.report import page_data, predictor, write_report
from segpipe.settings.compose import with_settings
from segpipe.settings.config import Config
from segpipe.train.checkpoint import load_network
from segpipe.train.metrics import flattering, scores
from segpipe.train.validate import validate


def main(given: Given) -> int:
    """Exit code. Prints one line of JSON on stdout, and tables on stderr."""
    figures, pixels = scored(given)
    ERRORS.print(iou_table(figures, pixels))
    if figures["sequences"]:
        ERRORS.print(sequence_table(figures["sequences"]))
    if figures["note"]:
        ERRORS.print(figures["note"])
    if given["out"]:
        ERRORS.print(f"report {given['out']}")
    print(json.dumps(plain(figures), allow_nan=False))
    return 0


def scored(given: Given) -> tuple[Given, list[int]]:
    """Figures that the command prints, and the pixel count of each class; writes the report if `out` is set."""
    how, run = inference(given), Path(given["run"])
    trained = load_network(run, given["which"])
    # A split given by name is scored completely.
    whole = {"data.hold_out": ""} if "data.split" in given else {}
    config = with_settings(trained.config, whole | given)
    flags.apply(config.compute.threads)
    samples = open_samples(config.data, config.data.split, config.seed)
    verify(config.data, {config.data.split: samples})
    check_scorable(samples, config.data.split, trained.classes.names)
    group = Group(0, 1, choose_device(config.compute.device, 0))
    if config.train.channels_last:
        # Another memory layout rounds sums differently: one pixel in ten million changed its class.
        trained.model.to(memory_format=torch.channels_last)
    trained.model.to(group.device)
    trained.preprocess.to(group.device)
    answer = partial(segment, trained.model, trained.preprocess, how=how)
    found = validate(
        trained.model,
        trained.preprocess,
        samples,
        group,
        config.data,
        answer=answer if how.described else None,
        precision=how.precision,
        backend=backend(config.loss, group.device.type),
    )
    figures: Given = {
        "run": given["run"],
        "split": config.data.split,
        "images": len(samples),
        "step": trained.step,
    }
    where = sequences(samples, config.data.sequence)
    seen = _seen(run, trained.config, config)
    figures |= scores(found, trained.classes.names, where, seen) | how.described
    changed = changed_since(run, trained.config.data, config.data)
    notes = [
        f"T{changed[1:]}: this is not the score of the run." if changed else "",
        flattering(figures["sequences"]),
    ]
    figures["note"] = " ".join(filter(None, notes))
    if given["out"]:
        about = {"device": str(group.device), "ema_digest": trained.ema_digest}
        predict = predictor(answer, group.device)
        write_report(
            Path(given["out"]),
            page_data(config, samples, found, figures | about, predict),
        )
    return figures, found.total.sum(1).tolist()


def _seen(run: Path, trained: Config, config: Config) -> set[str] | None:
    """Sequences of the run's training images; None if the folders do not hold these images.

    Names are not enough in a moved folder: two data sets often share names.
    """
    try:
        now = config.data
        data = replace(trained.data, root=now.root, images=now.images, masks=now.masks)
        training = open_samples(data, "train", trained.seed)
    except DataError:
        return None
    if data != trained.data and not were_read(run, training):
        return None
    return set(sequences(training, config.data.sequence))
