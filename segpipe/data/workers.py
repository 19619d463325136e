"""What a loader process does: it makes what it is asked for, on one thread and without random state of its own."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import pickle
import random
import signal
import sys
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe.errors import DataError, SegpipeError

PAGE_BYTES = 4096
LOOK_S = 5.0  # between looks of an idle worker whether its trainer still lives


class Room(Protocol):
    """Where a process makes an item."""

    def take(self, size: int) -> Tensor:
        """Flat memory for the item, uint8 (size,)."""

    def at(self, row: int) -> None:
        """This sample of the item is made next."""


class Items(Protocol):
    """What the processes of a loader make."""

    def make(self, request: Any, room: Room) -> tuple[Any, Tensor]:
        """A header, which is small to pickle, and the memory from `room` that holds the item."""

    def label(self, request: Any, row: int) -> str:
        """A sample of an item, for messages."""


class SharedBlock:
    """Shared memory, filled with zeros: a page of state per worker, then the slots. Pickled while a process starts."""

    def __init__(self, workers: int, num_slots: int, slot_bytes: int) -> None:
        self._workers = workers
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self._size = workers * PAGE_BYTES + num_slots * self.slot_bytes
        self._fd = os.memfd_create("segpipe")
        os.ftruncate(self._fd, self._size)
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fd": reduction.DupFd(self._fd), "bytes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._fd = state["_fd"].detach()
        self._map()

    def _map(self) -> None:
        self.bytes = np.frombuffer(mmap.mmap(self._fd, self._size), np.uint8)

    def state(self, worker: int) -> NDArray[np.int64]:
        """Of a worker: the row that it makes, and whether it shall end."""
        return self.bytes[PAGE_BYTES * worker :][:16].view(np.int64)

    def slot(self, number: int) -> NDArray[np.uint8]:
        """Memory of a slot."""
        start = PAGE_BYTES * self._workers + number * self.slot_bytes
        return self.bytes[start:][: self.slot_bytes]

    def close(self) -> None:
        """The memory stays as long as a tensor needs it."""
        os.close(self._fd)


class DoesNotFit(Exception):
    """An item is larger than a slot."""


class Ended(BaseException):
    """The trainer does not need what a worker is making."""


class Slot:
    """Room in a slot of the ring."""

    def __init__(self, memory: NDArray[np.uint8], state: NDArray[np.int64]) -> None:
        self._memory = torch.from_numpy(memory)
        self._state = state
        self.at(0)

    def take(self, size: int) -> Tensor:
        """As in `Room`. Raises DoesNotFit."""
        if size > len(self._memory):
            raise DoesNotFit
        return self._memory[:size]

    def at(self, row: int) -> None:
        """As in `Room`. Raises Ended."""
        self._state[0] = row
        if self._state[1]:
            raise Ended


def work(items: Items, block: SharedBlock, worker: int, pipe: Connection) -> None:
    """Answer requests until the trainer says that this is all, or is gone."""
    isolate()
    starter = os.getppid()
    state = block.state(worker)
    with contextlib.suppress(Ended, OSError):
        while (message := _received(pipe, starter)) is not None:
            number, slot, request = message
            answer: Any
            try:
                header, data = items.make(request, Slot(block.slot(slot), state))
                answer = header, len(data)
            except DoesNotFit:
                answer = None
            except Exception as error:
                answer = sendable(error)
            state[0] = (
                0  # or it would be of the next item, which may have fewer samples
            )
            pipe.send_bytes(pickle.dumps((number, answer)))


def _received(pipe: Connection, starter: int) -> Any:
    """The next message; None at the end.

    A forked worker holds copies of the trainer's ends of pipes, so a trainer that is gone does not close them.
    """
    while not pipe.poll(LOOK_S):
        if os.getppid() != starter:
            return None
    return pipe.recv()


def isolate() -> None:
    """One thread, no shared random state, no CUDA.

    Ctrl-C and a scheduler's signals reach all processes of a job at once. Workers ignore them: the trainer ends its
    step first, writes a checkpoint, and needs its workers until then.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    keep_memory()
    # OpenCV's threads do not survive a fork: a worker that uses them can hang.
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed would also queue work for CUDA.
    torch.default_generator.manual_seed(0)
    cv2.setRNGSeed(0)


def keep_memory() -> None:
    """Let this process keep the memory that it frees, where glibc allocates it.

    Otherwise each decoded image comes as new pages, and goes back at once: at 2048x1024, 7 of 25 ms for JPEG.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**30)
        mallopt(mmap_threshold, 2**25)  # the largest that glibc takes


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
