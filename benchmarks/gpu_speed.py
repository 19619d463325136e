"""The promises of speed on a GPU: the step beside other recipes, waits of the host, the loader, the whole loop.

Arms of 12 x 1024x1024 do not fit onto a GPU together, so each has its turn, and ours a second one at the end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import torch
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu_bits
from benchmarks import measure as measuring
from benchmarks.baselines import loops
from benchmarks.gpu_bench import LEFT_OUT, NO_TIME, Bench, GoalMissed
from benchmarks.train_step import Scene, Update, ours, theirs, wait
from segpipe.data.catalog import STREET
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.distributed.reduce import ALIGNMENT, FlatLayout
from segpipe.ledger.digest import state_digest
from segpipe.losses.total import shard_loss
from segpipe.models import MODELS, build_model
from segpipe.settings.config import Config
from segpipe.settings.groups import LossConfig
from segpipe.train.batches import Sampling
from segpipe.train.forward import RECORDED
from segpipe.train.step import train_step

# Memory traffic of an image of 1024x1024 in an update, by an estimate of unfused kernels (bf16, channels_last).
GB_PER_IMAGE = {"pidnet_s": 2.9, "ddrnet23_slim": 2.0, "fast_scnn": 2.0}
# What must be reached: times as fast as another recipe (G1b), the real loop as a share of what the bandwidth of copies
# would allow (G1), the fused loss (G2), determinism (G3), launches with a graph (G4), loader and GPU (G5), memory (G7).
FASTER = {"PIDNet-style bf16": 2.0, "torchvision-style bf16 compiled": 1.0}
LOOP, LOADER, BUSY, MEMORY = 0.38, 0.95, 0.9, 0.6
LOSS = {"time": 6.0, "memory": 20.0}
DETERMINISTIC, LAUNCHES = 1.05, 50
OURS = "segpipe bf16"
GIB = 1 << 30


def bandwidth(bench: Bench) -> dict[str, Any]:
    """What this machine can do at most: copies on the device and to it, launches; goals are shares of these."""
    cuda = bench.cuda
    size = GIB if cuda else 1 << 22
    here = torch.ones(size // 4, dtype=torch.uint8, pin_memory=cuda)
    pageable = torch.ones(size // 4, dtype=torch.uint8)
    a = torch.ones(size, dtype=torch.uint8, device=bench.device)
    b, small = torch.empty_like(a), torch.ones(8, device=bench.device)
    into = b[: size // 4]

    def rate(action: Callable[[], Any], moved: int) -> float:
        return round(moved / _best(action, bench.device, 7) / 1e9, 1)

    def launches() -> None:
        for _ in range(1000):
            small.add_(1)

    before = time.perf_counter()
    launches()
    host_us = (time.perf_counter() - before) * 1000
    wait(bench.device)
    return {
        "copy_gb_per_s": rate(lambda: b.copy_(a), 2 * size),
        "to_device_pinned_gb_per_s": rate(
            lambda: into.copy_(here, non_blocking=True), size // 4
        ),
        "to_device_pageable_gb_per_s": rate(lambda: into.copy_(pageable), size // 4),
        "host_us_per_launch": round(host_us, 2),
        "memory_mib": torch.cuda.mem_get_info()[1] >> 20 if cuda else None,
    }


def _best(action: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(rounds):
        wait(device)
        before = time.perf_counter()
        action()
        wait(device)
        seconds.append(time.perf_counter() - before)
    return min(seconds)


def _share(bench: Bench, rate: float, model: str) -> dict[str, float]:
    """Images per second, and as a share of what copies of the network's traffic would allow here."""
    copies = bandwidth(bench)["copy_gb_per_s"]
    gb = GB_PER_IMAGE[model] * (bench.size / 1024) ** 2
    return {
        "images_per_second": round(rate, 1),
        "copy_gb_per_s": copies,
        "share_of_copies": round(rate * gb / copies, 4),
    }


ARMS: dict[str, Callable[[Scene, int], Update]] = {  # and torch's threads
    OURS: lambda scene, threads: ours(scene, _fast(scene), threads, cuda_graph=True),
    "segpipe bf16 eager": lambda scene, threads: ours(scene, _fast(scene), threads),
    "PIDNet-style bf16": lambda scene, threads: theirs(
        scene, loops.pidnet_style, _fast(scene)
    ),
    "torchvision-style bf16 compiled": lambda scene, threads: compiled(scene),
    "torchvision-style bf16": lambda scene, threads: theirs(
        scene, loops.torchvision_style, _fast(scene)
    ),
    "segpipe bf16 compiled": lambda scene, threads: ours(
        scene, _fast(scene), threads, cuda_graph=True, compiled=True
    ),
    "segpipe tf32": lambda scene, threads: ours(
        scene, "tf32", threads, cuda_graph=True
    ),
}


