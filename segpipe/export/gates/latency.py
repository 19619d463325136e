"""Latency gate: time per image of each file on one CPU thread. `segpipe.runtime bench` measures precisely."""

from __future__ import annotations

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
    begin, rounds = time.perf_counter(), 0
    while rounds < _WARMUP + _MIN_RUNS or (
        rounds < _WARMUP + _MAX_RUNS
        and time.perf_counter() - begin < SECONDS * len(runs)
    ):
        for name, run in runs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run(image)
            spent[name].append((time.process_time() - start_cpu) * 1e3)
            times[name].append((time.perf_counter() - start) * 1e3)
        rounds += 1
    return {
        name: {
            **percentiles(np.array(found[_WARMUP:])),
            "cpu_ms": round(min(spent[name][_WARMUP:]), 3),
        }
        for name, found in times.items()
    }


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
    share = limits.relative_latency if fp32 is not None else None
    figures = {"budget_ms": budget_ms, "share_of_fp32": share}
    if 0 < budget_ms < measured["p50_ms"]:
        message = f"latency p50 {measured['p50_ms']:.1f} ms > {budget_ms:g} ms of export.latency_budget_ms, 1 thread"
    elif (
        share is not None
        and fp32 is not None
        and measured["cpu_ms"] > share * fp32["cpu_ms"]
    ):
        part = measured["cpu_ms"] / fp32["cpu_ms"]
        message = f"processor time is {part:.2f} > {share:g} of the fp32 file's, so the file is no gain"
    else:
        limit = f"within {budget_ms:g} ms" if budget_ms else "no budget"
        return GateResult(
            "latency",
            True,
            figures,
            limit + (f", at most {share:g} of fp32" if share else ""),
        )
    return GateResult("latency", False, figures, message)
