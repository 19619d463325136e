"""start: what 20,000 images add to the processor time of a run's start, the first time and the second."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil

from benchmarks import measure as measuring

MUST = {"first": 8.0, "second": 3.0}  # seconds
PAIRS = 20_000
FEW = 8  # pairs of the run that is taken away
SIZE = 48, 64
CLASSES = 4
SMOKE = {"PAIRS": 24, "MUST": {"first": 8.0}}
RUN = (
    "data=folder", "augment.crop_size=[32,32]", "augment.check=false", "compute.shards=1",
    "compute.samples_per_shard=2", "compute.device=cpu", "compute.threads=1", "data.workers=0",
    "train.steps=1", "train.progress=false",
    "export.enabled=false", "run.exists=replace", "run.name=start",
)  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Processor time of a whole run of one update, less that of the same run on few pairs; medians of the rounds."""
    rounds = given.repeats or 3
    added: dict[str, list[float]] = {name: [] for name in MUST}
    few: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            large, small = (
                Path(folder, f"large{number}"),
                Path(folder, f"small{number}"),
            )
            make(large, PAIRS)
            make(small, FEW)
            base = {name: processor_seconds(small) for name in MUST}
            few.extend(base.values())
            for name in MUST:
                added[name].append(processor_seconds(large) - base[name])
    figures = {
        name: measuring.interval(values, name="median")
        for name, values in added.items()
    }
    verdicts = {
        name: measuring.holds(figures[name], at_most=must)
        for name, must in MUST.items()
    }
    return {
        "what": f"processor time that {PAIRS} PNG pairs of {SIZE[0]}x{SIZE[1]} add to a run of one update with {FEW}",
        "machine": measuring.machine(),
        "load": round(psutil.getloadavg()[0], 2),
        "n": rounds,
        "seconds_with_few_pairs": measuring.interval(few, name="median"),
        "added_seconds": figures,
        "must": MUST,
        "verdicts": verdicts,
        "passed": all(verdicts.values()),
    }


def make(root: Path, pairs: int) -> None:
    """A folder of noise with this many pairs for training, and 2 for validation."""
    random = np.random.default_rng(0)
    for split, count in (("train", pairs), ("val", 2)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            image = random.integers(0, 256, (*SIZE, 3), np.uint8)
            mask = random.integers(0, CLASSES, SIZE, np.uint8)
            cv2.imwrite(str(root / "images" / split / f"{number:05}.png"), image)
            cv2.imwrite(str(root / "masks" / split / f"{number:05}.png"), mask)
    names = ", ".join(f"class{number}" for number in range(CLASSES))
    (root / "classes.yaml").write_text(f"names: [{names}]\n")


def processor_seconds(root: Path) -> float:
    """Of a run on this data and all its processes, in user and system mode."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [
        sys.executable,
        str(measuring.ROOT / "train.py"),
        *RUN,
        f"data.root={root}",
    ]
    done = subprocess.run(
        [*words, f"run.root={root}/runs"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
