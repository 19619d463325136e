"""Loader processes: how they start, and how the trainer notices that one died or hangs."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from copy import copy
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from segpipe.errors import DataError

LOOK_S = 1.0  # between looks at the workers while no item comes
STACK_S = 0.4  # for a worker to write its stack
_EXIT_S = 1.0  # a process closes its socket shortly before its exit can be seen


def _isolate(worker: int) -> None:
    """Start of every worker: one thread, no shared random state, no CUDA.

    Ctrl-C and a scheduler's signals reach all processes of a job at once. Workers ignore them: the trainer ends its
    step first, writes a checkpoint, and needs its workers until then.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    cv2.setNumThreads(0)  # OpenCV's threads do not survive a fork: a worker that uses them can hang
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed would also queue work for CUDA
    cv2.setRNGSeed(0)


class Flag:
    """An event as torch's loader needs it, without the lock of multiprocessing's.

    torch asks its event after every batch. A worker that is killed inside `is_set` never releases the lock of
    multiprocessing.Event, and then all other processes wait for it, the trainer too.
    """

    def __init__(self, context: BaseContext) -> None:
        self._byte = context.RawValue("b", 0)

    def set(self) -> None:
        self._byte.value = 1

    def is_set(self) -> bool:
        return bool(self._byte.value)


def _context(start_method: str, workers: list[BaseProcess]) -> BaseContext:
    """A way to start processes; those that torch starts are appended to `workers`."""
    context = copy(get_context(start_method))
    start = context.Process  # type: ignore[attr-defined]

    def process(*args: Any, **named: Any) -> BaseProcess:
        workers.append(start(*args, **named))
        return workers[-1]

    context.Process = process  # type: ignore[attr-defined]
    context.Event = partial(Flag, context)  # type: ignore[method-assign,assignment]
    if start_method == "forkserver":
        context.set_forkserver_preload(["segpipe.data.loader"])  # torch is imported once instead of once per worker
    return context


class Source:
    """Iterator over `items[request]` for `requests`, in their order, made by `num_workers` processes.

    Raises DataError when a worker has died, or has sent nothing for `timeout_s`.
    """

    def __init__(
        self,
        items: Dataset[Any],
        requests: Iterable[Any],
        num_workers: int,
        start_method: str,
        *,
        prefetch: int = 2,
        pin_memory: bool = False,
        timeout_s: float,
    ) -> None:
        self._workers: list[BaseProcess] = []
        self._timeout_s, self._received = timeout_s, 0
        # torch's SIGCHLD handler raises RuntimeError wherever the trainer happens to be, even inside a write of a
        # checkpoint. Without it a death is noticed when the next item is asked for.
        handler = signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            # Python 3.12 and later warn of any thread; the workers take no lock that a thread of torch could hold.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            loader: DataLoader[Any] = DataLoader(
                items,
                sampler=requests,
                batch_size=None,
                num_workers=num_workers,
                collate_fn=_identity,
                worker_init_fn=_isolate,
                timeout=LOOK_S if num_workers else 0,
                multiprocessing_context=_context(start_method, self._workers) if num_workers else None,
                prefetch_factor=prefetch if num_workers else None,
                pin_memory=pin_memory,
                generator=torch.Generator(),  # its one draw would otherwise come from the trainer's global state
            )
            self._items = iter(loader)
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
        # Should nobody call `end`: at its exit multiprocessing sends daemons SIGTERM, which they ignore, and waits.
        # Not atexit, which does not run in a process that multiprocessing has spawned.
        Finalize(self, _kill, args=(self._workers,), exitpriority=10)

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                item = next(self._items)
            except (RuntimeError, OSError, EOFError) as error:
                if "DataLoader timed out" in str(error):  # torch has no class of its own for it
                    if time.monotonic() < deadline:
                        continue
                    raise DataError(self._hang()) from error
                if (death := self._death()) is None:
                    raise
                raise DataError(death) from error
            self._received += 1
            return item

    def end(self) -> None:
        """End the workers; at once if one of them has died, since others may wait for a lock that it held."""
        if any(worker.exitcode for worker in self._workers):
            _kill(self._workers)
        if self._workers:
            self._items._shutdown_workers()  # type: ignore[attr-defined]  # nothing public ends them at a known time
        _kill(self._workers)

    def _death(self) -> str | None:
        """A message if a worker has died, or None."""
        deadline = time.monotonic() + _EXIT_S
        while self._workers:
            for number, worker in enumerate(self._workers):
                code = worker.exitcode
                if code is not None and code < 0:
                    return f"loader worker {number} was killed by signal {-code}, {_reason(-code)}"
                if code:
                    return f"loader worker {number} ended with exit code {code}. Set data.workers=0 to see its error."
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        return None

    def _hang(self) -> str:
        """Have all workers write their stacks, kill them, and return a message that names the one that hangs.

        One after another: two that write at the same time mix their lines.
        """
        number = self._received % len(self._workers)  # torch gives item n to worker n % num_workers
        for place, worker in enumerate(self._workers):
            if worker.is_alive() and worker.pid is not None:
                print(f"stack of loader worker {place} (process {worker.pid}):", file=sys.stderr, flush=True)
                os.kill(worker.pid, signal.SIGUSR1)
                time.sleep(STACK_S)
        _kill(self._workers)
        return (
            f"loader worker {number} (process {self._workers[number].pid}) has sent nothing for {self._timeout_s:g} s; "
            f"the stacks of all workers are on stderr. The disk may not answer, or a library may not survive a fork: "
            f"try data.start_method=spawn, or data.workers=0. If it only needs longer, raise data.timeout_s."
        )


def _identity(item: Any) -> Any:
    return item


def _kill(workers: Iterable[BaseProcess]) -> None:
    """Kill those that still live; SIGTERM, which torch sends, is ignored by them."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join(_EXIT_S)


def _reason(number: int) -> str:
    if number == signal.SIGBUS:
        return "often full shared memory: enlarge /dev/shm or lower data.workers or data.prefetch."
    if number == signal.SIGKILL:
        return "often memory: lower data.workers or data.prefetch, or give the job more memory."
    return "a crash inside a library: set data.workers=0 to see where."
