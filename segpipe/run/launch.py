"""Start the processes of a run: in this one, in children of this one, or as one of those that torchrun started."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.errors import CheckpointError, ConfigError, DivergenceError, Interrupted, NumericsError, SegpipeError
from segpipe.run.folder import claim_folder
from segpipe.run.tracking import check_tracking
from segpipe.settings.config import Config, check, config_hash
from segpipe.train.stop import handlers_kept

if TYPE_CHECKING:
    from segpipe.data.samples import Samples
    from segpipe.distributed.group import Group

# Raised on all ranks at once, so that one rank's word is enough.
COMMON_ERRORS = (ConfigError, CheckpointError, NumericsError, DivergenceError, Interrupted)


def launch(config: Config, *, isolated: bool = False) -> int:
    """Train as the configuration says; returns the exit code of the command.

    `isolated` always trains in child processes, so that runs of a sweep share no state.
    """
    if environment.under_launcher():
        return work(config)
    try:
        if not isolated:  # of a sweep, this process computes nothing
            flags.set_environment(config.compute.threads, config.compute.mode)  # before anything imports torch
        world_size = _world_size(config)
        prepare(config, world_size)
    except SegpipeError as error:
        return _tell(error)
    except KeyboardInterrupt:
        print("stopped before the first step; nothing was written.", file=sys.stderr)
        return Interrupted.exit_code
    if world_size == 1 and not isolated:
        return work(config, prepared=True)
    return _spawn(config, world_size)


def _world_size(config: Config) -> int:
    """Processes to start: `compute.nproc`, or one per GPU, or one."""
    number, device = config.compute.nproc, config.compute.device
    if number != "auto" and (not number.isdecimal() or int(number) < 1):
        raise ConfigError(f"compute.nproc = {number}, but auto or a number of processes from 1 was needed.")
    if device == "cpu" or (device == "auto" and number != "auto"):
        return 1 if number == "auto" else int(number)
    import torch

    gpus = torch.cuda.device_count()  # counts through NVML: makes no CUDA context in the parent
    if device == "cuda" and gpus == 0:
        raise ConfigError("compute.device = cuda, but torch sees no GPU. Set compute.device=cpu, or check the driver.")
    return max(gpus, 1) if number == "auto" else int(number)


def prepare(config: Config, world_size: int) -> None:
    """Everything that can be checked before the first process starts; then the run's folder."""
    from segpipe.data.augment import Augmenter
    from segpipe.data.samples import open_samples, verify
    from segpipe.purity import checker as purity

    check(config, world_size=world_size)
    check_tracking(config)
    verify(config.data, ["train", config.data.split])
    open_samples(config.data, config.data.split, config.seed)
    samples = open_samples(config.data, "train", config.seed)
    _check_crop(config, samples)
    if config.compute.mode != "off" and (left_out := purity.quick(Augmenter(config.augment), samples)):
        Console(stderr=True).print(left_out, markup=False, highlight=False, soft_wrap=True)
    if config.export.enabled and config.export.dir:
        from segpipe.export.artifact.place import check_place

        check_place(Path(config.export.dir))  # now, and not when hours of training are done
    claim_folder(config)


def _check_crop(config: Config, samples: Samples) -> None:
    """A crop that no image can fill, even at the largest scale, is a mistake, not a wish for padding."""
    from segpipe.data.samples import image_sizes

    sizes, largest = image_sizes(samples), config.augment.scale[1]
    height, width = max(size[0] for size in sizes), max(size[1] for size in sizes)
    crop = config.augment.crop_size
    fitting = [min(crop[0], int(height * largest)), min(crop[1], int(width * largest))]
    if crop != fitting:
        raise ConfigError(
            f"augment.crop_size = {crop}, but the training images have at most {height}x{width} pixels (height x width)"
            f" and augment.scale reaches {largest}. Set 'augment.crop_size={fitting}' or smaller."
        )


