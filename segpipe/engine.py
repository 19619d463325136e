"""A training run from first step to result: reads top to bottom, never asks which network it trains."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from segpipe import __version__, state
from segpipe.checkpoint import write_atomically
from segpipe.config import Config, config_hash, to_mapping
from segpipe.console import TrainView
from segpipe.data.augment import Augmenter
from segpipe.data.cache import CachedSamples
from segpipe.data.loader import ShardBatch, train_batches
from segpipe.data.order import Order
from segpipe.data.samples import Samples, class_pixels, open_samples
from segpipe.determinism import flags
from segpipe.determinism.digest import state_digest
from segpipe.distributed.group import Group
from segpipe.errors import CheckpointError, ConfigError, Interrupted, NumericsError
from segpipe.folder import clear_folder
from segpipe.losses import class_weights, valid_pixels
from segpipe.metrics import miou, summary
from segpipe.preprocess import Preprocess
from segpipe.step import StepResult, TrainStep
from segpipe.tracking import FILE_NAME, Tracker, open_tracker, read_metrics
from segpipe.validate import Validation, validate


class Clock:
    """Seconds spent on updates, without validations and checkpoints."""

    def __init__(self) -> None:
        self.seconds, self.updates = 0.0, 0
        self._mark = time.perf_counter()
        self._recent = (0.0, 0)

    def tick(self) -> None:
        """An update is done. The first is left out of the figures: it starts workers and picks kernels."""
        now = time.perf_counter()
        self.seconds += now - self._mark if self.updates else 0.0
        self.updates, self._mark = self.updates + 1, now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in which no update is done."""
        before = time.perf_counter()
        yield
        self._mark += time.perf_counter() - before

    def rate(self) -> float:
        """Updates per second so far; 0 before the second."""
        return (self.updates - 1) / self.seconds if self.seconds > 0 else 0.0

    def recent_rate(self) -> float:
        """Updates per second since the last call."""
        seconds, updates = self._recent
        self._recent = (self.seconds, self.updates)
        return (self.updates - updates) / (self.seconds - seconds) if self.seconds > seconds else 0.0


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

    @property
    def folder(self) -> Path:
        return self.config.run_dir


