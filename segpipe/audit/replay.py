"""Updates of a run, trained again from a checkpoint into a folder of their own: the same step, the same ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from segpipe.audit import exact
from segpipe.audit.trace import Tracer, write_traces
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.watch.agreement import common_fingerprint
from segpipe.errors import ConfigError
from segpipe.files import to_json, write_atomically
from segpipe.losses.total import backend
from segpipe.train import checkpoint, state
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import Recorder
from segpipe.train.start import WEIGHTS, read_start
from segpipe.train.step import TrainStep, train_step

if TYPE_CHECKING:
    from segpipe.audit.task import Task
    from segpipe.distributed.group import Group


def replay(task: Task, group: Group, report: Callable[[int], None]) -> None:
    """Write the ledger of updates `task.first` to `task.last - 1` and of the state before; hashes of the state after.

    Nothing is validated, exported or saved. `report(done)` is called after each update. Raises CheckpointError when
    the checkpoint is truncated, altered, or of another recipe or environment, and DataError when a sample cannot be
    read.
    """
    config = task.config
    flags.apply(config.compute.threads, config.compute.mode)
    samples = open_samples(config.data, "train", config.seed, packed=False)
    start = None if task.checkpoint else read_start(config, checkpoint.load)
    current = state.build_state(config, samples.classes, group.device, start)
    fingerprint, _ = common_fingerprint(
        config, group, backend(config.loss, group.device.type)
    )
    if task.checkpoint:
        checkpoint.restore(
            Path(task.checkpoint), current, config, samples.classes, fingerprint
        )
    assert current.step == task.first, (current.step, task)
    with contextlib.closing(
        Recorder(config, group, current, samples, fingerprint)
    ) as recorder:
        if group.is_main and current.weights:
            write_atomically(config.run_dir / WEIGHTS, to_json(current.weights))
        if task.first == task.last:
            return
        counts = counted(config, group, samples)
        step = TrainStep(config, recorder, loss_weights(config, samples, counts))
        own = group.own_shards(config.compute.shards)
        stream = shard_stream(
            config, group, samples, range(task.first, task.last), counts
        )
        with contextlib.closing(stream):
            for number in range(task.first, task.last):
                shards = [next(stream) for _ in own]
                with (
                    _traced(task, step)
                    if number == task.traced
                    else contextlib.nullcontext()
                ):
                    train_step(step, shards)
                report(current.step)
    if group.is_main:
        exact.write(config.run_dir, current)


@contextlib.contextmanager
def _traced(task: Task, step: TrainStep) -> Iterator[None]:
    """Writes digests of every module into the folder of the task."""
    config, group = task.config, step.group
    for name in ("compile", "cuda_graph"):
        if getattr(config.compute, name):
            raise ConfigError(
                f"compute.{name} = true: such a network has no layers to look into. Set replay=false."
            )
    tracer = Tracer(
        step.state.model, step.loss.preprocess, group.own_shards(config.compute.shards)
    )
    with tracer.watch():
        yield
    write_traces(config.run_dir / f"trace{group.rank:02d}.json", tracer.traces())