def recipes(bench: Bench) -> dict[str, Any]:
    """G1b and G7: our step, recorded, eager and compiled, against other recipes on one batch; peak memory of each.

    Each arm has a process of its own: after a compilation, other arms of the process were slower by a half.
    """
    names = list(ARMS) if bench.cuda else [OURS, "PIDNet-style bf16"]  # no compilation
    figures: dict[str, Any] = {"arms": {}, "times_as_fast": {}}
    seconds: dict[str, list[float]] = {}
    given = [bench.device.type, bench.size, bench.batch, bench.updates]
    for name in names:
        command = [gpu_bits.PYTHON, "-m", "benchmarks.gpu_speed", name]
        try:
            done = gpu_bits.finished(
                [*command, *map(str, given)],
                bench.seconds_left,
                {"PYTHONPATH": os.pathsep.join([str(gpu_bits.ROOT), *sys.path])},
            )
        except subprocess.TimeoutExpired:
            figures[LEFT_OUT] = NO_TIME
            break
        if done.returncode:  # of one recipe: the others are measured all the same
            figures["arms"][name] = done.stderr[-500:]
        else:
            seconds[name], figures["arms"][name] = json.loads(
                done.stdout.splitlines()[-1]
            )
        if name in seconds and OURS in seconds and not name.startswith("segpipe"):
            ratio = measuring.ratio(seconds[name], seconds[OURS])
            figures["times_as_fast"][name] = ratio
        bench.keep(figures)
    crashed = [name for name in names if isinstance(figures["arms"].get(name), str)]
    assert not crashed, f"arms that ended with an error: {', '.join(crashed)}"
    met = {
        f"over {name}": measuring.holds(ratio, at_least=FASTER[name])
        for name, ratio in figures["times_as_fast"].items()
        if name in FASTER
    }
    figures |= _share(bench, bench.batch / float(np.median(seconds[OURS])), "pidnet_s")
    return _judged(bench, figures, met)


def arm(name: str, device: str, size: int, batch: int, updates: int) -> None:
    """Print the seconds of each update of an arm, and its figures."""
    flags.set_environment()
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    bench = Bench(where, float("inf"), size, batch, updates)
    scene, threads = Scene(where, size, batch), torch.get_num_threads()
    print(json.dumps(_arm(bench, partial(ARMS[name], scene, threads), kernels=True)))


def memory(bench: Bench) -> dict[str, Any]:
    """G7: peak memory of our step beside the torchvision-style one."""
    scene = Scene(bench.device, bench.size, bench.batch)
    threads = torch.get_num_threads()
    # Eager: what a recording holds is not in torch's count.
    names = ("segpipe bf16 eager", "torchvision-style bf16")
    arms = {name: partial(ARMS[name], scene, threads) for name in names}
    peaks = {name: _arm(bench, make, 2)[1]["peak_mib"] for name, make in arms.items()}
    if not bench.cuda:
        return _judged(bench, {"peak_mib": peaks}, {})
    share = peaks[names[0]] / peaks[names[1]]
    figures = {"peak_mib": peaks, "share": round(share, 4)}
    return _judged(bench, figures, {"memory": share <= MEMORY})


def _fast(where: Bench | Scene) -> str:
    """The precision of the goals; a CPU may have no instructions for it."""
    return "bf16" if where.device.type == "cuda" else "fp32"


