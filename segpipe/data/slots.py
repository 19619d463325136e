"""Shared memory of a loader's ring: one block without a name, cut into slots that come back when nobody reads them.

Nothing is left of it when every process is killed, and the size of /dev/shm does not matter. Pages are used from the
first time they are written.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe.errors import DataError

PAGE_BYTES = 4096


class Block:
    """Shared memory without a name, of `size` bytes, filled with zeros. Small to pickle while a process is started."""

    def __init__(self, size: int) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("segpipe")
        else:  # not Linux
            self._fd, path = tempfile.mkstemp()
            os.unlink(path)
        os.ftruncate(self._fd, size)
        self.bytes = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": reduction.DupFd(self._fd), "size": len(self.bytes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["fd"].detach()
        self.bytes = np.frombuffer(mmap.mmap(self._fd, state["size"]), np.uint8)

    def close(self) -> None:
        """The memory stays as long as a tensor needs it."""
        os.close(self._fd)


class RingLayout(NamedTuple):
    """First a page per worker: the row that it is at, and whether it shall end. Then the slots."""

    workers: int
    slot_bytes: int

    def state(self, block: Block, worker: int) -> NDArray[np.int64]:
        return block.bytes[PAGE_BYTES * worker :][:16].view(np.int64)

    def slot(self, number: int) -> int:
        """Place of its first byte."""
        return PAGE_BYTES * self.workers + number * self.slot_bytes


class Ended(BaseException):
    """The trainer does not need what a worker is making."""


class Slot:
    """Room in a slot of the ring. What does not fit gets memory of the process, and travels through the socket."""

    def __init__(self, memory: Tensor, state: NDArray[np.int64]) -> None:
        self._memory, self._state, self.used = memory, state, False
        self.at(0)

    def take(self, size: int) -> Tensor:
        self.used = size <= len(self._memory)
        return (
            self._memory[:size] if self.used else torch.empty(size, dtype=torch.uint8)
        )

    def at(self, row: int) -> None:
        self._state[0] = row
        if self._state[1]:
            raise Ended


class Slots:
    """The free slots. The one that was returned last goes first: its memory is in use already."""

    def __init__(
        self, block: Block, layout: RingLayout, num: int, pinned: bool
    ) -> None:
        self._block, self._layout, self._pinned = block, layout, pinned
        self._free = list(reversed(range(num)))
        self._copying: deque[tuple[Any, int]] = deque()
        if pinned:
            _page_lock(block)

    def __len__(self) -> int:
        return len(self._free) + len(self._copying)

    def pop(self) -> int:
        while self._copying and (not self._free or self._copying[0][0].query()):
            event, slot = self._copying.popleft()
            event.synchronize()
            self._free.append(slot)
        return self._free.pop()

    def tensor(self, slot: int, size: int) -> Tensor:
        """The first bytes of a slot, which is free again when no view of them is left."""
        array = self._block.bytes[self._layout.slot(slot) :][:size]
        weakref.finalize(array, self.put, slot).atexit = False
        return torch.from_numpy(array)

    def put(self, slot: int) -> None:
        if self._pinned:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copying.append((event, slot))
        else:
            self._free.append(slot)


def _page_lock(block: Block) -> None:
    """Lock the pages of a block for copies to the GPU, until its memory is given back."""
    place, size = block.bytes.ctypes.data, block.bytes.size
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(place, size, 0)) != 0:
        raise DataError(
            f"{size / 2**20:.0f} MiB for the loader's ring could not be page-locked. Lower data.workers or "
            f"data.prefetch, raise `ulimit -l`, or set data.transport=dataloader."
        )
    weakref.finalize(
        block.bytes, runtime.cudaHostUnregister, place
    ).atexit = False  # slots are views of it
