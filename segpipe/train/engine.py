"""A training run from the first step to the result; independent of the network."""

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from segpipe import __version__, plugins
from segpipe.data.data_set import CachedSamples, DataSet, Samples
from segpipe.data.loader import ShardBatch
from segpipe.data.samples import Splits, open_splits, sequences
from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.distributed.contract import exit_code_of
from segpipe.distributed.group import Group
from segpipe.distributed.health import MIB, out_of_memory_named, sample
from segpipe.errors import CheckpointError, Interrupted, NumericsError
from segpipe.files import file_sha256, to_json, write_atomically
from segpipe.ledger import inputs
from segpipe.ledger.digest import state_digest
from segpipe.ledger.rows import INPUTS
from segpipe.losses.total import backend
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config, config_hash, to_mapping
from segpipe.train import checkpoint
from segpipe.train.batches import Sampling, counted
from segpipe.train.forward import norms
from segpipe.train.metrics import Validation, headline, miou, scores, summary
from segpipe.train.recorder import Watch, keeps_ledger, open_watch
from segpipe.train.start import WEIGHTS, weights_summary
from segpipe.train.state import TrainState
from segpipe.train.step import StepResult, TrainStep, train_step
from segpipe.train.stop import StopRequest
from segpipe.train.validate import eval_gap, validate

SETTLED = 50  # updates; then 0.9**50 = 0.5 % of BatchNorm's initial statistics is left


class View(contextlib.AbstractContextManager[Any], Protocol):
    """Shows progress to a person."""

    def say(self, text: str) -> None: ...

    def advance(self, done: int, figures: dict[str, str] | None = None) -> None: ...

    def validating(self, done: int, total: int) -> None: ...


class Log(Protocol):
    """Keeps figures by step and kind; does not repeat a line that an earlier session of the run has written."""

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None: ...

    def validated(self, run: "Run", found: Validation) -> None: ...

    def seconds(self) -> float: ...  # of all sessions

    def close(self, exit_code: int) -> None: ...


# Makes both, once only the training itself can still fail. Given the step at which a run is resumed, or None, which
# clears the folder of an earlier run.
OpenOutputs = Callable[[int | None], tuple[View, Log]]


class Clock:
    """Time spent on updates, with and without validations and checkpoints."""

    def __init__(self) -> None:
        # Timed ones: the first starts workers and picks kernels.
        self.updates = -1
        self.seconds = 0.0
        self.wall = 0.0  # seconds, with validations and checkpoints
        self._mark = self._first = time.perf_counter()
        self._recent = (0.0, 0)

    def tick(self) -> None:
        """Count an update."""
        now = time.perf_counter()
        if self.updates < 0:
            self._first = now
        else:
            self.seconds += now - self._mark
        self.wall = now - self._first
        self._mark = now
        self.updates += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock of `seconds` inside the block."""
        before = time.perf_counter()
        yield
        self._mark += time.perf_counter() - before

    def rate(self) -> float:
        """Updates per second so far; 0 before the second update."""
        return _rate(self.updates, self.seconds)

    def wall_rate(self) -> float:
        """Updates per second, including validations and checkpoints; 0 before the second update."""
        return _rate(self.updates, self.wall)

    def recent_rate(self) -> float:
        """Updates per second since the last call."""
        seconds, updates = self._recent
        self._recent = (self.seconds, self.updates)
        return _rate(self.updates - updates, self.seconds - seconds)


def _rate(updates: int, seconds: float) -> float:
    return updates / seconds if seconds > 0 else 0.0


@dataclass
class Run:
    """One training run in this process."""

    config: Config
    group: Group
    train_samples: DataSet
    val_samples: DataSet
    sampling: Sampling
    state: TrainState
    fingerprint: dict[str, Any]  # of rank 0
    watch: Watch
    view: View
    log: Log
    saved: int | None  # step of the newest checkpoint, if there is one
    ended: bool  # had finished at the step at which it resumes, and is now extended
    kept: float  # mIoU of best.pt; in an extended run also counts the validation at its former end
    clock: Clock = field(default_factory=Clock)
    saved_at: float = -math.inf  # time.monotonic() of this session's last last.pt
    log_after: int = 1  # step of the next line of metrics.jsonl
    # Writes one checkpoint at a time while updates continue.
    writer: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    writing: Future[None] | None = None

    @cached_property
    def val_cache(self) -> CachedSamples:
        """Validation images that stay in memory between validations."""
        return CachedSamples(
            self.val_samples,
            self.config.data.cache_mib if self.config.train.validate_every else 0,
        )

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    def settle(self) -> None:
        """Wait until the pending checkpoint is complete. Raises CheckpointError if it cannot be written."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()


