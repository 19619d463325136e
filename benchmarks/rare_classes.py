"""What class weights, balanced sampling and rare-class crops win and cost on CamVid, at equal updates.

The drive 0006R0 is held out for validation; training reads the other two. Runs lie in runs/rare_classes, and those that
are there already are not repeated. --repeats is the number of seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import measure as measuring
from segpipe.errors import ConfigError

VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "log": ("loss.class_weights=log",),
    "sqrt": ("loss.class_weights=sqrt",),
    "rare": ("augment.rare_crop=0.5",),
    "balance": ("data.balance=1",),
    "rare_balance": ("augment.rare_crop=0.5", "data.balance=1"),
}
HELD_OUT = "0006R0"  # the drives 0001TP (at dusk) and 0016E5 remain
RARE = ("sign_symbol", "pedestrian", "bicyclist", "fence", "pole")
FOLDER = measuring.ROOT / "runs" / "rare_classes"
RECIPE = (
    "data=camvid", "model=fast_scnn", "run.exists=replace", "train.steps=300", "compute.device=cpu", "compute.nproc=1",
    "compute.shards=1", "compute.samples_per_shard=8", "compute.threads=1", "data.workers=1", "data.cache_mib=300",
    "augment.crop_size=[192,256]", "augment.scale=[0.5,1.25]", "loss.stride=2", "loss.aux_stride=4", "optim.name=adamw",
    "optim.lr=3e-3", "optim.weight_decay=0.01", "optim.schedule=cosine", "optim.warmup_steps=20", "optim.clip_norm=5",
    "ema.decay=0.98", "export.enabled=false", "augment.check=false", "data.verify=headers", "compute.ledger=false",
)  # fmt: skip
SMOKE = {
    "RECIPE": (*RECIPE, "train.steps=2"),
    "VARIANTS": {"rare": VARIANTS["rare"]},
    "FOLDER": measuring.ROOT / "runs" / "rare_classes_smoke",
}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """IoU of each variant and seed, and the mean and range over the seeds."""
    if given.camvid is None:
        raise ConfigError("--camvid is missing. Set it to the folder of CamVid.")
    seeds = range(given.repeats or 2)
    with TemporaryDirectory() as scratch:
        data = by_drive(given.camvid.resolve(), Path(scratch))
        for seed in seeds:
            for name, changes in VARIANTS.items():
                train(data, f"{name}-{seed}", (f"seed={seed}", *changes))
    rows = {
        name: [scores(FOLDER / f"{name}-{seed}") for seed in seeds] for name in VARIANTS
    }
    return {
        "what": f"IoU in % on the held-out drive {HELD_OUT}, 300 updates of 8 crops of 192x256",
        "machine": measuring.machine(),
        "variants": {
            name: {"settings": VARIANTS[name], "seeds": found, **over_seeds(found)}
            for name, found in rows.items()
        },
        "passed": True,
    }


def by_drive(camvid: Path, folder: Path) -> Path:
    """A folder of links in which the held-out drive is the split val and all other images are train."""
    for split in ("train", "val"):
        for kind in ("", "annot"):
            for path in sorted((camvid / f"{split}{kind}").iterdir()):
                home = (
                    folder
                    / f"{'val' if path.name.startswith(HELD_OUT) else 'train'}{kind}"
                )
                home.mkdir(exist_ok=True)
                (home / path.name).symlink_to(path)
    return folder


def train(data: Path, name: str, changes: tuple[str, ...]) -> None:
    """One run, unless it is there already."""
    if not (FOLDER / name / "result.json").is_file():
        own = (f"data.root={data}", f"run.root={FOLDER}", f"run.name={name}")
        subprocess.run(
            [sys.executable, "train.py", *RECIPE, *own, *changes],
            check=True,
            cwd=measuring.ROOT,
        )


def scores(run: Path) -> dict[str, float]:
    """IoU of the rare classes, their mean, and the mean over all classes, in %."""
    found = json.loads((run / "result.json").read_text())
    rare = {name: round(100 * (found["iou"][name] or 0.0), 2) for name in RARE}
    return {
        "miou": round(100 * found["miou"], 2),
        "rare": round(statistics.mean(rare.values()), 2),
        **rare,
    }


def over_seeds(found: list[dict[str, float]]) -> dict[str, Any]:
    """Mean and range of every score."""
    return {
        "mean": {
            key: round(statistics.mean(row[key] for row in found), 2)
            for key in found[0]
        },
        "range": {
            key: [min(row[key] for row in found), max(row[key] for row in found)]
            for key in found[0]
        },
    }
