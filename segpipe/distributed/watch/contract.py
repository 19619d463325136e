"""The contract between ranks: the same collectives, with the same shapes, in the same order, from the same lines.

Backends do not check it. With shapes that differ, gloo reports success on some ranks and hangs on others; NCCL hangs.
So every collective of segpipe is announced to a `Contract` just before it is called, which costs a few microseconds.

A difference is found in two ways, and each names both sides (op, dtype, shape, line):
- a watcher thread compares the calls of all ranks every 0.3 s through the store, also while a rank hangs;
- `ticket` and `settle` compare a hash of all calls inside a collective that an update needs anyway, so that no update
  is applied or saved after a collective that went wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from segpipe.distributed.watch.calls import CallLog
from segpipe.distributed.watch.stacks import Stacks
from segpipe.distributed.watch.watcher import Watcher, print_error
from segpipe.errors import CollectiveError, SegpipeError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

MARGIN_S = 15.0  # by which the backend's own timeout is longer than ours, whose message says more
ANSWER_S = 10.0  # for the watchers to agree on what went wrong
TICKET_BITS = 48  # so that the sum of the tickets of 32768 ranks is exact in int64


class Contract:
    """This rank's side of it. Without a watcher (one process, tests) calls are only recorded."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, *, watcher: Watcher | None = None
    ) -> None:
        self.log = watcher.log if watcher is not None else CallLog()
        self._rank, self._world_size, self._watcher = rank, world_size, watcher
        self._stacks: Stacks | None = None
        self._ticket = 0

    def enter(self, op: str, tensor: Tensor | None = None, *, level: int = 0) -> None:
        """To be called just before each collective, on all of its ranks.

        Raises CollectiveError when a rank was found to break the contract.
        """
        self.log.add(op, tensor, level)
        if self._watcher is not None:
            self._watcher.check()

    def ticket(self) -> int:
        """48 bits of the hash of all calls, to be summed over all ranks and passed to `settle`."""
        self._ticket = self.log.rolling >> (64 - TICKET_BITS)
        return self._ticket

    def settle(self, total: int) -> None:
        """Raises CollectiveError unless the tickets of all ranks, whose sum is `total`, are the same."""
        if total != self._ticket * self._world_size:
            self._stop("ranks have made different calls, or their sum is wrong")

    def _stop(self, reason: str) -> NoReturn:
        """Have all ranks report their calls, and raise CollectiveError with the verdict."""
        entries = self.log.last()
        last = f"number {entries[-1].number}, {entries[-1].call}" if entries else "none"
        if self._watcher is None:
            raise CollectiveError(
                f"{reason}. The last call of rank {self._rank}: {last}."
            )
        raise self._watcher.ask(ANSWER_S) or CollectiveError(
            f"{reason}, and the ranks did not answer. The last call of rank {self._rank}: {last}."
        )

    def fail(self, error: Exception, *, lost: bool = False) -> None:
        """Tell the other ranks that this one ends with `error`, so that they end with the same exit code.

        Raises the verdict of the watchers instead, if there is one. With `lost`, when `error` only reports that another
        rank is gone, waits a moment for that rank's own report, then asks all ranks, so that the silent one is named.
        """
        if self._watcher is None or isinstance(error, CollectiveError):
            return
        verdict = self._watcher.wait(2.0 if lost else 0.0)
        if verdict is None and lost:
            verdict = self._watcher.ask(ANSWER_S)
        if verdict is not None:
            raise verdict from None
        if not lost:
            code, text = (
                getattr(error, "exit_code", 1),
                f"rank {self._rank}: {type(error).__name__}: {error}",
            )
            if not isinstance(
                error, SegpipeError
            ):  # its traceback may not name the rank
                self._watcher.say(text)
            self._watcher.publish(text, code)

    def keep_stacks(self, folder: Path) -> None:
        """From now on `folder`/stacks/rankNN.txt receives the stacks of all threads: on SIGUSR1, and on a failure."""
        self._stacks = Stacks(folder / "stacks" / f"rank{self._rank:02d}.txt")
        if self._watcher is not None:
            self._watcher.keep(self._stacks)

    def close(self) -> None:
        """End the watcher. Call it after the process group was destroyed: should that hang, the watcher ends it."""
        if self._watcher is not None:
            self._watcher.close()
        if self._stacks is not None:
            self._stacks.close()


def watch(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    say: Callable[[str], None] = print_error,
) -> Contract:
    """This rank's contract, watched from now on through a connection and keys of its own."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    own = PrefixStore("contract/watch", store.clone())
    watcher = Watcher(own, rank, world_size, timeout_s=timeout_s, say=say)
    watcher.start()
    return Contract(rank, world_size, watcher=watcher)
