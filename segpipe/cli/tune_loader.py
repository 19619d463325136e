"""`segpipe tune-loader`: samples per second by number of loader processes, and whether the loader limits training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
        nproc = config.compute.nproc
        ranks = gpus if nproc == "auto" else int(nproc)  # which share the cores
        cores = max(len(os.sched_getaffinity(0)) // ranks, 1)
        CONSOLE.print(
            f"The network ({config.model.name}, {group.device}) takes {needed:.1f} samples/s.",
            markup=False,
        )

        def measure(workers: int) -> float:
            rate = loader_rate(config, group, samples, workers, seconds)
            CONSOLE.print(f"workers {workers:3}: {rate:.1f} samples/s", markup=False)
            return rate

        workers, rate = choose(measure, cores, needed)
    finally:
        leave(group)
    lines = [f"data:\n  workers: {workers}\n  prefetch: {config.data.prefetch}"]
    if rate < needed:
        lines.append(
            "The loader is the bottleneck. Keep decoded samples (data.pack=auto, see docs/data.md), remove transforms "
            "from augment.extra, or take a machine with more cores per GPU."
        )
    else:
        lines.append("The loader is not the bottleneck.")
    if ranks > 1:
        lines.append(
            f"{ranks} ranks share the cores: at most {cores} workers for each."
        )
    CONSOLE.print("\n".join(lines), markup=False)
    return 0


def choose(
    measure: Callable[[int], float], cores: int, needed: float
) -> tuple[int, float]:
    """The fewest workers that keep the network busy, or else the best number, and samples per second with them.

    Measures 0, 1, 2, ... workers, up to `cores`; stops where a further one gains less than GAIN, or where there is
    MARGIN to the rate `needed`. No worker is never enough: the network waits while the training process loads.
    """
    measure(0)
    rates: list[float] = []
    for workers in range(1, cores + 1):
        rates.append(measure(workers))
        gained = workers == 1 or rates[-1] >= (1 + GAIN) * rates[-2]
        if not gained or rates[-1] >= MARGIN * needed:
            break
    wanted = min(MARGIN * needed, max(rates) / (1 + GAIN))
    chosen = next(place for place, rate in enumerate(rates) if rate >= wanted)
    return chosen + 1, rates[chosen]


def loader_rate(
    config: Config, group: Group, samples: DataSet, workers: int, seconds: float
) -> float:
    """Samples per second that `workers` loader processes deliver in the order and with the checks of a training."""
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
    """Samples per second that whole updates of the configured network take, with batches that are there already."""
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
