"""How long a file takes per image on this machine: a first impression, for a benchmark see segpipe.runtime."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from segpipe.export.profiles import Image, Run
from segpipe.runtime.bench import percentiles, processor

SECONDS = 1.0  # per file, once there are the fewest runs
_FEWEST, _MOST, _WARMUP = 10, 50, 2


def measure(runs: Mapping[str, Run], image: Image) -> dict[str, dict[str, float | int]]:
    """By name: p50_ms, p90_ms and p99_ms of n single runs.

    The runs take turns, so that a change of the machine's load falls on all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin, rounds = time.perf_counter(), 0
    while rounds < _WARMUP + _FEWEST or (
        rounds < _WARMUP + _MOST and time.perf_counter() - begin < SECONDS * len(runs)
    ):
        for name, run in runs.items():
            start = time.perf_counter()
            run(image)
            times[name].append((time.perf_counter() - start) * 1e3)
        rounds += 1
    return {name: percentiles(np.array(found[_WARMUP:])) for name, found in times.items()}


def entry(files: dict[str, dict[str, float | int]]) -> dict[str, Any]:
    """`latency` of the manifest: what was measured, and on what."""
    return {"device": "cpu", "processor": processor(), "threads": 1, "files": files}
