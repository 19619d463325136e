"""docs/cluster.md, examples/cluster and elastic: their commands are valid; two machines compute the bits of one."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from examples.elastic.demo import Demo
from runs import ROOT, result, torch_restored
from segpipe.cli.main import main as segpipe
from segpipe.data.loader import part_bytes
from segpipe.settings.compose import compose
from segpipe.settings.config import check

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples" / "cluster"
SCRIPT = EXAMPLES / "train.sbatch"
PAGE = (ROOT / "docs" / "cluster.md").read_text()


def commands(text: str) -> list[list[str]]:
    """Words of every command in the bash blocks of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        shlex.split(line, comments=True)
        for line in lines
        if line.strip() and not line.startswith("#")
    ]


def overrides(words: list[str]) -> list[str]:
    """What follows `segpipe train`, with a value for each shell variable."""
    place = next(
        place
        for place in range(1, len(words))
        if words[place - 1 : place + 1] == ["segpipe", "train"]
    )
    return [
        re.sub(r"\$\{?\w+\}?", "1", word)
        for word in words[place + 1 :]
        if not word.startswith("-")
    ]


def options(words: list[str]) -> dict[str, str]:
    return dict(
        word.removeprefix("--").split("=", 1)
        for word in words
        if word.startswith("--") and "=" in word
    )


def manifests() -> dict[str, Any]:
    return {
        each["kind"]: each
        for each in yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
    }


def script_overrides() -> list[str]:
    listed = SCRIPT.read_text().partition("overrides=(")[2].partition("\n)")[0]
    words = [word.replace("$name", "camvid-16gpu") for word in shlex.split(listed)]
    return [re.sub(r"\$\{?\w+\}?", "/somewhere", word) for word in words]


TRAINING = [
    words for words in commands(PAGE) if "segpipe" in words and "train" in words
]


@pytest.mark.parametrize("words", TRAINING, ids=lambda words: words[0])
def test_commands_of_the_page_are_valid(words: list[str]) -> None:
    assert len(TRAINING) >= 3
    given = options(words)
    size = int(given.get("nnodes", "1").split(":")[-1]) * int(
        given.get("nproc-per-node", 1)
    )
    config = compose(overrides(words))
    check(config, world_size=size)
    assert config.data.root.startswith("/scratch")


def test_each_task_of_the_array_has_a_run_of_its_own() -> None:
    task = "seed=$SLURM_ARRAY_TASK_ID"
    line = next(words for words in TRAINING if task in words)
    names = {compose([*overrides(line), f"seed={seed}"]).run.name for seed in range(8)}
    assert len(names) == 8


