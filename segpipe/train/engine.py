"""A training run from first step to result: reads top to bottom, never asks which network it trains."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from segpipe import __version__
from segpipe.data.augment import Augmenter
from segpipe.data.loader import ShardBatch, train_batches
from segpipe.data.order import Order
from segpipe.data.samples import CachedSamples, Samples, class_pixels, open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.distributed.watch.agreement import Agreement, agree_on_step, common_fingerprint
from segpipe.distributed.watch.health import Health, out_of_memory_told
from segpipe.errors import CheckpointError, Interrupted, NumericsError
from segpipe.files import write_atomically
from segpipe.ledger import inputs
from segpipe.ledger.digest import state_digest
from segpipe.ledger.files import last_seals
from segpipe.ledger.recorder import Recorder
from segpipe.losses.pixelwise import class_weights
from segpipe.losses.total import valid_pixels
from segpipe.models.preprocess import Preprocess
from segpipe.run.console import TrainView
from segpipe.run.folder import clear_folder
from segpipe.run.tracking import FILE_NAME, Tracker, open_tracker, plain, read_metrics
from segpipe.settings.config import Config, config_hash, to_mapping
from segpipe.train import state
from segpipe.train.clock import Clock
from segpipe.train.metrics import miou, summary
from segpipe.train.step import StepResult, TrainStep
from segpipe.train.stop import StopRequest
from segpipe.train.validate import Validation, validate


@dataclass
class Run:
    """What belongs to one training run in this process."""

    config: Config
    group: Group
    train_samples: Samples
    val_samples: Samples
    state: state.TrainState
    tracker: Tracker
    view: TrainView
    clock: Clock
    fingerprint: dict[str, Any]  # of rank 0
    health: Health
    agreement: Agreement
    recorder: Recorder | None = None  # of compute.ledger
    saved: int | None = None  # step of last.pt, where there is one

    @property
    def folder(self) -> Path:
        return self.config.run_dir


def train(
    config: Config, group: Group, console: Console, *, git: dict[str, Any] | None = None
) -> tuple[Run, Validation, dict[str, Any]]:
    """Train, validate and write the run's files; returns the run, its last validation and the content of result.json.

    git: commit, and whether files differ from it, for result.json; None where nobody knows.

    Raises ConfigError and DataError before the first step, NumericsError on a loss that is not finite, Interrupted
    after Ctrl-C, when last.pt has been written.
    """
    run, stream, notes = _open(config, group, console)
    exit_code = 1
    try:
        with run.view:
            for note in notes:
                run.view.say(note)
            images_per_second = _loop(run, stream)
            _save(run, "last.pt")  # before the validation, whose failure then costs nothing
            final = _validate(run, precision="fp32")
            if _keep_best(run, final):
                _save(run, "last.pt")
        result = {**_result(run, final, images_per_second), "git": git}
        if group.is_main:
            write_atomically(run.folder / "result.json", _json(result))
        exit_code = 0
    finally:
        if run.recorder is not None:
            with contextlib.suppress(CheckpointError):  # what fails here failed before, and was told
                run.recorder.close()
        run.tracker.close(exit_code)
    return run, final, result


def _open(config: Config, group: Group, console: Console) -> tuple[Run, Generator[ShardBatch, None, None], list[str]]:
    """The run at the step at which it starts or goes on, with its batches, and what is to be said of it."""
    flags.apply(config.compute.threads, config.compute.mode)
    train_samples = open_samples(config.data, "train", config.seed)
    val_samples = open_samples(config.data, config.data.split, config.seed)
    current = state.build_state(config, train_samples.classes, group.device)
    fingerprint, strangers = common_fingerprint(config, group)
    last = config.run_dir / "last.pt"
    resuming = config.run.exists == "resume" and last.is_file()
    if resuming:
        state.restore(last, current, config, train_samples.classes, fingerprint)
    agree_on_step(last, current.step, group)
    stream = shard_stream(config, group, train_samples, range(current.step, config.train.steps))
    if group.is_main and not resuming:
        clear_folder(config)
        write_atomically(config.run_dir / "config.json", _json(to_mapping(config)))
    if group.is_main and _records(config):
        inputs.record(config, {"train": train_samples, config.data.split: val_samples})
    group.keep_stacks(config.run_dir)
    tracker = open_tracker(config, config.run_dir, current.step if resuming else None, rank=group.rank)
    view = TrainView(
        console,
        name=config.run.name,
        done=current.step,
        total=config.train.steps,
        enabled=group.is_main and config.train.progress,
    )
    notes = [f"resuming {config.run_dir} at step {current.step}"] if resuming else []
    if strangers and config.compute.mode != "off":
        listed = "; ".join(strangers[:4])
        notes.insert(0, f"ranks differ, so another division of the shards may give other bits: {listed}")
    if group.device.type == "cpu" and flags.emulated(config.train.precision):
        notes.insert(
            0,
            f"train.precision = {config.train.precision}, for which this CPU has no instructions: updates take many "
            f"times as long as with train.precision=fp32.",
        )
    health = Health(group, allowance_mib=0.0 if config.data.workers else config.data.cache_mib)
    recorder = Recorder(config, group, current, train_samples, fingerprint) if _records(config) else None
    agreement = Agreement(group, recorder, config.run_dir)
    run = Run(
        config, group, train_samples, val_samples, current, tracker, view, Clock(), fingerprint, health, agreement,
        recorder, current.step if resuming else None,
    )  # fmt: skip
    return run, stream, notes


def _records(config: Config) -> bool:
    return config.compute.ledger and config.compute.mode != "off"


def _loop(run: Run, stream: Generator[ShardBatch, None, None]) -> float:
    """All updates that are left; returns images per second of the updates alone."""
    config, current, clock = run.config, run.state, run.clock
    own = run.group.own_shards(config.compute.shards)
    step = TrainStep(current, config, run.group, loss_weights(config, run.train_samples), run.recorder)
    with StopRequest(last_words=run.group.world_size > 1) as stop, contextlib.closing(stream):
        while current.step < config.train.steps:
            _train_once(run, step, [next(stream) for _ in own], stop)
            clock.tick()
            run.view.advance(current.step)
            if current.step == config.train.steps:
                break
            with clock.paused():
                if _due(current.step, config.train.validate_every):
                    _keep_best(run, _validate(run, precision=config.train.precision))
                if _due(current.step, config.checkpoint.every):
                    _save(run, "last.pt")
                if _due(current.step, config.checkpoint.keep_every):
                    _save(run, f"step_{current.step:06d}.pt")
    return clock.rate() * config.global_batch


def loss_weights(config: Config, samples: Samples) -> torch.Tensor | None:
    """Weight of every class in the loss, (C,), from how often `samples` show it; None when all weigh the same."""
    if config.loss.class_weights == "none":
        return None
    return class_weights(torch.from_numpy(class_pixels(samples)), config.loss.class_weights)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def shard_stream(config: Config, group: Group, samples: Samples, steps: range) -> Generator[ShardBatch, None, None]:
    """This rank's shard batches of `steps`; no worker starts before the first is asked for."""
    compute, data = config.compute, config.data
    augment = replace(config.augment, canary=0) if compute.mode == "off" else config.augment
    return train_batches(
        CachedSamples(samples, data.cache_mib) if data.cache_mib else samples,
        Augmenter(augment),
        Order(config.seed, len(samples), compute.shards, compute.samples_per_shard),
        seed=config.seed,
        shards=group.own_shards(compute.shards),
        steps=steps,
        workers=data.workers,
        start_method=data.start_method,
        prefetch=data.prefetch,
        pin_memory=group.device.type == "cuda",
        timeout_s=data.timeout_s,
    )


