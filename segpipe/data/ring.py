"""Delivers items that loader processes prefetch into slots of shared memory.

Each worker has its own pipe, so no worker waits for another one's lock. Messages are small, and the trainer waits for
all workers at once, with its own timeout.

The memory is one anonymous block: nothing remains if all processes are killed, and the size of /dev/shm does not
matter. A slot belongs to the tensor made from it. It is reused when the last view of that tensor is gone and, on CUDA,
the copies queued until then are done. If the caller keeps more items than there are spare slots, it gets copies.
"""

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
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.heap import Arena
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor

from segpipe.data import Uint8
from segpipe.errors import DataError, SegpipeError
from segpipe.native import one_thread

PAGE_BYTES = 4096
LOOK_S = 5.0  # interval at which an idle worker checks that its trainer is alive
EXIT_S = 1.0  # time for a killed process to end
STACK_S = 0.4  # time for a worker to write its stack
CONTINUE = "A training continues with run.exists=resume."
REASONS: dict[int, str] = {
    signal.SIGBUS: "a file that it read was truncated, or memory is full",
    signal.SIGKILL: "often out of memory. Lower data.workers or data.prefetch, or give the job more memory",
}
Item = tuple[Any, Tensor]  # header and memory, as `Items.make` returns them
Take = Callable[[int], Tensor]


class Items(Protocol):
    """Factory of the items that loader processes make."""

    def make(self, request: Any, take: Take) -> Item:
        """A header, small to pickle, and the memory that holds the item, from `take(size)`, uint8 (size,)."""

    def label(self, request: Any) -> str:
        """The samples of an item, for messages."""


class Delivery(NamedTuple):
    """Options of loader processes and their memory."""

    workers: int
    start_method: str
    slot_bytes: int  # for the largest item
    # Slots for items that the caller keeps, in addition to those for prefetched items.
    spare: int
    prefetch: int = 2  # items that each process prefetches
    pinned: bool = False
    timeout_s: float = 300.0


class _Asked(NamedTuple):
    worker: int
    slot: int
    request: Any


def deliver(
    items: Items, requests: Iterable[Any], how: Delivery
) -> Generator[Item, None, None]:
    """Items of `requests` in order, made by the workers in turn; without workers, made in this process.

    Workers start at the first `next` and end with the generator. Raises DataError, naming worker and sample, if a
    worker died, or sent nothing for how.timeout_s.
    """
    if how.workers:
        yield from Ring(items, iter(requests), how).deliver()
        return
    take = partial(torch.empty, dtype=torch.uint8, pin_memory=how.pinned)
    for request in requests:
        # As in a worker: the bits of user code that uses torch must not depend on `data.workers`.
        with one_thread():
            item = items.make(request, take)
        yield item


