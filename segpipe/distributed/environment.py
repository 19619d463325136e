"""The environment variables that a launcher such as torchrun sets; imports nothing heavy."""

from __future__ import annotations

import os
import time

from segpipe.errors import ConfigError

LINGER_S = 5.0  # a launcher checks its processes every 0.1 s


def world_size() -> int | None:
    """WORLD_SIZE when a launcher started this process, else None."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else None


def under_launcher() -> bool:
    """Whether a launcher started this process."""
    return world_size() is not None


def check_tasks() -> None:
    """Refuse to be one of several SLURM tasks without a launcher: each would train the whole run on its own.

    Raises ConfigError with the command to use.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1"
    if under_launcher() or not tasks.isdecimal() or int(tasks) <= 1:
        return
    raise ConfigError(
        f"SLURM_NTASKS = {tasks}, but RANK, WORLD_SIZE and MASTER_ADDR are not set: {tasks} tasks would each train the "
        f"whole run. Use one task per machine. On one machine: srun --ntasks=1 segpipe train ... (it starts a process "
        f"per GPU, or compute.nproc of them). On several: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
        f"--nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 -m segpipe train ..."
    )


def rank() -> int:
    """RANK, or 0."""
    return int(os.environ.get("RANK", 0)) if under_launcher() else 0


def local_rank() -> int:
    """LOCAL_RANK, or 0."""
    return int(os.environ.get("LOCAL_RANK", 0)) if under_launcher() else 0


def local_world_size() -> int:
    """LOCAL_WORLD_SIZE, or 1: processes of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size() or 1)) if under_launcher() else 1


def wait_to_be_ended() -> None:
    """Wait, so that the launcher reports the rank that failed first: it ends all processes when one has ended."""
    time.sleep(LINGER_S)
