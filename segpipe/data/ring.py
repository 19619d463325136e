"""A ring of shared memory that loader processes fill in place.

Each worker has a socket of its own, so none holds a lock that another one waits for, and the trainer never blocks in a
read or write of one: it waits for all of them at once, by its own clock.

A slot belongs to the tensor made of it. It is handed out again when the last view of that tensor is gone, on CUDA when
the copies queued until then are done. If the caller keeps more items than there are slots to spare, it gets copies.
"""

from __future__ import annotations

import os
import pickle
import select
import selectors
import socket
import struct
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch

from segpipe.data.slots import PAGE_BYTES, Block, Ended, RingLayout, Slot, Slots
from segpipe.data.workers import (
    Delivery,
    Items,
    context_of,
    death,
    hang,
    isolate,
    kill,
    sendable,
)
from segpipe.errors import DataError

LENGTH = struct.Struct("<Q")  # before each message
LOOK_S = 5.0  # between looks of an idle worker whether its trainer still lives
END_S = 1.0  # for workers to finish the sample that they are at
TRIES = 3  # workers that are replaced before one of the items that they were to make is delivered


class _Worker:
    """A process, and the trainer's end of its socket."""

    def __init__(self, process: BaseProcess, end: socket.socket) -> None:
        self.process, self.socket = process, end
        self.inbox, self.outbox = bytearray(), bytearray()
        end.setblocking(False)

    def send(self, message: Any = b"") -> None:
        """Send as much as fits in the socket; without a message, what is left of those before."""
        if message != b"":
            self.outbox += _framed(message)
        try:
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # its end is noticed by its sentinel
            self.outbox.clear()

    def messages(self) -> Iterator[Any]:
        """What has arrived."""
        try:
            while part := self.socket.recv(2**20):
                self.inbox += part
        except OSError:
            pass
        while len(self.inbox) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self.inbox)
            if len(self.inbox) < LENGTH.size + size:
                return
            content = bytes(self.inbox[LENGTH.size : LENGTH.size + size])
            del self.inbox[: LENGTH.size + size]
            yield pickle.loads(content)


def _framed(message: Any) -> bytes:
    content = pickle.dumps(message)
    return LENGTH.pack(len(content)) + content


