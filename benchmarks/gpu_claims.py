"""G1 to G7, the goals on a GPU: checks of `segpipe gpu-check`, one at a time.

`python -m benchmarks.gpu_claims gpu.jsonl` turns the rows that gpu-check left into files of benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks import measure as measuring
from benchmarks.gpu_bench import Bench, latest
from segpipe.determinism import flags

CHECKS = {
    "G1": "loop",
    "G1b": "recipes",
    "G2": "loss",
    "G3": "determinism",
    "G4": "syncs",
    "G5": "loader",
    "G6": "processes",
    "G7": "memory",
}
DEVICE, SIZE, BATCH, UPDATES = "cuda", 1024, 12, 20
SMOKE = {"DEVICE": "cpu", "SIZE": 64, "BATCH": 2}
RESULTS = Path(__file__).with_name("results")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The check of a claim, whose code gpu-check calls too. Raises ConfigError without a GPU."""
    if DEVICE == "cuda":
        gpu.needs_gpu()
    flags.set_environment()  # before CUDA starts
    keys = {"device": DEVICE, "size": SIZE, "batch": BATCH, "camvid": ""}
    keys |= {"updates": given.repeats or UPDATES, "folder": "runs"}
    bench = gpu.bench_of(keys, 3600)
    [row] = gpu.run(bench, [CHECKS[given.claim]])
    return _content(row, measuring.machine(), bench)


def _content(
    row: dict[str, Any], machine: dict[str, Any], bench: Bench | None = None
) -> dict[str, Any]:
    size, batch = (bench.size, bench.batch) if bench else (SIZE, BATCH)
    return {
        "what": f"{row['check']}: {batch} x {size}x{size}, bf16, on {row['device']}",
        "machine": machine,
        "verdict": row["verdict"],
        "figures": row["figures"],
        "passed": row["verdict"] == gpu.PASSED,
    }


def written(rows: Path, folder: Path) -> list[Path]:
    """Files of results for the claims that the rows of a GPU answer, met or not."""
    found, files = latest(rows), []
    by_call = [found[name] for name in ("machine", "bandwidth") if name in found]
    machine = by_call[-1]["figures"]["fingerprint"] if by_call else {}
    for claim, check in CHECKS.items():
        row = found.get(check, {"device": "", "verdict": ""})
        if row["device"] == "cuda" and row["verdict"] in (gpu.PASSED, gpu.MISSED):
            path = folder / f"{claim.lower()}_gpu.json"
            content = {"claim": claim, "smoke": False, **_content(row, machine)}
            path.write_text(json.dumps(content, indent=2) + "\n")
            files.append(path)
    return files


if __name__ == "__main__":
    print(*written(Path(sys.argv[1]), RESULTS), sep="\n")
