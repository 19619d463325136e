"""A training run from the first step to the result; independent of the network that it trains."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from segpipe.data import frequency
from segpipe.data.samples import Splits, open_splits
from segpipe.determinism import flags
from segpipe.distributed.agreement import agree_on_step, common_fingerprint
from segpipe.errors import CheckpointError, Interrupted, NumericsError
from segpipe.files import to_json, write_atomically
from segpipe.ledger import inputs
from segpipe.losses.total import backend
from segpipe.models.preprocess import Preprocess
from segpipe.plugins import is_path
from segpipe.settings.config import Config, to_mapping
from segpipe.train import checkpoint
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.eval_gap import eval_gap, is_due
from segpipe.train.metrics import Validation, miou, summary
from segpipe.train.recorder import keeps_ledger, open_watch
from segpipe.train.start import WEIGHTS
from segpipe.train.state import TrainState, build_state
from segpipe.train.step import StepResult, TrainStep, train_step
from segpipe.train.stop import StopRequest
from segpipe.train.training import OpenOutputs, Run, check_space, header, result_of
from segpipe.train.validate import validate

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.data.data_set import DataSet
    from segpipe.data.frequency import PixelCounts
    from segpipe.data.loader import ShardBatch
    from segpipe.distributed.group import Group


def train(
    config: Config,
    group: Group,
    open_outputs: OpenOutputs,
    *,
    splits: Splits | None = None,
    git: dict[str, Any] | None = None,
) -> tuple[Run, Validation, dict[str, Any]]:
    """Train, validate and write the run's files; returns the run, its last validation and the content of result.json.

    splits: the data, if this process has opened it already. git: commit and whether files differ from it, for
    result.json; None if unknown.

    Raises ConfigError and DataError before the first step, NumericsError on a loss that is not finite, Interrupted
    after Ctrl-C, when last.pt has been written.
    """
    flags.apply(config.compute.threads, config.compute.mode)
    run, stream, notes = _open(config, group, open_outputs, splits)
    exit_code = 1
    try:
        with run.view:
            for note in notes:
                run.view.say(note)
            _loop(run, stream)
            _save(run, "last.pt")  # before the validation, which may fail
            stopped_early = _stopped_early(run)
            # After an early stop, this step has its line of the log already.
            final = _validate(run, precision="fp32", log=not stopped_early)
            if _keep_best(run, final, final=True):
                _save(run, "last.pt")
        result = result_of(run, final, stopped_early=stopped_early)
        result["git"] = git
        if group.is_main:
            write_atomically(run.folder / "result.json", to_json(result))
        exit_code = 0
    finally:
        # What they raise has been reported, or hides no other error.
        with contextlib.suppress(CheckpointError):
            run.settle()
        with contextlib.suppress(CheckpointError):
            run.watch.close()
        run.log.close(exit_code)
    return run, final, result


def _open(
    config: Config, group: Group, open_outputs: OpenOutputs, splits: Splits | None
) -> tuple[Run, Generator[ShardBatch, None, None], list[str]]:
    """The run at the step at which it starts or resumes, its batches, and notes for the user."""
    data = splits or open_splits(config)
    resumes = config.run.exists == "resume"
    notes = []
    if resumes and (config.run_dir / "config.json").is_file():
        notes = [
            f"{config.run_dir} holds no checkpoint yet: the run starts again at step 0"
        ]
    found = checkpoint.newest_whole(config.run_dir) if resumes else None
    state, fingerprint, warnings = _start(config, group, data.train.classes, found)
    done = state.step if found else None
    if found:
        notes = [f"resuming {config.run_dir} at step {done}"]
    agree_on_step(
        found.path if found else config.run_dir / "last.pt", state.step, group
    )
    group.together(lambda: check_space(config, state, group))

    counts = _counts(config, group, data.train, found)
    steps = range(state.step, config.train.steps)
    stream = shard_stream(config, group, data.train, steps, counts)
    view, log = open_outputs(done)  # clears the folder of an earlier run
    if group.is_main:
        _write_origin(config, state, found, counts)
        ledger = keeps_ledger(config)
        inputs.record(config, data, fresh=not found, ledger=ledger)
    group.keep_stacks(config.run_dir)
    run = Run(
        config,
        group,
        data.train,
        data.val,
        counts,
        state,
        fingerprint,
        open_watch(config, group, state, data.train, fingerprint),
        view,
        log,
        saved=done if found and not found.note else None,
    )
    about = header(config, group, data.train, data.val, state.model)
    return run, stream, [*state.notes, about, *warnings, *notes]


def _start(
    config: Config, group: Group, classes: ClassTable, found: checkpoint.Found | None
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """The state, fresh or that of the checkpoint; the fingerprint of rank 0, and warnings."""
    weights = None if found else checkpoint.read_start(config)
    state = build_state(config, classes, group.device, weights)
    state.teacher = checkpoint.teacher_of(config, group.device)
    fingerprint, rank_differences = common_fingerprint(
        config, group, backend(config.loss, group.device.type)
    )
    if found:
        checkpoint.restore(
            found.path, state, config, classes, fingerprint, saved=found.content
        )
        if found.note and group.is_main:
            print(found.note, file=sys.stderr)  # also without train.progress
    warnings = []
    if slow := slow_precision(group.device.type, config.train.precision):
        warnings.append(slow)
    if rank_differences and config.compute.mode != "off":
        warnings.append(
            f"ranks differ, so another number of processes may give other bits: {'; '.join(rank_differences[:4])}"
        )
    return state, fingerprint, warnings


def slow_precision(device: str, precision: str) -> str:
    """Message about a `train.precision` that another would beat by far on this kind of device; empty if none would."""
    if device == "cpu" and flags.emulated(precision):
        return (
            f"train.precision = {precision} is emulated: this CPU has no instructions for it, and updates "
            f"take many times as long as with train.precision=fp32."
        )
    if device == "cuda" and precision == "fp32":
        return (
            "train.precision = fp32 computes without TF32: an estimated third of the speed of train.precision=bf16. "
            "tf32 lies between, with equal bits on GPUs of one kind."
        )
    is_off = device == "cpu" or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    if precision == "tf32" and is_off:
        return (
            "train.precision = tf32 is fp32 here: only GPUs have it, and NVIDIA_TF32_OVERRIDE=0 in the environment "
            "turns it off."
        )
    return ""


def _counts(
    config: Config, group: Group, samples: DataSet, found: checkpoint.Found | None
) -> PixelCounts | None:
    """Pixels of each class, if the run needs them; a resumed run has those of its folder."""

    def say(text: str) -> None:
        if group.is_main and config.train.progress:
            print(text, file=sys.stderr)  # the view is not open yet

    kept = config.run_dir / frequency.FILE_NAME if found else None
    return counted(config, group, samples, kept=kept, say=say)


def _write_origin(
    config: Config,
    state: TrainState,
    found: checkpoint.Found | None,
    counts: PixelCounts | None,
) -> None:
    """The files that say what the run starts from; a resumed run keeps those that it has."""
    folder = config.run_dir
    longer = found and found.content["config"]["train"]["steps"] != config.train.steps
    if longer or not found:
        write_atomically(folder / "config.json", to_json(to_mapping(config)))
    if state.weights and not found:
        write_atomically(folder / WEIGHTS, to_json(state.weights))
    kept = folder / frequency.FILE_NAME
    if counts is not None and not (found and kept.is_file()):
        counts.save(kept)


def _loop(run: Run, stream: Generator[ShardBatch, None, None]) -> None:
    """All updates that are left."""
    config, current, clock = run.config, run.state, run.clock
    own = run.group.own_shards(config.compute.shards)
    weights = loss_weights(config, run.train_samples, run.counts)
    step = TrainStep(config, run.watch, weights)
    every = config.train.log_every
    run.log_after = (current.step // every + 1) * every if current.step else 1
    with (
        StopRequest(outlive_error=run.group.world_size > 1) as stop,
        contextlib.closing(stream),
    ):
        while current.step < config.train.steps and not _stopped_early(run):
            shards = [next(stream) for _ in own]
            check = partial(_check, run, step)
            result = train_step(
                step, shards, stop=stop.asked, wait=_waits(run), check=check
            )
            if result is None:
                _save(run, "last.pt")
                raise Interrupted(
                    f"stopped at step {current.step}; {run.folder / 'last.pt'} is written. "
                    f"Continue with run.exists=resume."
                )
            if current.step == run.log_after:
                _log(run, result)
            clock.tick()
            run.view.advance(current.step)
            with clock.paused():
                _keep(run)


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
    if _due(done, config.checkpoint.every) and _long_ago(run):
        _save(run, "last.pt", wait=False)
    if _due(done, config.checkpoint.keep_every):
        _save(run, f"step_{done:06d}.pt")
        if config.checkpoint.keep_last and run.group.is_main:
            checkpoint.keep_newest(run.folder, config.checkpoint.keep_last)


def _stopped_early(run: Run) -> bool:
    """Whether mIoU has stayed below its best for `train.patience` validations: the same on every rank."""
    return 0 < run.config.train.patience <= run.state.stale


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _long_ago(run: Run) -> bool:
    """Whether last.pt may be written again, by the clock of rank 0. A collective."""
    if run.group.device.type == "cpu":
        return True
    passed = time.monotonic() - run.saved_at
    is_long = run.group.is_main and passed >= run.config.checkpoint.every_s
    return bool(run.watch.sum([int(is_long)])[0])


def _next_line(run: Run) -> int:
    """Step of the next line of metrics.jsonl: several lines further where a GPU is fast. A collective.

    A step at which the host waits for the GPU costs what it had queued ahead, on all ranks; rank 0 tells them which.
    """
    train, lines = run.config.train, 1
    if run.group.device.type != "cpu":
        fast = math.ceil(run.clock.rate() * train.log_every_s / train.log_every)
        lines = int(run.watch.sum([max(fast, 1) if run.group.is_main else 0])[0])
    return (run.state.step // train.log_every + lines) * train.log_every


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
    return run.group.device.type == "cpu" or saves or done == run.log_after


def _check(run: Run, step: TrainStep, result: StepResult) -> None:
    """Raises NumericsError when this update, or an earlier one that the host did not check, is not finite."""
    scaler, first_bad = run.state.scaler, int(step.first_bad)
    # The scaler skips an update that overflowed and halves its scale. Below 1 the gradients themselves are not finite.
    scale = scaler.get_scale()
    overflowed = scaler.is_enabled() and not bool(torch.isfinite(result.grad_norm))
    if first_bad > run.state.step and not (overflowed and scale < 1.0):
        return

    own = {shard: float(loss) for shard, loss in result.shard_losses.items()}
    bad = [
        f"rank {rank} shard {shard} loss {loss}"
        for rank, losses in enumerate(run.group.gather(own))
        for shard, loss in losses.items()
        if not math.isfinite(loss)
    ]
    named = "; ".join(bad[:4]) or "every loss is finite, a gradient is not"
    good = _last_good_state(run, first_bad)
    config = run.config
    precision, name = config.train.precision, config.loss.name
    advice = "Lower optim.lr, or set optim.clip_norm=5"
    advice += "." if precision == "fp32" else " or train.precision=fp32."
    if is_path(name):
        advice += f" `segpipe check-plugin loss.name={name}` tests the loss."
    at_scale = f" at loss scale {scale:g}" if scaler.is_enabled() else ""
    raise NumericsError(
        f"step {run.state.step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)} "
        f"({named}), lr {result.rate:.4g}, precision {precision}{at_scale}. {good} {advice}"
    )


def _last_good_state(run: Run, first_bad: int) -> str:
    """Saves the state before this update, unless an earlier one was not finite; returns a message that says where."""
    now = run.state.step
    if first_bad >= now:
        _save(run, "diverged.pt")
        return f"The state before this step is kept in {run.folder / 'diverged.pt'}."
    run.group.together(run.settle)
    good = "no last.pt was written"
    if run.saved is not None:
        good = f"last.pt of step {run.saved} is the last good state"
    return f"Step {first_bad} was the first that was not finite, {now} the first that was checked; {good}."


def _log(run: Run, result: StepResult) -> None:
    current, rate = run.state, result.rate
    speed = run.clock.recent_rate() * run.config.global_batch
    wall = run.clock.wall_rate() * run.config.global_batch
    values = {
        "loss": float(result.loss),
        "lr": rate,
        "grad_norm": float(result.grad_norm),
        "images_per_second": speed,
        "wall_images_per_second": wall,
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
        "img/s": f"{speed:.1f} (wall {wall:.1f})" if speed else "-",
    }
    run.view.advance(current.step, shown)
    run.log_after = _next_line(run)


def _validate(run: Run, *, precision: str, log: bool = True) -> Validation:
    """Confusion of the averaged weights on the validation split."""
    config, current = run.config, run.state
    run.group.together(run.settle)  # the loader may fork
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
        values = {"precision": precision, "loss": found.loss, **figures}
        run.log.log(current.step, "validation", values)
        run.log.validated(run, found)
    run.view.say(f"step {current.step}: validation mIoU {100 * figures['miou']:.2f} %")
    if run.group.is_main and is_due(config, current.step) and (told := eval_gap(run)):
        run.log.log(current.step, "warning", {"text": told})
        run.view.say(f"Warning: {told}")
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
    _save(run, "best.pt", wait=final)
    return True


def _save(run: Run, name: str, *, wait: bool = True) -> None:
    """Write a checkpoint from rank 0, and the ledger up to it from every rank.

    Without `wait` a thread writes it, and the next call reports a full disk. A run's first checkpoint is waited for:
    it is there as soon as metrics.jsonl goes beyond it.
    """
    run.watch.sum([])  # ranks whose states differ save nothing

    def write() -> None:
        run.settle()
        run.watch.flush(sync=True)
        if run.group.is_main:
            classes = run.train_samples.classes
            content = checkpoint.snapshot(
                run.state, run.config, classes, run.fingerprint
            )
            path = run.folder / name
            run.writing = run.writer.submit(checkpoint.save, path, content)
        if wait or run.saved is None:
            run.settle()

    run.group.together(write)  # a full disk ends all ranks, not one alone
    if name == "last.pt":
        run.saved = run.state.step
        run.saved_at = time.monotonic()
