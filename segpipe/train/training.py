"""One training run in this process: its parts, where it reports to, what it says first, and its result."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from segpipe import __version__
from segpipe.data.samples import CachedSamples, sequences
from segpipe.determinism import flags
from segpipe.errors import CheckpointError
from segpipe.ledger.digest import state_digest
from segpipe.settings.config import config_hash
from segpipe.train.metrics import scores
from segpipe.train.start import weights_summary

if TYPE_CHECKING:
    from torch import Tensor, nn

    from segpipe.data.data_set import DataSet, Samples
    from segpipe.data.frequency import PixelCounts
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config
    from segpipe.train.metrics import Validation
    from segpipe.train.recorder import Watch
    from segpipe.train.state import TrainState

MIB = 2**20
EXPORTED = 3  # sizes of the averaged weights that an exported folder has, about


class View(contextlib.AbstractContextManager[Any], Protocol):
    """Shows progress to a person."""

    def say(self, text: str) -> None: ...

    def advance(self, done: int, figures: dict[str, str] | None = None) -> None: ...

    def validating(self, done: int, total: int) -> None: ...


class Log(Protocol):
    """Keeps figures by step and kind; a line that an earlier session of the run has written is not written again."""

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None: ...

    def validated(self, run: Run, found: Validation) -> None: ...

    def close(self, exit_code: int = 0) -> None: ...


# Makes both when nothing but the training itself can fail any more; given the step from which a run is resumed, or
# None, which clears the folder of an earlier run.
OpenOutputs = Callable[[int | None], tuple[View, Log]]


class Clock:
    """Time spent on updates, without validations and checkpoints, and with them."""

    def __init__(self) -> None:
        self.seconds, self.updates = 0.0, 0
        self.wall = 0.0  # seconds with all that lay between
        self._mark = time.perf_counter()
        self._first = 0.0  # end of the first update
        self._recent = (0.0, 0)

    def tick(self) -> None:
        """Count an update. The first is left out of the figures: it starts workers and picks kernels."""
        now = time.perf_counter()
        if self.updates:
            self.seconds += now - self._mark
            self.wall = now - self._first
        else:
            self._first = now
        self.updates, self._mark = self.updates + 1, now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not counted."""
        before = time.perf_counter()
        yield
        self._mark += time.perf_counter() - before

    def rate(self) -> float:
        """Updates per second so far; 0 before the second."""
        return (self.updates - 1) / self.seconds if self.seconds > 0 else 0.0

    def wall_rate(self) -> float:
        """Updates per second with validations and checkpoints in between; 0 before the second."""
        return (self.updates - 1) / self.wall if self.wall > 0 else 0.0

    def recent_rate(self) -> float:
        """Updates per second since the last call."""
        seconds, updates = self._recent
        self._recent = (self.seconds, self.updates)
        return (
            (self.updates - updates) / (self.seconds - seconds)
            if self.seconds > seconds
            else 0.0
        )


@dataclass
class Run:
    """One training run in this process."""

    config: Config
    group: Group
    train_samples: DataSet
    val_samples: DataSet
    counts: PixelCounts | None  # pixels of each class in the training samples
    state: TrainState
    fingerprint: dict[str, Any]  # of rank 0
    watch: Watch
    view: View
    log: Log
    clock: Clock = field(default_factory=Clock)
    saved: int | None = None  # step of last.pt, if there is one
    saved_at: float = -math.inf  # time.monotonic() of this session's last one
    log_after: int = 1  # step of the next line of metrics.jsonl
    # Writes one checkpoint at a time, while the updates go on.
    writer: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    writing: Future[None] | None = None

    @cached_property
    def val_cache(self) -> CachedSamples:
        """Images that stay in memory from one validation to the next."""
        return CachedSamples(
            self.val_samples,
            self.config.data.cache_mib if self.config.train.validate_every else 0,
        )

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is whole. Raises CheckpointError if it cannot be written."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()


