"""Trains updates of a run again, from a checkpoint into a temporary folder: the same step, the same ledger."""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group, choose_device
from segpipe.distributed.health import out_of_memory_named
from segpipe.ledger.digest import tensor_digests
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.settings.config import Config
from segpipe.train import checkpoint
from segpipe.train.batches import counted
from segpipe.train.recorder import Recorder
from segpipe.train.step import TrainStep, train_step

PARTS = ("model", "ema", "optimizer")  # of a checkpoint; their tensors are compared


def replay(
    config: Config,
    start: Path | None,
    updates: range,
    report: Callable[[int], None],
    *,
    any_environment: bool,
) -> tuple[RunLedger, dict[str, str]]:
    """Train updates of a run again, in this process; returns their ledger, and the digests of all tensors after them.

    Starts from the checkpoint `start`, or from the seed. Writes to a temporary folder. Torch's switches are those of
    the run. Nothing is validated, exported or saved. `report(done)` is called after each update.
    Raises CheckpointError when the checkpoint is truncated, altered, or of another recipe or environment, and DataError
    when a sample cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="segpipe-replay-") as root:
        run = replace(config.run, root=root, allow_fingerprint_change=any_environment)
        compute = replace(config.compute, ledger=True)
        config = replace(config, run=run, compute=compute)
        group = Group(0, 1, choose_device(config.compute.device, 0))
        samples = open_samples(config.data, "train", config.seed, packed=False)
        found = checkpoint.Found(start, checkpoint.load(start)) if start else None
        state, fingerprint, _ = checkpoint.state_of(
            config, group, samples.classes, found
        )
        assert state.step == updates.start
        sampling = counted(config, group, samples)
        recorder = Recorder(config, group, state, samples, fingerprint)
        stream = sampling.batches(group, updates)
        with contextlib.closing(recorder), contextlib.closing(stream):
            step = TrainStep(config, recorder, sampling.loss_weights())
            with out_of_memory_named(0, group.device, lambda: state.step):
                for _ in updates:
                    shards = [next(stream) for _ in range(config.compute.shards)]
                    train_step(step, shards)
                    report(state.step)
        saved = checkpoint.snapshot(state, config, samples.classes, fingerprint)
        return read_run(config.run_dir), _digests(saved)


def first_difference(path: Path, wanted: Mapping[str, str]) -> str:
    """First tensor, or part of the class table, of a checkpoint that differs from `wanted`; empty if there is none.

    Raises CheckpointError when the file cannot be read.
    """
    found = _digests(checkpoint.load(path))
    return next(iter(flags.mapping_differences(wanted, found)), "")


def _digests(saved: Mapping[str, Any]) -> dict[str, str]:
    """Digests of a checkpoint's tensors, and its class table without the name, which may come from the folder."""
    table = saved["classes"]
    texts = {
        f"classes.{part}": repr(table.get(part))
        for part in ("names", "palette", "train_ids")
    }
    return tensor_digests({part: saved[part] for part in PARTS}) | texts
