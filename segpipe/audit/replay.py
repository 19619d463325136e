"""Updates of a run, trained again from a checkpoint into a folder of their own: the same step, the same ledger.

`python -m segpipe.audit.replay TASK` is one of several processes that torch's launcher starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from segpipe import plugins
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.distributed import group as processes
from segpipe.distributed.agreement import common_fingerprint
from segpipe.distributed.group import Group
from segpipe.errors import CollectiveError, DivergenceError, SegpipeError
from segpipe.ledger.digest import tensor_digests
from segpipe.losses.total import backend
from segpipe.settings.config import Config, config_hash, from_mapping, to_mapping
from segpipe.train import checkpoint, state
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import Recorder
from segpipe.train.start import read_start
from segpipe.train.step import TrainStep, train_step
from segpipe.train.teacher import teacher_of

ROOT = Path(__file__).resolve().parents[2]
ERROR = "error.txt"
STATE = "state.json"  # in the folder of a replay: digests of all tensors at its end
PARTS = ("model", "ema", "optimizer")  # of a checkpoint, whose tensors are compared

Report = Callable[[int], None]  # updates done


@dataclass(frozen=True)
class Task:
    """Updates `first` to `last - 1` of a run."""

    config: Config  # of the run, with a folder of its own
    checkpoint: str  # the file to start from; empty: from the seed
    first: int
    last: int


def in_folder(
    config: Config, folder: Path, *, mode: str = "", any_environment: bool = False
) -> Config:
    """Configuration for a replay of a run into `folder`; settings that affect numbers are unchanged."""
    values = to_mapping(config)
    values["run"] |= {
        "root": str(folder.parent),
        "name": folder.name,
        "exists": "resume",
        "allow_fingerprint_change": any_environment,
    }
    values["compute"] |= {
        "ledger": True,
        "nproc": "auto",
        "mode": mode or config.compute.mode,
    }
    return from_mapping(values)


def run_task(task: Task, *, nproc: int, report: Report) -> None:
    """Replay in this process, or in `nproc` others, which report at the end only.

    Raises what `replay` raises. From other processes, an error of segpipe comes as a DivergenceError with its message,
    and CollectiveError says that a process ended without one.
    """
    compute = task.config.compute
    flags.set_environment(compute.threads * nproc, compute.mode)
    if nproc > 1:
        _launch(task, nproc)
        report(task.last)
    else:
        device = processes.choose_device(compute.device, 0)
        replay(task, Group(0, 0, 1, device), report)


def _launch(task: Task, nproc: int) -> None:
    """Start the processes; one that fails leaves a file with its error."""
    for key, plugin in task.config.import_paths:
        plugins.check_place(key, plugin)
    with tempfile.TemporaryDirectory(prefix="segpipe-audit-") as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(asdict(task)))
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node={nproc}"
        command = [sys.executable, *launcher.split(), "-m", __name__, str(file)]
        threads = str(task.config.compute.threads)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ended = subprocess.run(
            command,
            env={
                "OMP_NUM_THREADS": threads,
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        errors = sorted(file.parent.glob(f"*{ERROR}"))
        if errors:
            raise DivergenceError(errors[0].read_text())
        if ended.returncode:
            last_lines = " | ".join(ended.stderr.splitlines()[-6:])
            raise CollectiveError(f"a process of the replay ended: {last_lines}")


def work(file: Path) -> int:
    """One process of several; returns the exit code. The message of an error is left beside `file`."""
    values = json.loads(file.read_text())
    task = Task(**{**values, "config": from_mapping(values["config"])})
    # `_launch` has checked their places.
    plugins.trust(path for _, path in task.config.import_paths)
    compute = task.config.compute
    # Before the group: NCCL reads switches when it is made.
    flags.apply(compute.threads, compute.mode)
    try:
        group = processes.join(compute, {"configuration": config_hash(task.config)})
        try:
            replay(task, group, lambda done: None)
        finally:
            processes.leave(group)
    except SegpipeError as error:
        if not isinstance(error, CollectiveError):  # an echo of another rank's error
            name = f"rank{environment.rank():02d}.{ERROR}"
            file.with_name(name).write_text(str(error))
        return error.exit_code
    return 0


def replay(task: Task, group: Group, report: Report) -> None:
    """Write the ledger of updates `task.first` to `task.last - 1`, and digests of the state after them.

    Nothing is validated, exported or saved. `report(done)` is called after each update. Raises CheckpointError when
    the checkpoint is truncated, altered, or of another recipe or environment, and DataError when a sample cannot be
    read.
    """
    config = task.config
    flags.apply(config.compute.threads, config.compute.mode)
    samples = open_samples(config.data, "train", config.seed, packed=False)
    start = None if task.checkpoint else read_start(config, checkpoint.load)
    current = state.build_state(config, samples.classes, group.device, start)
    current.teacher = teacher_of(config, group.device)
    loss_backend = backend(config.loss, group.device.type)
    fingerprint, _ = common_fingerprint(config, group, loss_backend)
    if task.checkpoint:
        path = Path(task.checkpoint)
        checkpoint.restore(path, current, config, samples.classes, fingerprint)
    assert current.step == task.first, (current.step, task)
    counts = counted(config, group, samples)
    updates = range(task.first, task.last)
    own = group.own_shards(config.compute.shards)
    recorder = Recorder(config, group, current, samples, fingerprint)
    stream = shard_stream(config, group, samples, updates, counts)
    with contextlib.closing(recorder), contextlib.closing(stream):
        step = TrainStep(config, recorder, loss_weights(config, samples, counts))
        for _ in updates:
            train_step(step, [next(stream) for _ in own])
            report(current.step)
    if group.is_main:
        content = {
            "model": current.model.state_dict(),
            "ema": current.ema.model.state_dict(),
            "optimizer": current.optimizer.state_dict(),
        }
        (config.run_dir / STATE).write_text(json.dumps(tensor_digests(content)))


def first_difference(path: Path, folder: Path) -> str:
    """Name of the first tensor of a checkpoint that differs from the end of the replay in `folder`; empty if none does.

    Raises CheckpointError when the file cannot be read.
    """
    saved = checkpoint.load(path)
    found = tensor_digests({part: saved[part] for part in PARTS})
    wanted = dict(json.loads((folder / STATE).read_bytes()))
    names = [
        name for name in {**wanted, **found} if found.get(name) != wanted.get(name)
    ]
    return names[0] if names else ""


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
