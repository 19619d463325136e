"""A training run from the first step to the result; independent of the network that it trains."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from segpipe.data import frequency
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.agreement import agree_on_step, common_fingerprint
from segpipe.errors import CheckpointError, Interrupted, NumericsError
from segpipe.files import to_json, write_atomically
from segpipe.ledger import inputs
from segpipe.losses.total import backend
from segpipe.models.preprocess import Preprocess
from segpipe.plugins import is_path
from segpipe.settings.config import Config, to_mapping
from segpipe.train import checkpoint, state
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.forward import autocast
from segpipe.train.metrics import miou, summary
from segpipe.train.recorder import keeps_ledger, open_watch
from segpipe.train.result import check_space, header, result_of
from segpipe.train.start import WEIGHTS, read_start
from segpipe.train.step import StepResult, TrainStep, train_step
from segpipe.train.stop import StopRequest
from segpipe.train.teacher import teacher_of
from segpipe.train.training import OpenOutputs, Run
from segpipe.train.validate import Validation, validate

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.data.data_set import DataSet
    from segpipe.data.frequency import PixelCounts
    from segpipe.data.loader import ShardBatch
    from segpipe.distributed.group import Group
    from segpipe.train.state import TrainState


def train(
    config: Config,
    group: Group,
    open_outputs: OpenOutputs,
    *,
    git: dict[str, Any] | None = None,
) -> tuple[Run, Validation, dict[str, Any]]:
    """Train, validate and write the run's files; returns the run, its last validation and the content of result.json.

    git: commit and whether files differ from it, for result.json; None if unknown.

    Raises ConfigError and DataError before the first step, NumericsError on a loss that is not finite, Interrupted
    after Ctrl-C, when last.pt has been written.
    """
    run, stream, notes = _open(config, group, open_outputs)
    exit_code = 1
    try:
        with run.view:
            for note in notes:
                run.view.say(note)
            images_per_second = _loop(run, stream)
            _save(run, "last.pt")  # before the validation, which may fail
            stopped_early = _stopped_early(run)
            # After an early stop, this step has its line of the log already.
            final = _validate(run, precision="fp32", log=not stopped_early)
            if _keep_best(run, final, final=True):
                _save(run, "last.pt")
        result = result_of(run, final, images_per_second, stopped_early=stopped_early)
        result["git"] = git
        if group.is_main:
            write_atomically(run.folder / "result.json", to_json(result))
        exit_code = 0
    finally:
        # What it raises has been reported by an earlier flush.
        with contextlib.suppress(CheckpointError):
            run.watch.close()
        run.log.close(exit_code)
    return run, final, result


def _open(
    config: Config, group: Group, open_outputs: OpenOutputs
) -> tuple[Run, Generator[ShardBatch, None, None], list[str]]:
    """The run at the step at which it starts or resumes, its batches, and notes for the user."""
    started_before = (config.run_dir / "config.json").is_file()
    flags.apply(config.compute.threads, config.compute.mode)
    train_samples = open_samples(config.data, "train", config.seed)
    current, found, fingerprint, notes = _start(config, group, train_samples.classes)
    val_samples = open_samples(config.data, config.data.split, config.seed)
    source = found.path if found else config.run_dir / "last.pt"
    agree_on_step(source, current.step, group)
    group.together(lambda: check_space(config, current, group))

    done = current.step if found else None
    counts, stream = _batches(config, group, train_samples, done)
    view, log = open_outputs(done)
    if group.is_main:
        _write_origin(config, current, found, counts)
        splits = {"train": train_samples, config.data.split: val_samples}
        ledger = keeps_ledger(config)
        inputs.record(config, splits, fresh=not found, ledger=ledger)
    group.keep_stacks(config.run_dir)
    watch = open_watch(config, group, current, train_samples, fingerprint)
    run = Run(
        config,
        group,
        train_samples,
        val_samples,
        counts,
        current,
        fingerprint,
        watch,
        view,
        log,
        saved=done if found and not found.note else None,
    )
    if done is not None:
        notes.append(f"resuming {config.run_dir} at step {done}")
    elif started_before and config.run.exists == "resume":
        notes.append(
            f"{config.run_dir} holds no checkpoint yet: the run starts again at step 0"
        )
    about = header(config, group, train_samples, val_samples, current.model)
    return run, stream, [*current.notes, about, *notes]


def _start(
    config: Config, group: Group, classes: ClassTable
) -> tuple[TrainState, checkpoint.Found | None, dict[str, Any], list[str]]:
    """The state, fresh or that of the checkpoint, which comes with it; the fingerprint of rank 0, and notes."""
    resumes = config.run.exists == "resume"
    found = checkpoint.newest_whole(config.run_dir) if resumes else None
    weights = None if found else read_start(config, checkpoint.load)
    current = state.build_state(config, classes, group.device, weights)
    current.teacher = teacher_of(config, group.device)
    fingerprint, rank_differences = common_fingerprint(
        config, group, backend(config.loss, group.device.type)
    )
    if found:
        checkpoint.restore(
            found.path, current, config, classes, fingerprint, saved=found.content
        )
        if found.note and group.is_main:
            print(found.note, file=sys.stderr)  # also without train.progress
    notes = []
    precision = config.train.precision
    if group.device.type == "cpu" and flags.emulated(precision):
        notes.append(
            f"train.precision = {precision} is emulated: this CPU has no instructions for it, and updates "
            f"take many times as long as with train.precision=fp32."
        )
    if rank_differences and config.compute.mode != "off":
        notes.append(
            f"ranks differ, so another number of processes may give other bits: {'; '.join(rank_differences[:4])}"
        )
    return current, found, fingerprint, notes


def _batches(
    config: Config, group: Group, samples: DataSet, done: int | None
) -> tuple[PixelCounts | None, Generator[ShardBatch, None, None]]:
    """Pixels of each class, if the run needs them, and the shard batches of all updates after `done`."""

    def say(text: str) -> None:
        if group.is_main and config.train.progress:
            print(text, file=sys.stderr)  # the view is not open yet

    kept = None if done is None else config.run_dir / frequency.FILE_NAME
    counts = counted(config, group, samples, kept=kept, say=say)
    steps = range(done or 0, config.train.steps)
    return counts, shard_stream(config, group, samples, steps, counts)


def _write_origin(
    config: Config,
    current: TrainState,
    found: checkpoint.Found | None,
    counts: PixelCounts | None,
) -> None:
    """The files that say what the run starts from; a resumed run keeps those that it has."""
    folder = config.run_dir
    longer = found and found.content["config"]["train"]["steps"] != config.train.steps
    if longer or not found:
        write_atomically(folder / "config.json", to_json(to_mapping(config)))
    if current.weights and not found:
        write_atomically(folder / WEIGHTS, to_json(current.weights))
    kept = folder / frequency.FILE_NAME
    if counts is not None and not (found and kept.is_file()):
        counts.save(kept)


def _loop(run: Run, stream: Generator[ShardBatch, None, None]) -> float:
    """All updates that are left; returns images per second of the updates alone."""
    config, current, clock = run.config, run.state, run.clock
    own = run.group.own_shards(config.compute.shards)
    weights = loss_weights(config, run.train_samples, run.counts)
    step = TrainStep(config, run.watch, weights)
    with (
        StopRequest(outlive_error=run.group.world_size > 1) as stop,
        contextlib.closing(stream),
    ):
        while current.step < config.train.steps and not _stopped_early(run):
            shards = [next(stream) for _ in own]
            check = partial(_check, run, step, shards)
            result = train_step(
                step, shards, stop=stop.asked, wait=_waits(run), check=check
            )
            if result is None:
                _save(run, "last.pt")
                raise Interrupted(
                    f"stopped at step {current.step}; {run.folder / 'last.pt'} is written. "
                    f"Continue with run.exists=resume."
                )
            if _logs(config, current.step):
                _log(run, result)
            clock.tick()
            run.view.advance(current.step)
            with clock.paused():
                _keep(run)
    return clock.rate() * config.global_batch


def _keep(run: Run) -> None:
    """Validation and checkpoints that are due, but for those of the end of the run."""
    config, done = run.config, run.state.step
    if done == config.train.steps:
        return
    if _due(done, config.train.validate_every):
        _keep_best(run, _validate(run, precision=config.train.precision))
        if _stopped_early(run):
            run.view.say(
                f"step {done}: stops here, train.patience = {config.train.patience} validations after the best"
            )
    if _due(done, config.checkpoint.every):
        _save(run, "last.pt")
    if _due(done, config.checkpoint.keep_every):
        _save(run, f"step_{done:06d}.pt")
        if config.checkpoint.keep_last and run.group.is_main:
            checkpoint.keep_newest(run.folder, config.checkpoint.keep_last)


def _stopped_early(run: Run) -> bool:
    """Whether mIoU has stayed below its best for `train.patience` validations: the same on every rank."""
    return 0 < run.config.train.patience <= run.state.stale


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _logs(config: Config, done: int) -> bool:
    return done == 1 or _due(done, config.train.log_every)


def _waits(run: Run) -> bool:
    """Whether the host waits for the next update: always on a CPU; on a GPU when its outcome is logged or saved."""
    config, done = run.config, run.state.step + 1
    saved_at = (
        config.checkpoint.every,
        config.checkpoint.keep_every,
        config.train.validate_every,
        config.train.steps,
    )
    saves = any(_due(done, every) for every in saved_at)
    return run.group.device.type == "cpu" or saves or _logs(config, done)


def _check(
    run: Run, step: TrainStep, shards: Sequence[ShardBatch], result: StepResult
) -> None:
    """Raises NumericsError when this update, or an earlier one that the host did not check, is not finite."""
    scaler, first_bad = run.state.scaler, int(step.first_bad)
    # The scaler skips an update that overflowed and halves its scale. Below 1 the gradients themselves are not finite.
    scale = scaler.get_scale()
    overflowed = scaler.is_enabled() and not bool(torch.isfinite(result.grad_norm))
    if first_bad > run.state.step and not (overflowed and scale < 1.0):
        return

    own = {shard: float(loss) for shard, loss in result.shard_losses.items()}
    bad = [
        (rank, shard, loss)
        for rank, losses in enumerate(run.group.gather(own))
        for shard, loss in losses.items()
        if not math.isfinite(loss)
    ]
    named = [f"rank {rank} shard {shard} loss {loss}" for rank, shard, loss in bad[:4]]
    precision, name = run.config.train.precision, run.config.loss.name
    good = _last_good_state(run, first_bad)
    cause = ""
    advice = "Lower optim.lr, or set optim.clip_norm=5"
    advice += "." if precision == "fp32" else " or train.precision=fp32."
    if bad and is_path(name) and _logits_are_finite(run, step, shards):
        cause = (
            f"loss.name = {name} returned {bad[0][-1]} for finite logits; "
            f"`segpipe check-plugin loss.name={name}` tests it. "
        )
        advice = "Mend the loss; a lower optim.lr does not help."
    at_scale = f" at loss scale {scale:g}" if scaler.is_enabled() else ""
    raise NumericsError(
        f"{cause}step {run.state.step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)} "
        f"({'; '.join(named) or 'every loss is finite, a gradient is not'}), lr {result.rate:.4g}, precision "
        f"{precision}{at_scale}. {good} {advice}"
    )


def _logits_are_finite(run: Run, step: TrainStep, shards: Sequence[ShardBatch]) -> bool:
    """Whether the network makes finite logits of these shards, on every rank. A collective; spoils its statistics."""
    device, model = run.group.device, run.state.model.train()
    finite = True
    for batch in shards:
        color = None if batch.color is None else batch.color.to(device)
        with torch.no_grad(), autocast(device, run.config.train.precision):
            image = step.loss.preprocess(batch.image.to(device), color)
            heads = model.logits(image, aux=True)
        finite &= all(bool(logits.isfinite().all()) for logits in heads.values())
    return all(run.group.gather(finite))


def _last_good_state(run: Run, first_bad: int) -> str:
    """Saves the state before this update, unless an earlier one was not finite; returns a message that says where."""
    now = run.state.step
    if first_bad >= now:
        _save(run, "diverged.pt")
        return f"The state before this step is kept in {run.folder / 'diverged.pt'}."
    good = "no last.pt was written"
    if run.saved is not None:
        good = f"last.pt of step {run.saved} is the last good state"
    return f"Step {first_bad} was the first that was not finite, {now} the first that was checked; {good}."


def _log(run: Run, result: StepResult) -> None:
    current, rate = run.state, result.rate
    speed = run.clock.recent_rate() * run.config.global_batch
    values = {
        "loss": float(result.loss),
        "lr": rate,
        "grad_norm": float(result.grad_norm),
        "images_per_second": speed,
        **{f"loss_{name}": float(part) for name, part in result.parts.items()},
    }
    if run.config.train.precision == "fp16":
        values["loss_scale"] = current.scaler.get_scale()
    run.log.log(current.step, "train", values)
    memory, warnings = run.watch.health.report(current.step)
    run.log.log(current.step, "memory", memory)
    for warning in warnings:
        run.view.say(warning)
    shown = {
        "loss": f"{values['loss']:.3f}",
        "lr": f"{rate:.2g}",
        "img/s": f"{speed:.1f}" if speed else "-",
    }
    run.view.advance(current.step, shown)


def _validate(run: Run, *, precision: str, log: bool = True) -> Validation:
    """Confusion of the averaged weights on the validation split."""
    config, current = run.config, run.state
    image, _ = run.val_cache.read(run.group.rank % len(run.val_samples))
    with run.watch.explain_out_of_memory([(1, *image.shape)]):
        found = validate(
            current.ema.model,
            Preprocess().to(run.group.device),
            run.val_samples,
            run.group,
            config.data,
            precision=precision,
            backend=backend(config.loss, run.group.device.type),
            cache=run.val_cache,
            progress=run.view.validating,
        )
    figures = summary(found.total, run.val_samples.classes.names)
    if log:
        run.log.log(current.step, "validation", {"precision": precision, **figures})
        run.log.validated(run, found)
    run.view.say(f"step {current.step}: validation mIoU {100 * figures['miou']:.2f} %")
    return found


def _keep_best(run: Run, found: Validation, *, final: bool = False) -> bool:
    """Whether this validation is the best so far; its weights are then in best.pt.

    The final one does not count for `train.patience`: a run that has stopped must not go on when it is resumed.
    """
    score = miou(found.total)
    better = score > run.state.best_miou
    if not final:
        run.state.stale = 0 if better else run.state.stale + 1
    if not better:
        return False
    run.state.best_miou = score
    _save(run, "best.pt")
    return True


def _save(run: Run, name: str) -> None:
    """Write a checkpoint from rank 0, and the ledger up to it from every rank."""
    run.watch.sum([])  # ranks whose states differ save nothing

    def write() -> None:
        run.watch.flush(sync=True)
        if run.group.is_main:
            classes = run.train_samples.classes
            checkpoint.save_state(
                run.folder / name, run.state, run.config, classes, run.fingerprint
            )

    run.group.together(write)  # a full disk ends all ranks, not one alone
    if name == "last.pt":
        run.saved = run.state.step
