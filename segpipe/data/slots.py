"""Shared memory of a loader's ring: one block without a name, cut into slots that come back when nobody reads them.

Nothing is left of it when every process is killed, and the size of /dev/shm does not matter. Pages are used from the
first time they are written.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe.errors import DataError

PAGE_BYTES = 4096


class Block:
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


class Slots:
    """The free slots of a block. The one that was returned last goes first: its memory is in use already."""

    def __init__(self, block: Block, num_slots: int, pinned: bool) -> None:
        self._block = block
        self._pinned = pinned
        self._free = list(reversed(range(num_slots)))
        self._copying: deque[tuple[Any, int]] = deque()
        if pinned:
            _page_lock(block)

    def __len__(self) -> int:
        return len(self._free) + len(self._copying)

    def pop(self) -> int:
        """Number of a free slot; waits until the GPU has copied one if there is no other."""
        while self._copying and (not self._free or self._copying[0][0].query()):
            event, slot = self._copying.popleft()
            event.synchronize()
            self._free.append(slot)
        return self._free.pop()

    def tensor(self, slot: int, size: int) -> Tensor:
        """The first bytes of a slot, which is free again when no view of them is left."""
        array = self._block.slot(slot)[:size]
        weakref.finalize(array, self.put, slot).atexit = False
        return torch.from_numpy(array)

    def put(self, slot: int) -> None:
        """Return a slot; with page-locked memory it is free when the copies queued so far are done."""
        if not self._pinned:
            self._free.append(slot)
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copying.append((event, slot))


def _page_lock(block: Block) -> None:
    """Lock the pages of a block for copies to the GPU, until its memory is given back."""
    address, size = block.bytes.ctypes.data, block.bytes.size
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        raise DataError(
            f"{size / 2**20:.0f} MiB for the loader's ring could not be page-locked. Lower data.workers or "
            f"data.prefetch, or raise `ulimit -l`."
        )
    # Slots are views of these bytes, so this runs when the last one is gone.
    weakref.finalize(block.bytes, runtime.cudaHostUnregister, address).atexit = False
