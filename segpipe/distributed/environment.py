"""The environment variables that a launcher such as torchrun sets; imports nothing heavy."""

from __future__ import annotations

import os
import time

from segpipe.errors import ConfigError

LOOPBACK = "127.0.0.1"
LINGER_S = 5.0  # a launcher checks its processes every 0.1 s
LAUNCHER = (
    "Start with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
    "or unset these to train without."
)


def world_size() -> int | None:
    """WORLD_SIZE when a launcher started this process, else None.

    Raises ConfigError for variables that no launcher sets so: a part of them, or no number.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and _number(
            "WORLD_SIZE", low=1
        ) > 1:
            raise ConfigError(
                f"MASTER_ADDR is not set, but WORLD_SIZE = {os.environ['WORLD_SIZE']}. {LAUNCHER}"
            )
        return None
    size, place = _number("WORLD_SIZE", low=1), _number("RANK")
    if size == 1 and place:
        raise ConfigError(
            f"RANK = {place}, but WORLD_SIZE = 1 needs RANK = 0. {LAUNCHER}"
        )
    if size > 1 and "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"MASTER_PORT is not set, but WORLD_SIZE = {size}. {LAUNCHER}"
        )
    return size


def _number(name: str, default: int = 0, low: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text) >= low):
        raise ConfigError(
            f"{name} = {text!r}, but a whole number from {low} was needed. {LAUNCHER}"
        )
    return int(text)


def under_launcher() -> bool:
    """Whether a launcher started this process."""
    return world_size() is not None


def check_tasks() -> None:
    """Refuse to be one of several SLURM or MPI tasks without a launcher: each would train the whole run on its own.

    Raises ConfigError with the command to use.
    """
    slurm = (
        "SLURM_STEP_NUM_TASKS"
        if os.environ.get("SLURM_STEP_NUM_TASKS")
        else "SLURM_NTASKS"
    )
    counts = {
        name: os.environ.get(name, "")
        for name in (slurm, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    }
    several = {
        name: tasks
        for name, tasks in counts.items()
        if tasks.isdecimal() and int(tasks) > 1
    }
    if under_launcher() or not several:
        return
    name, tasks = next(iter(several.items()))
    raise ConfigError(
        f"{name} = {tasks}, but RANK, WORLD_SIZE and MASTER_ADDR are not set: {tasks} tasks would each train the "
        f"whole run. Use one task per machine. On one machine: srun --ntasks=1 segpipe train ... (it starts a process "
        f"per GPU, or compute.nproc of them). On several: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
        f"--nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 -m segpipe train ..."
    )


def rank() -> int:
    """RANK, or 0."""
    return _number("RANK") if under_launcher() else 0


def local_rank() -> int:
    """LOCAL_RANK, or 0."""
    return _number("LOCAL_RANK") if under_launcher() else 0


def local_world_size() -> int:
    """LOCAL_WORLD_SIZE, or 1: processes of this machine."""
    return (
        _number("LOCAL_WORLD_SIZE", world_size() or 1, low=1) if under_launcher() else 1
    )


def enter_rank(number: int, size: int, port: int) -> None:
    """Be a rank of a run on this machine alone, whose parent holds the store."""
    variables = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})


def on_loopback() -> bool:
    """Whether all ranks are on this machine, because their MASTER_ADDR is its loopback."""
    return os.environ.get("MASTER_ADDR") in ("localhost", LOOPBACK)


def wait_to_be_ended() -> None:
    """Wait, so that the launcher reports the rank that failed first: it ends all processes when one has ended."""
    time.sleep(LINGER_S)