class StopRequest:
    """Remembers Ctrl-C and SIGTERM until the end of the step; a second Ctrl-C interrupts at once.

    The terminal sends Ctrl-C to every process, and launchers send it on to theirs: what follows at once is its echo.
    """

    ECHO_S = 3.0

    def __init__(self) -> None:
        self.asked = False
        self._first = 0.0

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _remember(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._first = True, now
        elif number == signal.SIGINT and now - self._first > self.ECHO_S:
            raise KeyboardInterrupt

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(config: Config, group: Group, console: Console) -> tuple[Run, Validation, dict[str, Any]]:
    """Train, validate and write the run's files; returns the run, its last validation and the content of result.json.

    Raises ConfigError and DataError before the first step, NumericsError on a loss that is not finite, Interrupted
    after Ctrl-C, when last.pt has been written.
    """
    flags.apply(config.compute.threads)
    _agree(config, group)
    train_samples = open_samples(config.data, "train", config.seed)
    val_samples = open_samples(config.data, config.data.split, config.seed)
    current = state.build_state(config, train_samples.classes, group.device)
    last = config.run_dir / "last.pt"
    resuming = config.run.exists == "resume" and last.is_file()
    if resuming:
        state.restore(last, current, config, train_samples.classes)
    _agree_on_step(last, current.step, group)
    stream = _stream(config, group, train_samples, current.step)
    if group.is_main and not resuming:
        clear_folder(config)
        write_atomically(config.run_dir / "config.json", _json(to_mapping(config)))
    tracker = open_tracker(config, config.run_dir, current.step if resuming else None, rank=group.rank)
    view = TrainView(
        console,
        name=config.run.name,
        done=current.step,
        total=config.train.steps,
        enabled=group.is_main and config.train.progress,
    )
    run = Run(config, group, train_samples, val_samples, current, tracker, view, Clock())
    exit_code = 1
    try:
        with view:
            if resuming:
                view.say(f"resuming {run.folder} at step {current.step}")
            images_per_second = _loop(run, stream)
            _save(run, "last.pt")  # before the validation, whose failure then costs nothing
            final = _validate(run, precision="fp32")
            if _keep_best(run, final):
                _save(run, "last.pt")
        result = _result(run, final, images_per_second)
        if group.is_main:
            write_atomically(run.folder / "result.json", _json(result))
        exit_code = 0
    finally:
        tracker.close(exit_code)
    return run, final, result


def _agree(config: Config, group: Group) -> None:
    """All ranks must have composed the same configuration."""
    hashes = group.gather(config_hash(config))
    strangers = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if strangers:
        raise ConfigError(
            f"ranks {strangers} have another configuration than rank 0. Give every node the same command."
        )


def _agree_on_step(last: Path, step: int, group: Group) -> None:
    """All ranks must have found the same checkpoint, or all none."""
    steps = group.gather(step)
    if set(steps) != {step}:
        raise CheckpointError(
            f"{last} is not the same file on every machine: ranks 0, 1, ... would start at steps {steps}. "
            f"Set run.root to a folder that all machines share."
        )


def _loop(run: Run, stream: Generator[ShardBatch, None, None]) -> float:
    """All updates that are left; returns images per second of the updates alone."""
    config, current, clock = run.config, run.state, run.clock
    own = run.group.own_shards(config.compute.shards)
    step = TrainStep(current, config, run.group, _class_weights(run))
    with StopRequest() as stop, contextlib.closing(stream):
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
    return clock.rate() * config.global_batch


def _class_weights(run: Run) -> torch.Tensor | None:
    if run.config.loss.class_weights == "none":
        return None
    return class_weights(torch.from_numpy(class_pixels(run.train_samples)), run.config.loss.class_weights)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _stream(config: Config, group: Group, samples: Samples, first: int) -> Generator[ShardBatch, None, None]:
    """This rank's shard batches of all steps from `first` on; no worker starts before the first is asked for."""
    compute, data = config.compute, config.data
    return train_batches(
        CachedSamples(samples, data.cache_mib) if data.cache_mib else samples,
        Augmenter(config.augment),
        Order(config.seed, len(samples), compute.shards, compute.samples_per_shard),
        seed=config.seed,
        shards=group.own_shards(compute.shards),
        steps=range(first, config.train.steps),
        workers=data.workers,
        start_method=data.start_method,
        prefetch=data.prefetch,
        pin_memory=group.device.type == "cuda",
    )


def _train_once(run: Run, step: TrainStep, shards: list[ShardBatch], stop: StopRequest) -> None:
    """One update, unless a stop was asked for."""
    group, number = run.group, run.state.step
    counts = torch.tensor([sum(valid_pixels(batch.target) for batch in shards), int(stop.asked)])
    counts = group.sum_tensor(counts.to(group.device))
    looks = _looks(run)
    if looks and int(counts[1]):
        _save(run, "last.pt")
        raise Interrupted(
            f"stopped at step {number}; {run.folder / 'last.pt'} is written. Continue with run.exists=resume."
        )
    result = step(shards, counts[0])
    if looks:
        _check_finite(run, result)
    step.apply()
    if _logs(run.config, number + 1):
        _log(run, result)


def _logs(config: Config, done: int) -> bool:
    return done == 1 or _due(done, config.train.log_every)


def _looks(run: Run) -> bool:
    """Whether the host waits for the next update: always on a CPU; on a GPU where its outcome is logged or kept."""
    config, done = run.config, run.state.step + 1
    kept = _due(done, config.checkpoint.every) or _due(done, config.train.validate_every) or done == config.train.steps
    return run.group.device.type == "cpu" or kept or _logs(config, done)


def _check_finite(run: Run, result: StepResult) -> None:
    config, current, group = run.config, run.state, run.group
    overflow_is_normal = config.train.precision == "fp16"  # the scaler skips the update and lowers its scale
    fine = bool(torch.isfinite(result.loss)) and (overflow_is_normal or bool(torch.isfinite(result.grad_norm)))
    if fine:
        return
    own = {shard: float(loss) for shard, loss in result.shard_losses.items()}
    everywhere = [
        (rank, shard, loss) for rank, losses in enumerate(group.gather(own)) for shard, loss in losses.items()
    ]
    bad = [f"rank {rank} shard {shard} loss {loss}" for rank, shard, loss in everywhere if loss - loss != 0]
    _save(run, "diverged.pt")
    rate = current.optimizer.param_groups[0]["lr"]
    or_fp32 = "" if config.train.precision == "fp32" else " or train.precision=fp32"
    raise NumericsError(
        f"step {current.step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)} "
        f"({'; '.join(bad[:4]) or 'every loss is finite, a gradient is not'}), lr {rate:.4g}, precision "
        f"{config.train.precision}. The state before this step is kept in {run.folder / 'diverged.pt'}. "
        f"Lower optim.lr, or set optim.clip_norm=5{or_fp32}."
    )


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
    shown = {"loss": f"{values['loss']:.3f}", "lr": f"{rate:.2g}", "img/s": f"{speed:.1f}" if speed else "-"}
    run.view.advance(current.step, shown)


def _validate(run: Run, *, precision: str) -> Validation:
    """Confusion of the averaged weights on the validation split, logged."""
    config, current = run.config, run.state
    found = validate(
        current.ema.model,
        Preprocess().to(run.group.device),
        run.val_samples,
        run.group,
        precision=precision,
        workers=min(config.data.workers, 1),
        start_method=config.data.start_method,
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
    """Write a checkpoint from rank 0; a full disk ends all ranks, not rank 0 alone."""
    problem = ""
    if run.group.is_main:
        try:
            state.save(run.folder / name, run.state, run.config, run.train_samples.classes)
        except CheckpointError as error:
            problem = str(error)
    problem = run.group.gather(problem)[0]
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
        "images_per_second": round(images_per_second, 3),
        "train_seconds": round(run.clock.seconds, 3),
        "world_size": run.group.world_size,
        "shards": config.compute.shards,
        "global_batch": config.global_batch,
        "weights_digest": state_digest(current.model.state_dict()),
        "ema_digest": state_digest(current.ema.model.state_dict()),
        "config_hash": config_hash(config),
        "segpipe": __version__,
        "versions": flags.fingerprint(),
    }


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