def _spawn(config: Config, world_size: int) -> int:
    """Run `world_size` children under torch's elastic launcher; this process never touches the GPU."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the ranks say what happened; the launcher would add two tracebacks of its own
    try:
        with handlers_kept(), _environment_of_children(config, world_size):
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
            elastic_launch(settings, _child)(config)
    except ConfigError as error:
        return _tell(error)
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        if code < 0:
            print(f"a training process was ended by signal {-code}; its memory may have run out.", file=sys.stderr)
        return max(code, 1)
    except (SignalException, KeyboardInterrupt):
        return Interrupted.exit_code
    finally:
        logging.disable(logging.NOTSET)
    return 0


@contextlib.contextmanager
def _environment_of_children(config: Config, world_size: int) -> Iterator[None]:
    """Set what the children must find when they start, which is before they can set it; the next job of a sweep may
    need something else."""
    before = set(os.environ)
    flags.set_environment(world_size * config.compute.threads, config.compute.mode)
    # After Ctrl-C they end a step or a validation first; whoever takes longer than this is killed without a checkpoint.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(config.compute.timeout_s)))
    added = os.environ.keys() - before
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _child(config: Config) -> None:
    try:
        code = work(config, prepared=True)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def work(config: Config, *, prepared: bool = False) -> int:
    """Train as one process of the run, and on rank 0 write report and export; returns the exit code."""
    try:
        flags.set_environment(environment.local_world_size() * config.compute.threads, config.compute.mode)
        from segpipe.distributed import group as processes

        flags.apply(config.compute.threads, config.compute.mode)  # before the group: NCCL reads switches then
        group = processes.join(config.compute, {"configuration": config_hash(config)})
        try:
            if not prepared:
                _check_launcher(config)
                _together(group, lambda: prepare(config, group.world_size))
            return _train(config, group)
        except Exception as error:
            if not isinstance(error, COMMON_ERRORS):
                group.contract.fail(error, lost=isinstance(error, RuntimeError) and _lost_another_rank(error))
            raise
        finally:
            processes.leave(group)
    except SegpipeError as error:
        return _tell(error, rank=environment.rank())
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _tell(CheckpointError(f"{error.filename or config.run_dir} could not be written: {error.strerror}."))
    except RuntimeError as error:
        if not _lost_another_rank(error):
            raise
        return _outlive(error)


def _check_launcher(config: Config) -> None:
    """The launcher decides how many processes there are; another number in the command would be ignored."""
    started = environment.local_world_size()
    if config.compute.nproc not in ("auto", str(started)):
        raise ConfigError(
            f"compute.nproc = {config.compute.nproc}, but the launcher started {started} processes on this machine. "
            f"Leave compute.nproc out, or start without the launcher."
        )


def _lost_another_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone; gloo says so in plain RuntimeErrors."""
    from torch.distributed import DistError

    text = str(error)
    return isinstance(error, DistError) or "gloo/transport" in text or "Connection closed by peer" in text


def _outlive(error: RuntimeError) -> int:
    """Say one line, then wait to be ended, so that the launcher reports the rank that failed first and not this one."""
    reason = str(error).strip().splitlines()[0]
    print(f"rank {environment.rank()}: a collective failed, because another rank ended: {reason}", file=sys.stderr)
    environment.wait_to_be_ended()
    return 1


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
    from segpipe.run.finish import finish
    from segpipe.train.engine import train

    console = Console()
    run, validation, result = train(config, group, console, git=_commit() if group.is_main else None)
    processes.leave(group)  # the rest is rank 0's alone; the others need not wait for it
    if group.is_main:
        finish(run, validation, result, console)
    return 0


def _commit() -> dict[str, object] | None:
    """What is trained with, as result.json keeps it; asked at the start, since the checkout may move on meanwhile."""
    from segpipe.export.artifact.origin import ROOT, git_state

    state = git_state(ROOT)
    return state and {"commit": state["commit"], "dirty": state["dirty"]}


def _tell(error: SegpipeError, *, rank: int = 0) -> int:
    if getattr(error, "told", False):
        environment.wait_to_be_ended()  # another rank told it, and its launcher is to name that one
    elif rank == 0 or not isinstance(error, COMMON_ERRORS):
        where = f"rank {rank}: " if rank else ""
        Console(stderr=True).print(f"{where}{error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    else:
        environment.wait_to_be_ended()
    return error.exit_code