class SharedBlock:
    """Zeroed shared memory, divided into slots. Can be pickled only while a process starts."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        size = num_slots * self.slot_bytes
        fd = os.memfd_create("segpipe")
        os.ftruncate(fd, size)
        self._arena = Arena(size, fd)

    def __getstate__(self) -> dict[str, Any]:
        # Without `bytes`, which would be a copy in the other process.
        return {"slot_bytes": self.slot_bytes, "_arena": self._arena}

    @cached_property
    def bytes(self) -> Uint8:
        """All memory, uint8 (size,)."""
        return np.frombuffer(self._arena.buffer, np.uint8)

    def slot(self, number: int) -> Uint8:
        """Memory of a slot."""
        return self.bytes[number * self.slot_bytes :][: self.slot_bytes]

    def close(self) -> None:
        """Close the file descriptor; the memory stays as long as a tensor needs it."""
        os.close(self._arena.fd)


class Slots:
    """The free slots of a block. The last one returned is reused first, since its memory is already allocated."""

    def __init__(self, block: SharedBlock, num_slots: int, pinned: bool) -> None:
        self._block = block
        self._pinned = pinned and _page_lock(block)
        self._free = list(reversed(range(num_slots)))
        self._copying: deque[tuple[Any, int]] = deque()

    def __len__(self) -> int:
        return len(self._free) + len(self._copying)

    def pop(self) -> int:
        """Number of a free slot; if there is none, waits until the GPU has copied one."""
        while self._copying and (not self._free or self._copying[0][0].query()):
            event, slot = self._copying.popleft()
            event.synchronize()
            self._free.append(slot)
        return self._free.pop()

    def tensor(self, slot: int, size: int) -> Tensor:
        """Tensor of the first `size` bytes of a slot, which is freed when no view of it is left."""
        array = self._block.slot(slot)[:size]
        weakref.finalize(array, self.put, slot).atexit = False
        return torch.from_numpy(array)

    def put(self, slot: int) -> None:
        """Return a slot; with page-locked memory, it is free once the copies queued so far are done."""
        if not self._pinned:
            self._free.append(slot)
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copying.append((event, slot))


def _page_lock(block: SharedBlock) -> bool:
    """Page-lock a block for copies to the GPU until its memory is freed; returns False, with a warning, if refused."""
    address, size = block.bytes.ctypes.data, block.bytes.size
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        warnings.warn(
            f"{size / 2**20:.0f} MiB for the loader's ring could not be page-locked, so the host waits for copies to "
            f"the GPU. Lower data.workers or data.prefetch, or raise `ulimit -l`.",
            stacklevel=2,
        )
        # CUDA would report the refusal at the next kernel launch, so clear it here.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return False
    # Slots are views of these bytes, so this runs when the last one is gone.
    weakref.finalize(block.bytes, runtime.cudaHostUnregister, address).atexit = False
    return True


class Ring:
    """Loader processes and their pending requests."""

    def __init__(self, items: Items, requests: Iterator[Any], how: Delivery) -> None:
        self._items, self._requests, self._how = items, requests, how
        self._ahead = how.workers * how.prefetch
        self._asked: dict[int, _Asked] = {}  # by number, until it is delivered
        self._answers: dict[int, Any] = {}
        self._count = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def deliver(self) -> Generator[Item, None, None]:
        """As the function `deliver`."""
        how = self._how
        num_slots = self._ahead + how.spare
        self._block = SharedBlock(num_slots, how.slot_bytes)
        # If the generator is never closed: at exit, multiprocessing sends daemons SIGTERM, which they ignore, and
        # waits. Not atexit, which does not run in a process spawned by multiprocessing.
        Finalize(self, _kill, args=(self._processes,), exitpriority=10)
        try:
            for _ in range(how.workers):
                self._start()
            # After the forks: workers need no locked pages.
            self._slots = Slots(self._block, num_slots, how.pinned)
            for _ in range(self._ahead):
                self._ask()
            while self._asked:
                yield self._next()
        finally:
            # A worker holds nothing that others need, so it can be killed at any point.
            _kill(self._processes)
            for pipe in self._pipes:
                pipe.close()
            self._block.close()

    def _start(self) -> None:
        context = get_context(self._how.start_method)
        if self._how.start_method == "forkserver":
            # torch is imported once instead of once per worker.
            context.set_forkserver_preload(["segpipe.data.loader"])
        ours, theirs = context.Pipe()
        # As an argument, large items would block start() forever if a spawned worker ends early.
        items = self._items if self._how.start_method == "fork" else None
        process = context.Process(  # type: ignore[attr-defined]
            target=work, args=(items, self._block, theirs), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 and later warn about any thread; workers take no lock that a torch thread could hold.
            warnings.filterwarnings(
                "ignore",
                message=".*multi-threaded, use of fork",
                category=DeprecationWarning,
            )
            try:
                process.start()
            except BlockingIOError as error:
                raise DataError(
                    f"data.workers = {self._how.workers}: no further process can be started ({error.strerror}). Raise "
                    "the limit (ulimit -u; in a container, of its pids), or lower data.workers."
                ) from error
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)
        if items is None:
            with contextlib.suppress(OSError):  # as in `_ask`
                ours.send(self._items)

    def _ask(self) -> None:
        """Send the next request to its worker."""
        request = next(self._requests, None)
        if request is None:
            return
        worker = self._count % self._how.workers
        self._receive(0)  # otherwise both sides could block on full pipes
        asked = _Asked(worker, self._slots.pop(), request)
        self._asked[self._count] = asked
        with contextlib.suppress(OSError):  # a dead worker is found by its sentinel
            self._pipes[worker].send((self._count, asked.slot, request))
        self._count += 1

    def _next(self) -> Item:
        number, asked = next(iter(self._asked.items()))
        left = self._how.timeout_s
        while number not in self._answers:
            if left <= 0:
                raise self._hang(asked.worker)
            begun, part = time.monotonic(), min(left, self._how.timeout_s / 10)
            self._receive(part)
            # If the whole job was stopped (Ctrl-Z, a scheduler), its workers could not work either.
            left -= min(time.monotonic() - begun, part)
        del self._asked[number]
        answer = self._answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        header, size = answer
        data = self._slots.tensor(asked.slot, size)
        if not self._slots:
            data = data.clone()
        self._ask()
        return header, data

    def _receive(self, timeout_s: float) -> None:
        """Wait for an answer, then take one from each ready worker. Raises DataError if a worker died."""
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

    def _label(self, worker: int) -> str:
        """The samples that a worker is making: those of the first item that it has not sent."""
        for number, asked in self._asked.items():
            if asked.worker == worker and number not in self._answers:
                return f" while it made {self._items.label(asked.request)}"
        return ""

    def _death(self, worker: int) -> DataError:
        process = self._processes[worker]
        process.join(EXIT_S)
        code = process.exitcode
        end = f"ended with exit code {code}"
        reason = ". Set data.workers=0 to see its error"
        if code is not None and code < 0:
            end = f"was killed by signal {-code}"
            reason = f": {REASONS.get(-code, 'a library crashed. Set data.workers=0 to see where')}"
        return DataError(
            f"loader worker {worker} {end}{self._label(worker)}{reason}. {CONTINUE}"
        )

    def _hang(self, worker: int) -> DataError:
        """Make all workers write their stacks, kill them, and return the error."""
        for number, process in enumerate(self._processes):
            if process.is_alive() and process.pid is not None:
                print(
                    f"stack of loader worker {number} (process {process.pid}):",
                    file=sys.stderr,
                    flush=True,
                )
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(STACK_S)  # one after another, so that lines do not mix
        _kill(self._processes)
        return DataError(
            f"loader worker {worker} (process {self._processes[worker].pid}) has sent nothing for "
            f"{self._how.timeout_s:g} s{self._label(worker)}. The stacks of all workers are on stderr, except stopped "
            "ones (SIGSTOP, a debugger, a scheduler). The disk may be hanging, or a library may not survive a fork: "
            f"try data.start_method=spawn, or data.workers=0. If it only needs longer, raise data.timeout_s. {CONTINUE}"
        )


def _kill(processes: list[BaseProcess]) -> None:
    """Kill and join processes. Workers ignore SIGTERM, so this sends SIGKILL."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(EXIT_S)


