"""Updates of a run, trained again from a checkpoint into a folder of their own: the same step, the same ledger."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed import group as processes
from segpipe.distributed.agreement import common_fingerprint
from segpipe.distributed.group import Group
from segpipe.distributed.health import out_of_memory_named
from segpipe.errors import CheckpointError, ConfigError
from segpipe.ledger.digest import tensor_digests
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.losses.total import backend
from segpipe.settings.config import (
    Config,
    check,
    saved_config,
)
from segpipe.train import checkpoint, state
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import Recorder
from segpipe.train.step import TrainStep, train_step

PARTS = ("model", "ema", "optimizer")  # of a checkpoint, whose tensors are compared

Report = Callable[[int], None]  # updates done


class Replay(NamedTuple):
    """What updates gave when they were trained again."""

    ledger: RunLedger
    tensors: dict[str, str]  # digests of all tensors at its end, as `tensor_digests`


def read_config(run: Path) -> Config:
    """The configuration of a run. Raises CheckpointError when config.json is missing or invalid."""
    try:
        config = saved_config(run)
        check(config, world_size=1)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return config


def in_folder(config: Config, root: Path, *, any_environment: bool) -> Config:
    """Configuration for a replay of a run below `root`; settings that affect numbers are unchanged."""
    run = replace(
        config.run,
        root=str(root),
        exists="resume",
        allow_fingerprint_change=any_environment,
    )
    compute = replace(config.compute, ledger=True, nproc="auto")
    return replace(config, run=run, compute=compute)


def replay(
    config: Config,
    start: Path | None,
    updates: range,
    report: Report,
    *,
    any_environment: bool = False,
) -> Replay:
    """Train updates of a run again, from a checkpoint or the seed, in this process and a folder that is then deleted.

    Nothing is validated, exported or saved. `report(done)` is called after each update.
    Raises CheckpointError when the checkpoint is truncated, altered, or of another recipe or environment, and DataError
    when a sample cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="segpipe-replay-") as root:
        copy = in_folder(config, Path(root), any_environment=any_environment)
        tensors = _train(copy, start, updates, report)
        return Replay(read_run(copy.run_dir), tensors)


def _train(
    config: Config, start: Path | None, updates: range, report: Report
) -> dict[str, str]:
    """Write the ledger of the updates; digests of the state after them."""
    compute = config.compute
    flags.set_environment(compute.threads, compute.mode)
    flags.apply(compute.threads, compute.mode)
    group = Group(0, 0, 1, processes.choose_device(compute.device, 0))
    samples = open_samples(config.data, "train", config.seed, packed=False)
    weights = None if start else checkpoint.read_start(config)
    current = state.build_state(config, samples.classes, group.device, weights)
    current.teacher = checkpoint.teacher_of(config, group.device)
    loss_backend = backend(config.loss, group.device.type)
    fingerprint, _ = common_fingerprint(config, group, loss_backend)
    if start:
        checkpoint.restore(start, current, config, samples.classes, fingerprint)
    assert current.step == updates.start
    counts = counted(config, group, samples)
    recorder = Recorder(config, group, current, samples, fingerprint)
    stream = shard_stream(config, group, samples, updates, counts)
    with contextlib.closing(recorder), contextlib.closing(stream):
        step = TrainStep(config, recorder, loss_weights(config, samples, counts))
        with out_of_memory_named(0, group.device, lambda: current.step):
            for _ in updates:
                train_step(step, [next(stream) for _ in range(compute.shards)])
                report(current.step)
    content = {
        "model": current.model.state_dict(),
        "ema": current.ema.model.state_dict(),
        "optimizer": current.optimizer.state_dict(),
    }
    return tensor_digests(content)


def first_difference(path: Path, wanted: Mapping[str, str]) -> str:
    """Name of the first tensor of a checkpoint with another digest than in `wanted`; empty if none has.

    Raises CheckpointError when the file cannot be read.
    """
    saved = checkpoint.load(path)
    found = tensor_digests({part: saved[part] for part in PARTS})
    return next(iter(flags.mapping_differences(wanted, found)), "")
