"""Loader processes: how they start, what is said of one that died or hangs, and torch's DataLoader as a transport."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from segpipe.errors import DataError, SegpipeError
from segpipe.native import one_thread

STACK_S = 0.4  # for a worker to write its stack
_EXIT_S = 1.0  # for a process that was killed to end


class Room(Protocol):
    """Where a process makes an item."""

    def take(self, size: int) -> Tensor:
        """Flat memory for the item, uint8 (size,)."""

    def at(self, row: int) -> None:
        """This sample of the item is made next."""


class Fresh:
    """New memory for each item; page-locked if `pinned`."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned

    def take(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def at(self, row: int) -> None:
        """Nobody looks."""


@dataclass(frozen=True)
class Delivery:
    """How items come from loader processes."""

    workers: int
    start_method: str
    prefetch: int = 2  # items that each process makes ahead
    pinned: bool = False
    timeout_s: float = 300.0
    transport: str = "ring"
    replace: bool = False  # a process that died or hangs


class Items(Protocol):
    """What the processes of a loader make."""

    def make(self, request: Any, room: Room) -> Any:
        """An item; small to pickle but for `data`, its flat memory, which is a tensor that `room` gave."""

    def label(self, request: Any, row: int) -> str:
        """A sample of an item, for messages."""


class Source(Protocol):
    """Iterator over the items of requests, in their order."""

    def __next__(self) -> Any: ...

    def end(self) -> None:
        """End its processes."""


class InProcess:
    """Items made by the caller's own process when they are asked for."""

    def __init__(self, items: Items, requests: Iterable[Any], *, pinned: bool) -> None:
        room = Fresh(pinned)
        self._items = (items.make(request, room) for request in requests)

    @one_thread()  # as a worker has: the bits of user code with torch must not depend on `data.workers`
    def __next__(self) -> Any:
        return next(self._items)

    def end(self) -> None:
        self._items.close()


class _Numbered(Dataset[Any]):
    def __init__(self, items: Items) -> None:
        self._items = items

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._items.make(request, Fresh())
        except Exception as error:  # as an item, it keeps its message
            return sendable(error)


class TorchLoader:
    """torch's DataLoader. It allocates each item anew, and passes a file descriptor for it through a socket.

    A worker that dies raises RuntimeError wherever the trainer happens to be; a worker that is stopped while it answers
    hangs the trainer for ever. `Ring` does neither.
    """

    def __init__(self, items: Items, requests: Iterable[Any], how: Delivery) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="This DataLoader will create", category=UserWarning
            )
            warnings.filterwarnings(
                "ignore",
                message=".*multi-threaded, use of fork",
                category=DeprecationWarning,
            )
            loader: DataLoader[Any] = DataLoader(
                _Numbered(items),
                sampler=requests,
                batch_size=None,
                num_workers=how.workers,
                collate_fn=_identity,
                worker_init_fn=isolate,
                timeout=how.timeout_s,
                multiprocessing_context=context_of(how.start_method),
                prefetch_factor=how.prefetch,
                pin_memory=how.pinned,
                generator=torch.Generator(),  # its one draw would otherwise come from the trainer's global state
            )
            self._items = iter(loader)

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except RuntimeError as error:
            if "DataLoader" not in str(
                error
            ):  # torch has no class of its own for a worker that died or hangs
                raise
            raise DataError(
                f"{error}. With data.transport=ring, worker and sample are named."
            ) from error
        if isinstance(item, Exception):
            raise item
        return item

    def end(self) -> None:
        self._items._shutdown_workers()  # type: ignore[attr-defined]  # nothing public ends them at a known time


def _identity(item: Any) -> Any:
    return item


def context_of(start_method: str) -> BaseContext:
    """A way to start processes."""
    context = get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(
            ["segpipe.data.loader"]
        )  # torch is imported once instead of once per worker
    return context


def isolate(worker: int) -> None:
    """Start of every worker: one thread, no shared random state, no CUDA.

    Ctrl-C and a scheduler's signals reach all processes of a job at once. Workers ignore them: the trainer ends its
    step first, writes a checkpoint, and needs its workers until then.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    keep_memory()
    cv2.setNumThreads(
        0
    )  # OpenCV's threads do not survive a fork: a worker that uses them can hang
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed would also queue work for CUDA
    cv2.setRNGSeed(0)


def sendable(error: Exception) -> Exception:
    """The error, with its traceback in a note unless it is expected; in another class if that cannot be sent or raised.

    StopIteration would end a stream of batches as if it were over.
    """
    expected = isinstance(error, SegpipeError)
    text = str(error) if expected else "".join(traceback.format_exception(error))
    try:
        if not expected:
            error.add_note(f"in a loader process:\n{text}")
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DataError(text) if expected else RuntimeError(text)
    return RuntimeError(text) if isinstance(error, StopIteration) else error


def keep_memory() -> None:
    """Let this process keep the memory that it frees, where glibc allocates it.

    Otherwise each decoded image comes as new pages, and goes back at once: at 2048x1024, 7 of 25 ms for JPEG.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(
            -1, 2**30
        )  # M_TRIM_THRESHOLD: bytes that may lie free at the end of the heap
        mallopt(
            -3, 2**25
        )  # M_MMAP_THRESHOLD: the largest that glibc takes; larger blocks are mapped one by one


def kill(processes: Iterable[BaseProcess]) -> None:
    """Kill those that still live; SIGTERM is ignored by them."""
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(_EXIT_S)


def death(number: int, process: BaseProcess, label: str) -> str:
    """A message about a worker whose end was noticed."""
    process.join(
        _EXIT_S
    )  # a process closes its socket shortly before its exit can be seen
    code = process.exitcode
    if code is not None and code < 0:
        return f"loader worker {number} was killed by signal {-code}{label}: {_reason(-code)}"
    at = f"loader worker {number} ended with exit code {code}{label}."
    return f"{at} Set data.workers=0 to see its error."


def _reason(number: int) -> str:
    if number == signal.SIGBUS:
        return "a file that it read was cut short, or memory is full."
    if number == signal.SIGKILL:
        return "often memory. Lower data.workers or data.prefetch, or give the job more memory."
    return "a crash inside a library. Set data.workers=0 to see where."


def hang(
    number: int, processes: Sequence[BaseProcess], label: str, timeout_s: float
) -> str:
    """Have all workers write their stacks, and return a message about the one that does not answer.

    One after another: two that write at the same time mix their lines.
    """
    stopped = _is_stopped(processes[number])
    for place, process in enumerate(processes):
        if process.is_alive() and process.pid is not None:
            print(
                f"stack of loader worker {place} (process {process.pid}):",
                file=sys.stderr,
                flush=True,
            )
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(STACK_S)
    advice = (
        "It was stopped by a signal (SIGSTOP, a debugger, or a scheduler)."
        if stopped
        else "The stacks of all workers are on stderr. The disk may not answer, or a library may not survive a fork: "
        "try data.start_method=spawn, or data.workers=0. If it only needs longer, raise data.timeout_s."
    )
    return (
        f"loader worker {number} (process {processes[number].pid}) has sent nothing for {timeout_s:g} s{label}. "
        f"{advice}"
    )


def _is_stopped(process: BaseProcess) -> bool:
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[
            0
        ] in ("T", "t")
    except OSError:
        return False