def train(
    config: Config,
    group: Group,
    open_outputs: OpenOutputs,
    *,
    splits: Splits | None = None,
    git: dict[str, Any] | None = None,
) -> tuple[Run, Validation, dict[str, Any]]:
    """Train, validate and write the run's files; returns the run, its last validation and the content of result.json.

    splits: the data, if this process has already opened it. git: commit and whether files differ from it, for
    result.json; None if unknown.

    Raises ConfigError and DataError before the first step, NumericsError on a loss or gradient that is not finite, and
    Interrupted after Ctrl-C, once last.pt is written.
    """
    for key, path in config.import_paths:
        plugins.load(key, path)
    run, stream, notes = _open(config, group, open_outputs, splits)
    exit_code = Interrupted.exit_code  # also of a Ctrl-C while this waits for a verdict
    try:
        named = out_of_memory_named(group.rank, group.device, lambda: run.state.step)
        with run.view, named:
            for note in notes:
                run.view.say(note)
            _loop(run, stream)
            # After an early stop, the log already has this step's line.
            final = _validate(run, precision="fp32", log=not _stopped_early(run))
            _keep_best(run, final, final=True)
        result = result_of(run, final)
        result["git"] = git
        if group.is_main:
            write_atomically(run.folder / "result.json", to_json(result))
        exit_code = 0
    except BaseException as error:
        exit_code = exit_code_of(error, group.contract)
        raise
    finally:
        # Already reported; must not hide another error.
        with contextlib.suppress(CheckpointError):
            run.settle()
        with contextlib.suppress(CheckpointError):
            run.watch.close()
        run.log.close(exit_code)
    return run, final, result


def _open(
    config: Config, group: Group, open_outputs: OpenOutputs, splits: Splits | None
) -> tuple[Run, Generator[ShardBatch, None, None], list[str]]:
    """The run at the step where it starts or resumes, its batches, and notes for the user."""
    data = splits or open_splits(config)
    folder, resumes = config.run_dir, config.run.exists == "resume"
    found = checkpoint.newest_whole(folder) if resumes else None
    state, fingerprint, warnings = checkpoint.state_of(
        config, group, data.train.classes, found
    )
    done = state.step if found else None
    notes = [*state.notes, header(config, group, *data, state.model), *warnings]
    if found:
        notes.append(f"resuming {folder} at step {done}")
    elif resumes and (folder / "config.json").is_file():
        notes.append(
            f"{folder} holds no checkpoint yet: the run starts again at step 0"
        )
    checkpoint.agree_on_step(
        found.path if found else folder / "last.pt", state.step, group
    )
    kept = state.best_miou
    record = partial(inputs.record, config, data, ledger=keeps_ledger(config))
    if found and group.is_main:
        record()  # before trackers hear of a session that is refused
        with contextlib.suppress(CheckpointError):  # there may be none yet
            kept = max(kept, checkpoint.load(folder / "best.pt")["best_miou"])
    group.together(lambda: check_space(config, state) if group.is_main else None)

    def say(text: str) -> None:
        if group.is_main and config.train.progress:
            print(text, file=sys.stderr)  # the view is not open yet

    sampling = counted(config, group, data.train, say)
    stream = sampling.batches(group, range(state.step, config.train.steps))
    view, log = open_outputs(done)  # clears the folder of an earlier run
    if group.is_main:
        if not found:
            record(fresh=True)
            if state.weights:
                write_atomically(folder / WEIGHTS, to_json(state.weights))
        # Also of a resumed run, whose export may be another.
        write_atomically(folder / "config.json", to_json(to_mapping(config)))
    group.keep_stacks(folder)
    if group.world_size > 1:
        # The first rank of each other machine compares its files with those that rank 0 has recorded. Without a common
        # disk there is no such record, or that of an earlier run.
        path = folder / INPUTS
        first = environment.local_rank() == 0 and path.is_file()
        own = file_sha256(path) if first else ""
        compares = own == group.gather(own)[0] and not group.is_main
        group.together(lambda: record() if compares else None)
    run = Run(
        config,
        group,
        data.train,
        data.val,
        sampling,
        state,
        fingerprint,
        open_watch(config, group, state, data.train, fingerprint),
        view,
        log,
        saved=None if found and found.note else done,
        ended=found is not None and found.content["config"]["train"]["steps"] == done,
        kept=group.gather(kept)[0],
    )
    return run, stream, notes


