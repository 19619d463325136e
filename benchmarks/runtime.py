"""An artifact on a robot's side: latency, its spread, growth of memory, and what `infer` adds to the engine's run.

The process has not imported torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure as measuring
from segpipe.errors import ConfigError, SegpipeError
from segpipe.runtime import Segmenter, Status
from segpipe.runtime.artifact import ArtifactError

OVERHEAD_MS, OVERHEAD_PIXELS = (
    0.5,
    360 * 480,
)  # `infer` may add this much at this size; larger frames in proportion
SMOKE: dict[str, Any] = {}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Latency and growth of memory of `artifact=FOLDER`, on `--repeats` frames (10000), one thread."""
    key, _, folder = " ".join(given.settings).partition("=")
    if key != "artifact" or not folder:
        raise ConfigError(
            f"{' '.join(given.settings)!r} names no artifact. Set artifact=FOLDER, an exported folder."
        )
    try:
        segmenter = Segmenter.load(folder)
    except ArtifactError as error:
        raise SegpipeError(str(error)) from error
    found = bench(segmenter, given.repeats or 10_000)
    added, size = overhead(segmenter, min(given.repeats or 300, 300)), found["size"]
    limit = OVERHEAD_MS * max(1.0, size[0] * size[1] / OVERHEAD_PIXELS)
    return {
        "what": f"{found['model_id']}, {' x '.join(map(str, found['size']))}, one CPU thread",
        **found,
        "machine": {**found["machine"], **measuring.machine()},
        "overhead": added,
        "overhead_limit_ms": round(limit, 3),
        "passed": (
            found["statuses"].keys() <= {Status.OK}
            and found["memory_flat"] is not False
            and added["high_ms"] <= limit
        ),
    }


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


def resident_mib() -> float | None:
    """Resident memory of this process; None where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def overhead(segmenter: Segmenter, frames: int) -> dict[str, float]:
    """Processor time of `infer` outside the engine's run, in ms: median over frames with its 95 % interval.

    The time of the run is taken within the same call. Caches are as cold as a run leaves them, and the noise of two
    separate runs, which is larger than what is looked for, does not enter.
    """
    engine, inside = segmenter.session.engine, [0.0]
    prepare = engine.prepare

    def timed(outputs: list[str]) -> Any:
        run, end = prepare(outputs)

        def measured(batch: Any) -> Any:
            begin = time.thread_time()
            answer = run(batch)
            inside[0] = time.thread_time() - begin
            return answer

        return measured, end

    engine.prepare = timed  # type: ignore[method-assign]
    try:
        image = cycle(segmenter.artifact.golden.image)
        return summary(
            np.array(
                [
                    _outside(lambda: segmenter.infer(next(image)), inside)
                    for _ in range(frames)
                ]
            )
        )
    finally:
        engine.prepare = prepare  # type: ignore[method-assign]


def _outside(call: Callable[[], object], inside: list[float]) -> float:
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin - inside[0]) * 1e3


def summary(times_ms: NDArray[np.float64]) -> dict[str, float]:
    """Median with its 95 % interval by bootstrap, p90, least, and number."""
    medians = np.median(
        np.random.default_rng(0).choice(times_ms, (2000, len(times_ms))), axis=1
    )
    low, high = np.percentile(medians, [2.5, 97.5])
    named = {
        "median_ms": np.median(times_ms),
        "low_ms": low,
        "high_ms": high,
        "p90_ms": np.percentile(times_ms, 90),
    }
    return {
        **{name: round(float(value), 4) for name, value in named.items()},
        "n": len(times_ms),
    }
