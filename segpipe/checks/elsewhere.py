"""Calls a function in another process: a forked one, or a spawned one that looks like another start."""

import multiprocessing.process
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import cv2
import torch
from torch import distributed

from segpipe import plugins
from segpipe.checks import tripwire
from segpipe.determinism.flags import SELECTING
from segpipe.errors import ConfigError, SegpipeError

PATIENCE_S = 300.0  # for an answer; the slowest, on a busy machine, takes 30
START_SEED = 20_001  # seed of the global generators in a spawned process
# Prefixes of variables for the interpreter and for devices; their numbers are kept.
KEPT = ("PYTHON", "CUDA")
RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


class UnansweredError(SegpipeError):
    """Another process gave no answer; the message says why."""


def elsewhere(method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in another process. Raises what it raises, and UnansweredError.

    With `spawn`, only the code and the arguments are the same: the interpreter is new, with a different hash seed,
    sys.argv, generators and numbers in its environment, and looks like the main process of rank 1 of 2.
    """
    tripwire.set_opencv_threads(cv2.getNumThreads())
    context: Any = get_context(method)
    receiver, sender = context.Pipe()
    call, content = partial(function, *arguments), b""
    if method == "spawn":
        content = _pickled(call)
        given = sender, torch.get_num_threads()
        with _another_environment():
            process = context.Process(
                target=_send_from_another_start, args=given, daemon=True
            )
            process.start()
    else:
        process = context.Process(target=_send, args=(sender, call), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 and later warn about any thread; this code takes no lock that a thread could hold.
            warnings.filterwarnings(
                "ignore", ".*multi-threaded, use of fork", DeprecationWarning
            )
            process.start()
    sender.close()
    try:
        # As an argument, a large call would block start() forever if the process ends early.
        if content:  # a forked process reads nothing, and may have answered already
            receiver.send_bytes(content)
        if not receiver.poll(PATIENCE_S):
            raise UnansweredError(f"no answer in {PATIENCE_S:.0f} s")
        answer = receiver.recv()
    except (EOFError, ConnectionError):
        raise UnansweredError("the process ended without an answer") from None
    finally:
        receiver.close()
        process.kill()
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _pickled(call: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(call)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise UnansweredError(
            f"cannot be sent to another process: {error}. Open files and databases at first use, not in __init__"
        ) from error


def _send(sender: Connection, call: Callable[[], Any]) -> None:
    """Send the result of the call, or its error."""
    try:
        sender.send(call())
    except SegpipeError as error:
        sender.send(error)
    except Exception as error:
        text = f"your code cannot run in another process. {plugins.located(error)}"
        sender.send(ConfigError(text))


def _send_from_another_start(sender: Connection, threads: int) -> None:
    """`_send` for a pickled call; imports the user's code after all looks like the main process of rank 1."""
    process: Any = multiprocessing.current_process()
    process.name = "MainProcess"
    process._identity = ()
    process._config["daemon"] = False
    vars(multiprocessing.process)["_parent_process"] = None

    answers = {"is_initialized": True, "get_rank": 1, "get_world_size": 2}
    for name, answer in answers.items():
        setattr(distributed, name, lambda *_, answer=answer, **__: answer)

    torch.set_num_threads(threads)
    tripwire.seed_globals(START_SEED)
    content = sender.recv_bytes()
    _send(sender, lambda: pickle.loads(content)())


def other_environment() -> None:
    """Add 3 to each number in an environment variable, except those of the interpreter and of devices."""
    for name, value in [*os.environ.items()]:
        kept = name.startswith(KEPT) or SELECTING.match(name)
        if value.isdecimal() and not kept:
            os.environ[name] = str(int(value) + 3)


@contextmanager
def _another_environment() -> Iterator[None]:
    """Sets environment variables and arguments for processes spawned in the block."""
    arguments = [*sys.argv[:1], *(["started=again"] * (len(sys.argv) + 1))]
    with patch.dict(os.environ), patch.object(sys, "argv", arguments):
        hashed = os.environ.get("PYTHONHASHSEED")
        other_environment()
        os.environ |= {**RANK_1, "PYTHONHASHSEED": "2" if hashed == "1" else "1"}
        yield
