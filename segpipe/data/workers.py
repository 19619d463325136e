"""Loader processes: how they start, and what is told when one dies, or hangs, instead of waiting for it forever."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from copy import copy
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any

import cv2
import numpy as np
import torch

from segpipe.errors import DataError

LOOK_S = 1.0  # between looks at the processes while no batch comes
STACKS_S = 1.0  # that they get to write where they stand
_LAST_WORDS_S = 1.0  # a process closes its socket shortly before its exit can be seen


def isolate(worker: int) -> None:
    """Start of every worker: one thread, no shared random state. Touches no CUDA.

    Ctrl-C and SIGTERM reach all processes of a job at once: they are left to the training process, which ends its step
    first, writes a checkpoint, and needs its workers for neither more nor less than that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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

    Who is killed while it asks never gives that lock back; all others wait for it then, the training process as well.
    """

    def __init__(self, context: BaseContext) -> None:
        self._byte = context.RawValue("b", 0)

    def set(self) -> None:
        self._byte.value = 1

    def is_set(self) -> bool:
        return bool(self._byte.value)


def workers_context(start_method: str) -> BaseContext:
    """How worker processes are made: fork, forkserver or spawn."""
    context = copy(get_context(start_method))
    context.Event = partial(Flag, context)  # type: ignore[method-assign,assignment]
    if start_method == "forkserver":
        context.set_forkserver_preload(["segpipe.data.loader"])  # torch is imported once instead of once per worker
    return context


def take(source: Any, timeout_s: float) -> Any:
    """The next item of a DataLoader's iterator. Its loader's `timeout` must be LOOK_S if it has workers.

    Raises StopIteration at the end, and DataError when a worker has died, or has not answered for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return next(source)
        except (RuntimeError, OSError, EOFError) as error:
            workers = getattr(source, "_workers", [])
            if "DataLoader timed out" in str(error):
                if time.monotonic() < deadline:
                    continue
                raise DataError(_stalled(source, timeout_s)) from error
            found = _death(workers)
            if found is None:
                raise
            raise DataError(found) from error


def end(sources: Sequence[Any]) -> None:
    """End the workers of DataLoaders' iterators, at once if one of them was killed or ended by itself."""
    workers = [worker for source in sources for worker in source._workers]
    if any(worker.exitcode for worker in workers):
        _kill(workers)  # one may wait for a lock that the dead one held
    for source in sources:
        source._shutdown_workers()
    _kill(workers)


def _kill(workers: Iterable[Any]) -> None:
    """End those that still live; SIGTERM, which torch sends, does not reach them."""
    for worker in list(workers):
        if worker.is_alive():
            worker.kill()
            worker.join(_LAST_WORDS_S)


def watch_over(source: Any) -> None:
    """Have the workers of a DataLoader's iterator ended at the exit of this process, should nobody end them before:
    multiprocessing would send them SIGTERM, and wait; in a spawned rank that comes before atexit."""
    if hasattr(source, "_workers"):
        Finalize(source, _kill, args=(source._workers,), exitpriority=10)


def _death(workers: Sequence[Any]) -> str | None:
    """What to tell when a worker has died, or None."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while workers:
        for number, worker in enumerate(workers):
            code = worker.exitcode
            if code is not None and code < 0:
                return f"loader worker {number} was killed by signal {-code}, {_reason(-code)}"
            if code:
                return f"loader worker {number} ended with exit code {code}. Set data.workers=0 to see its error."
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    return None


def _reason(number: int) -> str:
    if number == signal.SIGBUS:
        return "often full shared memory: enlarge /dev/shm or lower data.workers or data.prefetch."
    if number == signal.SIGKILL:
        return "often memory: lower data.workers or data.prefetch, or give the job more memory."
    return "a crash inside a library: set data.workers=0 to see where."


def _stalled(source: Any, timeout_s: float) -> str:
    """Let all workers write where they stand, end them, and tell which one is waited for."""
    number = source._task_info[source._rcvd_idx][0]
    for worker in source._workers:
        if worker.is_alive():
            os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(STACKS_S)
    _kill(source._workers)
    return (
        f"loader worker {number} (process {source._workers[number].pid}) has sent nothing for {timeout_s:g} s; where "
        f"the workers stood is written to stderr. A disk that does not answer, or a library that does not survive a "
        f"fork: try data.start_method=spawn, or data.workers=0. If it only needs longer, raise data.timeout_s."
    )