def header(
    config: Config, group: Group, train: Samples, val: Samples, model: nn.Module
) -> str:
    """Four lines on network, data, batch and hardware."""
    parameters = list(model.parameters())
    frozen = _elements(p for p in parameters if not p.requires_grad)

    height, width = config.augment.crop_size
    compute, steps = config.compute, config.train.steps
    warmup = config.optim.warmup_steps
    slow = f", all below optim.lr (optim.warmup_steps = {warmup})"
    images, batch, classes = len(train), config.global_batch, val.classes
    held_out = f" (sequence {config.data.hold_out})" if config.data.hold_out else ""
    split = config.data.train_split
    of = "" if split == "train" else f" of {split}"

    device = group.device.type
    if device == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(group.device)})"
    compiled = ", compiled (minutes before the first update)" if compute.compile else ""

    return (
        f"model   {config.model.name}, {_elements(parameters):,} parameters, {frozen:,} of them frozen, "
        f"{classes.num_classes} classes\n"
        f"data    {classes.name}: {images} training images{of}, crop {height}x{width}; "
        f"{len(val)} validation images{held_out}\n"
        f"batch   {batch} = {compute.shards} shards x {compute.samples_per_shard} samples; {steps} steps"
        f"{slow if steps < warmup else ''}, {steps * batch / images:.1f} epochs; {config.train.precision}\n"
        f"device  {device}; processes {group.world_size}, threads per process {compute.threads}; mode {compute.mode}"
        f"{compiled}"
    )


