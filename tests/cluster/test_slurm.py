"""examples/cluster/train.sbatch under a real Slurm with two nodes: pytest -m daemons tests/cluster, about 10 minutes.

Slurm is the one that is installed, its daemons are started by slurm.py. Each run must end with the digests of one that
nothing disturbed, in one process without Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import slurm as scheduler
from benchmarks.cluster import digests, steps_done, wait_for
from segpipe.run.tracking import FILE_NAME, read_metrics
from segpipe.train.checkpoint import load
from slurm import Slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.daemons,
    pytest.mark.skipif(bool(scheduler.missing()), reason=scheduler.missing()),
]
SCRIPT = scheduler.ROOT / "examples" / "cluster" / "train.sbatch"
# A GPU is a file here, and gives each machine one process.
SMALL = ("--gpus-per-node=1", "--cpus-per-task=1", "--time=20")
RECIPE = (
    "model=fast_scnn", "augment.crop_size=[64,96]", "augment.check=false", "train.progress=false", "train.log_every=1",
    "checkpoint.every=5", "compute.shards=2", "compute.samples_per_shard=2", "compute.threads=1", "compute.device=cpu",
    "compute.timeout_s=10", "data.workers=1", "export.enabled=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with scheduler.slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def camvid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as CamVid's, with small frames of noise."""
    folder, random = tmp_path_factory.mktemp("camvid"), np.random.default_rng(0)
    for split, number in (("train", 32), ("val", 2)):
        for kind, depth in ((split, (3,)), (f"{split}annot", ())):
            (folder / kind).mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 12, (96, 128, *depth), np.uint8)
                cv2.imwrite(str(folder / kind / f"0001TP_{index:04}.png"), pixels)
    return folder