def work(items: Items | None, block: SharedBlock, pipe: Connection) -> None:
    """Main loop of a loader process: makes requested items until the trainer is gone.

    The process has one thread and no random state of its own.
    """
    isolate()
    starter = os.getppid()
    with contextlib.suppress(OSError, EOFError):
        if items is None:
            items = _received(pipe, starter)
            isolate()  # again: they import the user's modules
        while (message := _received(pipe, starter)) is not None:
            number, slot, request = message
            answer: Any
            try:
                header, data = items.make(request, partial(_slot, block, slot))
                answer = header, len(data)
            except Exception as error:
                answer = sendable(error)
            pipe.send_bytes(pickle.dumps((number, answer)))


def _slot(block: SharedBlock, number: int, size: int) -> Tensor:
    """The first `size` bytes of a slot. Raises DataError if the slot is smaller."""
    if size > block.slot_bytes:
        raise DataError(
            f"a sample needs {size} bytes, but a slot of the loader has {block.slot_bytes}. Set data.workers=0."
        )
    return torch.from_numpy(block.slot(number)[:size])


def _received(pipe: Connection, starter: int) -> Any:
    """The next message; None if the trainer is gone.

    A forked worker holds copies of the trainer's ends of the pipes, so they stay open when the trainer is gone.
    """
    while not pipe.poll(LOOK_S):
        if os.getppid() != starter:
            return None
    return pipe.recv()


def isolate() -> None:
    """Give this process one thread, no shared random state, and no CUDA work.

    A terminal's and a scheduler's signals reach all processes of a job at once. Workers ignore them, because the
    trainer needs them until it has finished its step and written a checkpoint.
    """
    for number in (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR2,
    ):
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
    """Let this process keep freed memory, if glibc allocates it.

    Otherwise each decoded image takes new pages and returns them at once: at 2048x1024, 7 of 25 ms for JPEG.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**30)
        mallopt(mmap_threshold, 2**25)  # the maximum that glibc accepts


def sendable(error: Exception) -> Exception:
    """The error, with its traceback in a note unless expected; as another class if it cannot be pickled or raised.

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
