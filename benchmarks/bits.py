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
from typing import Any

from rich.console import Console

from benchmarks import measure as measuring

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = ("weights_digest", "ema_digest", "miou")
# Real augmentation, BatchNorm, auxiliary and boundary heads, OHEM, class weights, clipping, EMA; see `recipe`, too.
RECIPE = (
    "model=pidnet_s", "train.steps=3", "compute.samples_per_shard=2",
    "compute.threads=1", "compute.device=cpu", "augment.crop_size=[64,96]", "loss.name=ohem", "loss.class_weights=log",
    "optim.clip_norm=1", "optim.warmup_steps=0", "export.enabled=false", "train.progress=false", "data.num_val=4",
    "data.num_train=64", "data.size=[96,128]",
)  # fmt: skip
PROCESSES = (1, 3, 5, 7, 2, 4, 8, 12, 16)  # uneven ones first
UNEVEN = (1, 3, 4, 5, 6)  # of 6 shards
LAYOUTS = [
    (0, "fork"),
    *((workers, how) for workers in (1, 3) for how in ("fork", "forkserver", "spawn")),
]
CONTROLS = (1, 2, 4)  # processes in mode ddp
SMOKE = {
    "RECIPE": (*RECIPE, "model=fast_scnn", "train.steps=1", "data.num_train=32",
               "data.num_val=1"),
    "PROCESSES": (1,), "UNEVEN": (), "CONTROLS": (), "LAYOUTS": LAYOUTS[:1],
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

    @property
    def changes(self) -> list[str]:
        return [
            f"data.workers={self.workers}", f"data.start_method={self.start_method}", f"compute.mode={self.mode}",
            f"compute.shards={self.shards}",
        ]  # fmt: skip


def recipe() -> tuple[str, ...]:
    """RECIPE in bf16; in fp32 where the CPU has no instruction for bf16, which makes an update 16 times as long."""
    found = measuring.machine()["instructions"].split()
    precision = "bf16" if {"avx512_bf16", "amx_bf16"} & set(found) else "fp32"
    return (*RECIPE, f"train.precision={precision}")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Digests of all cases; passed when those of one data set and number of shards are equal, and those of the control
    are not. `--repeats` limits the numbers of processes and the layouts of workers to the first so many."""
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
    cases += [Case("synthetic", processes=2, workers=workers, start_method=how)]
    cases += [Case("synthetic", processes=number, shards=6) for number in UNEVEN[:most]]
    controls = [Case("synthetic", processes=number, mode="ddp") for number in CONTROLS]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate([*cases, *controls]):
            found = digests(case, Path(folder) / f"run{number:03d}", given.camvid)
            rows.append({**case.__dict__, **found})
            Console(stderr=True).print(rows[-1], soft_wrap=True)
    elastic = [row for row in rows if row["mode"] == "elastic"]
    kinds = sorted({(row["data"], row["shards"]) for row in elastic})
    equal = {
        f"{data}, {shards} shards": _equal(
            [row for row in elastic if (row["data"], row["shards"]) == (data, shards)]
        )
        for data, shards in kinds
    }
    control = _equal([row for row in rows if row["mode"] == "ddp"])
    return {
        "what": f"{' '.join(recipe())}; torchrun --nproc-per-node=processes",
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
    start = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={case.processes}",
    ]
    command = [
        *start,
        "train.py",
        *recipe(),
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
