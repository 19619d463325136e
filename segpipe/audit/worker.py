"""The processes of a replay: this one, or workers under torch's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from segpipe import plugins
from segpipe.audit.task import Report, Task
from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.errors import CollectiveError, DivergenceError, SegpipeError
from segpipe.settings.config import config_hash

ROOT = Path(__file__).resolve().parents[2]
ERROR = "error.txt"


def run_tasks(tasks: Sequence[Task], *, nproc: int, report: Report = lambda number, done: None) -> None:
    """Do the tasks one after another, in this process or in `nproc` others.

    Raises what `replay` raises. From other processes, an error of segpipe comes as a DivergenceError with its message,
    and CollectiveError says that a process ended without one.
    """
    if nproc > 1:
        _launch(tasks, nproc, report)
        return
    compute = tasks[0].config.compute
    flags.set_environment(compute.threads, compute.mode)
    from segpipe.audit.replay import replay
    from segpipe.distributed.group import Group, choose_device

    group = Group(0, 0, 1, choose_device(compute.device, 0))
    for number, task in enumerate(tasks):
        replay(task, group, partial(report, number))


def _launch(tasks: Sequence[Task], nproc: int, report: Report) -> None:
    """Start the workers; rank 0 prints its progress, and a rank that fails leaves a file with its error."""
    for key, plugin in tasks[0].config.import_paths:
        plugins.check_place(key, plugin)
    with tempfile.TemporaryDirectory(prefix="segpipe-audit-") as folder:
        listed = Path(folder) / "tasks.json"
        listed.write_text(json.dumps([asdict(task) for task in tasks]))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command += ["-m", "segpipe.audit.worker", str(listed)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {"OMP_NUM_THREADS": str(tasks[0].config.compute.threads), **os.environ, "PYTHONPATH": path}
        with (Path(folder) / "stderr.txt").open("w+") as noise:
            with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=noise, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("replayed "):
                        number, done = map(int, line.split()[1:])
                        report(number, done)
            if process.returncode:
                noise.seek(0)
                raise _failure(Path(folder), noise.read())


def _failure(folder: Path, noise: str) -> SegpipeError:
    """The error of the first rank that failed by itself; without one, the end of what the processes printed."""
    errors = [path.read_text() for path in sorted(folder.glob(f"0.*{ERROR}"))]
    if errors:
        return DivergenceError(errors[0])
    return CollectiveError(f"a process of the replay ended: {' | '.join(noise.splitlines()[-6:])}")


def work(listed: Path) -> int:
    """One worker: do the listed tasks; returns the exit code. The message of an error is left beside the list."""
    tasks = [Task.read(values) for values in json.loads(listed.read_text())]
    plugins.trust(path for task in tasks for _, path in task.config.import_paths)  # `_launch` has checked them
    config = tasks[0].config
    flags.set_environment(environment.local_world_size() * config.compute.threads, config.compute.mode)
    from segpipe.audit.replay import replay
    from segpipe.distributed import group as processes

    flags.apply(config.compute.threads, config.compute.mode)  # before the group: NCCL reads switches when it is made
    rank = environment.rank()
    try:
        group = processes.join(config.compute, {"configuration": config_hash(config)})
        try:
            for number, task in enumerate(tasks):
                replay(task, group, partial(_print_progress, number) if group.is_main else lambda done: None)
            return 0
        finally:
            processes.leave(group)
    except SegpipeError as error:
        echo = isinstance(error, CollectiveError)  # of the error on another rank
        (listed.parent / f"{int(echo)}.rank{rank:02d}.{ERROR}").write_text(str(error))
        return error.exit_code


def _print_progress(number: int, done: int) -> None:
    print(f"replayed {number} {done}", flush=True)


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
