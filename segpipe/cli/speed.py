"""`segpipe describe`, `profile` and `gpu-check`: cost of a network, time per part of an update, checks of the GPU.

torch is imported inside the functions: `profile` sets the environment of its process first.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from segpipe import plugins
from segpipe.cli.commands import Given
from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.errors import ConfigError
from segpipe.files import to_json, write_atomically
from segpipe.run.console import CONSOLE, table
from segpipe.run.launch import with_steps
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, check, config_hash

if TYPE_CHECKING:
    import torch

    from segpipe.distributed.group import Group

SMALLEST = 32  # image height and width
WARM_UP = 2  # forward passes before timing starts
# Updates of `profile`.
FIRST = 3  # not timed
TIMED = 10
TRACED = 3
SAMPLES = 8  # samples on which loading is timed


def describe(given: Given) -> int:
    """Exit code. Prints a network's sizes, counted without computing, and its latency on this machine."""
    config = compose(given["overrides"])
    check(config)
    size, classes = _size(given["size"]), given["classes"]
    about = config, size, classes
    asked = partial(plugins.call, "model.name", config.model.name)
    found = asked(counts, {}, *about)
    if given["runs"]:
        found |= asked(latency, {}, *about, given["runs"])
    if given["json"]:
        print(json.dumps(found))
        return 0
    rows = [
        (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
        for name, value in found.items()
    ]
    CONSOLE.print(table(("", ""), rows))
    return 0


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or min(map(int, match.groups())) < SMALLEST:
        raise ConfigError(
            f"size = {text!r}, but HEIGHTxWIDTH of at least {SMALLEST}x{SMALLEST} was needed, such as size=512x1024."
        )
    return int(match[1]), int(match[2])


def counts(config: Config, size: tuple[int, int], num_classes: int) -> Given:
    """Sizes of the network for images of `size`.

    A MAC is one multiplication with its addition, in convolutions and matrix products.
    """
    import torch

    from segpipe.models import build_model

    model = config.model
    with torch.device("meta"):
        net = build_model(model.name, num_classes, model.args)
        image = torch.empty(1, 3, *size)
    params = sum(value.numel() for value in net.parameters())
    heads = getattr(net, "train_only", torch.nn.Module())
    auxiliary = sum(value.numel() for value in heads.parameters())
    with torch.no_grad():
        macs = operations(net.eval(), image)
    return {
        "model": model.name,
        "image": f"{size[0]}x{size[1]}",
        "classes": num_classes,
        "parameters": params - auxiliary,
        "parameters_in_training": params,
        "macs": macs,
        "output_stride": net.output_stride,
        "size_multiple": net.size_multiple,
    }


def operations(net: torch.nn.Module, image: torch.Tensor) -> int:
    """MACs of one forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        net(image)
    return int(counter.get_total_flops() // 2)


def latency(
    config: Config, size: tuple[int, int], num_classes: int, runs: int
) -> Given:
    """Median time of a forward pass of one fp32 image on this machine, in ms. Other processes slow it down."""
    import torch

    from segpipe.distributed.group import choose_device
    from segpipe.models import build_model

    device = choose_device(config.compute.device, 0)
    flags.apply(config.compute.threads, "off")
    net = build_model(config.model.name, num_classes, config.model.args)
    net.to(device).eval()
    image = torch.zeros(1, 3, *size, device=device)
    with torch.inference_mode():
        times = [_seconds(lambda: net(image), device) for _ in range(WARM_UP + runs)]
    return {
        "latency_ms": round(1e3 * statistics.median(times[WARM_UP:]), 2),
        "latency_runs": runs,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    import torch

    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gpu_check(given: Given) -> int:
    """Exit code. Runs all checks that need a GPU, within a time limit."""
    if find_spec("benchmarks") is None or find_spec("benchmarks.gpu") is None:
        raise ConfigError(
            "gpu-check needs benchmarks/gpu.py, which is not installed. Run it in a clone of segpipe."
        )
    flags.set_environment()  # before torch is imported
    from benchmarks.gpu import check

    return check(given)


def profile(given: Given) -> int:
    """Exit code. Prints the time of each part of an update, and writes profile.json and a trace."""
    config = compose(given["overrides"])
    check(config)
    if not Path("/proc/driver/nvidia").exists():
        # torch's profiler calls a machine without a GPU an error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    flags.set_environment(
        environment.local_world_size() * config.compute.threads, config.compute.mode
    )
    from segpipe.distributed import group as processes

    config, _ = with_steps(config)
    group = processes.join(config.compute, {"configuration": config_hash(config)})
    folder = config.run_dir.with_name(f"{config.run_dir.name}_profile")
    own = folder / f"rank{group.rank:02d}" if group.world_size > 1 else folder
    try:
        found = _profiled(config, group, own)
    finally:
        processes.leave(group)
    if not group.is_main:
        return 0
    write_atomically(folder / "profile.json", to_json(found))
    whole, parts = found["update_ms"], found["parts"]
    rows = [(name, f"{ms:.1f}", f"{ms / whole:.1%}") for name, ms in parts.items()]
    CONSOLE.print(
        f"{config.model.name} on {group.device.type}: {whole:.1f} ms per update, "
        f"{found['images_per_second']:.1f} images/s per process"
    )
    CONSOLE.print(table(("part of an update", "ms", "share"), rows))
    CONSOLE.print(
        f"loader: {found['sample_ms']:.1f} ms to read and augment a sample in one process; updates wait "
        f"{parts['data'] / whole:.0%} of their time. data.workers={found['workers']} would keep up, "
        "given as many cores."
    )
    CONSOLE.print(f"trace for ui.perfetto.dev: {own / 'trace.json'}")
    return 0


def _profiled(config: Config, group: Group, folder: Path) -> Given:
    """Content of profile.json, from a few updates of a new network; writes `folder`/trace.json.

    `parts` has the milliseconds of each part of an update, slowest first, with `other` for time outside all spans.
    Their shares come from updates under torch's profiler, which adds overhead; `update_ms` is measured without it.
    A collective: every rank measures itself. Raises ConfigError and DataError as a training does.
    """
    from torch import profiler

    from segpipe.data.augment import Augmenter
    from segpipe.data.samples import open_samples
    from segpipe.train import checkpoint
    from segpipe.train.batches import counted
    from segpipe.train.recorder import open_watch, spent
    from segpipe.train.step import TrainStep, train_step

    samples = open_samples(config.data, "train", config.seed)
    shards = group.own_shards(config.compute.shards)
    sampling = counted(config, group, samples, say=print)
    state, fingerprint, warnings = checkpoint.state_of(
        config, group, samples.classes, None
    )
    for warning in warnings:  # such as a precision that makes these updates slow
        print(warning)
    stream = sampling.batches(group, range(FIRST + TIMED + TRACED))
    with tempfile.TemporaryDirectory() as scratch, closing(stream):
        elsewhere = replace(config, run=replace(config.run, root=scratch))
        watch = open_watch(elsewhere, group, state, samples, fingerprint)
        step = TrainStep(config, watch, sampling.loss_weights())

        def updates(number: int) -> float:
            def work() -> None:
                for _ in range(number):
                    with watch.span("data"):
                        batches = [next(stream) for _ in shards]
                    train_step(step, batches, wait=group.device.type == "cpu")

            return _seconds(work, group.device) / number

        updates(FIRST)
        whole = updates(TIMED)
        with profiler.profile() as trace:
            traced = updates(TRACED)
        watch.close()
    augmenter = Augmenter(config.augment)

    def load() -> None:
        for index in range(SAMPLES):
            augmenter(*samples.read(index % len(samples)), index)

    load()  # warms up
    sample_ms = 1000 * _seconds(load, group.device) / SAMPLES
    folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(folder / "trace.json"))  # type: ignore[no-untyped-call]
    found = spent(trace, group.device)
    found["other"] = max(traced * TRACED - sum(found.values()), 0.0)
    factor = 1000 * whole / sum(found.values())
    batch = len(shards) * config.compute.samples_per_shard
    parts = {
        name: factor * found[name]
        for name in sorted(found, key=found.__getitem__, reverse=True)
    }
    busy_ms = 1000 * whole - parts["data"]
    return {
        "update_ms": 1000 * whole,
        "images_per_second": batch / whole,  # of this process
        "parts": parts,
        "sample_ms": sample_ms,
        "workers": math.ceil(batch * sample_ms / busy_ms),
    }
