"""Latency of an artifact on this machine, and growth of memory."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .segmenter import Segmenter

# Growth that counts as none: allocators take and return pages; a leak of 0.5 KiB in 9,000 frames is more.
FLAT_MIB = 4.0
WARM_UP = 10  # calls that are not counted


def bench(segmenter: Segmenter, frames: int) -> dict[str, Any]:
    """Latencies of `infer` and of the bare run; memory growth over the `infer` calls.

    Cycles through the golden frames. `memory_growth_mib` is the growth of resident memory over the last nine tenths of
    the `infer` calls, after one-time allocations; it and `memory_flat` are None where the system does not report it.
    """
    if frames < 1:
        raise ValueError(f"frames = {frames}, but a number above 0 was needed.")
    golden = segmenter.artifact.golden.image
    endless = cycle(golden)
    statuses: Counter[str] = Counter()
    calls = count()

    def infer() -> None:
        image = next(endless).copy()
        image[-1, -1] = next(calls) % 251  # golden frames that repeat would look frozen
        statuses[segmenter.infer(image).status] += 1

    timed(infer, WARM_UP)
    first = frames // 10
    early = timed(infer, first)
    before = resident_mib()
    times = np.concatenate([early, timed(infer, frames - first)])
    after = resident_mib()
    run = timed(lambda: segmenter.session.run(golden[0]), min(frames, 1000))
    growth = None if before is None or after is None else round(after - before, 2)
    return {
        "model_id": segmenter.artifact.model_id,
        "size": list(golden[0].shape[:2]),
        "machine": {
            "processor": processor(),
            "engine": segmenter.session.engine.described,
        },
        "statuses": dict(statuses),
        "infer": percentiles(times),
        "run": percentiles(run),
        "memory_growth_mib": growth,
        "memory_flat": None if growth is None else growth <= FLAT_MIB,
    }


def percentiles(times_ms: NDArray[np.float64]) -> dict[str, float | int]:
    """p50, p90 and p99 in ms, and their number `n`."""
    p50, p90, p99 = np.percentile(times_ms, (50, 90, 99)).round(3).tolist()
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "n": len(times_ms)}


def timed(call: Callable[[], object], count: int) -> NDArray[np.float64]:
    """Wall times of `count` calls, in ms."""
    times_ms = np.zeros(count)
    for index in range(count):
        start = time.perf_counter()
        call()
        times_ms[index] = (time.perf_counter() - start) * 1e3
    return times_ms


def processor() -> str:
    """Name of the CPU, or its architecture where the system does not report a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def resident_mib() -> float | None:
    """Resident memory of this process; None where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
