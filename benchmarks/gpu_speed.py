"""The promises of speed on a GPU: the step beside other recipes, waits of the host, the loader, alignment."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks import measure as measuring
from benchmarks.baselines import loops
from benchmarks.gpu_bench import Bench
from benchmarks.train_step import Scene, Update, arms, ours, theirs, wait
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.distributed.reduce import ALIGNMENT, FlatLayout
from segpipe.ledger.digest import state_digest
from segpipe.models import build_model
from segpipe.settings.config import Config
from segpipe.train.batches import shard_stream
from segpipe.train.step import train_step

NO_TIME = {"left out": "no time"}
# Ours in bf16 against each (G1), images per second (G1d), the real loader (G5), peak memory (G7): what must be reached.
FASTER = {
    "PIDNet-style fp32": 4.0,
    "torchvision-style fp32": 2.0,
    "torchvision-style bf16 compiled": 1.3,
}
IMAGES_PER_SECOND, LOADER, MEMORY = 900.0, 0.95, 0.6
OURS = "segpipe bf16"


def recipes(bench: Bench) -> dict[str, Any]:
    """G1, G1d and G7: our step against other recipes on one batch, interleaved, and the peak memory of each."""
    flags.set_environment()
    if bench.too_late(150):
        return NO_TIME
    scene, cuda = (
        Scene(bench.device, bench.size, bench.batch),
        bench.device.type == "cuda",
    )
    updates = arms(scene, threads=torch.get_num_threads())
    if cuda:
        updates["torchvision-style bf16 compiled"] = compiled(scene)
    memory = (
        {name: _peak_mib(update) for name, update in updates.items()} if cuda else {}
    )
    seconds = measuring.interleaved(
        {name: update.run for name, update in updates.items()},
        repeats=bench.updates,
        prepare=lambda name: updates[name].prepare(),
    )
    ratios = {
        name: measuring.ratio(values, seconds[OURS])
        for name, values in seconds.items()
        if name != OURS
    }
    rate = measuring.interval(
        [bench.batch / value for value in seconds[OURS]], name="median"
    )
    figures: dict[str, Any] = {
        "ours_over": ratios,
        "images_per_second": rate,
        "peak_memory_mib": memory,
    }
    figures["seconds"] = {
        name: measuring.summary(values) for name, values in seconds.items()
    }
    met = {
        name: measuring.holds(ratios[name], at_least=must)
        for name, must in FASTER.items()
        if name in ratios
    }
    met["images_per_second"] = measuring.holds(rate, at_least=IMAGES_PER_SECOND)
    if memory:
        met["memory"] = memory[OURS] <= MEMORY * memory["torchvision-style fp32"]
    return {**figures, **_judged(bench, met)}


def compiled(scene: Scene) -> Update:
    """The torchvision-style step with channels_last, bf16 and torch.compile: a tuned recipe."""
    return theirs(
        scene, loops.torchvision_style, "bf16", torch.get_num_threads(), compiled=True
    )


def _peak_mib(update: Update) -> int:
    """Of two steps, with what all arms hold between steps taken off."""
    update.prepare()
    update.run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    update.run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - held) >> 20


def _judged(bench: Bench, met: dict[str, bool]) -> dict[str, Any]:
    """Verdicts; AssertionError on a GPU of the goals when one is missed. Small sizes and CPUs say nothing."""
    judged = bench.device.type == "cuda" and bench.size >= 1024
    missed = [name for name, holds in met.items() if not holds]
    assert not (judged and missed), f"not met: {', '.join(missed)}"
    return (
        {"met": met}
        if judged
        else {"met": "not judged: the goals are those of a GPU at 1024x1024"}
    )


def graphs(bench: Bench) -> dict[str, Any]:
    """Small updates with `compute.cuda_graph` against the same without: equal weights after three, and the speedup."""
    if bench.device.type != "cuda":
        return {"left out": "needs a GPU"}
    scene = Scene(bench.device, min(bench.size, 256), min(bench.batch, 4))
    updates = {
        name: ours(scene, "bf16", torch.get_num_threads(), cuda_graph=name == "graph")
        for name in ("eager", "graph")
    }
    weights = []
    for update in updates.values():
        assert update.step is not None
        update.prepare()
        for _ in range(3):
            update.run()
        weights.append(state_digest(update.step.state.model.state_dict()))
    assert weights[0] == weights[1], (
        f"weights {weights[1]} with a graph, {weights[0]} without"
    )
    seconds = measuring.interleaved(
        {name: update.run for name, update in updates.items()}, repeats=bench.updates
    )
    return {
        "speedup": measuring.ratio(seconds["eager"], seconds["graph"]),
        "weights_digest": weights[0],
    }


def syncs(bench: Bench) -> dict[str, Any]:
    """G4: how often the host waits for the device in an update between logs, in every precision; with a control."""
    figures = {}
    for precision in (
        ("fp32", "bf16", "fp16") if bench.device.type == "cuda" else ("fp32",)
    ):
        scene = Scene(bench.device, min(bench.size, 256), min(bench.batch, 4))
        update = ours(scene, precision, torch.get_num_threads())
        update.prepare()
        update.run()  # picks kernels, makes the vector
        update.run()
        figures[precision] = _waits(bench.device, update.between_logs)
        assert figures[precision] == 0, (
            f"{precision}: the host waited {figures[precision]} times in one update"
        )
    control = _waits(bench.device, lambda: torch.ones(1, device=bench.device).item())
    assert control == 1 or bench.device.type == "cpu", (
        "the control, .item(), was not seen"
    )
    return {"waits": figures, "control": control}


def _waits(device: torch.device, action: Callable[[], Any]) -> int:
    """How often torch warns that `action` synchronized; always 0 on a CPU."""
    with _sync_warnings(device) as caught:
        action()
    return sum("synchroniz" in str(warning.message) for warning in caught)


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
    if bench.too_late(60):
        return NO_TIME
    scene = Scene(bench.device, bench.size, bench.batch)
    update = ours(scene, "bf16", torch.get_num_threads())
    assert update.step is not None
    step, config = update.step, replace(update.step.config)
    side = 2 * bench.size
    config.data = replace(
        Config().data,
        num_train=2 * bench.batch,
        size=[bench.size, side],
        workers=_workers(bench),
    )
    config.data.cache_mib = 4096 if bench.device.type == "cuda" else 64
    samples = open_samples(config.data, "train", 0)
    count = max(bench.updates, 2)
    group = Group(0, 0, 1, bench.device)
    with contextlib.closing(
        shard_stream(config, group, samples, range(3 * count), None)
    ) as stream:

        def fed() -> None:
            train_step(step, [next(stream)], wait=False)

        def burst(action: Callable[[], None]) -> float:
            before = time.perf_counter()
            for _ in range(count):
                action()
            wait(bench.device)
            return time.perf_counter() - before

        burst(fed)  # fills the caches
        real = [burst(fed), burst(fed)]
    synthetic = [burst(update.between_logs), burst(update.between_logs)]
    share = min(synthetic) / min(real)
    figures = {
        "share_of_synthetic": round(share, 4),
        "images_per_second": round(count * bench.batch / min(real), 1),
    }
    return {
        **figures,
        "workers": config.data.workers,
        **_judged(bench, {"loader": share >= LOADER}),
    }


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
