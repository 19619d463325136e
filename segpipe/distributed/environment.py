"""The environment variables that a launcher such as torchrun sets; imports nothing heavy."""

import os
import time

from segpipe.errors import ConfigError

LOOPBACK = "127.0.0.1"
LINGER_S = 5.0  # a launcher checks its processes every 0.1 s
LAUNCHER = (
    "Start with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
    "or unset them to train without it."
)


def world_size() -> int | None:
    """WORLD_SIZE if a launcher started this process, else None.

    Raises ConfigError when the launcher's variables are incomplete or not valid numbers.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    size = _number("WORLD_SIZE", low=1)
    number = _number("RANK")
    if size == 1 and "MASTER_ADDR" not in os.environ:
        return None
    if number >= size:
        raise ConfigError(f"RANK = {number}, but WORLD_SIZE = {size}. {LAUNCHER}")
    for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 else ():
        if name not in os.environ:
            raise ConfigError(f"{name} is not set, but WORLD_SIZE = {size}. {LAUNCHER}")
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
    """Raise ConfigError, with the command to use, in one of several SLURM or MPI tasks without a launcher.

    Each task would train the whole run on its own.
    """
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        tasks = os.environ.get(name, "")
        if tasks.isdecimal() and int(tasks) > 1 and not under_launcher():
            raise ConfigError(
                f"{name} = {tasks}, but RANK, WORLD_SIZE and MASTER_ADDR are not set: {tasks} tasks would each train "
                f"the whole run. Use one task per machine. On one machine: srun --ntasks=1 segpipe train ... (it "
                f"starts a process per GPU, or compute.nproc of them). On several: srun --ntasks-per-node=1 torchrun "
                f"--nnodes=$SLURM_NNODES --nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 "
                f"-m segpipe train ..."
            )


def rank() -> int:
    """RANK, or 0."""
    return _number("RANK") if under_launcher() else 0


def local_rank() -> int:
    """LOCAL_RANK, or 0."""
    return _number("LOCAL_RANK") if under_launcher() else 0


def local_world_size() -> int:
    """Number of processes on this machine: LOCAL_WORLD_SIZE, or 1."""
    size = world_size()
    return 1 if size is None else _number("LOCAL_WORLD_SIZE", size, low=1)


def enter_rank(number: int, size: int, port: int) -> None:
    """Make this process a rank of a single-machine run whose parent process holds the store."""
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def on_loopback() -> bool:
    """Whether all ranks must be on this machine, because MASTER_ADDR is its loopback."""
    return os.environ.get("MASTER_ADDR") in ("localhost", LOOPBACK)


def job_attempt() -> tuple[str, list[int]]:
    """The scheduler's or torchrun's job id of this process, and its attempt; a later attempt compares greater.

    The id is empty if neither gives one.
    """
    launcher = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    job = os.environ.get("SLURM_JOB_ID") or launcher.removeprefix("none")
    counts = "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"
    # A script may set one to nothing.
    return job, [_number(name) if os.environ.get(name) else 0 for name in counts]


def wait_to_be_ended() -> None:
    """Wait, so that the launcher reports the rank that failed first: it ends all processes as soon as one ends."""
    time.sleep(LINGER_S)
