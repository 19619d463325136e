"""What a function returns in another process: a forked one, or a spawned one that looks like another start."""

from __future__ import annotations

import math
import multiprocessing.process
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cv2

from segpipe import plugins
from segpipe.determinism.flags import SELECTING
from segpipe.errors import ConfigError, SegpipeError
from segpipe.checks import tripwire

PATIENCE_S = 120.0  # for another process, as long as it does nothing
START_SEED = 20_001  # of the global generators in a spawned process
KEPT = (
    "PYTHON",
    "CUDA",
)  # numbers in these variables are those of the interpreter and of devices
RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def elsewhere(method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in another process; text if there is no answer. Raises what it raises."""
    with started(method, function, *arguments) as answer:
        return answer()


@contextmanager
def started(
    method: str, function: Callable[..., Any], *arguments: Any
) -> Iterator[Callable[[], Any]]:
    """The same while this process goes on with the block, in which what is yielded waits for the answer.

    With `spawn`, nothing but the code and the arguments is as here: the interpreter is a new one, with another hash of
    text, other arguments, generators and numbers in its environment, and as it were the main process of rank 1 of 2.
    """
    import torch  # not by a child before it has read its arguments, which this process waits for

    tripwire.set_opencv_threads(cv2.getNumThreads())
    context, spawns = get_context(method), method != "fork"
    receiver, sender = context.Pipe(duplex=False)
    process, problem = None, ""
    try:
        try:
            afresh = (
                (pickle.dumps(partial(function, *arguments)), torch.get_num_threads())
                if spawns
                else ()
            )
            target, given = (
                (_send_afresh, afresh) if spawns else (_send, (function, *arguments))
            )
            process = context.Process(target=target, args=(sender, *given), daemon=True)  # type: ignore[attr-defined]
            with (
                warnings.catch_warnings(),
                _another_start() if spawns else nullcontext(),
            ):
                # Python 3.12 and later warn of any thread; this code takes no lock that a thread could hold.
                warnings.filterwarnings(
                    "ignore",
                    message=".*multi-threaded, use of fork",
                    category=DeprecationWarning,
                )
                process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            problem = f"cannot be sent to another process: {error}"
        sender.close()
        yield lambda: problem or _received(receiver, process.pid if process else None)
    finally:
        receiver.close()
        sender.close()
        if process is not None and process.pid is not None:
            process.kill()
            process.join()


def _received(receiver: Any, pid: int | None) -> Any:
    used = -1.0
    while not receiver.poll(
        PATIENCE_S
    ):  # on a busy machine, one that computes needs longer
        if (now := _processor_s(pid)) - used < PATIENCE_S / 100 or now > max(
            PATIENCE_S, 40
        ):
            return f"no answer in {PATIENCE_S:.0f} s"
        used = now
    try:
        found = receiver.recv()
    except EOFError:
        return "the process ended without an answer"
    if isinstance(found, Exception):
        raise found
    return found


def _processor_s(pid: int | None) -> float:
    """Processor time of a process; infinity where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.inf


def _send(sender: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        sender.send(function(*arguments))
    except SegpipeError as error:
        sender.send(error)
    except Exception as error:
        sender.send(
            ConfigError(
                f"your code cannot run in another process. {plugins.located(error)}"
            )
        )
    sender.close()


def _send_afresh(sender: Any, content: bytes, threads: int) -> None:
    """`content` holds the call, with code of the user that is not imported before all looks like another start."""
    import torch

    here: Any = multiprocessing.current_process()
    here.name, here._identity, here._config["daemon"] = "MainProcess", (), False
    vars(multiprocessing.process)["_parent_process"] = None
    for name, value in (
        ("is_initialized", True),
        ("get_rank", 1),
        ("get_world_size", 2),
    ):
        setattr(torch.distributed, name, lambda *_, value=value, **__: value)
    torch.set_num_threads(threads)
    tripwire.seed_globals(START_SEED)
    _send(sender, lambda: pickle.loads(content)())


@contextmanager
def _another_start() -> Iterator[None]:
    """What a process inherits that is spawned in the block."""
    before, arguments = dict(os.environ), sys.argv
    for name, value in before.items():
        if (
            value.isdecimal()
            and not name.startswith(KEPT)
            and not SELECTING.match(name)
        ):
            os.environ[name] = str(int(value) + 3)
    os.environ.update(
        RANK_1, PYTHONHASHSEED="2" if before.get("PYTHONHASHSEED") == "1" else "1"
    )
    sys.argv = [*arguments[:1], *(["started=again"] * (len(arguments) + 1))]
    try:
        yield
    finally:
        sys.argv = arguments
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
