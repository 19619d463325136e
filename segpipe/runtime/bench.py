"""How fast and how steadily an artefact answers on this machine, and how steady the machine itself is."""

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
import onnxruntime
from numpy.typing import NDArray

if TYPE_CHECKING:
    from segpipe.runtime.segmenter import Segmenter

FLAT_MIB = 4.0  # growth that still counts as none: allocators take and return pages; 0.5 KiB a frame in 9,000 is a leak
_WARMUP = 10


class Series(NamedTuple):
    """Calls, float64 in ms: by the clock, and computing of the calling thread, without its waiting for a core."""

    times_ms: NDArray[np.float64]
    cpu_ms: NDArray[np.float64]


def bench(segmenter: Segmenter, frames: int, threads: int) -> dict[str, Any]:
    """Latencies of `infer` as a whole, of the run alone, and of the run without host copies; then the memory.

    The golden frames take turns, in the size of the artefact. `steadiness` sets the spread of `infer` beside that of
    plain hashing that takes as long (`machine`): what both have is this machine's doing, not the network's.
    `memory_growth_mib` is that of the resident memory over the last nine tenths of the `infer` calls: what is
    allocated once comes before. None where the system does not tell, and then `memory_flat` too.
    """
    images = _images(segmenter)
    turns = cycle(images)
    statuses: Counter[str] = Counter()

    def infer() -> None:
        statuses[segmenter.infer(next(turns)).status] += 1

    marks: list[float | None] = []
    collections = _collections()
    inferred = _timed(infer, frames, at=frames // 10, look=lambda: marks.append(resident_mib()))
    marks.append(resident_mib())
    collections = _collections() - collections
    others = min(frames, 1000)
    machine = _timed(fixed_work(float(np.median(inferred.times_ms))), others)
    run = _timed(lambda: segmenter.session.run(images[0]), others)
    bound = _timed(segmenter.session.bound(images[0]), others)
    before, after = marks
    growth = None if before is None or after is None else round(after - before, 2)
    return {
        "model_id": segmenter.artifact.model_id,
        "size": list(images[0].shape[:2]),
        "threads": threads,
        "machine": {"processor": processor(), "cores": os.cpu_count(), "onnxruntime": onnxruntime.__version__},
        "statuses": dict(sorted(statuses.items())),
        "infer": percentiles(inferred.times_ms),
        "run_with_host_copies": percentiles(run.times_ms),
        "run_without_host_copies": percentiles(bound.times_ms),
        "p99_over_p50": spread(inferred.times_ms),
        "steadiness": {"infer": steadiness(inferred), "machine": steadiness(machine), "collections": collections},
        "memory_growth_mib": growth,
        "memory_flat": None if growth is None else growth <= FLAT_MIB,
    }


def percentiles(times_ms: NDArray[np.float64]) -> dict[str, float | int]:
    """p50, p90 and p99 in ms, and of how many."""
    values = np.percentile(times_ms, (50, 90, 99))
    return {
        **{f"p{share}_ms": round(float(v), 3) for share, v in zip((50, 90, 99), values, strict=True)},
        "n": len(times_ms),
    }


def spread(times_ms: NDArray[np.float64]) -> float:
    """p99 over p50."""
    return round(float(np.percentile(times_ms, 99) / max(np.percentile(times_ms, 50), 1e-9)), 3)


def steadiness(series: Series) -> dict[str, float]:
    """p99 over p50 by the clock, and of the computing alone."""
    return {"p99_over_p50": spread(series.times_ms), "cpu_p99_over_p50": spread(series.cpu_ms)}


def fixed_work(wanted_ms: float) -> Callable[[], object]:
    """A call that does the same work every time and takes about `wanted_ms`: hashing of a buffer."""
    sample = bytes(2**20)
    sample_ms = min(_once(lambda: hashlib.sha256(sample))[0] for _ in range(5))
    buffer = bytes(max(1, int(len(sample) * wanted_ms / sample_ms)))
    return lambda: hashlib.sha256(buffer)


def processor() -> str:
    """The CPU's name, or its kind where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def resident_mib() -> float | None:
    """Resident memory of this process; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _images(segmenter: Segmenter) -> list[NDArray[np.uint8]]:
    """Golden frames; a single one and the same upside down, which is as bright, since alone it would look frozen."""
    golden = segmenter.artifact.golden.image
    return list(golden) if len(golden) > 1 else [golden[0], golden[0][::-1].copy()]


def _collections() -> int:
    """Runs of Python's garbage collector so far."""
    return sum(generation["collections"] for generation in gc.get_stats())


def _timed(call: Callable[[], object], count: int, *, at: int = 0, look: Callable[[], object] = lambda: None) -> Series:
    """Times of `count` calls; `look` is called before the call number `at`."""
    for _ in range(_WARMUP):
        call()
    series = Series(np.zeros(count), np.zeros(count))
    for place in range(count):
        if place == at:
            look()
        series.times_ms[place], series.cpu_ms[place] = _once(call)
    return series


def _once(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds by the clock and of this thread's computing."""
    cpu, start = time.thread_time(), time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3, (time.thread_time() - cpu) * 1e3