class Ring:
    """Iterator over items of `requests`, in their order: request n is made by worker n % how.workers.

    slot_bytes: size of an item that travels in place. spare: slots beside those of items made ahead, for items that
    the caller keeps. Raises DataError, which names worker and sample, when a worker has died, or has sent nothing for
    how.timeout_s; with how.replace, another process then makes what it was asked for.
    """

    def __init__(
        self,
        items: Items,
        requests: Iterable[Any],
        how: Delivery,
        *,
        slot_bytes: int,
        spare: int,
    ) -> None:
        self._items, self._requests, self._how = items, iter(requests), how
        self._context, workers, ahead = (
            context_of(how.start_method),
            how.workers,
            how.workers * how.prefetch,
        )
        self._layout = RingLayout(workers, -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES)
        self._block = Block(self._layout.slot(ahead + spare))
        self._asked: dict[
            int, tuple[int, Any]
        ] = {}  # slot and request of each item that is not delivered yet
        self._made: dict[int, Any] = {}
        self._next = self._sent = self._losses = 0
        self._processes: list[BaseProcess] = []
        # Should nobody call `end`: at its exit multiprocessing sends daemons SIGTERM, which they ignore, and waits.
        # Not atexit, which does not run in a process that multiprocessing has spawned.
        Finalize(self, kill, args=(self._processes,), exitpriority=10)
        self._workers: list[_Worker] = []
        for number in range(workers):
            self._workers.append(self._start(number))
        self._slots = Slots(
            self._block, self._layout, ahead + spare, how.pinned
        )  # after the forks: workers need no locked pages
        for _ in range(ahead):
            self._ask()

    def __next__(self) -> Any:
        if self._next == self._sent:
            raise StopIteration
        number = self._next % len(self._workers)
        deadline = time.monotonic() + self._how.timeout_s
        while self._next not in self._made:
            left = deadline - time.monotonic()
            if left <= 0:
                text = hang(
                    number, self._processes, self._label(number), self._how.timeout_s
                )
                self._lose(number, text)
                deadline = time.monotonic() + self._how.timeout_s
            self._exchange(max(left, 0))
        slot, _ = self._asked.pop(self._next)
        item, size = self._made.pop(self._next)
        self._next += 1
        self._losses = 0
        if isinstance(item, Exception):
            raise item
        if size is None:
            self._slots.put(slot)
            item = item._replace(data=torch.from_numpy(item.data))
        elif len(self._slots):
            item = item._replace(data=self._slots.tensor(slot, size))
        else:
            item = item._replace(data=self._slots.tensor(slot, size).clone())
        self._ask()
        return item

    def end(self) -> None:
        """End the workers: each after the item that it is at, or by force."""
        for number, worker in enumerate(self._workers):
            self._layout.state(self._block, number)[1] = 1
            worker.send(None)
        deadline = time.monotonic() + (
            END_S if all(process.is_alive() for process in self._processes) else 0
        )
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        kill(self._processes)
        for worker in self._workers:
            worker.socket.close()
        if self._workers:
            self._block.close()
        self._workers.clear()

    def _ask(self) -> None:
        """Send the next request to the worker whose turn it is."""
        request = next(self._requests, None)
        if request is None:
            return
        self._asked[self._sent] = slot, _ = self._slots.pop(), request
        self._workers[self._sent % len(self._workers)].send((self._sent, slot, request))
        self._sent += 1

    def _exchange(self, timeout_s: float) -> None:
        """Wait until a worker has sent something, can be sent more, or has died; take what there is."""
        with selectors.DefaultSelector() as selector:
            for number, worker in enumerate(self._workers):
                events = selectors.EVENT_READ | (
                    selectors.EVENT_WRITE if worker.outbox else 0
                )
                selector.register(worker.socket, events, (number, False))
                selector.register(
                    worker.process.sentinel, selectors.EVENT_READ, (number, True)
                )
            ready = [key.data for key, _ in selector.select(timeout_s)]
        for number, _ in ready:
            self._workers[number].send()
            for place, item, size in self._workers[number].messages():
                self._made[place] = item, size
        for number in sorted({number for number, ended in ready if ended}):
            self._lose(
                number, death(number, self._processes[number], self._label(number))
            )

    def _start(self, number: int) -> _Worker:
        ours, theirs = socket.socketpair()
        inherited = [worker.socket for worker in self._workers] + [ours]
        others = inherited if self._context.get_start_method() == "fork" else []
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_work,
            args=(self._items, self._block, self._layout, number, theirs, others),
            daemon=True,
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
        self._processes[number:] = [process, *self._processes[number + 1 :]]
        return _Worker(process, ours)

    def _lose(self, number: int, text: str) -> None:
        """Replace a worker, or raise DataError."""
        self._losses += 1
        if not self._how.replace or self._losses > TRIES:
            kill(self._processes)
            raise DataError(text)
        print(f"{text} It is replaced.", file=sys.stderr)
        kill([self._processes[number]])
        self._workers[number].socket.close()
        self._workers[number] = self._start(number)
        for place, (slot, request) in sorted(self._asked.items()):
            if place % len(self._workers) == number and place not in self._made:
                self._workers[number].send((place, slot, request))

    def _label(self, number: int) -> str:
        """The sample that a worker is at: of the first item that it has not sent."""
        for place, (_, request) in sorted(self._asked.items()):
            if place % len(self._workers) == number and place not in self._made:
                return f" while it made {self._items.label(request, int(self._layout.state(self._block, number)[0]))}"
        return ""


def _work(
    items: Items,
    block: Block,
    layout: RingLayout,
    number: int,
    end: socket.socket,
    others: Sequence[socket.socket],
) -> None:
    """A worker: makes what it is asked for until the trainer says that this is all, or is gone."""
    isolate(number)
    for inherited in others:
        inherited.close()
    starter, state = os.getppid(), layout.state(block, number)
    with suppress(Ended, OSError):  # OSError: the trainer has closed its end
        while (message := _received(end, starter)) is not None:
            place, slot, request = message
            room = Slot(
                torch.from_numpy(block.bytes[layout.slot(slot) :][: layout.slot_bytes]),
                state,
            )
            try:
                item = items.make(request, room)
                size = len(item.data) if room.used else None
                item = item._replace(data=None if room.used else item.data.numpy())
            except Exception as error:
                item, size = sendable(error), None
            end.sendall(_framed((place, item, size)))


def _received(end: socket.socket, starter: int) -> Any:
    """The next message; None if there will be none."""
    content, wanted = bytearray(), LENGTH.size
    while len(content) < wanted:
        if not select.select([end], [], [], LOOK_S)[0]:
            if os.getppid() != starter:
                return None
            continue
        part = end.recv(wanted - len(content))
        if not part:
            return None
        content += part
        if len(content) == LENGTH.size == wanted:
            wanted += LENGTH.unpack(content)[0]
    return pickle.loads(content[LENGTH.size :])
