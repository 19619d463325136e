"""Kill ranks with SIGKILL at random moments, resume with another number of processes, and compare the digests."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import measure as measuring
from benchmarks.bits import DIGESTS, ROOT
from segpipe.train.checkpoint import load

RECIPE = (
    "model=fast_scnn", "data.size=[96,128]", "data.num_train=64", "data.num_val=2", "augment.crop_size=[64,96]",
    "train.steps=60", "train.progress=false", "checkpoint.every=2", "compute.shards=4", "compute.samples_per_shard=2",
    "compute.threads=1", "compute.device=cpu", "data.workers=1", "optim.name=adamw", "optim.lr=1e-3",
    "export.enabled=false", "train.log_every=1",
)  # fmt: skip
KILLS_OF_A_RUN = 5  # then it may come to its end
PROCESSES, WORKERS = (1, 2, 4), (0, 1, 2)
SMOKE = {
    "KILLS_OF_A_RUN": 1, "RECIPE": (*RECIPE, "train.steps=8"), "PROCESSES": (1,), "WORKERS": (0,),
}  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Kills `--repeats` ranks (20) in all. Passed when what each kill left behind has the digests that a run which was
    left alone had at that step, and every run ends with those of its end."""
    kills, chance, done = given.repeats or 20, random.Random(0), 0
    console, rows = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        alone = root / "alone"
        finish(start(alone, 1, "checkpoint.keep_every=2"))
        wanted = digests(alone)
        while done < kills:
            folder = root / f"run{len(rows)}"
            row = torment(folder, min(KILLS_OF_A_RUN, kills - done), chance, alone)
            row["equal"] = digests(folder) == wanted
            done += len(row["kills"])
            rows.append(row)
            console.print(row, soft_wrap=True)
    return {
        "what": " ".join(RECIPE),
        "machine": measuring.machine(),
        **verdict(rows),
        "runs": rows,
    }


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was killed and compared, and whether all that was compared is equal."""
    kills = [kill for row in rows for kill in row["kills"]]
    compared = [kill["equal"] for kill in kills if kill["equal"] is not None]
    writes = sum(kill["during"] == "checkpoint" for kill in kills)
    return {
        "kills": len(kills),
        "kills_by_rank": dict(sorted(Counter(kill["rank"] for kill in kills).items())),
        "kills_while_a_checkpoint_was_written": writes,
        "checkpoints_compared": len(compared),
        "checkpoints_equal": sum(compared),
        "passed": writes > 0
        and len(compared) > 0
        and all(compared)
        and all(row["equal"] for row in rows),
    }


def torment(
    folder: Path, kills: int, chance: random.Random, alone: Path
) -> dict[str, Any]:
    """Start the run, kill a rank, resume with other numbers of processes and workers, and so on, then let it end."""
    row: dict[str, Any] = {"kills": []}
    for _ in range(kills):
        processes, workers = chance.choice(PROCESSES), chance.choice(WORKERS)
        launcher = start(folder, processes, f"data.workers={workers}")
        found = kill_one(
            folder, launcher, *victim(processes, chance), chance.uniform(0, 3)
        )
        if found is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(60)
        end(launcher)
        if found is None:  # it came to its end before
            break
        row["kills"].append(
            {"processes": processes, "workers": workers, **found, **kept(folder, alone)}
        )
    processes, workers = chance.choice(PROCESSES), chance.choice(WORKERS)
    finish(start(folder, processes, f"data.workers={workers}"))
    return {**row, "ended_with_processes": processes, "ended_with_workers": workers}


def start(folder: Path, processes: int, *changes: str) -> subprocess.Popen[bytes]:
    """The run under torchrun, from its last checkpoint; anew if it was killed before the first, which needs asking."""
    exists = "resume" if (folder / "last.pt").is_file() else "replace"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    settings = dict(part.split("=", 1) for part in (*RECIPE, *changes))
    command += ["train.py", *(f"{key}={value}" for key, value in settings.items())]
    command += [
        f"run.root={folder.parent}",
        f"run.name={folder.name}",
        f"run.exists={exists}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def victim(processes: int, chance: random.Random) -> tuple[int, str]:
    """Rank that will be killed, and during what. Rank 0 writes: half of the kills during a write hit it."""
    during = chance.choice(("training", "checkpoint"))
    if during == "checkpoint" and processes > 1:
        return chance.choice((0, chance.randrange(1, processes))), during
    return chance.randrange(processes), during


def kill_one(
    folder: Path,
    launcher: subprocess.Popen[bytes],
    rank: int,
    during: str,
    delay_s: float,
) -> dict[str, Any] | None:
    """SIGKILL for the rank, `delay_s` after the run is set up, or then while last.pt is being written."""
    log, started = folder / "metrics.jsonl", time.time()
    while (
        not log.exists() or log.stat().st_mtime < started
    ):  # until it opens its log, right before the first step
        if launcher.poll() is not None:
            return None
        time.sleep(0.005)
    process, until = _ranks(launcher).get(rank), time.monotonic() + delay_s
    while time.monotonic() < until or (
        during == "checkpoint" and not list(folder.glob(".last.pt.*.tmp"))
    ):
        if launcher.poll() is not None:
            return None
        time.sleep(0.0005)
    writing = bool(list(folder.glob(".last.pt.*.tmp")))
    if process is None:
        return None
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return None
    return {"rank": rank, "during": "checkpoint" if writing else "training"}


def kept(folder: Path, alone: Path) -> dict[str, Any]:
    """Step of the checkpoint that a killed run left, and whether it has the digests that the other run had then; None
    where nothing had been written yet."""
    if not (folder / "last.pt").is_file():
        return {"checkpoint_step": 0, "equal": None}
    left = load(folder / "last.pt")
    then = (
        alone / f"step_{left['step']:06d}.pt"
    )  # none is kept of the last step, which last.pt is of
    other = load(then if then.is_file() else alone / "last.pt")
    same = all(
        left["digests"][part] == other["digests"][part] for part in ("model", "ema")
    )
    return {
        "checkpoint_step": left["step"],
        "equal": same and left["step"] == other["step"],
    }


def _ranks(launcher: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    found = {}
    for child in psutil.Process(launcher.pid).children():
        with contextlib.suppress(psutil.Error):
            found[int(child.environ()["RANK"])] = child
    return found


def finish(launcher: subprocess.Popen[bytes]) -> None:
    """Wait for the run's own end; it must be a good one."""
    code = launcher.wait(600)
    if code:
        raise RuntimeError(f"a run that nobody killed ended with {code}")


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Nothing of a killed run may go on beside its successor."""
    measuring.kill_with_children(launcher)
    launcher.wait()
    time.sleep(0.2)


def digests(folder: Path) -> dict[str, Any]:
    """What must be equal, of a run's result.json."""
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in DIGESTS}