def variables() -> dict[str, str]:
    """What a user's shell has who may type segpipe and torchrun."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PYTHONPATH": f"{scheduler.ROOT}:{os.environ.get('PYTHONPATH', '')}", "PATH": path}  # fmt: skip


class Job:
    """The script, submitted from a folder of its own."""

    def __init__(
        self, made: Slurm, folder: Path, data: Path, *words: str, steps: int
    ) -> None:
        self.made, self.folder = made, folder
        self.recipe = [*RECIPE, f"train.steps={steps}"]
        given = {"SEGPIPE_ROOT": str(folder), "SEGPIPE_DATA": str(data), **variables()}
        self.number = made.submit(
            *SMALL, *words, str(SCRIPT), *self.recipe, cwd=folder, **given
        )

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "camvid-16gpu"

    def log(self) -> str:
        return (self.folder / f"segpipe-{self.number}.log").read_text()

    def state(self) -> str:
        return self.made.job(self.number)["JobState"]

    def reaches(self, step: int) -> None:
        assert wait_for(lambda: steps_done(self.run) >= step, 150), self.log()

    def ends(self, state: str, seconds: float = 400) -> dict[str, str]:
        over = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        job = self.made.wait(self.number, *over, seconds=seconds)
        assert job["JobState"] == state, f"{job}\n{self.log()}"
        return job


@pytest.fixture
def submit(cluster: Slurm, camvid: Path, tmp_path: Path) -> Callable[..., Job]:
    def submit(*words: str, steps: int) -> Job:
        return Job(cluster, tmp_path, camvid, *words, steps=steps)

    return submit


@pytest.fixture(scope="module")
def undisturbed(
    camvid: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """Digests of the run in one process without Slurm."""
    root = tmp_path_factory.mktemp("alone")

    def alone(steps: int) -> dict[str, Any]:
        run = root / f"steps{steps}"
        if not run.exists():
            words = [
                sys.executable, "-m", "segpipe", "train", "data=camvid", f"data.root={camvid}", *RECIPE,
                f"train.steps={steps}", f"run.root={root}", f"run.name={run.name}", "compute.nproc=1",
            ]  # fmt: skip
            subprocess.run(words, check=True, cwd=scheduler.ROOT)
        return digests(run)

    return alone


@pytest.mark.parametrize("number", [1, 0], ids=["the other", "that of the script"])
def test_a_machine_that_loses_its_power(
    submit: Callable[..., Job],
    cluster: Slurm,
    undisturbed: Callable[[int], Any],
    number: int,
) -> None:
    """The job goes back into the queue and continues when both machines are there again."""
    job = submit(steps=60)
    job.reaches(12)
    cluster.power_off(number)
    lost = time.monotonic()
    try:
        assert wait_for(lambda: job.state() != "RUNNING", 200), job.log()
        print(f"{job.state()} after {time.monotonic() - lost:.0f} s")
        # Slurm has messages to the dead step that it repeats for half a minute; they would reach its successor.
        time.sleep(40)
    finally:
        cluster.power_on(number)
    told = job.ends("COMPLETED")
    assert int(told["Restarts"]) >= 1
    assert digests(job.run) == undisturbed(60)


def test_a_rank_that_is_killed(
    submit: Callable[..., Job], cluster: Slurm, undisturbed: Callable[[int], Any]
) -> None:
    """The machines are well, so Slurm has no reason to repeat the job: the script does, once per lost rank."""
    job = submit(steps=60)
    job.reaches(12)
    for process in cluster.made.machines[1].ranks():
        process.kill()
    told = job.ends("COMPLETED")
    assert int(told["Restarts"]) == 1
    assert digests(job.run) == undisturbed(60)


def test_an_error_of_the_run_is_not_repeated(submit: Callable[..., Job]) -> None:
    job = submit(steps=0)
    assert int(job.ends("FAILED")["Restarts"]) == 0
    assert "train.steps" in job.log()


def test_the_time_limit(
    submit: Callable[..., Job], undisturbed: Callable[[int], Any]
) -> None:
    """USR1 before the limit: saved, requeued, continued, as often as it takes."""
    job = submit("--time=2", "--signal=B:USR1@75", steps=400)
    told = job.ends("COMPLETED", 580)
    assert int(told["Restarts"]) >= 1
    said = job.log()
    assert said.count("saving, then requeue") == int(told["Restarts"])
    assert "TIME LIMIT" not in said
    assert digests(job.run) == undisturbed(400)


def test_scancel(submit: Callable[..., Job]) -> None:
    """The run saves within the grace time, and stays cancelled."""
    job = submit("--signal=B:USR1@300", steps=4000)
    job.reaches(7)
    job.made.call("scancel", job.number)
    job.ends("CANCELLED")
    assert wait_for(lambda: not (job.run / "run.lock").exists(), 60), job.log()
    last = read_metrics(job.run / FILE_NAME)[-1]["step"]
    assert load(job.run / "last.pt")["step"] == last, job.log()


def test_preemption(submit: Callable[..., Job], cluster: Slurm, undisturbed: Callable[[int], Any]) -> None:  # fmt: skip
    """A job of more weight takes the machines: saved within the grace time, requeued, continued."""
    job = submit(steps=150)
    job.reaches(12)
    urgent = cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 3")  # fmt: skip
    assert wait_for(lambda: job.state() != "RUNNING", 100)
    cluster.wait(urgent, "COMPLETED")
    told = job.ends("COMPLETED")
    assert int(told["Restarts"]) == 1
    assert "continues at step" in job.log() or "resum" in job.log(), job.log()
    assert digests(job.run) == undisturbed(150)


def test_a_sweep_as_an_array(cluster: Slurm, camvid: Path, tmp_path: Path) -> None:
    """The lines of docs/cluster.md, with four seeds at once."""
    page = (scheduler.ROOT / "docs" / "cluster.md").read_text()
    line = next(one for one in page.splitlines() if "SLURM_ARRAY_TASK_ID" in one)
    line = line.replace("/scratch/camvid", str(camvid)).replace("experiment=camvid_gpu", "data=camvid")  # fmt: skip
    text = " ".join(["#!/bin/bash\n#SBATCH --array=0-3\n", line, *RECIPE, "train.steps=4"])  # fmt: skip
    (tmp_path / "sweep.sbatch").write_text(text)
    number = cluster.submit("sweep.sbatch", cwd=tmp_path, **variables())
    assert wait_for(lambda: not cluster.call("squeue", "--noheader", f"--job={number}"), 300)  # fmt: skip
    logs = [path.read_text() for path in tmp_path.glob("slurm-*.out")]
    results = list((tmp_path / "runs").glob("*/result.json"))
    assert len(results) == 4, logs


def test_a_sweep_by_submitit(cluster: Slurm, camvid: Path, tmp_path: Path) -> None:
    """hydra/launcher=submitit_slurm: each job on a node of its own, and the table at the end."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [
        sys.executable, "-m", "segpipe", "train", "-m", "seed=1,2", "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=normal", "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=10",
        "hydra.launcher.mem_gb=null", "data=camvid", f"data.root={camvid}", *RECIPE, "train.steps=4",
    ]  # fmt: skip
    done = cluster.run(*words, cwd=tmp_path, **variables())
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2, done.stdout
