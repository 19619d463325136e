"""What is to be trained again, and the processes that do it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from segpipe.determinism import flags
from segpipe.errors import CollectiveError, DivergenceError, SegpipeError
from segpipe.settings.config import Config, from_mapping, to_mapping

ROOT = Path(__file__).resolve().parents[2]
ERROR = "error.txt"
Report = Callable[[int, int], None]  # number of the task, updates done


@dataclass(frozen=True)
class Task:
    """Updates `first` to `last - 1` of a run; with none, only its state is written into a ledger."""

    config: Config  # of the run, with a folder of its own
    checkpoint: str  # the file to start from; empty: from the seed
    first: int
    last: int
    traced: int = -1  # the update in which every module is traced

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Task:
        """From what `asdict` gave."""
        return cls(**{**values, "config": from_mapping(values["config"])})


def in_folder(config: Config, folder: Path, *, mode: str = "", any_environment: bool = False) -> Config:
    """The configuration of a run for a replay into `folder`; no setting that reaches a number is another."""
    values = to_mapping(config)
    values["run"] |= {"root": str(folder.parent), "name": folder.name, "exists": "resume"}
    values["run"]["allow_fingerprint_change"] = any_environment
    values["compute"] |= {"ledger": True, "nproc": "auto"}
    if mode:
        values["compute"]["mode"] = mode
    return from_mapping(values)


def run_tasks(tasks: Sequence[Task], *, nproc: int, report: Report = lambda number, done: None) -> None:
    """Do the tasks one after another, in this process or in `nproc` others.

    Raises what `replay` raises; from other processes its words come as a DivergenceError, and CollectiveError where
    they ended without any.
    """
    if nproc > 1:
        _run_apart(tasks, nproc, report)
        return
    compute = tasks[0].config.compute
    flags.set_environment(compute.threads, compute.mode)
    from segpipe.audit.replay import replay
    from segpipe.distributed.group import Group, choose_device

    group = Group(0, 0, 1, choose_device(compute.device, 0))
    for number, task in enumerate(tasks):
        replay(task, group, lambda done, number=number: report(number, done))  # type: ignore[misc]


def _run_apart(tasks: Sequence[Task], nproc: int, report: Report) -> None:
    """Under torch's launcher; rank 0 says what it has done in lines, and a rank that fails leaves a file."""
    with tempfile.TemporaryDirectory(prefix="segpipe-audit-") as folder:
        listed = Path(folder) / "tasks.json"
        listed.write_text(json.dumps([asdict(task) for task in tasks]))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command += ["-m", "segpipe.audit.worker", str(listed)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        threads = str(tasks[0].config.compute.threads)
        with (Path(folder) / "stderr.txt").open("w+") as noise:
            environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=noise, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("replayed "):
                        number, done = map(int, line.split()[1:])
                        report(number, done)
            if process.returncode:
                noise.seek(0)
                raise _failure(Path(folder), noise.read())


def _failure(folder: Path, noise: str) -> SegpipeError:
    """The words of the first rank that failed by an error of ours; else that the processes could not do it."""
    told = [path.read_text() for path in sorted(folder.glob(f"0.*{ERROR}"))]
    if told:
        return DivergenceError(told[0])
    return CollectiveError(f"a process of the replay ended: {' | '.join(noise.split(chr(10))[-6:])}")
