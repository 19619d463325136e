"""`segpipe tune-loader`: samples per second by number of loader processes, and whether the loader limits training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from segpipe.run.console import CONSOLE
from segpipe.settings.check import check
from segpipe.settings.compose import compose
from segpipe.settings.config import Config

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.data.loader import ShardBatch
    from segpipe.distributed.group import Group

GAIN = 0.05  # a further worker that gains less is the last one that is measured
MARGIN = 1.2  # times the network's rate: more would only wait
UPDATES = 4  # that are timed, after one that is not
STEPS = 10**5  # more than are measured


class Choice(NamedTuple):
    """What the measurements say."""

    rates: dict[int, float]  # samples per second by number of workers
    workers: int
    limits: bool  # the loader is slower than the network


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    seconds = given["seconds"]
    config = compose(given["overrides"])
    check(config, world_size=1)
    import torch

    from segpipe.data.samples import open_samples
    from segpipe.determinism import flags
    from segpipe.distributed.group import join, leave

    samples = open_samples(config.data, "train", config.seed)
    flags.apply(config.compute.threads, config.compute.mode)
    group = join(config.compute, {})
    try:
        needed = network_rate(config, group, samples)
        gpus = torch.cuda.device_count() if group.device.type == "cuda" else 1
        ranks = (
            gpus if config.compute.nproc == "auto" else int(config.compute.nproc)
        )  # which share the cores
        cores = max(len(os.sched_getaffinity(0)) // ranks, 1)
        CONSOLE.print(
            f"The network ({config.model.name}, {group.device}) takes {needed:.1f} samples/s. Measuring up to {cores} "
            f"workers, {seconds:g} s each.",
            markup=False,
        )
        found = choose(
            lambda workers: loader_rate(config, group, samples, workers, seconds),
            cores,
            needed,
        )
    finally:
        leave(group)
    CONSOLE.print(table(found))
    CONSOLE.print(verdict(found, needed, config, cores, ranks), markup=False)
    return 0


def choose(measure: Callable[[int], float], cores: int, needed: float) -> Choice:
    """Rates of 0, 1, 2, ... workers, up to `cores`, and the fewest that keep the network busy, or else the best.

    Stops where a further worker gains less than GAIN, or where there is MARGIN to the rate `needed`. No worker is never
    enough: the network waits while the training process loads.
    """
    rates = {0: measure(0)}
    for workers in range(1, cores + 1):
        rates[workers] = measure(workers)
        if rates[workers] >= MARGIN * needed or (
            workers > 1 and rates[workers] < (1 + GAIN) * rates[workers - 1]
        ):
            break
    best = max(rate for workers, rate in rates.items() if workers)
    wanted = MARGIN * needed if best >= MARGIN * needed else best / (1 + GAIN)
    return Choice(
        rates,
        min(workers for workers, rate in rates.items() if workers and rate >= wanted),
        best < needed,
    )


def loader_rate(
    config: Config, group: Group, samples: DataSet, workers: int, seconds: float
) -> float:
    """DataSet per second that `workers` loader processes deliver in the order and with the checks of a training."""
    from segpipe.train.batches import shard_stream

    data = replace(config.data, workers=workers)
    positions = replace(
        config, data=replace(data, balance=0.0)
    )  # counting the masks would take longer than this
    with closing(shard_stream(positions, group, samples, range(STEPS), None)) as stream:
        for _ in range(
            1 + workers * (config.data.prefetch + 1)
        ):  # what was prepared while the workers started
            next(stream)
        start, batches = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds or batches < 2:
            next(stream)
            batches += 1
    return batches * config.compute.samples_per_shard / passed


def network_rate(config: Config, group: Group, samples: DataSet) -> float:
    """DataSet per second that whole updates of the configured network take, with batches that are there already."""
    import torch

    from segpipe.train.batches import shard_stream
    from segpipe.train.recorder import Watch
    from segpipe.train.state import build_state
    from segpipe.train.step import TrainStep, train_step

    config = replace(
        config,
        data=replace(config.data, balance=0.0, workers=0),
        loss=replace(config.loss, class_weights="none", teacher=""),
    )
    own = group.own_shards(config.compute.shards)
    state = build_state(config, samples.classes, group.device)
    step = TrainStep(config, Watch(group, state))
    with closing(shard_stream(config, group, samples, range(1), None)) as stream:
        shards: list[ShardBatch] = [next(stream) for _ in own]
    times = []
    for _ in range(1 + UPDATES):
        start = time.perf_counter()
        train_step(step, shards)
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return config.global_batch / min(times[1:])


def table(found: Choice) -> Table:
    """The measurements."""
    shown = Table("workers", "samples/s", "per worker, % of the first")
    for workers, rate in found.rates.items():
        efficiency = f"{100 * rate / (workers * found.rates[1]):.0f}" if workers else ""
        mark = " <-" if workers == found.workers else ""
        shown.add_row(f"{workers}{mark}", f"{rate:.1f}", efficiency)
    return shown


def verdict(
    found: Choice, needed: float, config: Config, cores: int, ranks: int
) -> str:
    """What to paste, and whether it helps."""
    rate = found.rates[found.workers]
    lines = [f"data:\n  workers: {found.workers}\n  prefetch: {config.data.prefetch}"]
    if not found.limits:
        lines.append(
            f"The loader is not the bottleneck: {found.workers} workers give {rate:.1f} samples/s, the network takes "
            f"{needed:.1f}."
        )
    else:
        lines.append(
            f"The loader is the bottleneck: at best {rate:.1f} samples/s ({found.workers} workers), and the network "
            f"takes {needed:.1f}. Keep decoded samples (data.pack=auto, see docs/data.md), "
            f"remove transforms from augment.extra, or take a machine with more cores per GPU."
        )
    if ranks > 1:
        lines.append(
            f"compute.nproc = {ranks} ranks share the cores: at most {cores} workers for each."
        )
    return "\n".join(lines)
