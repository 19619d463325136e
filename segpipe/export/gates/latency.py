"""How long a file takes per image on this machine: a first impression, for a benchmark see segpipe.runtime."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from segpipe.export.artifact.outcome import EAGER
from segpipe.export.graph.profiles import Image, Run
from segpipe.runtime.bench import percentiles, processor

SECONDS = 1.0  # per file, once there are the fewest runs
CLEARLY = 0.9  # a file that takes at most this share of another's time is faster, not lucky
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


def preference(measured: Mapping[str, Mapping[str, float]], files: Mapping[str, Mapping[str, Any]]) -> str:
    """Which of the files to take and why, in a sentence, and in another the quickest one of lower precision.

    measured: as `measure` gives it, the reference among them; files: `files` of the manifest.
    """
    p50_ms = {name: found["p50_ms"] for name, found in measured.items()}
    whole = [name for name, file in files.items() if file["precision"] == "fp32"]
    best, why = min(whole, key=lambda name: p50_ms[name]), "in fp32 it is clearly the fastest"
    for name in whole:
        if files[name]["format"] == "onnx" and p50_ms[best] > CLEARLY * p50_ms[name]:
            best, why = name, "the gates saw the inside of this very graph and no file in fp32 is clearly faster"
    text = f"Prefer {best}: {why}; {p50_ms[EAGER] / p50_ms[best]:.2f} times as fast as eager."
    lower = [name for name in files if name not in whole and p50_ms[name] <= CLEARLY * p50_ms[best]]
    if lower:
        name = min(lower, key=lambda name: p50_ms[name])
        text += f" {name} takes {p50_ms[name] / p50_ms[best]:.2f} of its time, within the wider limits of its gates."
    return text


def entry(files: dict[str, dict[str, float | int]]) -> dict[str, Any]:
    """`latency` of the manifest: what was measured, and on what."""
    return {"device": "cpu", "processor": processor(), "threads": 1, "files": files}