def _train_once(run: Run, step: TrainStep, shards: list[ShardBatch], stop: StopRequest) -> None:
    """One update, unless a stop was asked for."""
    number = run.state.step
    looks = _looks(run)
    pixels = sum(valid_pixels(batch.target) for batch in shards)
    counts = run.agreement.sum([pixels, int(stop.asked)], wait=looks)
    if looks and int(counts[1]) and int(step.first_bad) > number:  # else nothing is kept, and the update says why
        _save(run, "last.pt")
        raise Interrupted(
            f"stopped at step {number}; {run.folder / 'last.pt'} is written. Continue with run.exists=resume."
        )
    with out_of_memory_told(run.state, [batch.image.shape for batch in shards], run.group, run.folder):
        result = step(shards, counts[0])
        if looks:
            _check_finite(run, result, int(step.first_bad))
        step.apply()
    run.health.after_step(run.state.step)
    if run.recorder is not None and _due(number + 1, run.recorder.steps_held):
        _together(run, run.recorder.flush)
    if _logs(run.config, number + 1):
        _log(run, result)


def _logs(config: Config, done: int) -> bool:
    return done == 1 or _due(done, config.train.log_every)


def _looks(run: Run) -> bool:
    """Whether the host waits for the next update: always on a CPU; on a GPU where its outcome is logged or kept."""
    config, done = run.config, run.state.step + 1
    kept_at = (config.checkpoint.every, config.checkpoint.keep_every, config.train.validate_every, config.train.steps)
    kept = any(_due(done, every) for every in kept_at)
    return run.group.device.type == "cpu" or kept or _logs(config, done)


def _check_finite(run: Run, result: StepResult, first: int) -> None:
    """Raises NumericsError when this update is not finite; `first` is the first that was not, seen or not."""
    config, current, group = run.config, run.state, run.group
    overflow = current.scaler.is_enabled() and not bool(torch.isfinite(result.grad_norm))
    # The scaler skips such an update and halves its scale. Below 1 the gradients themselves are not finite.
    if first > current.step and not (overflow and current.scaler.get_scale() < 1.0):
        return
    own = {shard: float(loss) for shard, loss in result.shard_losses.items()}
    everywhere = [
        (rank, shard, loss) for rank, losses in enumerate(group.gather(own)) for shard, loss in losses.items()
    ]
    bad = [f"rank {rank} shard {shard} loss {loss}" for rank, shard, loss in everywhere if loss - loss != 0]
    rate = current.optimizer.param_groups[0]["lr"]
    scale = f" at loss scale {current.scaler.get_scale():g}" if current.scaler.is_enabled() else ""
    or_fp32 = "" if config.train.precision == "fp32" else " or train.precision=fp32"
    raise NumericsError(
        f"step {current.step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)} "
        f"({'; '.join(bad[:4]) or 'every loss is finite, a gradient is not'}), lr {rate:.4g}, precision "
        f"{config.train.precision}{scale}. {_kept_of(run, first)} Lower optim.lr, or set optim.clip_norm=5{or_fp32}."
    )


