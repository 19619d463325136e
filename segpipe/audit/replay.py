"""Updates of a run, trained again from a checkpoint into a folder of their own: the same step, the same ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from segpipe.audit.task import Task
from segpipe.audit.trace import Tracer, write_traces
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.distributed.watch.agreement import Agreement, common_fingerprint
from segpipe.ledger.recorder import Recorder
from segpipe.losses.total import valid_pixels
from segpipe.train import state
from segpipe.train.engine import loss_weights, shard_stream
from segpipe.train.step import TrainStep


def replay(task: Task, group: Group, report: Callable[[int], None]) -> None:
    """Write the ledger of the updates `task.first` to `task.last - 1`, and of the state before them.

    Nothing is validated, exported or saved. `report(done)` is called after each update. Raises CheckpointError when
    the checkpoint is torn, altered, or of another recipe or environment, and DataError when a sample cannot be read.
    """
    config = task.config
    flags.apply(config.compute.threads, config.compute.mode)
    samples = open_samples(config.data, "train", config.seed)
    current = state.build_state(config, samples.classes, group.device)
    fingerprint, _ = common_fingerprint(config, group)
    if task.checkpoint:
        state.restore(Path(task.checkpoint), current, config, samples.classes, fingerprint)
    assert current.step == task.first, (current.step, task)
    with contextlib.closing(Recorder(config, group, current, samples, fingerprint)) as recorder:
        if task.first == task.last:
            return
        step = TrainStep(current, config, group, loss_weights(config, samples), recorder)
        agreement = Agreement(group, recorder, config.run_dir)
        own = group.own_shards(config.compute.shards)
        with contextlib.closing(shard_stream(config, group, samples, range(task.first, task.last))) as stream:
            for number in range(task.first, task.last):
                shards = [next(stream) for _ in own]
                counts = agreement.sum([sum(valid_pixels(batch.target) for batch in shards)])
                with _traced(task, step, group) if number == task.traced else contextlib.nullcontext():
                    step(shards, counts[0])
                step.apply()
                if number % recorder.steps_held == 0:
                    recorder.flush()
                report(current.step)


@contextlib.contextmanager
def _traced(task: Task, step: TrainStep, group: Group) -> Iterator[None]:
    """Digests of every module into the folder of the task."""
    config = task.config
    tracer = Tracer(step.state.model, step.gradients.loss.preprocess, group.own_shards(config.compute.shards))
    with tracer.watch():
        yield
    write_traces(config.run_dir / f"trace{group.rank:02d}.json", tracer.traces())