def test_torchrun_knows_the_options_that_are_used() -> None:
    from torch.distributed.run import get_args_parser

    job = manifests()["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]
    script = (
        SCRIPT.read_text()
        .partition("torchrun")[2]
        .partition("-m segpipe")[0]
        .replace("\\\n", " ")
    )
    used = [
        words[: words.index("-m")] for words in [*TRAINING, job] if "-m" in words
    ] + [shlex.split(script)]
    known = {
        name for action in get_args_parser()._actions for name in action.option_strings
    }
    for words in used:
        names = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert len(names) > 3
        assert names <= known, names - known


def test_the_script_for_slurm_is_sound() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    asked = options(re.findall(r"^#SBATCH (--\S+)", SCRIPT.read_text(), re.M))
    size = int(asked["nodes"]) * int(asked["gpus-per-node"])
    assert asked["ntasks-per-node"] == "1"
    assert "#SBATCH --requeue" in SCRIPT.read_text()
    assert int(asked["signal"].removeprefix("B:USR1@")) > int(
        re.findall(r"--shutdown-timeout=(\d+)", SCRIPT.read_text())[0]
    )
    config = compose(script_overrides())
    check(config, world_size=size)
    assert config.run.exists == "resume"


@pytest.mark.parametrize("code", [130, 0])
def test_the_script_saves_and_requeues_before_the_time_limit(
    tmp_path: Path, code: int
) -> None:
    """With stand-ins for Slurm: `srun` trains until it gets TERM, which `scancel` sends."""
    bodies = {
        "srun": f"trap 'exit {code}' TERM; echo $$ > pid; echo \"$@\" > started; while :; do sleep 0.05; done",
        "scancel": "echo $@ > cancelled; kill -TERM $(cat pid)",
        "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo $@ > requeued; fi',
    }
    for name, body in bodies.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
    }
    env = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = subprocess.Popen(
        ["bash", str(SCRIPT)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    script.send_signal(signal.SIGUSR1)
    said, _ = script.communicate(timeout=60)
    assert script.returncode == 0
    assert "saving, then requeue" in said
    words = (tmp_path / "started").read_text().split()
    assert options(words)["rdzv-endpoint"] == "node7:20042"
    check(compose(overrides(words)), world_size=16)
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 42\n"
    assert (tmp_path / "requeued").exists() is (
        code != 0
    )  # a run that was just finished is not started again


def test_the_job_for_kubernetes_fits_together() -> None:
    service, job = manifests()["Service"], manifests()["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    given = options(container["args"])
    assert spec["completionMode"] == "Indexed"
    assert f"1:{spec['completions']}" == f"1:{spec['parallelism']}" == given["nnodes"]
    assert (
        int(given["nproc-per-node"])
        == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    host, port = given["rdzv-endpoint"].split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert container["ports"][0]["containerPort"] == int(port)
    assert pod["terminationGracePeriodSeconds"] > int(given["shutdown-timeout"])
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    shm = next(
        volume["emptyDir"]
        for volume in pod["volumes"]
        if mounted[volume["name"]] == "/dev/shm"
    )
    config = compose(
        overrides(["segpipe", *container["args"][container["args"].index("train") :]])
    )
    check(config, world_size=16)
    assert (pod["restartPolicy"], config.run.exists) == ("OnFailure", "resume")
    assert shm["medium"] == "Memory"
    assert (
        shared_memory(8, config.data.workers, config.data.prefetch, 4, 720, 960)
        < int(shm["sizeLimit"][:-2]) * 2**30
    )


def shared_memory(
    processes: int, workers: int, prefetch: int, samples: int, height: int, width: int
) -> int:
    return processes * workers * prefetch * sum(part_bytes((samples, height, width)))


def test_the_page_gives_the_formula_of_the_loader() -> None:
    assert "samples_per_shard * height * width * 4 bytes" in PAGE
    assert f"720x960 are {shared_memory(8, 6, 4, 4, 720, 960) / 2**30:.1f} GiB" in PAGE


# Images from a disk that takes its time: a machine needs seconds to come back, in which the other is not to come to the
# end, nor to do the work of a hundred updates.
SLOW = """
import os, time
from multiprocessing import parent_process
import numpy as np


class Images:
    classes = ("floor", "crate")
    palette = ((0, 0, 0), (200, 100, 50))

    def __init__(self, root, split):
        self.num = {"train": 16, "val": 2}[split]

    def __len__(self):
        return self.num

    def name(self, index):
        return str(index)

    def read(self, index):
        if parent_process():  # a worker of the loader
            time.sleep(float(os.environ.get("PAUSE", "0")))
        noise = np.random.Generator(np.random.Philox(index))
        return noise.integers(0, 256, (64, 96, 3), np.uint8), noise.integers(0, 2, (64, 96), np.uint8)
"""
CHANGES = (
    "data=folder", "data.name=slow:Images", "data.root=.", "augment.crop_size=[64,96]", "checkpoint.every=2",
)  # fmt: skip


class Story(Demo):
    """The demo, whose undisturbed training runs in this process."""

    def _alone(self) -> Callable[[], bool]:
        with torch_restored():
            code = segpipe(
                ["train", *self._settings("one"), "compute.nproc=1", "data.workers=0"]
            )
        return lambda: code == 0


def test_a_machine_is_lost_and_comes_back_with_the_bits_of_one_process(
    project: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two launchers of one host that meet as two machines would, over c10d, with one process each."""
    project("slow.py", SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path.cwd()), str(ROOT))))
    monkeypatch.setenv("PAUSE", "0.6")
    folder = tmp_path / "runs"
    demo = Story(folder, Console(), steps=24, after=2, changes=CHANGES)
    assert demo.story(), capsys.readouterr().out
    assert result(folder / "two")["world_size"] == 2