def header(
    config: Config, group: Group, train: Samples, val: Samples, model: nn.Module
) -> str:
    """Four lines on network, data, batch and hardware."""
    parameters = list(model.parameters())
    frozen = _elements(p for p in parameters if not p.requires_grad)

    height, width = config.augment.crop_size
    compute, steps = config.compute, config.train.steps
    epochs = steps * config.global_batch / len(train)
    held_out = f" (sequence {config.data.hold_out})" if config.data.hold_out else ""
    split = config.data.train_split
    of = "" if split == "train" else f" of {split}"

    device = group.device.type
    if device == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(group.device)})"

    return (
        f"model   {config.model.name}, {_elements(parameters):,} parameters, {frozen:,} of them frozen, "
        f"{val.classes.num_classes} classes\n"
        f"data    {val.classes.name}: {len(train)} training images{of}, crop {height}x{width}; "
        f"{len(val)} validation images{held_out}\n"
        f"batch   {config.global_batch} = {compute.shards} shards x {compute.samples_per_shard} samples; {steps} steps,"
        f" {epochs:.1f} epochs; {config.train.precision}\n"
        f"device  {device}; processes {group.world_size}, threads of each {compute.threads}; mode {compute.mode}"
    )


def check_space(config: Config, state: TrainState, group: Group) -> None:
    """Raise CheckpointError on rank 0 when the run's disk has less room than checkpoints, ledger and export need."""
    if not group.is_main:
        return

    weights = 4 * _elements(state.model.state_dict().values())
    trained = 4 * _elements(p for p in state.model.parameters() if p.requires_grad)
    moments = 2 if config.optim.name == "adamw" else 1
    one = 2 * weights + moments * trained  # with the average

    # At once: last, best, the one being written, and those that are kept.
    every, last = config.checkpoint.keep_every, config.checkpoint.keep_last
    updates = config.train.steps - state.step
    kept = (updates - 1) // every if every else 0
    files = 3 + (min(kept, last) if last else kept)
    paths = (config.run_dir / "last.pt", config.run_dir / "best.pt")
    there = sum(path.stat().st_size for path in paths if path.is_file())

    rows = config.compute.shards + group.world_size
    row = 64 + 24 * config.compute.samples_per_shard
    ledger = updates * rows * row if config.compute.ledger else 0
    exports = config.export.enabled and not config.export.dir
    needed = files * one - there + ledger + (EXPORTED * weights if exports else 0)

    folder = config.run_dir.absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if needed > (free := shutil.disk_usage(nearest).free):
        export = ", and the export" if exports else ""
        fewer = ", or keep fewer checkpoints: checkpoint.keep_last" if files > 3 else ""
        raise CheckpointError(
            f"{config.run_dir} will need {math.ceil(needed / MIB)} MiB ({files} checkpoints of {one / MIB:.0f} MiB, "
            f"ledger {ledger / MIB:.0f} MiB{export}), but its disk has {free // MIB:.0f} MiB free. "
            f"Free some space, or choose another run.root{fewer}."
        )


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def result_of(run: Run, found: Validation, *, stopped_early: bool) -> dict[str, Any]:
    """Content of result.json. `miou` is that of the last averaged weights in fp32, not of the best checkpoint."""
    config, current, clock = run.config, run.state, run.clock

    where = sequences(run.val_samples, config.data.sequence)
    seen = sequences(run.train_samples, config.data.sequence)
    return {
        "name": config.run.name,
        "images": len(run.val_samples),
        **scores(found, run.val_samples.classes.names, where, set(seen)),
        "best_miou": current.best_miou,
        "steps": current.step,
        "stopped_early": stopped_early,
        "images_per_second": round(clock.rate() * config.global_batch, 3),
        "wall_images_per_second": round(clock.wall_rate() * config.global_batch, 3),
        "train_seconds": round(clock.seconds, 3),
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
