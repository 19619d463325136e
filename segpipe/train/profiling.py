"""Where updates and the loader spend their time, and what to change first."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from segpipe.data.augment import Augmenter
from segpipe.data.plan import REPEATS
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import open_watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step
from segpipe.train.teacher import teacher_of

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config
    from segpipe.train.watch import Watch

WARM, TIMED, TRACED = 3, 10, 2  # updates
SAMPLES = 8  # that the loader's work is measured on
# Of a Watch: the ledger's work.
HOOKS = ("forward", "shard", "whole_batch", "reduced", "applied", "after_update")


@dataclass(frozen=True)
class SpanCost:
    """A part of an update."""

    name: str
    ms: float  # per update
    share: float  # of an update


@dataclass(frozen=True)
class StepProfile:
    """What `measure` found."""

    update_ms: float
    images_per_second: float  # of this process
    parts: list[SpanCost]
    read_ms: float  # per sample, in one process
    augment_ms: float
    repeated: float  # share of the samples that the canary has made again
    advice: list[str]


class Spans:
    """Seconds spent in each span, on the device where it is a GPU, and a range of the trace for each."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self, name: str, *, host: bool = False) -> Iterator[None]:
        """`host`: measure the host's time even if there is a GPU."""
        before = time.perf_counter()
        with record_function(name):
            if host or not self._cuda:
                yield
                self._seconds[name] += time.perf_counter() - before
            else:
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                start.record()
                yield
                end.record()
                self._events.append((name, start, end))

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; waits for a GPU."""
        if self._cuda:
            torch.cuda.synchronize()
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1000
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds

    def attach(self, watch: Watch) -> None:
        """Measure this watch's spans, and its hooks as `ledger`."""
        watch.span = self  # type: ignore[method-assign, assignment]
        for name in HOOKS:
            setattr(watch, name, partial(self._hook, getattr(watch, name)))

    @staticmethod
    def detach(watch: Watch) -> None:
        """Undo `attach`."""
        for name in ("span", *HOOKS):
            delattr(watch, name)

    def _hook(self, hook: Any, *given: Any) -> None:
        with self("ledger"):
            hook(*given)


def measure(config: Config, group: Group, folder: Path) -> StepProfile:
    """Profile of some updates of a fresh network; writes `folder`/trace.json, for chrome://tracing and Perfetto.

    A collective: every rank measures itself. Raises ConfigError and DataError as a training does.
    """
    device, compute = group.device, config.compute
    flags.apply(compute.threads, compute.mode)
    samples = open_samples(config.data, "train", config.seed)
    spans = Spans(device)
    with _updates(config, group, samples, spans) as update:
        for _ in range(WARM):
            update()
        spans.take()
        before = time.perf_counter()
        for _ in range(TIMED):
            update()
        seconds = {name: spent / TIMED for name, spent in spans.take().items()}
        whole = (time.perf_counter() - before) / TIMED
        _trace(update, folder, device)
    read, augment = _loader(config, samples)
    batch = len(group.own_shards(compute.shards)) * compute.samples_per_shard
    found = StepProfile(
        update_ms=round(1000 * whole, 2),
        images_per_second=round(batch / whole, 2),
        parts=_parts(seconds, whole),
        read_ms=round(read, 2),
        augment_ms=round(augment, 2),
        repeated=REPEATS / config.augment.canary if config.augment.canary else 0.0,
        advice=[],
    )
    return replace(found, advice=advice(found, config, device, batch))


@contextlib.contextmanager
def _updates(
    config: Config, group: Group, samples: DataSet, spans: Spans
) -> Iterator[Callable[[], None]]:
    """A function that does the next update; nothing of it outlives the block."""
    counts = counted(config, group, samples, kept=None, say=print)
    steps = range(WARM + TIMED + TRACED)
    state = build_state(config, samples.classes, group.device)
    state.teacher = teacher_of(config, group.device)
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.closing(
            shard_stream(config, group, samples, steps, counts)
        ) as stream,
    ):
        elsewhere = replace(config, run=replace(config.run, root=scratch))
        watch = open_watch(elsewhere, group, state, samples, flags.fingerprint())
        spans.attach(watch)
        step = TrainStep(config, watch, loss_weights(config, samples, counts))

        def update() -> None:
            with spans("data", host=True):
                shards = [next(stream) for _ in group.own_shards(config.compute.shards)]
            train_step(step, shards, wait=group.device.type == "cpu")

        yield update
        watch.close()


def _trace(update: Callable[[], None], folder: Path, device: torch.device) -> None:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        for _ in range(TRACED):
            update()
    folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(folder / "trace.json"))  # type: ignore[no-untyped-call]


def _parts(seconds: dict[str, float], whole: float) -> list[SpanCost]:
    """Parts by time, and `other` for what no span holds."""
    seconds["other"] = max(whole - sum(seconds.values()), 0.0)
    slowest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return [
        SpanCost(name, ms=round(1000 * spent, 2), share=round(spent / whole, 4))
        for name, spent in slowest_first
    ]


def _loader(config: Config, samples: DataSet) -> tuple[float, float]:
    """Milliseconds to read a sample and to augment it, in this process on one thread: medians."""
    augmenter = Augmenter(config.augment)
    reading, augmenting = [], []
    for index in range(SAMPLES + 1):
        start = time.perf_counter()
        image, target = samples.read(index % len(samples))
        read = time.perf_counter()
        augmenter.crop(image, target, index)
        reading.append(read - start)
        augmenting.append(time.perf_counter() - read)
    # The first sample warms up.
    return 1000 * median(reading[1:]), 1000 * median(augmenting[1:])


def advice(
    found: StepProfile, config: Config, device: torch.device, batch: int
) -> list[str]:
    """What to change first, in words: one sentence for each part that takes more than it should."""
    share = defaultdict[str, float](float)
    share |= {part.name: part.share for part in found.parts}
    sentences = []
    if share["data"] > 0.1:
        per_sample = (found.read_ms + found.augment_ms) * (1 + found.repeated)
        busy_ms = max(found.update_ms * (1 - share["data"]), 1e-9)
        needed = math.ceil(batch * per_sample / busy_ms)
        more = "The workers lack cores or memory bandwidth: leave them cores, with compute.threads"
        if needed > config.data.workers:
            more = f"Set data.workers={needed} (now {config.data.workers}), which should keep up"
        sentences.append(
            f"Loader-bound: {share['data']:.0%} of an update waits for data, and a sample takes {per_sample:.1f} ms. "
            f"{more}, or let data.cache_mib keep decoded images."
        )
    if share["loss"] > 0.25:
        sentences.append(
            f"Loss-bound: the loss takes {share['loss']:.0%} of an update, without its backward. loss.stride=2 (now "
            f"{config.loss.stride}) takes a quarter of the pixels, and changes the training a little."
        )
    if share["reduction"] > 0.1:
        sentences.append(
            f"Reduction-bound: {share['reduction']:.0%} of an update moves gradients and waits for other processes. "
            f"Raise compute.samples_per_shard (now {config.compute.samples_per_shard}), or use fewer processes."
        )
    if share["ledger"] > 0.03:
        sentences.append(
            f"The ledger takes {share['ledger']:.0%} of an update; compute.ledger=false leaves it out."
        )
    slow_bf16 = device.type == "cpu" and flags.emulated("bf16")
    if config.train.precision == "fp32" and not slow_bf16:
        sentences.append(
            "train.precision=bf16 runs the network in bf16, which this device has instructions for."
        )
    return sentences or [
        "Nothing stands out: the network's forward and backward take most of the time."
    ]
