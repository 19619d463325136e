"""The processes of a replay: this one, or workers under torch's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from segpipe import plugins
from segpipe.audit.task import Report, Task
from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.errors import CollectiveError, DivergenceError, SegpipeError
from segpipe.settings.config import config_hash

ROOT = Path(__file__).resolve().parents[2]
ERROR = "error.txt"


def run_task(task: Task, *, nproc: int, report: Report = lambda done: None) -> None:
    """Do the task in this process or in `nproc` others.

    Raises what `replay` raises. From other processes, an error of segpipe comes as a DivergenceError with its message,
    and CollectiveError says that a process ended without one.
    """
    if nproc > 1:
        _launch(task, nproc, report)
        return
    compute = task.config.compute
    flags.set_environment(compute.threads, compute.mode)
    from segpipe.audit.replay import replay
    from segpipe.distributed.group import Group, choose_device

    replay(task, Group(0, 0, 1, choose_device(compute.device, 0)), report)


def _launch(task: Task, nproc: int, report: Report) -> None:
    """Start the workers; rank 0 prints its progress, and a rank that fails leaves a file with its error."""
    for key, plugin in task.config.import_paths:
        plugins.check_place(key, plugin)
    with tempfile.TemporaryDirectory(prefix="segpipe-audit-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(asdict(task)))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={nproc}",
        ]
        command += ["-m", "segpipe.audit.worker", str(file)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {
            "OMP_NUM_THREADS": str(task.config.compute.threads),
            **os.environ,
            "PYTHONPATH": path,
        }
        with (Path(folder) / "stderr.txt").open("w+") as noise:
            with subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=noise, text=True
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("replayed "):
                        report(int(line.split()[1]))
            if process.returncode:
                noise.seek(0)
                raise _failure(Path(folder), noise.read())


def _failure(folder: Path, noise: str) -> SegpipeError:
    """The error of the first rank that failed by itself; without one, the end of what the processes printed."""
    errors = [path.read_text() for path in sorted(folder.glob(f"0.*{ERROR}"))]
    if errors:
        return DivergenceError(errors[0])
    return CollectiveError(
        f"a process of the replay ended: {' | '.join(noise.splitlines()[-6:])}"
    )


def work(file: Path) -> int:
    """One worker: do the task in `file`; returns the exit code. The message of an error is left beside it."""
    task = Task.read(json.loads(file.read_text()))
    plugins.trust(
        path for _, path in task.config.import_paths
    )  # `_launch` has checked them
    compute = task.config.compute
    flags.set_environment(
        environment.local_world_size() * compute.threads, compute.mode
    )
    from segpipe.audit.replay import replay
    from segpipe.distributed import group as processes

    flags.apply(
        compute.threads, compute.mode
    )  # before the group: NCCL reads switches when it is made
    rank = environment.rank()
    try:
        group = processes.join(compute, {"configuration": config_hash(task.config)})
        try:
            replay(task, group, _print_progress if group.is_main else lambda done: None)
            return 0
        finally:
            processes.leave(group)
    except SegpipeError as error:
        echo = isinstance(error, CollectiveError)  # of the error on another rank
        (file.parent / f"{int(echo)}.rank{rank:02d}.{ERROR}").write_text(str(error))
        return error.exit_code


def _print_progress(done: int) -> None:
    print(f"replayed {done}", flush=True)


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
