"""Latency gate: time per image of each file on one CPU thread. `segpipe.runtime bench` measures precisely."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from segpipe.export.gates.limits import FP32, GateResult, Limits
from segpipe.export.graph.profiles import Image, Run
from segpipe.runtime.bench import percentiles

SECONDS = 1.0  # per file, after the minimum number of runs
_MIN_RUNS, _MAX_RUNS, _WARMUP = 10, 50, 2


def measure(runs: Mapping[str, Run], image: Image) -> dict[str, dict[str, float | int]]:
    """By name: p50_ms, p90_ms and p99_ms of n single runs, and cpu_ms, the least processor time of one.

    The runs take turns, so a change of the machine's load affects all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for rounds in range(_WARMUP + _MAX_RUNS):
        is_late = time.perf_counter() - begin >= SECONDS * len(runs)
        if is_late and rounds >= _WARMUP + _MIN_RUNS:
            break
        for name, run in runs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run(image)
            spent[name].append((time.process_time() - start_cpu) * 1e3)
            times[name].append((time.perf_counter() - start) * 1e3)

    figures: dict[str, dict[str, float | int]] = {}
    for name in runs:
        figures[name] = {
            **percentiles(np.array(times[name][_WARMUP:])),
            "cpu_ms": round(min(spent[name][_WARMUP:]), 3),
        }
    return figures


def gate_latency(
    measured: Mapping[str, float],
    *,
    budget_ms: float,
    fp32: Mapping[str, float] | None = None,
    limits: Limits = FP32,
) -> GateResult:
    """Latency: p50 within `budget_ms` (0: no budget); processor time within `limits.relative_latency` of fp32's.

    measured, fp32: `measure` of the file and of the fp32 file. Files are compared by their least processor time, which
    other processes hardly move. The figures are the limits only, so that equal exports have equal reports except for
    `latency`.
    """
    # Without an fp32 file there is nothing to be faster than.
    share = limits.relative_latency if fp32 is not None else math.inf
    part = measured["cpu_ms"] / max(fp32["cpu_ms"], 1e-3) if fp32 is not None else 0.0
    failure = ""
    if 0 < budget_ms < measured["p50_ms"]:
        failure = f"latency p50 {measured['p50_ms']:.1f} ms > {budget_ms:g} ms of export.latency_budget_ms, 1 thread"
    elif not part <= share:
        failure = f"processor time is {part:.2f} > {share:g} of the fp32 file's, so the file is no gain"
    message = f"within {budget_ms:g} ms" if budget_ms else "no budget"
    if math.isfinite(share):
        message += f", at most {share:g} of fp32"
    figures = {
        "budget_ms": budget_ms,
        "share_of_fp32": share if math.isfinite(share) else None,
    }
    return GateResult.of("latency", failure, figures, message)
