"""Where updates and the loader spend their time, and what to change first."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile

from segpipe.data.augment import Augmenter
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.train import checkpoint
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import open_watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config

# Updates.
WARM = 3
TIMED = 10
TRACED = 3
SAMPLES = 8  # that the loader's work is measured on
# Spans of an update, in its order; see Watch.span.
PARTS = (
    "data", "counts", "copy", "forward", "loss", "backward", "reduction", "clip", "optimizer", "average", "ledger",
)  # fmt: skip
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


def measure(config: Config, group: Group, folder: Path) -> dict[str, Any]:
    """Content of profile.json, from some updates of a fresh network; writes `folder`/trace.json, for Perfetto.

    `parts` has the milliseconds of each part of an update, the slowest first, with `other` for what no span holds.
    Their shares are those of a few updates under torch's profiler, which takes time of its own; `update_ms` is
    measured without it. A collective: every rank measures itself. Raises ConfigError and DataError as a training does.
    """
    compute = config.compute
    flags.apply(compute.threads, compute.mode)

    samples = open_samples(config.data, "train", config.seed)
    with _updates(config, group, samples) as update:
        for _ in range(WARM):
            update()
        whole = _seconds(update, TIMED, group.device)
        with profile() as trace:
            traced = _seconds(update, TRACED, group.device)

    folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(folder / "trace.json"))  # type: ignore[no-untyped-call]
    shares = spent(trace, group.device)
    shares["other"] = max(traced * TRACED - sum(shares.values()), 0.0)
    factor = 1000 * whole / max(sum(shares.values()), 1e-9)
    slowest_first = sorted(shares, key=lambda name: -shares[name])

    batch = len(group.own_shards(compute.shards)) * compute.samples_per_shard
    found: dict[str, Any] = {
        "update_ms": 1000 * whole,
        "images_per_second": batch / whole,  # of this process
        "parts": {name: factor * shares[name] for name in slowest_first},
        "sample_ms": 1000 * _sample_seconds(config, samples),
    }
    return {**found, "advice": advice(found, config, batch)}


def spent(trace: profile, device: torch.device) -> dict[str, float]:
    """Seconds in each of PARTS, on the device where it is a GPU; the host alone waits for data."""
    found: dict[str, float] = {}
    for event in trace.key_averages():
        if event.key in PARTS:
            on_host = event.key == "data" or device.type == "cpu"
            time_us = event.cpu_time_total if on_host else event.device_time_total
            found[event.key] = max(found.get(event.key, 0.0), time_us / 1e6)
    return found


def _seconds(update: Callable[[], None], number: int, device: torch.device) -> float:
    """Time of an update, the mean of some."""
    before = time.perf_counter()
    for _ in range(number):
        update()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - before) / number


@contextlib.contextmanager
def _updates(
    config: Config, group: Group, samples: DataSet
) -> Iterator[Callable[[], None]]:
    """A function that does the next update; nothing of it outlives the block."""
    counts = counted(config, group, samples, kept=None, say=print)
    steps = range(WARM + TIMED + TRACED)
    state = build_state(config, samples.classes, group.device)
    state.teacher = checkpoint.teacher_of(config, group.device)

    stream = shard_stream(config, group, samples, steps, counts)
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(stream):
        elsewhere = replace(config, run=replace(config.run, root=scratch))
        watch = open_watch(elsewhere, group, state, samples, flags.fingerprint())

        step = TrainStep(config, watch, loss_weights(config, samples, counts))

        def update() -> None:
            with watch.span("data"):
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
