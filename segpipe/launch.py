"""Start the processes of a run: in this one, in children of this one, or as one of those that torchrun started."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from segpipe.config import Config, check
from segpipe.distributed import environment
from segpipe.errors import CheckpointError, ConfigError, Interrupted, NumericsError, SegpipeError
from segpipe.tracking import check_tracking

if TYPE_CHECKING:
    from segpipe.distributed.group import Group

# Raised on all ranks at once, so that one rank's word is enough.
COMMON_ERRORS = (ConfigError, CheckpointError, NumericsError, Interrupted)


def launch(config: Config, *, isolated: bool = False) -> int:
    """Train as the configuration says; returns the exit code of the command.

    `isolated` always trains in child processes, so that runs of a sweep share no state.
    """
    if environment.under_launcher():
        return work(config)
    try:
        world_size = _world_size(config)
        _prepare(config, world_size)
    except SegpipeError as error:
        return _tell(error)
    if world_size == 1 and not isolated:
        return work(config, prepared=True)
    return _spawn(config, world_size)


def _world_size(config: Config) -> int:
    """Processes to start: `compute.nproc`, or one per GPU, or one."""
    if config.compute.nproc != "auto":
        number = int(config.compute.nproc)
        if number < 1:
            raise ConfigError(f"compute.nproc = {number}, but auto or at least 1 was needed.")
        return number
    if config.compute.device == "cpu":
        return 1
    import torch

    return max(torch.cuda.device_count(), 1)  # counts through NVML: makes no CUDA context in the parent


def _prepare(config: Config, world_size: int) -> None:
    """Everything that can be checked before the first process starts; then the run's folder."""
    from segpipe.data.samples import verify

    check(config, world_size=world_size)
    check_tracking(config)
    verify(config.data, ["train", config.data.split])
    claim_folder(config)


def claim_folder(config: Config) -> None:
    """Make the run's folder, as `run.exists` says. Raises ConfigError when it already holds a run."""
    folder = config.run_dir
    held = [name for name in ("last.pt", "config.json", "result.json") if (folder / name).exists()]
    if held and config.run.exists == "error":
        what = _progress(folder)
        raise ConfigError(
            f"{folder} already holds {what}. Set run.exists=resume to continue it, run.exists=replace to delete it, or "
            f"choose another run.name."
        )
    if held and config.run.exists == "replace":
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.root = {config.run.root}: {folder} cannot be made: {error.strerror}.") from error


def _progress(folder: Path) -> str:
    from segpipe.checkpoint import load

    try:
        return f"step {load(folder / 'last.pt')['step']}"
    except SegpipeError:
        return "a run without a readable checkpoint"


def _spawn(config: Config, world_size: int) -> int:
    """Run `world_size` children under torch's elastic launcher; this process never touches the GPU."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=f"segpipe-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        elastic_launch(settings, _child)(config)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        known = [code for code in codes if code > 0]  # a negative one is a rank that was ended because of another
        if not known:
            print(f"a training process ended by signal {-codes[0]}; its memory may have run out.", file=sys.stderr)
        return known[0] if known else 1
    except (SignalException, KeyboardInterrupt):
        return Interrupted.exit_code
    return 0


def _child(config: Config) -> None:
    sys.exit(work(config, prepared=True))


def work(config: Config, *, prepared: bool = False) -> int:
    """Train as one process of the run, and on rank 0 write report and export; returns the exit code."""
    from segpipe.determinism import flags

    flags.set_environment()
    from segpipe.distributed import group as processes

    try:
        group = processes.join(config.compute)
        try:
            if not prepared:
                _together(group, lambda: _prepare(config, group.world_size))
            return _train(config, group)
        finally:
            processes.leave()
    except SegpipeError as error:
        return _tell(error, rank=environment.rank())
    except KeyboardInterrupt:
        return Interrupted.exit_code


def _together(group: Group, action: Callable[[], None]) -> None:
    """Do `action` on rank 0; when it fails there, fail with the same error on every rank."""
    found: SegpipeError | None = None
    if group.is_main:
        try:
            action()
        except SegpipeError as error:
            found = error
    found = group.gather((found,))[0][0]
    if found is not None:
        raise found if group.is_main else ConfigError(str(found))


def _train(config: Config, group: Group) -> int:
    from segpipe.distributed import group as processes
    from segpipe.engine import train
    from segpipe.finish import finish

    console = Console()
    run, validation, result = train(config, group, console)
    processes.leave()  # the rest is rank 0's alone; the others need not wait for it
    if group.is_main:
        finish(run, validation, result, console)
    return 0


def _tell(error: SegpipeError, *, rank: int = 0) -> int:
    if rank == 0 or not isinstance(error, COMMON_ERRORS):
        where = f"rank {rank}: " if rank else ""
        Console(stderr=True).print(f"{where}{error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    return error.exit_code
