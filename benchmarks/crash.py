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
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import measure as measuring
from benchmarks.bits import DIGESTS, ROOT

RECIPE = (
    "model=fast_scnn", "data.size=[96,128]", "data.num_train=64", "data.num_val=2", "augment.crop_size=[64,96]",
    "train.steps=60", "train.progress=false", "checkpoint.every=2", "compute.shards=4", "compute.samples_per_shard=2",
    "compute.threads=1", "compute.device=cpu", "data.workers=1", "optim.name=adamw", "optim.lr=1e-3",
    "export.enabled=false", "train.log_every=1",
)  # fmt: skip
KILLS_OF_A_RUN = 5  # then it may come to its end
PROCESSES = (1, 2, 4)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Kills `--repeats` ranks (20) in all; passed when every run ends with the digests of one that was left alone."""
    kills, chance, done = given.repeats or 20, random.Random(0), 0
    console, rows = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        finish(start(root / "alone", 1))
        wanted = digests(root / "alone")
        while done < kills:
            folder = root / f"run{len(rows)}"
            row = torment(folder, min(KILLS_OF_A_RUN, kills - done), chance)
            row["equal"] = digests(folder) == wanted
            done += len(row["kills"])
            rows.append(row)
            console.print(row, soft_wrap=True)
    writes = sum(kill["during"] == "checkpoint" for row in rows for kill in row["kills"])
    return {
        "what": " ".join(RECIPE),
        "machine": measuring.machine(),
        "kills": done,
        "kills_while_a_checkpoint_was_written": writes,
        "runs": rows,
        "passed": all(row["equal"] for row in rows) and writes > 0,
    }


def torment(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """Start the run, kill a rank, resume with another number of processes, and so on, then let it end."""
    row: dict[str, Any] = {"kills": []}
    for _ in range(kills):
        processes = chance.choice(PROCESSES)
        launcher = start(folder, processes)
        found = kill_one(folder, launcher, chance)
        if found is None:  # it came to its end before
            break
        row["kills"].append({"processes": processes, **found})
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(60)
        end(launcher)
    last = chance.choice(PROCESSES)
    finish(start(folder, last))
    return {**row, "ended_with_processes": last}


def start(folder: Path, processes: int) -> subprocess.Popen[bytes]:
    """The run under torchrun, from its last checkpoint if it has one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["train.py", *RECIPE, f"run.root={folder.parent}", f"run.name={folder.name}", "run.exists=resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (folder.parent / f"{folder.name}.log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def kill_one(folder: Path, launcher: subprocess.Popen[bytes], chance: random.Random) -> dict[str, Any] | None:
    """SIGKILL for a random rank, at a random time after it is set up, or while last.pt is being written."""
    during, log, started = chance.choice(("training", "checkpoint")), folder / "metrics.jsonl", time.time()
    while not log.exists() or log.stat().st_mtime < started:  # until it opens its log, right before the first step
        if launcher.poll() is not None:
            return None
        time.sleep(0.005)
    until = time.monotonic() + chance.uniform(0, 3)
    while time.monotonic() < until or (during == "checkpoint" and not list(folder.glob(".last.pt.*.tmp"))):
        if launcher.poll() is not None:
            return None
        time.sleep(0.0005)
    writing = bool(list(folder.glob(".last.pt.*.tmp")))
    ranks = _ranks(launcher)
    # Rank 0 writes; a kill in the middle of a write is one of rank 0.
    victims = [process for rank, process in ranks.items() if rank == 0 or during == "training"]
    if not victims:
        return None
    victim = chance.choice(victims)
    rank = next(rank for rank, process in ranks.items() if process == victim)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGKILL)
    return {
        "rank": rank,
        "logged_steps": len(log.read_bytes().splitlines()),
        "during": "checkpoint" if writing else "training",
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
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    time.sleep(0.2)


def digests(folder: Path) -> dict[str, Any]:
    """What must be equal, of a run's result.json."""
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in DIGESTS}
