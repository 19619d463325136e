"""A training run from the first step to the result; independent of the network that it trains."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from segpipe.data import frequency
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.watch.agreement import agree_on_step, common_fingerprint
from segpipe.errors import CheckpointError, Interrupted, NumericsError
from segpipe.files import to_json, write_atomically
from segpipe.ledger import inputs
from segpipe.losses.total import backend
from segpipe.models.preprocess import Preprocess
from segpipe.plugins import is_path
from segpipe.settings.config import Config, to_mapping
from segpipe.train import checkpoint, state
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.gradients import autocast
from segpipe.train.metrics import miou, summary
from segpipe.train.recorder import Recorder
from segpipe.train.result import check_space, header, result_of
from segpipe.train.start import WEIGHTS, read_start
from segpipe.train.step import StepResult, TrainStep, train_step
from segpipe.train.stop import StopRequest
from segpipe.train.training import OpenOutputs, Run
from segpipe.train.validate import Validation, validate
from segpipe.train.watch import Watch

if TYPE_CHECKING:
    from segpipe.data.loader import ShardBatch
    from segpipe.distributed.group import Group


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
            final = _validate(
                run, precision="fp32", log=not _stopped_early(run)
            )  # there, this step has its line
            if _keep_best(run, final, final=True):
                _save(run, "last.pt")
        result = {
            **result_of(
                run, final, images_per_second, stopped_early=_stopped_early(run)
            ),
            "git": git,
        }
        if group.is_main:
            write_atomically(run.folder / "result.json", to_json(result))
        exit_code = 0
    finally:
        with contextlib.suppress(
            CheckpointError
        ):  # already reported by an earlier flush
            run.watch.close()
        run.log.close(exit_code)
    return run, final, result


def _open(
    config: Config, group: Group, open_outputs: OpenOutputs
) -> tuple[Run, Generator[ShardBatch, None, None], list[str]]:
    """The run at the step at which it starts or resumes, its batches, and notes for the user."""
    last = config.run_dir / "last.pt"
    found = (
        checkpoint.newest_whole(config.run_dir)
        if config.run.exists == "resume"
        else None
    )
    earlier = (
        config.run_dir / "config.json"
    ).is_file()  # before this session writes its own
    flags.apply(config.compute.threads, config.compute.mode)
    samples = open_samples(config.data, "train", config.seed)
    start = None if found else read_start(config, checkpoint.load)
    current = state.build_state(config, samples.classes, group.device, start)
    fingerprint, differences = common_fingerprint(
        config, group, backend(config.loss, group.device.type)
    )
    if found:
        checkpoint.restore(
            found.path,
            current,
            config,
            samples.classes,
            fingerprint,
            saved=found.content,
        )
        if found.note and group.is_main:
            print(found.note, file=sys.stderr)  # also without train.progress
    val_samples = open_samples(config.data, config.data.split, config.seed)
    agree_on_step(found.path if found else last, current.step, group)
    group.together(
        lambda: (
            check_space(config, current, group.world_size) if group.is_main else None
        )
    )
    kept = config.run_dir / frequency.FILE_NAME
    counts = counted(
        config,
        group,
        samples,
        kept=kept if found else None,
        say=partial(_tell, config, group),
    )
    stream = shard_stream(
        config, group, samples, range(current.step, config.train.steps), counts
    )
    done = current.step if found else None
    view, log = open_outputs(done)
    longer = found and found.content["config"]["train"]["steps"] != config.train.steps
    if group.is_main and (longer or not found):
        write_atomically(config.run_dir / "config.json", to_json(to_mapping(config)))
        if current.weights and not found:
            write_atomically(config.run_dir / WEIGHTS, to_json(current.weights))
    if group.is_main and counts is not None and not (found and kept.is_file()):
        counts.save(kept)
    if group.is_main:
        splits = {"train": samples, config.data.split: val_samples}
        inputs.record(config, splits, fresh=not found, ledger=_keeps_ledger(config))
    group.keep_stacks(config.run_dir)
    cache_mib = config.data.cache_mib * (
        1 if config.data.workers else 2
    )  # of training, it is in the workers
    watch = (
        Recorder(config, group, current, samples, fingerprint, cache_mib=cache_mib)
        if _keeps_ledger(config)
        else Watch(group, current, config.run_dir, cache_mib=cache_mib)
    )
    run = Run(
        config,
        group,
        samples,
        val_samples,
        counts,
        current,
        fingerprint,
        watch,
        view,
        log,
    )
    notes = [
        *current.notes,
        header(config, group, samples, val_samples, current.model),
        *_notes(config, group, differences),
        *_resumed(config, done, earlier),
    ]
    run.saved = done if found and not found.note else None
    return run, stream, notes


def _tell(config: Config, group: Group, text: str) -> None:
    """Say something on rank 0 before the view is open."""
    if group.is_main and config.train.progress:
        print(text, file=sys.stderr)


def _keeps_ledger(config: Config) -> bool:
    return config.compute.ledger and config.compute.mode != "off"


def _notes(config: Config, group: Group, differences: list[str]) -> list[str]:
    notes = []
    if group.device.type == "cpu" and flags.emulated(config.train.precision):
        notes.append(
            f"train.precision = {config.train.precision} is emulated: this CPU has no instructions for it, and updates "
            f"take many times as long as with train.precision=fp32."
        )
    if differences and config.compute.mode != "off":
        listed = "; ".join(differences[:4])
        notes.append(
            f"ranks differ, so another number of processes may give other bits: {listed}"
        )
    return notes


def _resumed(config: Config, done: int | None, earlier: bool) -> list[str]:
    """A note on where the run goes on; `earlier`: another session has started it."""
    if done is not None:
        return [f"resuming {config.run_dir} at step {done}"]
    if earlier and config.run.exists == "resume":
        return [
            f"{config.run_dir} holds no checkpoint yet: the run starts again at step 0"
        ]
    return []


def _loop(run: Run, stream: Generator[ShardBatch, None, None]) -> float:
    """All updates that are left; returns images per second of the updates alone."""
    config, current, clock = run.config, run.state, run.clock
    own = run.group.own_shards(config.compute.shards)
    step = TrainStep(
        config, run.watch, loss_weights(config, run.train_samples, run.counts)
    )
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
    config, current, group = run.config, run.state, run.group
    first = int(step.first_bad)
    overflow = current.scaler.is_enabled() and not bool(
        torch.isfinite(result.grad_norm)
    )
    # The scaler skips such an update and halves its scale. Below 1 the gradients themselves are not finite.
    if first > current.step and not (overflow and current.scaler.get_scale() < 1.0):
        return
    own = {shard: float(loss) for shard, loss in result.shard_losses.items()}
    everywhere = [
        (rank, shard, loss)
        for rank, losses in enumerate(group.gather(own))
        for shard, loss in losses.items()
    ]
    bad = [
        f"rank {rank} shard {shard} loss {loss}"
        for rank, shard, loss in everywhere
        if loss - loss != 0
    ]
    rate = result.rate
    scale = (
        f" at loss scale {current.scaler.get_scale():g}"
        if current.scaler.is_enabled()
        else ""
    )
    or_fp32 = "" if config.train.precision == "fp32" else " or train.precision=fp32"
    good, name = _last_good_state(run, first), config.loss.name
    lead, advice = "", f" Lower optim.lr, or set optim.clip_norm=5{or_fp32}."
    if bad and is_path(name) and _logits_are_finite(run, step, shards):
        value = next(loss for *_, loss in everywhere if loss - loss != 0)
        lead = (
            f"loss.name = {name} returned {value} for finite logits; "
            f"`segpipe check-plugin loss.name={name}` tests it. "
        )
        advice = " Mend the loss; a lower optim.lr does not help."
    raise NumericsError(
        f"{lead}step {current.step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)} "
        f"({'; '.join(bad[:4]) or 'every loss is finite, a gradient is not'}), lr {rate:.4g}, precision "
        f"{config.train.precision}{scale}. {good}{advice}"
    )


def _logits_are_finite(run: Run, step: TrainStep, shards: Sequence[ShardBatch]) -> bool:
    """Whether the network makes finite logits of these shards, on every rank. A collective; spoils its statistics."""
    device, found = run.group.device, []
    for batch in shards:
        image, *color = (
            value.to(device)
            for value in (batch.image, batch.color)
            if value is not None
        )
        with torch.no_grad(), autocast(device, run.config.train.precision):
            heads = run.state.model.train().logits(
                step.loss.preprocess(image, *color), aux=True
            )  # type: ignore[operator]
        found += [bool(logits.isfinite().all()) for logits in heads.values()]
    return all(run.group.gather(all(found)))


def _last_good_state(run: Run, first: int) -> str:
    """Saves the state before this update, unless an earlier one was not finite; returns a message that says where."""
    if first >= run.state.step:
        _save(run, "diverged.pt")
        return f"The state before this step is kept in {run.folder / 'diverged.pt'}."
    good = (
        f"last.pt of step {run.saved} is the last good state"
        if run.saved is not None
        else "no last.pt was written"
    )
    return f"Step {first} was the first that was not finite, {run.state.step} the first that was checked; {good}."


def _log(run: Run, result: StepResult) -> None:
    current = run.state
    rate = result.rate
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
            precision=precision,
            backend=backend(config.loss, run.group.device.type),
            workers=min(config.data.workers, 1),
            start_method=config.data.start_method,
            timeout_s=config.data.timeout_s,
            cache=run.val_cache,
            progress=run.view.validating,
        )
    figures = summary(found.total, run.val_samples.classes.names)
    if log:
        run.log.log(current.step, "validation", {"precision": precision, **figures})
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
    run.watch.sum([])  # a state in which ranks differ is not saved

    def write() -> None:
        run.watch.flush(sync=True)
        if run.group.is_main:
            path = run.folder / name
            checkpoint.save_state(
                path, run.state, run.config, run.train_samples.classes, run.fingerprint
            )

    run.group.together(write)  # a full disk ends all ranks, not one alone
    if name == "last.pt":
        run.saved = run.state.step
