"""Items made ahead by loader processes, in slots of shared memory that they fill in place.

Each worker has a pipe of its own, so none holds a lock that another one waits for. Messages are small, and the trainer
waits for all workers at once, by its own clock.

The memory is one block without a name: nothing is left of it when every process is killed, and the size of /dev/shm
does not matter. A slot belongs to the tensor made of it. It is handed out again when the last view of that tensor is
gone, on CUDA when the copies queued until then are done. If the caller keeps more items than there are slots to spare,
it gets copies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from segpipe.errors import DataError
from segpipe.native import one_thread

if TYPE_CHECKING:
    from segpipe.data.workers import Items, SharedBlock

END_S = 1.0  # for workers to finish the sample that they are at
EXIT_S = 1.0  # for a process that was killed to end
STACK_S = 0.4  # for a worker to write its stack
CONTINUE = "A training continues with run.exists=resume."
REASONS: dict[int, str] = {
    signal.SIGBUS: "a file that it read was cut short, or memory is full",
    signal.SIGKILL: "often memory. Lower data.workers or data.prefetch, or give the job more memory",
}
Item = tuple[Any, Tensor]  # header and memory, as `Items.make` returns them


@dataclass(frozen=True)
class Delivery:
    """How items come from loader processes."""

    workers: int
    start_method: str
    prefetch: int = 2  # items that each process makes ahead
    pinned: bool = False
    timeout_s: float = 300.0


class _Asked(NamedTuple):
    worker: int
    slot: int
    request: Any


def deliver(
    items: Items,
    requests: Iterable[tuple[int, Any]],
    how: Delivery,
    *,
    helpers: int = 0,
    slot_bytes: int,
    spare: int,
) -> Generator[Item, None, None]:
    """Items of `requests`, each with the number of its worker, in their order; made here without workers.

    helpers: processes beside the workers. slot_bytes: size of an item that travels in place; larger ones are made here.
    spare: slots beside those of items made ahead, for items that the caller keeps. Workers start at the first `next`
    and end with the generator. Raises DataError, which names worker and sample, when a worker has died, or has sent
    nothing for how.timeout_s.
    """
    if not how.workers:
        return _in_process(items, requests, Fresh(how.pinned))
    return Ring(items, iter(requests), how, helpers, slot_bytes, spare).deliver()


def _in_process(
    items: Items, requests: Iterable[tuple[int, Any]], room: Fresh
) -> Generator[Item, None, None]:
    for _, request in requests:
        yield _made_here(items, request, room)


@one_thread()
def _made_here(items: Items, request: Any, room: Fresh) -> Item:
    """On one thread as in a worker: the bits of user code with torch must not depend on `data.workers`."""
    return items.make(request, room)


class Fresh:
    """New memory for each item; page-locked if `pinned`."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned

    def take(self, size: int) -> Tensor:
        """As in `Room`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def at(self, row: int) -> None:
        """As in `Room`; nobody looks."""


class Slots:
    """The free slots of a block. The one that was returned last goes first: its memory is in use already."""

    def __init__(self, block: SharedBlock, num_slots: int, pinned: bool) -> None:
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


def _page_lock(block: SharedBlock) -> None:
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


class Ring:
    """Loader processes, and what they were asked for."""

    def __init__(
        self,
        items: Items,
        requests: Iterator[tuple[int, Any]],
        how: Delivery,
        helpers: int,
        slot_bytes: int,
        spare: int,
    ) -> None:
        self._items, self._requests, self._how = items, requests, how
        self._num_processes = how.workers + helpers
        self._ahead = how.workers * how.prefetch + helpers
        self._num_slots = self._ahead + spare
        self._slot_bytes = slot_bytes
        self._asked: dict[int, _Asked] = {}  # by number, until it is delivered
        self._answers: dict[int, Any] = {}
        self._count = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def deliver(self) -> Generator[Item, None, None]:
        """As the function of this name."""
        from segpipe.data.workers import SharedBlock

        self._block = SharedBlock(
            self._num_processes, self._num_slots, self._slot_bytes
        )
        # Should nobody close the generator: at its exit multiprocessing sends daemons SIGTERM, which they ignore, and
        # waits. Not atexit, which does not run in a process that multiprocessing has spawned.
        Finalize(self, _kill, args=(self._processes,), exitpriority=10)
        try:
            for worker in range(self._num_processes):
                self._start(worker)
            # After the forks: workers need no locked pages.
            self._slots = Slots(self._block, self._num_slots, self._how.pinned)
            for _ in range(self._ahead):
                self._ask()
            while self._asked:
                yield self._next()
        finally:
            self._end()

    def _start(self, worker: int) -> None:
        from segpipe.data.workers import work

        context = get_context(self._how.start_method)
        if self._how.start_method == "forkserver":
            # torch is imported once instead of once per worker.
            context.set_forkserver_preload(["segpipe.data.loader"])
        ours, theirs = context.Pipe()
        process = context.Process(  # type: ignore[attr-defined]
            target=work, args=(self._items, self._block, worker, theirs), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any thread; the workers take no lock that a thread of torch could hold.
            warnings.filterwarnings(
                "ignore",
                message=".*multi-threaded, use of fork",
                category=DeprecationWarning,
            )
            process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _ask(self) -> None:
        """Send the next request to its worker."""
        worker, request = next(self._requests, (0, None))
        if request is None:
            return
        self._receive(0)  # or both could wait for room in full pipes
        asked = _Asked(worker, self._slots.pop(), request)
        self._asked[self._count] = asked
        with contextlib.suppress(OSError):  # of a dead worker: its sentinel tells
            self._pipes[worker].send((self._count, asked.slot, request))
        self._count += 1

    def _next(self) -> Item:
        number, asked = next(iter(self._asked.items()))
        deadline = time.monotonic() + self._how.timeout_s
        while number not in self._answers:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._hang(asked.worker)
            self._receive(left)
        del self._asked[number]
        answer = self._answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        item = self._taken(asked, answer)
        self._ask()
        return item

    def _taken(self, asked: _Asked, answer: tuple[Any, int] | None) -> Item:
        """The item in its slot; None was answered where it does not fit."""
        if answer is None:
            self._slots.put(asked.slot)
            return _made_here(self._items, asked.request, Fresh())
        header, size = answer
        data = self._slots.tensor(asked.slot, size)
        return header, data if len(self._slots) else data.clone()

    def _receive(self, timeout_s: float) -> None:
        """Wait for an answer and take one of each worker. Raises DataError when a worker has died."""
        sentinels = [process.sentinel for process in self._processes]
        ready = wait([*self._pipes, *sentinels], timeout_s)
        for pipe in self._pipes:
            if pipe in ready:
                with contextlib.suppress(EOFError, OSError):
                    number, answer = pickle.loads(pipe.recv_bytes())
                    self._answers[number] = answer
        for worker, sentinel in enumerate(sentinels):
            if sentinel in ready:
                raise self._death(worker)

    def _end(self) -> None:
        """End the workers: each after the sample that it is at, or by force."""
        for worker, pipe in enumerate(self._pipes):
            self._block.state(worker)[1] = 1
            with contextlib.suppress(OSError):
                pipe.send(None)
        unhurt = all(process.is_alive() for process in self._processes)
        deadline = time.monotonic() + (END_S if unhurt else 0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _kill(self._processes)
        for pipe in self._pipes:
            pipe.close()
        self._block.close()

    def _label(self, worker: int) -> str:
        """The sample that a worker is at: of the first item that it has not sent."""
        for number, asked in self._asked.items():
            if asked.worker == worker and number not in self._answers:
                row = int(self._block.state(worker)[0])
                return f" while it made {self._items.label(asked.request, row)}"
        return ""

    def _death(self, worker: int) -> DataError:
        process = self._processes[worker]
        process.join(EXIT_S)
        code = process.exitcode
        if code is None or code >= 0:
            return DataError(
                f"loader worker {worker} ended with exit code {code}{self._label(worker)}. Set data.workers=0 to see "
                f"its error. {CONTINUE}"
            )
        crash = "a crash inside a library. Set data.workers=0 to see where"
        return DataError(
            f"loader worker {worker} was killed by signal {-code}{self._label(worker)}: {REASONS.get(-code, crash)}. "
            f"{CONTINUE}"
        )

    def _hang(self, worker: int) -> DataError:
        """Have all workers write their stacks, and kill them."""
        process = self._processes[worker]
        if _is_stopped(process):
            advice = "It was stopped by a signal (SIGSTOP, a debugger, or a scheduler)."
        else:
            advice = (
                "The stacks of all workers are on stderr. The disk may not answer, or a library may not survive a "
                "fork: try data.start_method=spawn, or data.workers=0. If it only needs longer, raise data.timeout_s."
            )
        _write_stacks(self._processes)
        _kill(self._processes)
        return DataError(
            f"loader worker {worker} (process {process.pid}) has sent nothing for {self._how.timeout_s:g} s"
            f"{self._label(worker)}. {advice} {CONTINUE}"
        )


def _write_stacks(processes: list[BaseProcess]) -> None:
    """One after another: two that write at the same time mix their lines."""
    for worker, process in enumerate(processes):
        if process.is_alive() and process.pid is not None:
            print(
                f"stack of loader worker {worker} (process {process.pid}):",
                file=sys.stderr,
                flush=True,
            )
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(STACK_S)


def _is_stopped(process: BaseProcess) -> bool:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return fields.split()[0] in ("T", "t")


def _kill(processes: list[BaseProcess]) -> None:
    """SIGTERM is ignored by workers."""
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(EXIT_S)
