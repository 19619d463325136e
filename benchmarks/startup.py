"""C10: seconds to `train.py --help`, and from the start of a run to the end of its first update."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import measure as measuring

MUST = {"help_s": 3.0, "first_update_s": 8.0}
RUN = (
    "data=synthetic", "data.size=[256,512]", "augment.crop_size=[256,256]", "train.steps=1", "train.log_every=1",
    "compute.device=cpu", "export.enabled=false", "train.progress=false", "run.name=startup",
)  # fmt: skip
LIMIT_S = 300.0
WARM = 1  # runs that are not counted
SMOKE = {
    "WARM": 0,
    "RUN": (*RUN, "data.size=[64,64]", "augment.crop_size=[64,64]", "data.num_train=8", "data.num_val=1",
            "compute.shards=1"),
}  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both, as the user waits for them: files in the page cache, digests compiled by an earlier run."""
    rounds = given.repeats or 10
    for _ in range(WARM):
        first_update()
    found: dict[str, list[float]] = {name: [] for name in MUST}
    for _ in range(rounds):
        found["help_s"].append(seconds_of_help())
        found["first_update_s"].append(first_update())
    figures = {
        name: measuring.interval(values, name="median")
        for name, values in found.items()
    }
    verdicts = {
        name: measuring.holds(figures[name], at_most=must)
        for name, must in MUST.items()
    }
    return {
        "what": "train.py --help; a run of the default network on 256x512 scenes, start to first line of metrics.jsonl",
        "machine": measuring.machine(),
        "load": round(psutil.getloadavg()[0], 2),
        "n": rounds,
        "seconds": figures,
        "must": MUST,
        "verdicts": verdicts,
        "passed": all(verdicts.values()),
    }


def command(*arguments: str) -> list[str]:
    """train.py with these arguments."""
    return [sys.executable, str(measuring.ROOT / "train.py"), *arguments]


def seconds_of_help() -> float:
    """Of one `--help`."""
    before = time.perf_counter()
    subprocess.run(command("--help"), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - before


def first_update() -> float:
    """From the start of the process until metrics.jsonl has the line of the first update."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, before = (
            Path(folder) / "startup" / "metrics.jsonl",
            time.perf_counter(),
        )
        run = subprocess.Popen(
            command(*RUN, f"run.root={folder}"), stdout=subprocess.DEVNULL
        )
        try:
            while not metrics.is_file() or '"train"' not in metrics.read_text():
                assert run.poll() is None, (
                    f"the run ended with {run.returncode} before its first update"
                )
                assert time.perf_counter() - before < LIMIT_S, (
                    f"no update within {LIMIT_S} s"
                )
                time.sleep(0.01)
            return time.perf_counter() - before
        finally:
            run.wait(LIMIT_S)
