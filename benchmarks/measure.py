"""How figures are taken: arms interleaved in one process, medians, and a ratio with its interval."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arm = Callable[[], Any]


def machine() -> dict[str, Any]:
    """Versions and hardware that a figure belongs to, as plain JSON values."""
    from segpipe.determinism import flags

    sha = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    return {**flags.fingerprint(), "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "git": sha or None}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def interleaved(
    arms: Mapping[str, Arm], *, repeats: int, prepare: Callable[[str], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of every call of every arm. Rounds go through all arms, in an order that changes from round to round, so
    that drift of the machine falls on all alike; one round to warm up is not counted. `prepare(name)` is not timed."""
    random, names = np.random.default_rng(0), list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats + 1):
        for name in random.permutation(names).tolist():
            if prepare is not None:
                prepare(name)
            before = time.perf_counter()
            arms[name]()
            if number:
                seconds[name].append(time.perf_counter() - before)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Number, median and the middle half of timings, in milliseconds."""
    low, median, high = np.percentile(np.array(seconds) * 1000, [25, 50, 75])
    return {"n": len(seconds), "median_ms": round(median, 3), "p25_ms": round(low, 3), "p75_ms": round(high, 3)}


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Median of the ratios within each round, and its 95 % interval by bootstrap over the rounds."""
    pairs = np.array(above) / np.array(below)
    draws = np.random.default_rng(0).choice(pairs, (4000, len(pairs)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {"ratio": round(float(np.median(pairs)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