def _kept_of(run: Run, first: int) -> str:
    """Which state is left of a run that diverged: that before this update, unless an earlier one spoiled it unseen."""
    if first >= run.state.step:
        _save(run, "diverged.pt")
        return f"The state before this step is kept in {run.folder / 'diverged.pt'}."
    good = f"last.pt of step {run.saved} is the last good state" if run.saved is not None else "no last.pt was written"
    return f"Step {first} was the first that was not finite, {run.state.step} the first that was looked at; {good}."


def _log(run: Run, result: StepResult) -> None:
    current = run.state
    rate = current.optimizer.param_groups[0]["lr"]
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
    run.tracker.log(current.step, "train", values)
    memory, warnings = run.health.report(current.step)
    run.tracker.log(current.step, "memory", memory)
    for warning in warnings:
        run.view.say(warning)
    shown = {"loss": f"{values['loss']:.3f}", "lr": f"{rate:.2g}", "img/s": f"{speed:.1f}" if speed else "-"}
    run.view.advance(current.step, shown)


def _validate(run: Run, *, precision: str) -> Validation:
    """Confusion of the averaged weights on the validation split, logged."""
    config, current = run.config, run.state
    image, _ = run.val_samples.read(run.group.rank % len(run.val_samples))
    with out_of_memory_told(current, [(1, *image.shape)], run.group, run.folder):
        found = validate(
            current.ema.model,
            Preprocess().to(run.group.device),
            run.val_samples,
            run.group,
            precision=precision,
            workers=min(config.data.workers, 1),
            start_method=config.data.start_method,
            timeout_s=config.data.timeout_s,
            progress=run.view.validating,
        )
    figures = summary(found.total, run.val_samples.classes.names)
    if not _logged(run):
        run.tracker.log(current.step, "validation", {"precision": precision, **figures})
    run.view.say(f"step {current.step}: validation mIoU {100 * figures['miou']:.2f} %")
    return found


def _logged(run: Run) -> bool:
    """Whether this validation was logged before the run was ended and resumed."""
    lines = read_metrics(run.folder / FILE_NAME) if run.group.is_main else []
    return any(line["kind"] == "validation" and line["step"] == run.state.step for line in lines)


def _keep_best(run: Run, found: Validation) -> bool:
    """Whether this validation is the best so far; its weights are then in best.pt."""
    score = miou(found.total)
    if not score > run.state.best_miou:
        return False
    run.state.best_miou = score
    _save(run, "best.pt")
    return True


def _save(run: Run, name: str) -> None:
    """Write a checkpoint from rank 0, and what every rank has to say about the steps before it."""
    run.agreement.sum([])  # nothing is kept that one rank alone holds

    def write() -> None:
        if run.recorder is not None:
            run.recorder.flush(sync=True)
        if run.group.is_main:
            state.save(run.folder / name, run.state, run.config, run.train_samples.classes, run.fingerprint)

    _together(run, write)
    if name == "last.pt":
        run.saved = run.state.step


def _together(run: Run, write: Callable[[], None]) -> None:
    """Do `write` on every rank; a full disk ends all of them, not one alone."""
    problem = ""
    try:
        write()
    except CheckpointError as error:
        problem = str(error)
    problem = next(filter(None, run.group.gather(problem)), "")
    if problem:
        raise CheckpointError(problem)


def _result(run: Run, found: Validation, images_per_second: float) -> dict[str, Any]:
    """Content of result.json. `miou` is that of the last averaged weights in fp32: nothing was picked by looking."""
    config, current = run.config, run.state
    return {
        "name": config.run.name,
        **summary(found.total, run.val_samples.classes.names),
        "best_miou": current.best_miou,
        "steps": current.step,
        **_speed(run, images_per_second),
        "world_size": run.group.world_size,
        "shards": config.compute.shards,
        "global_batch": config.global_batch,
        "weights_digest": state_digest(current.model.state_dict()),
        "ema_digest": state_digest(current.ema.model.state_dict()),
        "config_hash": config_hash(config),
        "segpipe": __version__,
        "mode": config.compute.mode,
        "versions": run.fingerprint,
        "switches": flags.switches(),
        "ledger": last_seals(run.folder),
    }


def _speed(run: Run, images_per_second: float) -> dict[str, float]:
    """How fast the updates since the start were; where none was left to do, what result.json said before."""
    found = {"images_per_second": round(images_per_second, 3), "train_seconds": round(run.clock.seconds, 3)}
    path = run.folder / "result.json"
    if run.clock.updates or not path.is_file():
        return found
    try:
        earlier = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):  # altered by hand
        return found
    return {name: earlier.get(name, value) for name, value in found.items()}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode()
