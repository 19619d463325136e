"""Latency of an artifact on this machine and its spread, beside that of a fixed workload; growth of memory."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .segmenter import Segmenter

# Growth that counts as none: allocators take and return pages; a leak of 0.5 KiB in 9,000 frames is more.
FLAT_MIB = 4.0
_WARMUP = 10


class Series(NamedTuple):
    """Durations of calls in ms, float64: wall time, and CPU time of the calling thread."""

    times_ms: NDArray[np.float64]
    cpu_ms: NDArray[np.float64]


def bench(segmenter: Segmenter, frames: int, threads: int) -> dict[str, Any]:
    """Latencies of `infer`, of the bare run, and of the run without host copies; memory growth over the `infer` calls.

    Cycles through the golden frames. `steadiness` compares the spread of `infer` with that of hashing that takes as
    long (`machine`): spread that both show comes from the machine, not from the network. `memory_growth_mib` is
    the growth of resident memory over the last nine tenths of the `infer` calls, after one-time allocations; it and
    `memory_flat` are None where the system does not report it.
    """
    images = _images(segmenter)
    endless = cycle(images)
    statuses: Counter[str] = Counter()

    def infer() -> None:
        statuses[segmenter.infer(next(endless)).status] += 1

    resident: list[float | None] = []
    collections = _collections()
    inferred = _timed(
        infer, frames, at=frames // 10, action=lambda: resident.append(resident_mib())
    )
    resident.append(resident_mib())
    collections = _collections() - collections
    others = min(frames, 1000)
    machine = _timed(fixed_work(float(np.median(inferred.times_ms))), others)
    run = _timed(lambda: segmenter.session.run(images[0]), others)
    bound = _timed(segmenter.session.bound(images[0]), others)
    before, after = resident
    growth = None if before is None or after is None else round(after - before, 2)
    return {
        "model_id": segmenter.artifact.model_id,
        "size": list(images[0].shape[:2]),
        "threads": threads,
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "engine": segmenter.session.engine.described,
        },
        "statuses": dict(sorted(statuses.items())),
        "infer": percentiles(inferred.times_ms),
        "run_with_host_copies": percentiles(run.times_ms),
        "run_without_host_copies": percentiles(bound.times_ms),
        "p99_over_p50": spread(inferred.times_ms),
        "steadiness": {
            "infer": steadiness(inferred),
            "machine": steadiness(machine),
            "collections": collections,
        },
        "memory_growth_mib": growth,
        "memory_flat": None if growth is None else growth <= FLAT_MIB,
    }


def percentiles(times_ms: NDArray[np.float64]) -> dict[str, float | int]:
    """p50, p90 and p99 in ms, and their number `n`."""
    p50, p90, p99 = (
        round(float(value), 3) for value in np.percentile(times_ms, (50, 90, 99))
    )
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "n": len(times_ms)}


def spread(times_ms: NDArray[np.float64]) -> float:
    """p99 / p50."""
    return round(
        float(np.percentile(times_ms, 99) / max(np.percentile(times_ms, 50), 1e-9)), 3
    )


def steadiness(series: Series) -> dict[str, float]:
    """p99 / p50 of wall time and of CPU time."""
    return {
        "p99_over_p50": spread(series.times_ms),
        "cpu_p99_over_p50": spread(series.cpu_ms),
    }


def fixed_work(wanted_ms: float) -> Callable[[], object]:
    """A function that always does the same work, hashing a buffer, and takes about `wanted_ms`."""
    sample = bytes(2**20)
    sample_ms = min(_once(lambda: hashlib.sha256(sample))[0] for _ in range(5))
    buffer = bytes(max(1, int(len(sample) * wanted_ms / sample_ms)))
    return lambda: hashlib.sha256(buffer)


def processor() -> str:
    """Name of the CPU, or its architecture where the system does not report a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def resident_mib() -> float | None:
    """Resident memory of this process; None where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _images(segmenter: Segmenter) -> list[NDArray[np.uint8]]:
    """The golden frames. A single one would look frozen, so it alternates with itself upside down, equally bright."""
    golden = segmenter.artifact.golden.image
    return list(golden) if len(golden) > 1 else [golden[0], golden[0][::-1].copy()]


def _collections() -> int:
    """Runs of Python's garbage collector so far."""
    return sum(generation["collections"] for generation in gc.get_stats())


def _timed(
    call: Callable[[], object],
    count: int,
    *,
    at: int = 0,
    action: Callable[[], object] = lambda: None,
) -> Series:
    """Times of `count` calls after a warm-up; runs `action` once, before call number `at`."""
    for _ in range(_WARMUP):
        call()
    series = Series(np.zeros(count), np.zeros(count))
    for index in range(count):
        if index == at:
            action()
        series.times_ms[index], series.cpu_ms[index] = _once(call)
    return series


def _once(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time and CPU time of this thread, in ms."""
    cpu, start = time.thread_time(), time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3, (time.thread_time() - cpu) * 1e3