def _arm(
    bench: Bench,
    make: Callable[[], Update],
    updates: int = 0,
    *,
    kernels: bool = False,
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each update of an arm that is alone on the device, and its figures.

    With `kernels`, those of an update, too; the profiler slows what the process runs after it.
    """
    before = torch.cuda.memory_allocated() if bench.cuda else 0
    started = time.perf_counter()
    update = make()
    update.prepare()
    for _ in range(3):
        update.run()
    warm_up = time.perf_counter() - started
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(updates or bench.updates):
        started = time.perf_counter()
        update.run()
        seconds.append(time.perf_counter() - started)
    figures = {
        **measuring.summary(seconds),
        "images_per_second": round(bench.batch / float(np.median(seconds)), 1),
        "warm_up_s": round(warm_up, 1),
        "peak_mib": (torch.cuda.max_memory_allocated() - before) >> 20
        if bench.cuda
        else None,
    }
    if kernels and bench.cuda:
        figures["kernels"] = _kernels(update.run)
    del update
    gc.collect()
    if bench.cuda:
        torch.cuda.empty_cache()
    return seconds, figures


def _kernels(action: Callable[[], Any], rounds: int = 2) -> dict[str, Any]:
    """Milliseconds and number of the kernels and copies of an action, and the kernels that take most of them."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            action()
        torch.cuda.synchronize()
    ms: dict[str, float] = {}
    found = [e for e in trace.events() or () if e.device_type == DeviceType.CUDA]
    for event in found:
        spent = event.time_range.elapsed_us() / 1000 / rounds
        ms[event.name] = ms.get(event.name, 0.0) + spent
    longest = sorted(ms, key=lambda name: -ms[name])[:12]
    return {
        "ms": round(sum(ms.values()), 2),
        "number": len(found) // rounds,
        "longest_ms": {name[:120]: round(ms[name], 3) for name in longest},
    }


def networks_speed(bench: Bench) -> dict[str, Any]:
    """An update of each network, eager and recorded: images per second, and as a share of the bandwidth of copies."""
    scene = Scene(bench.device, bench.size, bench.batch)
    threads = torch.get_num_threads()
    figures: dict[str, Any] = {}
    for model in GB_PER_IMAGE if bench.cuda else ("fast_scnn",):
        for graph in (False, True) if bench.cuda else (False,):
            if bench.too_late(20):
                return {**figures, LEFT_OUT: NO_TIME}
            make = partial(ours, scene, "bf16", threads, model=model, cuda_graph=graph)
            seconds, found = _arm(bench, make)
            rate = bench.batch / float(np.median(seconds))
            name = f"{model} graph" if graph else model
            figures[name] = found | _share(bench, rate, model)
            bench.keep(figures)
    return figures


def determinism(bench: Bench) -> dict[str, Any]:
    """G3: mode elastic against mode off at the bench's size in bf16, all other switches alike."""
    flags.set_environment()
    scene = Scene(bench.device, bench.size, bench.batch)
    threads = torch.get_num_threads()
    seconds, figures = {}, {}
    for name in ("off", "elastic", "off again", "elastic again"):
        mode = name.split()[0]
        seconds[name], figures[name] = _arm(
            bench, partial(ours, scene, _fast(bench), threads, mode)
        )
        bench.keep(figures)
    over = [
        measuring.ratio(seconds["elastic"], seconds["off"]),
        measuring.ratio(seconds["elastic again"], seconds["off again"]),
    ]
    lowest = min(over, key=lambda ratio: ratio["high"])
    figures["elastic_over_off"] = over
    met = {"cost": measuring.holds(lowest, at_most=DETERMINISTIC)}
    return _judged(bench, figures, met)


def loss(bench: Bench) -> dict[str, Any]:
    """G2: upsampling and loss with its gradient, fused against interpolate + cross_entropy: time, peak memory."""
    small = bench.size // 8
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(bench.batch, 19, small, small, generator=random)
    logits = logits.to(bench.device)
    _, given = Scene(bench.device, bench.size, bench.batch).tensors()
    target, ids = given.to(bench.device), given.long().to(bench.device)
    valid = (given != 255).sum().to(bench.device)

    def fused() -> None:
        leaf = logits.detach().requires_grad_()
        parts = shard_loss(
            {"main": leaf},
            target,
            LossConfig(),
            class_weights=None,
            global_valid=valid,
            align_corners=False,
        )
        parts["total"].backward()  # type: ignore[no-untyped-call]

    def usual() -> None:
        leaf = logits.detach().requires_grad_()
        resized = F.interpolate(leaf, size=ids.shape[-2:], mode="bilinear")
        F.cross_entropy(resized, ids, ignore_index=255).backward()  # type: ignore[no-untyped-call]

    arms: dict[str, Callable[[], None]] = {"fused": fused, "usual": usual}
    flags.apply(torch.get_num_threads(), "off")  # the usual way has no exact backward
    seconds = measuring.interleaved(
        {name: partial(_waited, arm, bench.device) for name, arm in arms.items()},
        repeats=bench.updates,
    )
    ratio = measuring.ratio(seconds["usual"], seconds["fused"])
    figures: dict[str, Any] = {"times_as_fast": ratio}
    figures["ms"] = {name: measuring.summary(each) for name, each in seconds.items()}
    met = {"time": measuring.holds(ratio, at_least=LOSS["time"])}
    if bench.cuda:
        peak = {name: _peak_mib(arm) for name, arm in arms.items()}
        figures["peak_extra_mib"] = peak
        met["memory"] = peak["usual"] >= LOSS["memory"] * peak["fused"]
    return _judged(bench, figures, met)


def _waited(action: Callable[[], None], device: torch.device) -> None:
    action()
    wait(device)


def _peak_mib(action: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return max(int(torch.cuda.max_memory_allocated() - held) >> 20, 1)


def compiled(scene: Scene) -> Update:
    """The torchvision-style step with channels_last, bf16 and torch.compile: a tuned recipe."""
    return theirs(
        scene, loops.torchvision_style, "bf16", torch.get_num_threads(), compiled=True
    )


def _judged(
    bench: Bench, figures: dict[str, Any], met: dict[str, bool]
) -> dict[str, Any]:
    """Figures with verdicts; raises GoalMissed on a GPU when one is missed. Small sizes and CPUs say nothing."""
    if not (bench.cuda and bench.size >= 1024):
        return figures | {"met": "not judged: goals are those of a GPU at 1024x1024"}
    figures = figures | {"met": met}
    bench.keep(figures)
    if missed := [name for name, holds in met.items() if not holds]:
        raise GoalMissed(", ".join(missed))
    return figures


def graphs(bench: Bench) -> dict[str, Any]:
    """Small updates with `compute.cuda_graph` against the same without: equal weights after three, and the speedup.

    Of the networks that are recorded by default. On a CPU the recording is left out, and all that surrounds it runs.
    """
    return _graphs(bench, RECORDED)


def other_graphs(bench: Bench) -> dict[str, Any]:
    """As `graphs`, of the networks that are recorded on demand alone."""
    return _graphs(bench, [name for name in MODELS if name not in (*RECORDED, "smp")])


def _graphs(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for model in names if bench.cuda else names[:1]:
        if bench.too_late(15):
            return {**figures, LEFT_OUT: NO_TIME}
        figures[model] = _graphed(bench, model)
        bench.keep(figures)
    return figures


def _graphed(bench: Bench, model: str) -> dict[str, Any]:
    scene = Scene(bench.device, min(bench.size, 256), min(bench.batch, 4))
    with contextlib.ExitStack() as held:
        if not bench.cuda:
            held.enter_context(_recorded_by_nobody())
        updates = {
            name: ours(
                scene,
                "bf16",
                torch.get_num_threads(),
                model=model,
                cuda_graph=name == "graph",
            )
            for name in ("eager", "graph")
        }
        weights = []
        for update in updates.values():
            assert update.step is not None
            update.prepare()
            for _ in range(3):
                update.run()
            weights.append(state_digest(update.step.state.model.state_dict()))
        network: Any = updates["graph"].step.gradients.network  # type: ignore[union-attr]
        assert network._replay is not network.heads, (
            f"{model}: a replay gave other bits, so eager ran in its place"
        )
        assert weights[0] == weights[1], (
            f"{model}: weights {weights[1]} with a graph, {weights[0]} without"
        )
        seconds = measuring.interleaved(
            {name: update.run for name, update in updates.items()},
            repeats=bench.updates,
        )
        found = {
            "speedup": measuring.ratio(seconds["eager"], seconds["graph"]),
            "weights_digest": weights[0],
        }
        between = updates["graph"].between_logs
        found["waits"] = _waits(bench.device, between)
        found["launches"] = launches_of(bench.device, between)
    assert found["waits"] == 0, f"{model}: {found['waits']} waits with a graph"
    return found


@contextlib.contextmanager
def _recorded_by_nobody() -> Iterator[None]:
    from segpipe.train import step
    from segpipe.train.forward import AllHeads, GraphedHeads

    def heads(model: Any, config: Any, device: torch.device) -> Any:
        return GraphedHeads(AllHeads(model), config.train.precision)

    def record(callables: Any, *given: Any, **named: Any) -> Any:
        callables(*given[0])  # the pass that is recorded
        return callables

    with (
        mock.patch.object(step, "training_heads", heads),
        mock.patch.object(torch.cuda, "make_graphed_callables", record),
    ):
        yield


def syncs(bench: Bench) -> dict[str, Any]:
    """G4: waits of the host for the device in an update between logs, in every precision; launches; with controls."""
    figures: dict[str, Any] = {"waits": {}, "launches": {}}
    for precision in ("fp32", "bf16", "fp16") if bench.cuda else ("fp32",):
        scene = Scene(bench.device, min(bench.size, 256), min(bench.batch, 4))
        update = ours(scene, precision, torch.get_num_threads())
        update.prepare()
        update.run()  # picks kernels, makes the vector
        update.run()
        figures["waits"][precision] = found = _waits(bench.device, update.between_logs)
        figures["launches"][precision] = launches_of(bench.device, update.between_logs)
        bench.keep(figures)
        assert found == 0, f"{precision}: the host waited {found} times in one update"
    one = torch.ones(1, device=bench.device)
    figures["control"] = {
        "waits": _waits(bench.device, one.item),
        "launches": launches_of(bench.device, lambda: one.add_(1)),
    }
    seen = figures["control"] == {"waits": 1, "launches": 1}
    assert seen or not bench.cuda, f"of one .item() and one add_: {figures['control']}"
    met = {}
    if bench.cuda:
        graph = ours(scene, "bf16", torch.get_num_threads(), cuda_graph=True)
        graph.run()
        graph.run()
        count = launches_of(bench.device, graph.between_logs)
        figures["launches"]["bf16 graph"] = count
        met["launches with a graph"] = count <= LAUNCHES
    return _judged(bench, figures, met)


def launches_of(device: torch.device, action: Callable[[], Any]) -> int:
    """Kernels and graphs that the host starts in `action`; 0 on a CPU."""
    if device.type != "cuda":
        action()
        return 0
    wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        action()
        wait(device)
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    return sum(
        each.count for each in trace.key_averages() if each.key.startswith(names)
    )


def busy_share(device: torch.device, action: Callable[[], Any]) -> float | None:
    """Part of the time in which a kernel or a copy ran; under the profiler, which slows the host: a lower bound."""
    if device.type != "cuda":
        action()
        return None
    wait(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        started = time.perf_counter()
        action()
        wait(device)
        seconds = time.perf_counter() - started
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return round(_covered(spans) / 1e6 / seconds, 4)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, -float("inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


# Of torch's warnings; the first of a process, that this mode is a prototype, is no wait.
SYNCHRONIZED = "called a synchronizing CUDA operation"


def _waits(device: torch.device, action: Callable[[], Any]) -> int:
    """How often torch warns that `action` synchronized; always 0 on a CPU."""
    with _sync_warnings(device) as caught:
        action()
    return sum(SYNCHRONIZED in str(warning.message) for warning in caught)


@contextlib.contextmanager
def _sync_warnings(device: torch.device) -> Iterator[list[warnings.WarningMessage]]:
    wait(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode(before)


def loader(bench: Bench) -> dict[str, Any]:
    """G5: updates fed by the loader against updates on one batch; scenes come from the cache, not from a disk."""
    flags.set_environment()
    scene = Scene(bench.device, bench.size, bench.batch)
    threads = torch.get_num_threads()
    update = ours(scene, _fast(bench), threads, cuda_graph=True)
    assert update.step is not None
    step, config = update.step, replace(update.step.config)
    side = 2 * bench.size
    config.data = replace(
        Config().data,
        num_train=2 * bench.batch,
        size=[bench.size, side],
        workers=_workers(bench),
    )
    config.data.cache_mib = 4096 if bench.cuda else 64
    # What is made ahead, while the first updates build their kernels, must not be what is measured.
    config.data.num_train, config.data.prefetch = bench.batch, 1
    samples = open_samples(config.data, "train", 0)
    count = max(bench.updates, 4 * config.data.workers, 2)
    update.run()
    group = Group(0, 1, bench.device)
    with contextlib.closing(
        Sampling(config, samples).batches(group, range(4 * count))
    ) as stream:

        def fed() -> None:
            train_step(step, [next(stream)], wait=False)

        def burst(action: Callable[[], None]) -> float:
            before = time.perf_counter()
            for _ in range(count):
                action()
            wait(bench.device)
            return time.perf_counter() - before

        burst(fed)  # each worker fills its cache
        # Before the profiler, which slowed the updates after it.
        synthetic = [burst(update.between_logs)]
        real = [burst(fed), burst(fed)]
        synthetic.append(burst(update.between_logs))
        busy = busy_share(bench.device, lambda: burst(fed))
    share = min(synthetic) / min(real)
    figures = {
        "share_of_synthetic": round(share, 4),
        "images_per_second": round(count * bench.batch / min(real), 1),
        "gpu_busy": busy,
        "workers": config.data.workers,
    }
    met = {"loader": share >= LOADER, "GPU busy": (busy or 0.0) >= BUSY}
    return _judged(bench, figures, met)


def loop(bench: Bench) -> dict[str, Any]:
    """G1: `segpipe train` on files, with logs, checkpoints and ledger: wall rate, from PNG files and from a pack."""
    root, count = bench.folder / "gpu_loop" / "files", 96 if bench.cuda else 4
    _write_files(root, count, bench.size)
    figures: dict[str, Any] = {"workers": _workers(bench)}
    for name, pack in PACKS.items():
        if bench.too_late(50):
            figures[LEFT_OUT] = NO_TIME
            break
        figures[name] = _looped(bench, root, name, pack)
        bench.keep(figures)
    if LEFT_OUT in figures and "pack" not in figures:
        return figures
    rate = figures["pack"]["wall_images_per_second"]
    figures |= _share(bench, rate, "pidnet_s")
    return _judged(bench, figures, {"loop": figures["share_of_copies"] >= LOOP})


PACKS = {"pack": "auto", "png": "off"}  # data.pack of the runs of `loop`


def loop_settings(bench: Bench, root: Path, name: str, pack: str) -> list[str]:
    """Of the run that `loop` times."""
    updates = (30 if pack == "auto" else 6) * bench.updates
    return [
        "data=folder", f"data.root={root}", f"data.pack={pack}", "data.verify=headers", "data.allow_overlap=true",
        "model=pidnet_s", f"train.precision={_fast(bench)}", f"train.steps={updates}", "train.validate_every=0",
        "compute.shards=1", f"compute.samples_per_shard={bench.batch}", f"compute.device={bench.device.type}",
        f"augment.crop_size=[{bench.size},{bench.size}]", f"data.workers={_workers(bench)}", "loss.name=ohem",
        "export.enabled=false", "train.progress=false", "run.exists=replace", f"run.root={bench.folder / 'gpu_loop'}",
        f"run.name={name}",
    ]  # fmt: skip


def _looped(bench: Bench, root: Path, name: str, pack: str) -> dict[str, Any]:
    settings = loop_settings(bench, root, name, pack)
    done = gpu_bits.finished(
        [gpu_bits.PYTHON, str(gpu_bits.ROOT / "train.py"), *settings],
        bench.seconds_left,
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-1500:]}"
    result = json.loads((bench.folder / "gpu_loop" / name / "result.json").read_text())
    keys = ("images_per_second", "wall_images_per_second", "steps", "train_seconds")
    return {key: result[key] for key in keys}


def _write_files(root: Path, count: int, size: int) -> None:
    """Images and masks of size x 2 size as PNG, in folders that `data=folder` reads; kept for the next call."""
    for split, number in (("train", count), ("val", 2)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        config = replace(Config().data, num_train=count, size=[size, 2 * size])
        samples = open_samples(config, "train", 0)
        for index in range(number):
            mask = root / "masks" / split / f"{index:04}.png"
            if mask.exists():
                continue
            image, target = samples.read(index % min(count, 12))
            shifted = np.roll(image, 16 * index, axis=1)
            path = root / "images" / split / mask.name
            cv2.imwrite(str(path), shifted[..., ::-1])
            cv2.imwrite(str(mask), np.roll(target, 16 * index, axis=1))
    table = json.dumps({"names": list(STREET.names)})
    (root / "classes.yaml").write_text(table)


def _workers(bench: Bench) -> int:
    return 14 if bench.device.type == "cuda" else 0


def alignment(bench: Bench) -> dict[str, Any]:
    """Every gradient view starts at a multiple of 512 bytes on the device, so kernels choose alike for any ranks."""
    figures = {}
    for name in ("pidnet_s", "ddrnet23_slim", "fast_scnn"):
        model = (
            build_model(name, 19).to(bench.device).to(memory_format=torch.channels_last)
        )
        layout = FlatLayout(list(model.parameters()))
        views = layout.views(layout.new())
        step = (
            4 * ALIGNMENT if bench.device.type == "cuda" else 64
        )  # what the allocator of a CPU promises
        odd = [view.data_ptr() % step for view in views if view.data_ptr() % step]
        assert not odd, (
            f"{name}: {len(odd)} of {len(views)} views do not start at a multiple of {step} bytes"
        )
        alone = torch.stack(torch._foreach_norm([view.clone() for view in views]))
        together = torch.stack(torch._foreach_norm(views))
        assert torch.equal(alone, together), (
            f"{name}: norms depend on where a tensor lies"
        )
        figures[name] = len(views)
    return {"views": figures}


if __name__ == "__main__":
    arm(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
