"""Where updates and the loader spend their time, and what to change first."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, record_function

from segpipe.data.augment import Augmenter
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.train import checkpoint
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import open_watch
from segpipe.train.start import teacher_of
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config
    from segpipe.train.recorder import Watch

# Updates.
WARM = 3
TIMED = 10
TRACED = 2
SAMPLES = 8  # that the loader's work is measured on
# Of a Watch: the ledger's work.
HOOKS = ("forward", "shard", "whole_batch", "reduced", "applied", "after_update")
# Of each part, the share of an update from which this is worth a change.
ADVICE = {
    "data": (
        0.1,
        "the update waits for data. Set data.workers={workers}, if there are as many cores, or let data.cache_mib keep "
        "decoded images.",
    ),
    "loss": (
        0.25,
        "loss.stride=2 takes a quarter of the pixels, and changes the training a little.",
    ),
    "reduction": (
        0.1,
        "gradients are moved and other processes waited for. Raise compute.samples_per_shard, or use fewer processes.",
    ),
    "ledger": (0.03, "compute.ledger=false leaves it out."),
}


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


def measure(config: Config, group: Group, folder: Path) -> dict[str, Any]:
    """Content of profile.json, from some updates of a fresh network; writes `folder`/trace.json, for Perfetto.

    `parts` has the milliseconds of each part of an update, the slowest first, with `other` for what no span holds.
    A collective: every rank measures itself. Raises ConfigError and DataError as a training does.
    """
    compute = config.compute
    flags.apply(compute.threads, compute.mode)

    samples = open_samples(config.data, "train", config.seed)
    spans = Spans(group.device)

    with _updates(config, group, samples, spans) as update:
        for _ in range(WARM):
            update()
        spans.take()

        before = time.perf_counter()
        for _ in range(TIMED):
            update()

        seconds = spans.take()
        whole = time.perf_counter() - before

        with profile() as trace:
            for _ in range(TRACED):
                update()
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / "trace.json"))  # type: ignore[no-untyped-call]

    seconds["other"] = max(whole - sum(seconds.values()), 0.0)
    slowest_first = sorted(seconds, key=lambda name: -seconds[name])

    batch = len(group.own_shards(compute.shards)) * compute.samples_per_shard

    found: dict[str, Any] = {
        "update_ms": 1000 * whole / TIMED,
        "images_per_second": batch * TIMED / whole,  # of this process
        "parts": {name: 1000 * seconds[name] / TIMED for name in slowest_first},
        "sample_ms": 1000 * _sample_seconds(config, samples),
    }
    return {**found, "advice": advice(found, config, batch)}


@contextlib.contextmanager
def _updates(
    config: Config, group: Group, samples: DataSet, spans: Spans
) -> Iterator[Callable[[], None]]:
    """A function that does the next update; nothing of it outlives the block."""
    counts = counted(config, group, samples, kept=None, say=print)
    steps = range(WARM + TIMED + TRACED)
    state = build_state(config, samples.classes, group.device)
    state.teacher = teacher_of(config, group.device, checkpoint.load_network)

    stream = shard_stream(config, group, samples, steps, counts)
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(stream):
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


def _sample_seconds(config: Config, samples: DataSet) -> float:
    """Time to read and augment a sample, in this process on one thread."""
    augmenter = Augmenter(config.augment)

    before = 0.0
    for index in range(SAMPLES + 1):
        if index == 1:  # the first warms up
            before = time.perf_counter()
        augmenter.crop(*samples.read(index % len(samples)), index)

    return (time.perf_counter() - before) / SAMPLES


def advice(found: Mapping[str, Any], config: Config, batch: int) -> list[str]:
    """What to change first, in words: one sentence for each part that takes more than it should."""
    whole = found["update_ms"]
    parts = found["parts"]
    busy_ms = max(whole - parts.get("data", 0.0), 1e-9)
    workers = math.ceil(batch * found["sample_ms"] / busy_ms)

    sentences = []
    for name, (threshold, sentence) in ADVICE.items():
        share = parts.get(name, 0.0) / whole
        if share > threshold:
            sentences.append(f"{name} {share:.0%}: {sentence.format(workers=workers)}")

    on_cpu = config.compute.device == "cpu" or not torch.cuda.is_available()
    slow = on_cpu and flags.emulated("bf16")
    if config.train.precision == "fp32" and not slow:
        sentences.append(
            "train.precision=bf16 runs the network in bf16, which this processor has instructions for."
        )

    return sentences or [
        "Nothing stands out: the network's forward and backward take most of the time."
    ]