def check_space(config: Config, state: TrainState) -> None:
    """Raise CheckpointError when the run's disk has too little space for its checkpoints."""
    weights = 4 * _elements(state.model.state_dict().values())
    trained = 4 * _elements(p for p in state.model.parameters() if p.requires_grad)
    moments = 2 if config.optim.name == "adamw" else 1
    one = 2 * weights + moments * trained  # weights and their average

    # At the same time: last, best, the one being written, and those that are kept.
    every, last = config.checkpoint.keep_every, config.checkpoint.keep_last
    kept = (config.train.steps - state.step - 1) // every if every else 0
    files = 3 + (min(kept, last) if last else kept)
    folder = config.run_dir.absolute()
    needed = files * one - sum(
        path.stat().st_size
        for path in (folder / "last.pt", folder / "best.pt")
        if path.is_file()
    )

    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if needed > (free := shutil.disk_usage(nearest).free):
        fewer = ", or keep fewer checkpoints: checkpoint.keep_last" * (files > 3)
        raise CheckpointError(
            f"{folder} will need {math.ceil(needed / MIB)} MiB ({files} checkpoints of {one / MIB:.0f} MiB), "
            f"but its disk has {free // MIB:.0f} MiB free. Free some space or choose another run.root{fewer}."
        )


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _loop(run: Run, stream: Generator[ShardBatch, None, None]) -> None:
    """Do all remaining updates, or those until a signal, and save."""
    config, current, clock = run.config, run.state, run.clock
    own = run.group.own_shards(config.compute.shards)
    step = TrainStep(config, run.watch, run.sampling.loss_weights())
    every = config.train.log_every
    run.log_after = (current.step // every + 1) * every if current.step else 1
    with (
        StopRequest(outlive_error=run.group.world_size > 1) as stop,
        contextlib.closing(stream),
        # Or a backward pass would run in the autocast of whoever calls the training.
        torch.autocast(run.group.device.type, enabled=False),
    ):
        if run.ended:
            _keep(run)  # as an uninterrupted run does at this step
        while current.step < config.train.steps and not _stopped_early(run):
            with run.watch.span("data"):
                shards = [next(stream) for _ in own]
            result = train_step(
                step,
                shards,
                stop=stop.asked,
                wait=_waits(run),
                check=partial(_check, run, step),
            )
            if result is None:
                break
            clock.tick()
            if current.step == run.log_after:
                _log(run, result)
            run.view.advance(current.step)
            with clock.paused():
                _keep(run)
        _save(run, "last.pt")  # before the validation, which may fail
        # A signal since the last update began has no next update to stop.
        if run.watch.sum([int(stop.asked)])[0]:
            raise Interrupted(
                f"stopped at step {current.step}; {run.folder / 'last.pt'} is written. "
                f"Continue with run.exists=resume."
            )


def _keep(run: Run) -> None:
    """Do the validation and checkpoints that are due, except those at the end of the run."""
    config, done = run.config, run.state.step
    if done == config.train.steps:
        return
    if _due(done, config.train.validate_every):
        _keep_best(run, _validate(run, precision=config.train.precision))
        if _stopped_early(run):
            run.view.say(
                f"step {done}: stopping early, train.patience = {config.train.patience} validations after the best"
            )
    if _due(done, config.checkpoint.every) and _long_ago(run):
        _save(run, "last.pt", wait=False)
    if _due(done, config.checkpoint.keep_every):
        _save(run, f"step_{done:06d}.pt")
        if config.checkpoint.keep_last and run.group.is_main:
            files = checkpoint.candidates(run.folder)
            numbered = [path for path in files if path.stem.startswith("step_")]
            for path in numbered[config.checkpoint.keep_last :]:
                path.unlink(missing_ok=True)


def _stopped_early(run: Run) -> bool:
    """Whether mIoU has not improved for `train.patience` validations; the same on every rank."""
    return 0 < run.config.train.patience <= run.state.stale


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _long_ago(run: Run) -> bool:
    """Whether last.pt may be written again, by the clock of rank 0. A collective."""
    if run.group.device.type == "cpu":
        return True
    is_long = time.monotonic() - run.saved_at >= run.config.checkpoint.every_s
    return bool(run.watch.sum([int(run.group.is_main and is_long)])[0])


def _next_line(run: Run) -> int:
    """Step of the next line of metrics.jsonl; on a fast GPU, some multiples of `train.log_every` are skipped.

    A collective. When the host waits for the GPU at a step, all ranks lose the work they had queued ahead, so rank 0
    decides the step.
    """
    train, lines = run.config.train, 1
    if run.group.device.type != "cpu":
        fast = math.ceil(run.clock.rate() * train.log_every_s / train.log_every)
        lines = int(run.watch.sum([max(fast, 1) if run.group.is_main else 0])[0])
    return (run.state.step // train.log_every + lines) * train.log_every


def _waits(run: Run) -> bool:
    """Whether the host waits for the next update: always on a CPU, on a GPU when its result is logged or saved."""
    config, done = run.config, run.state.step + 1
    train, saving = config.train, config.checkpoint
    due = (saving.every, saving.keep_every, train.validate_every, train.steps)
    saves = any(_due(done, every) for every in due)
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
    named = "; ".join(bad[:4]) or "every loss is finite, but a gradient is not"
    run.group.together(run.settle)
    good = "No checkpoint was written."
    if run.saved is not None:
        good = f"The checkpoint of step {run.saved} is the last good state."
    if first_bad < run.state.step:
        good = f"Step {first_bad} was the first non-finite one. {good}"
    precision, name = run.config.train.precision, run.config.loss.name
    advice = "Lower optim.lr, or set optim.clip_norm=5"
    advice += "." if precision == "fp32" else " or train.precision=fp32."
    if plugins.is_path(name):
        advice += f" `segpipe check-plugin loss.name={name}` tests the loss."
    at_scale = f" at loss scale {scale:g}" if scaler.is_enabled() else ""
    raise NumericsError(
        f"step {run.state.step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)} "
        f"({named}), lr {result.rate:.4g}, precision {precision}{at_scale}. {good} {advice}"
    )


def _log(run: Run, result: StepResult) -> None:
    current, rate = run.state, result.rate
    speed = run.clock.recent_rate() * run.config.global_batch
    wall = run.clock.wall_rate() * run.config.global_batch
    values: dict[str, Any] = {
        "loss": float(result.loss),
        "lr": rate,
        "grad_norm": float(result.grad_norm),
        # Unknown at the first update of a session.
        "images_per_second": speed or None,
        "wall_images_per_second": wall or None,
        "rank_wait_s": run.group.contract.waited_s,
        "part_s": dict(run.watch.seconds),
        "saved_step": run.saved or 0,
        **{f"loss_{name}": float(part) for name, part in result.parts.items()},
    }
    if run.config.train.precision == "fp16":
        values["scale"] = current.scaler.get_scale()
    run.log.log(current.step, "train", values)
    ranks = run.group.gather(sample(run.group.device))
    memory = {name: [figures[name] for figures in ranks] for name in ranks[0]}
    run.log.log(current.step, "memory", memory)
    shown = {
        "loss": f"{values['loss']:.3f}",
        "lr": f"{rate:.2g}",
        "img/s": f"{speed:.1f} (wall {wall:.1f})" if speed else "-",
    }
    run.view.advance(current.step, shown)
    run.log_after = _next_line(run)


def _validate(run: Run, *, precision: str, log: bool = True) -> Validation:
    """Validation of the averaged weights, which is also logged and shown."""
    config, current = run.config, run.state
    run.group.together(run.settle)  # the loader may fork
    preprocess = Preprocess(standardize=config.model.standardize).to(run.group.device)
    found = validate(
        current.ema.model,
        preprocess,
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
    run.view.say(f"step {current.step}: validation {headline(figures)}")
    if run.group.is_main and _is_settled(config, current.step):
        shard = run.sampling.first_shard()
        told = eval_gap(
            current.ema.model,
            preprocess,
            list(norms(current.model)),
            shard.image.to(run.group.device),
            shard.target.to(run.group.device),
            config.train.precision,
        )
        if told:
            run.log.log(current.step, "warning", {"text": told})
            run.view.say(f"Warning: {told}")
    return found


def _is_settled(config: Config, step: int) -> bool:
    """Whether the validation after `step` updates is the run's first with settled BatchNorm statistics."""
    steps = config.train.steps
    every = config.train.validate_every or steps
    return step == min(-(-SETTLED // every) * every, steps) >= SETTLED


def _keep_best(run: Run, found: Validation, *, final: bool = False) -> None:
    """Write best.pt if this validation is better than the one stored there.

    The final one does not count for `train.patience`: a run that stopped early must not continue when it is resumed.
    """
    score = miou(found.total)
    better = score > run.state.best_miou
    if not final:
        run.state.stale = 0 if better else run.state.stale + 1
    if better:
        run.state.best_miou = score
    if score > run.kept:
        run.kept = score
        _save(run, "best.pt", wait=final)


def _save(run: Run, name: str, *, wait: bool = True) -> None:
    """Write a checkpoint on rank 0, and the ledger up to that step on every rank.

    Without `wait` a thread writes it, and the next call reports a full disk. A run always waits for its first
    checkpoint, so that it exists before metrics.jsonl goes beyond its step.
    """
    run.watch.sum([])  # raises if states differ, so nothing is saved

    def flush() -> None:
        run.settle()
        run.watch.flush(sync=True)

    def write() -> None:
        if run.group.is_main:
            classes = run.train_samples.classes
            content = checkpoint.snapshot(
                run.state, run.config, classes, run.fingerprint
            )
            path = run.folder / name
            run.writing = run.writer.submit(checkpoint.save, path, content)
        if wait or run.saved is None:
            run.settle()

    run.group.together(flush)  # a full disk ends all ranks, not only one
    run.group.together(write)  # when all ranks have written their rows
    run.saved = run.state.step
    if name == "last.pt":
        run.saved_at = time.monotonic()


def result_of(run: Run, found: Validation) -> dict[str, Any]:
    """Content of result.json. `miou` belongs to the last averaged weights in fp32, not to the best checkpoint."""
    config, current, clock = run.config, run.state, run.clock

    where = sequences(run.val_samples, config.data.sequence)
    seen = sequences(run.train_samples, config.data.sequence)
    return {
        "name": config.run.name,
        "images": len(run.val_samples),
        **scores(found, run.val_samples.classes.names, where, set(seen)),
        "best_miou": run.kept,
        "steps": current.step,
        "stopped_early": _stopped_early(run),
        # Unknown when a finished run is resumed.
        "images_per_second": round(clock.rate() * config.global_batch, 3) or None,
        "wall_images_per_second": round(clock.wall_rate() * config.global_batch, 3)
        or None,
        "train_seconds": round(run.log.seconds(), 3),
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
        **weights_summary(config),
    }
