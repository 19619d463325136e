"""Runs of one recipe by the real command line, started in every way that must not matter, and their digests."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from benchmarks import measure as measuring
from segpipe.settings.compose import compose

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = ("weights_digest", "ema_digest", "miou")
PRECISION = "${cpu_precision:}"
# Real augmentation, BatchNorm, auxiliary and boundary heads, OHEM, class weights, clipping, EMA; see `recipe`, too.
RECIPE = (
    "model=pidnet_s", "train.steps=3", "compute.samples_per_shard=2",
    "compute.threads=1", "compute.device=cpu", "augment.crop_size=[64,96]", "loss.name=ohem", "loss.class_weights=log",
    "optim.clip_norm=1", "optim.warmup_steps=0", "export.enabled=false", "train.progress=false", "data.num_val=4",
    "data.num_train=64", "data.size=[96,128]", f"train.precision={PRECISION}",
)  # fmt: skip
PROCESSES = (1, 3, 5, 7, 2, 4, 8, 12, 16)  # uneven ones first
UNEVEN = (1, 3, 4, 5, 6)  # of 6 shards
LAYOUTS = [
    (0, "fork"),
    *((workers, how) for workers in (1, 3) for how in ("fork", "forkserver", "spawn")),
]
CONTROLS = (1, 2, 4)  # processes in mode ddp
# Further recipes: RECIPE with EACH of the following drawn at random, in one process without torchrun and in 2 or 3.
DRAWN: tuple[int, ...] = tuple(range(1, 25))
EACH = 8
CHOICES = {
    "model": ("fast_scnn", "ddrnet23_slim", "dabnet", "regseg", "pp_liteseg_t", "stdc1", "bisenetv2", "lraspp"),
    "model.standardize": ("true",), "optim.lr_scale": ("{classifier.*: 10}",),
    "loss.name": ("cross_entropy", "focal"), "loss.class_weights": ("none", "sqrt", "log1.10"),
    "loss.label_smoothing": ("0.1",), "loss.dice_weight": ("1",), "loss.lovasz_weight": ("0.5",),
    "loss.stride": ("2",), "loss.aux_stride": ("4",), "loss.aux_weight": ("0",), "loss.boundary": ("detail",),
    "loss.backend": ("plain",), "loss.ohem_min_kept": ("0", "1"), "optim.name": ("adamw",),
    "optim.schedule": ("cosine",), "optim.clip_norm": ("0",), "ema.decay": ("0",), "train.precision": ("fp32", "fp16"),
    "train.channels_last": ("false",), "train.validate_every": ("1",),
    "augment.gamma": ("[0.7,2.0]",), "augment.scale": ("[1,2.5]",), "augment.rare_crop": ("0.5",),
    "augment.crop_size": ("[60,90]", "[96,96]"), "data.balance": ("0.5",), "data.cache_mib": ("10",),
    "compute.samples_per_shard": ("3",), "checkpoint.every": ("1",),
}  # fmt: skip
SMOKE = {
    "RECIPE": (*RECIPE, "model=fast_scnn", "train.steps=1", "data.num_train=16",
               "data.num_val=1"),
    "PROCESSES": (), "UNEVEN": (), "CONTROLS": (), "LAYOUTS": LAYOUTS[:1], "DRAWN": (6,),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way to start the run."""

    data: str
    processes: int = 1
    workers: int = 0
    start_method: str = "fork"
    mode: str = "elastic"
    shards: int = 16
    drawn: int = 0  # number of a drawn recipe; 0: RECIPE itself

    @property
    def changes(self) -> list[str]:
        return [
            f"data.workers={self.workers}", f"data.start_method={self.start_method}", f"compute.mode={self.mode}",
            f"compute.shards={self.shards}", *(drawn(self.drawn) if self.drawn else ()),
        ]  # fmt: skip


def drawn(number: int) -> list[str]:
    """What a drawn recipe changes. A pattern that matches nothing is refused, so it comes with its network."""
    random = Random(number)
    found = {
        key: random.choice(CHOICES[key]) for key in random.sample([*CHOICES], EACH)
    }
    if "optim.lr_scale" in found:
        found["model"] = "fast_scnn"
    if "loss.label_smoothing" in found:  # which OHEM refuses
        found["loss.name"] = "cross_entropy"
    return [f"{key}={value}" for key, value in found.items()]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Digests of all cases; passed when those of one data set and number of shards are equal, and those of the control
    are not. `--repeats` limits the numbers of processes, layouts of workers and drawn recipes to the first so many."""
    sets, most = ["synthetic", *(["camvid"] if given.camvid else [])], given.repeats
    cases = [
        Case(data, processes=number) for data in sets for number in PROCESSES[:most]
    ]
    cases += [
        Case(data, workers=workers, start_method=how)
        for data in sets
        for workers, how in LAYOUTS[1:][:most]
    ]
    workers, how = LAYOUTS[-1]
    if PROCESSES:
        cases += [Case("synthetic", processes=2, workers=workers, start_method=how)]
    for number in DRAWN[:most]:
        cases += [
            Case("synthetic", shards=4, drawn=number),
            Case(
                "synthetic", processes=2 + number % 2, workers=1, shards=4, drawn=number
            ),
        ]
    cases += [Case("synthetic", processes=number, shards=6) for number in UNEVEN[:most]]
    controls = [Case("synthetic", processes=number, mode="ddp") for number in CONTROLS]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate([*cases, *controls]):
            found = digests(case, Path(folder) / f"run{number:03d}", given.camvid)
            rows.append({**case.__dict__, **found})
            Console(stderr=True).print(rows[-1], soft_wrap=True)
    elastic = [row for row in rows if row["mode"] == "elastic"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in elastic:
        number = row["drawn"]
        recipe_of = (
            f"drawn recipe {number}: {' '.join(drawn(number))}, " if number else ""
        )
        kind = f"{recipe_of}{row['data']}, {row['shards']} shards"
        kinds.setdefault(kind, []).append(row)
    equal = {kind: _equal(alike) for kind, alike in kinds.items()}
    recipe = " ".join(RECIPE).replace(PRECISION, compose(RECIPE).train.precision)
    control = _equal([row for row in rows if row["mode"] == "ddp"])
    return {
        "what": f"{recipe}; torchrun --nproc-per-node=processes",
        "machine": measuring.machine(),
        "rows": rows,
        "equal": equal,
        "control_is_equal": control,
        "passed": all(equal.values()) and not control,
    }


def _equal(rows: list[dict[str, Any]]) -> bool:
    return len({tuple(row[name] for name in DIGESTS) for row in rows}) == 1


def digests(case: Case, folder: Path, camvid: Path | None) -> dict[str, Any]:
    """What result.json of the case's run says."""
    data = [
        f"data={case.data}",
        *(
            [f"data.root={camvid.resolve()}"]
            if case.data == "camvid" and camvid
            else []
        ),
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]  # fmt: skip
    start = [] if case.drawn and case.processes == 1 else launcher
    command = [
        *start,
        "train.py",
        *RECIPE,
        *data,
        *case.changes,
        f"run.root={folder.parent}",
        f"run.name={folder.name}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in DIGESTS}
