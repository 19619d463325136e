"""How figures are taken: arms interleaved in one process, medians, and a ratio with its interval."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

Arm = Callable[[], Any]
ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Versions, hardware and code that a figure belongs to, as plain JSON values."""
    from segpipe.determinism import flags

    return {**flags.fingerprint(), "cores": len(os.sched_getaffinity(0)), **code(ROOT)}


def code(root: Path) -> dict[str, Any]:
    """What was measured: git's id of the folder segpipe, which outlives a rewritten history, and whether all of segpipe
    and benchmarks was committed as it ran; results do not count. None where git does not tell."""
    tree = _git(root, "rev-parse", "HEAD:./segpipe")
    changed = _git(
        root,
        "status",
        "--porcelain",
        "--",
        "segpipe",
        "benchmarks",
        ":!benchmarks/results",
    )
    return {"code": tree, "clean": None if changed is None else not changed}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, cwd=root
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def peak_resident_mib() -> int:
    """Most resident memory of this process so far. `ru_maxrss` would be the parent's where the parent held more."""
    status = Path("/proc/self/status").read_text().splitlines()
    return (
        next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) >> 10
    )


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that is nobody else's until the block ends: bound, but nobody listens on it yet.

    Only a server that sets SO_REUSEADDR may still take it, as torch's store does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("localhost", 0))
        yield int(holder.getsockname()[1])


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """SIGKILL for a process and all that it started. The ranks of torchrun have sessions of their own: a signal to the
    launcher's group would not reach them."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def interleaved(
    arms: Mapping[str, Arm],
    *,
    repeats: int,
    prepare: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call of every arm. Rounds go through all arms, in an order that changes from round to round, so
    that drift of the machine falls on all alike; one round to warm up is not counted. `prepare(name)` is not timed.
    clock: time.process_time for arms of one thread on a machine that others use too."""
    random, names = np.random.default_rng(0), list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats + 1):
        for name in random.permutation(names).tolist():
            if prepare is not None:
                prepare(name)
            before = clock()
            arms[name]()
            if number:
                seconds[name].append(clock() - before)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Number, median and the middle half of timings, in milliseconds."""
    low, median, high = np.percentile(np.array(seconds) * 1000, [25, 50, 75])
    return {
        "n": len(seconds),
        "median_ms": round(median, 3),
        "p25_ms": round(low, 3),
        "p75_ms": round(high, 3),
    }


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Median of the ratios within each round, and its 95 % interval."""
    return interval(np.array(above) / np.array(below), name="ratio")


def interval(values: Any, *, name: str) -> dict[str, float]:
    """Median under this name, and its 95 % interval by bootstrap: `low` and `high`."""
    draws = np.random.default_rng(0).choice(np.asarray(values), (4000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        name: round(float(np.median(values)), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
    }


def holds(
    found: Mapping[str, float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> bool:
    """Whether a claim about a figure holds on its whole interval: the end that speaks against it decides."""
    return (at_least is None or found["low"] >= at_least) and (
        at_most is None or found["high"] <= at_most
    )
