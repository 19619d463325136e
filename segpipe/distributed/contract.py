"""The contract between ranks: the same collectives, with the same shapes, in the same order, from the same lines.

Backends do not check this. If shapes differ, gloo reports success on some ranks and hangs on others; NCCL hangs. So
segpipe announces every collective to a `Contract` just before the call, which costs a few microseconds.

Differences are found in two ways, and each names both sides (op, dtype, shape, line):
- `ticket` and `settle` compare a hash of all calls inside a collective that an update needs anyway, so that no update
  is applied or saved after a collective that went wrong;
- a watcher thread on every rank writes the hashes of its last calls to the store every 0.3 s, and rank 0 compares
  them, even while a rank hangs. The other ranks also take turns at comparing, in case rank 0 is silent.

When calls differ, some ranks wait longer than `compute.timeout_s` for others, or all ranks of a machine are silent for
SILENT_S, all ranks report their calls and stacks. The lowest rank that answers writes the diagnosis to the store as the
verdict, one rank per machine prints it, and every rank raises it at its next collective. A rank that hangs inside a
collective cannot, so its process is ended. A rank that loses the store names its machine in a verdict of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from sys import _getframe
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from segpipe.errors import (
    CollectiveError,
    ConfigError,
    Interrupted,
    NotWritten,
    SegpipeError,
    first_line,
    listed,
)
from segpipe.files import ADVICE, sha256_of
from segpipe.processes import Watcher, end_process

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
RING = 512  # calls that are remembered; the watcher looks every 0.3 s, and a step makes 4 to 40
_MULTIPLIER = 6364136223846793005  # odd, so that every earlier call keeps its effect; Knuth's MMIX generator
_WORD = 2**64 - 1
# As in code objects: links are not resolved.
_HERE = str(Path(__file__).parent)
_PACKAGE = Path(__file__).parents[1]

MARGIN_S = 15.0  # added to the backend's own timeout, so that ours, with the better message, fires first
ANSWER_S = 10.0  # for the ranks to agree on what went wrong
ANSWERS_S = 0.6  # for ranks to report their calls
REPORT_S = 2.0  # for a rank that ended to say why
TURN_S = 3.0  # how long one of the other ranks compares, in addition to rank 0
SILENT_S = 20.0  # a machine counts as lost after this time without a sign of its ranks, or an answer from its store
GRACE_S = 3.0  # for the training thread to notice a verdict
CLOSING_S = 60.0  # for the training thread to end after that
PARTING_S = 10.0  # how long rank 0 waits for the others to close first
LOST_S = 1.0  # the same after a verdict, when some ranks may never close
TICKET_BITS = 48  # so that the sum of the tickets of 32768 ranks is exact in int64
POSTED = 64  # calls whose hashes are in the store; ranks that wait for each other are only a few calls apart


class Call(NamedTuple):
    """One collective in the sequence of all calls of a rank."""

    number: int  # from 1
    rolling: int  # hash of all calls up to this one
    text: str  # operation, dtype, shape, level of the group, line


class CallLog:
    """The last RING calls of this rank, and a rolling 64-bit hash of all its calls so far, in order."""

    def __init__(self) -> None:
        self.count = 0
        self.rolling = 0
        self._calls: deque[Call] = deque(maxlen=RING)

    def add(self, op: str, tensor: Tensor | None = None, level: int = 0) -> None:
        """Append a call, with the nearest line outside segpipe/distributed. Takes 2 to 4 us."""
        frame = _getframe(1)
        while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
            frame = frame.f_back
        kind, shape = ("", ()) if tensor is None else (str(tensor.dtype), tensor.shape)

        text, digest = _known(op, kind, shape, level, frame.f_code, frame.f_lineno)
        self.rolling = (self.rolling * _MULTIPLIER + digest) & _WORD
        self.count += 1
        self._calls.append(Call(self.count, self.rolling, text))

    def last(self) -> list[Call]:
        """The remembered calls, oldest first. Safe from another thread."""
        return list(self._calls)  # atomic: no other thread runs meanwhile


@lru_cache(maxsize=1024)
def _known(
    op: str, dtype: str, shape: tuple[int, ...], level: int, code: CodeType, line: int
) -> tuple[str, int]:
    """A call as text, and 64 bits of its hash; both are the same on every machine, wherever segpipe is installed."""
    path = Path(code.co_filename)
    ours = path.is_relative_to(_PACKAGE)
    path = path.relative_to(_PACKAGE) if ours else Path(path.name)
    # Python objects have no dtype, and their sizes may differ.
    tensor = f" {dtype.removeprefix('torch.')} {list(shape)}" if dtype else ""
    within = f" (level {level})" if level else ""
    text = f"{op}{tensor}{within} at {path}:{line} {code.co_name}"
    return text, int(sha256_of(text.encode())[:16], 16)


def diagnose(
    calls: Mapping[int, Mapping[int, str]], counts: Sequence[int], hosts: Sequence[str]
) -> str:
    """One paragraph that names the first difference between the ranks' calls, with both sides.

    If there is no difference, it names the ranks that are behind.

    calls: of each rank that answered, by call number. counts: calls that every rank has made, as far as known.
    hosts: machine of every rank, named where there are several.
    """
    if found := first_difference(calls):
        number, sides = found
        both = [f"{_listed(members)}: {call}" for call, members in sides.items()]
        verdict = (
            f"collective {number} is not the same on all ranks. {'; '.join(both)}. All ranks must make the same calls "
            "in the same order: look for a branch that only some ranks take, or a size that depends on the rank."
        )
    elif not (verdict := _behind(calls, counts)):
        verdict = (
            f"the last {RING} collectives are the same on all ranks that answered, up to {_named(max(counts), calls)}: "
            f"an earlier one differs, or that of a rank without an answer, data was corrupted, or a connection broke."
        )

    silent = [rank for rank in range(len(counts)) if rank not in calls]
    if silent:
        verdict += (
            f" No answer from {_listed(silent)}{_on(silent, hosts)}: ended, stopped, or inside a call that holds the "
            f"interpreter."
        )
    return verdict


def first_difference(
    calls: Mapping[int, Mapping[int, T]],
) -> tuple[int, dict[T, list[int]]] | None:
    """The first number at which calls differ, and the ranks of each call; None when no remembered call differs.

    `calls`: each rank's last calls by number, or for each the hash of all calls up to it. Any two ranks that differ
    are enough: a third may be behind, because it died of what the two sent.
    """
    for number in sorted({number for own in calls.values() for number in own}):
        sides: dict[T, list[int]] = {}
        for rank, own in calls.items():
            if number in own:
                sides.setdefault(own[number], []).append(rank)
        if len(sides) > 1:
            return number, sides
    return None


def _behind(calls: Mapping[int, Mapping[int, str]], counts: Sequence[int]) -> str:
    """Names the ranks that did not reach the collective in which the others wait; empty if none is behind."""
    least = min(counts)
    behind = [rank for rank, count in enumerate(counts) if count == least]
    waiting = [rank for rank, count in enumerate(counts) if count > least]
    if not waiting:
        return ""
    return (
        f"collective {_named(least + 1, calls)}, was not reached by {_listed(behind)}, last seen after "
        f"{_named(least, calls)}; {_listed(waiting)} waited. If it only needs more time, raise compute.timeout_s."
    )


def _named(number: int, calls: Mapping[int, Mapping[int, str]]) -> str:
    """A call's number and text, from any rank that remembers it."""
    known = [own[number] for own in calls.values() if number in own]
    return f"{number}, {known[0] if known else 'which no rank remembers'}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks], 8)}"


def _on(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """The machines of ranks, where there are several."""
    if len(set(hosts)) < 2:
        return ""
    names = dict.fromkeys(
        hosts[rank].rpartition("-")[0] or hosts[rank] for rank in ranks
    )
    return f" on {listed(list(names), 8)}"


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


class Contract:
    """This rank's side of the contract. Without a store (one process, tests) calls are only recorded.

    After `watch`, only the watcher thread uses the store.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        *,
        timeout_s: float = 600.0,
        hosts: Sequence[str] = (),
    ) -> None:
        self.log = CallLog()
        self.watcher = Watcher(self.look)
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self.server = store  # a reference, because rank 0's may be the server and would end with the process group
        self._timeout_s = timeout_s
        self._hosts = hosts or [""] * world_size
        # Number of each rank's last look, and when it was first seen; under "least", the call count of the slowest
        # rank.
        self._since: dict[int | str, tuple[int, float]] = {}
        self._looked_at = 0.0
        self._looks = 0
        self._keys = [f"state/{other}" for other in range(world_size)]
        self._stacks: Stacks | None = None
        self._ticket = 0
        self._posts: dict[str, str] = {}  # what this rank asks or reports, by key
        self._verdict: CollectiveError | None = None
        self._decided = threading.Event()  # there is a verdict
        self._limit = 0.0  # for the training thread, after a verdict
        # Called on the ranks that print the verdict; in a thread, because a disk may hang. And with their own errors.
        self.on_verdict: Callable[[SegpipeError], None] = lambda error: None
        self._answered_at: float | None = None
        self.waited_s = 0.0  # for other ranks; NCCL lets the GPU wait instead

    # The training thread's side.

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Adds the time spent inside to `waited_s`."""
        started = time.monotonic()
        yield
        self.waited_s += time.monotonic() - started

    def enter(self, op: str, tensor: Tensor | None = None, *, level: int = 0) -> None:
        """Announce a collective. Call it just before each one, on all of its ranks.

        Raises CollectiveError when a rank has broken the contract.
        """
        self.log.add(op, tensor, level)
        if verdict := self._wait(0.0):
            raise verdict

    def ticket(self) -> int:
        """48 bits of the hash of all calls; sum it over all ranks and pass the sum to `settle`."""
        self._ticket = self.log.rolling >> (64 - TICKET_BITS)
        return self._ticket

    def settle(self, total: int) -> None:
        """Raises CollectiveError unless all ranks have the same ticket. `total`: the sum of their tickets."""
        if total == self._ticket * self._world_size:
            return
        last = self.log.last()[-1:]
        raise self._ask() or CollectiveError(
            f"ranks have made different calls, or their sum is wrong. The last call of rank {self._rank}: "
            f"{last[0].text if last else 'none'}."
        )

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this one ends with `error`, so that they end with the same exit code.

        If there is a verdict before its own, raises that instead: all ranks may have the same error. If `error` only
        says that another rank is gone, this waits a moment for that rank's own report, asks all ranks so that the
        silent one is named, and always raises CollectiveError.
        """
        if self._store is None or isinstance(error, CollectiveError):
            return
        code = getattr(error, "exit_code", 1)
        # All ranks have the same settings and files: rank 0 has the first word on them.
        waits = code == ConfigError.exit_code and self._rank
        if verdict := self.verdict(error) or self._wait(ANSWERS_S if waits else 0.0):
            raise verdict from None

        own = f"rank {self._rank}{_on([self._rank], self._hosts)}"
        if lost_another_rank(error):
            raise lost_rank(error, own) from None
        kind = type(error).__name__
        text = f"{own}: {kind}: {error}"
        if not isinstance(error, SegpipeError):
            say(text)  # its traceback may not name the rank
        self._post("verdict", self._as_json(text, code, self._elsewhere(), kind))
        if (verdict := self._wait(REPORT_S)) and str(verdict) != text:
            raise verdict

    def verdict(self, error: BaseException) -> CollectiveError | None:
        """The ranks' verdict. Waits for it if `error` says that another rank is gone, and a moment after a signal.

        Launchers send SIGTERM to all other ranks as soon as the one that failed has ended.
        """
        if self._store is None:
            return None
        if lost_another_rank(error):
            return self._wait(REPORT_S) or self._ask()
        return self._wait(ANSWERS_S if isinstance(error, KeyboardInterrupt) else 0.0)

    def keep_stacks(self, folder: Path) -> None:
        """From now on, write the stacks of all threads to `folder`/stacks/rankNN.txt on SIGUSR1 and on a failure."""
        self._stacks = Stacks(folder / "stacks" / f"rank{self._rank:02d}.txt")

    def close(self) -> None:
        """Stop watching. Call it after the process group is destroyed: if that hangs, the watcher ends the process."""
        self.watcher.stop()
        store, self._store = self._store, None
        if store is not None:
            # Rank 0 goes last, because its process may hold the store: torch prints a stack when it loses the store.
            end = time.monotonic() + (PARTING_S if self._verdict is None else LOST_S)
            awaited = self._world_size if self._rank == 0 else 0
            with contextlib.suppress(RuntimeError):
                gone = store.add("closed", 1)
                while gone < awaited and time.monotonic() < end:
                    time.sleep(0.02)
                    gone = store.add("closed", 0)
        if self._stacks is not None:
            self._stacks.close()

    def _wait(self, seconds: float) -> CollectiveError | None:
        """The verdict, if there is one now or within `seconds`."""
        self._decided.wait(seconds)
        if verdict := self._verdict:
            self._limit = time.monotonic() + CLOSING_S
        return verdict

    def _ask(self) -> CollectiveError | None:
        """Ask all ranks to report their calls; returns the verdict, if they reach one."""
        if self._store is None:
            return None
        self._post("alarm", "raised")
        return self._wait(ANSWER_S)

    def _post(self, key: str, text: str) -> None:
        self._posts[key] = text
        self.watcher.hurry()

    # The watcher thread's side.

    def look(self) -> bool:
        """Look at the other ranks once; returns whether the next look should be soon."""
        if self._verdict is not None:
            if time.monotonic() > self._limit:
                end_process(self._verdict.exit_code)
        elif self._store is not None:
            try:
                self.tick(self._store)
            except RuntimeError as error:  # its process ended, or does not answer
                self._store = None  # a late answer would be taken for the next one
                self._accept(
                    self._without_store(error), CollectiveError.exit_code, told=False
                )
        return self._answered_at is not None

    def tick(self, store: Store) -> None:
        """Write this rank's state, then judge or answer the others. Raises RuntimeError when the store is gone."""
        if self._stacks is not None:
            self._stacks.dump_unless_called_again(self._timeout_s / 2)
        hashes = [(call.number, call.rolling) for call in self.log.last()[-POSTED:]]
        self._looks += 1
        state = self._looks, self.log.count, hashes
        store.set(self._keys[self._rank], json.dumps(state))

        for key, text in tuple(self._posts.items()):
            store.compare_set(key, "", text)

        now = time.monotonic()
        if now - self._looked_at > SILENT_S / 4:
            self._since.clear()  # the whole job may have been suspended
        self._looked_at = now
        turn = int(now / TURN_S) % self._world_size
        if store.check(["verdict"]):
            verdict = json.loads(store.get("verdict"))
            told = self._rank not in verdict.pop("speakers")
            self._accept(**verdict, told=told)
        elif store.check(["alarm"]):
            self._answer(store)
        elif self._rank in (0, turn) and store.check(self._keys):
            states = map(json.loads, store.multi_get(self._keys))
            looks, counts, last = zip(*states, strict=True)
            late, silent = self._late(counts), self._silent(looks)
            if late or silent or first_difference(dict(enumerate(map(dict, last)))):
                store.compare_set("alarm", "", "raised")
                self.watcher.hurry()

    def _late(self, counts: Sequence[int]) -> bool:
        """Whether some ranks have waited longer than the timeout for others. `counts`: calls of each rank."""
        least = min(counts) if len(set(counts)) > 1 else -1
        waited_s = self._unchanged_for("least", least)
        return least >= 0 and waited_s > self._timeout_s

    def _silent(self, beats: Sequence[int]) -> bool:
        """Whether all ranks of another machine have been silent for SILENT_S. `beats`: looks of each rank."""
        heard = {
            self._hosts[rank]
            for rank, beat in enumerate(beats)
            if self._unchanged_for(rank, beat) < SILENT_S
        }
        return bool(set(self._hosts) - heard - {self._hosts[self._rank]})

    def _unchanged_for(self, name: int | str, value: int) -> float:
        """Seconds since this name's current value was first seen."""
        now = time.monotonic()
        before, since = self._since.get(name, (None, now))
        if before != value:
            since = now
        self._since[name] = (value, since)
        return now - since

    def _answer(self, store: Store) -> None:
        """Report this rank's calls and stacks once; then, as the lowest rank that answers, write the verdict."""
        now = time.monotonic()
        if self._answered_at is None:
            self._answered_at = now
            calls = [(call.number, call.text) for call in self.log.last()]
            store.set(f"calls/{self._rank}", json.dumps(calls))
            if self._stacks is not None:
                self._stacks.dump(
                    "ranks called different collectives, or one is missing"
                )

        answers = {
            rank: dict(json.loads(store.get(f"calls/{rank}")))
            for rank in range(self._world_size)
            if store.check([f"calls/{rank}"])
        }

        missing = len(answers) < self._world_size
        waits = missing and now - self._answered_at <= ANSWERS_S
        if waits or self._rank != min(answers):
            return
        counts = [
            json.loads(store.get(key))[1] if store.check([key]) else 0
            for key in self._keys
        ]
        text = diagnose(answers, counts, self._hosts)
        if self._stacks is not None:
            text += f" The stacks of all ranks are in {self._stacks.path.parent}."
        code = CollectiveError.exit_code
        store.compare_set("verdict", "", self._as_json(text, code, sorted(answers)))

    def _as_json(
        self, text: str, exit_code: int, ranks: Sequence[int], kind: str = ""
    ) -> str:
        """A verdict as JSON; the first of `ranks` on every machine prints it."""
        first = {self._hosts[rank]: rank for rank in reversed(ranks)}
        speakers = [*first.values()]
        return json.dumps(
            {"text": text, "exit_code": exit_code, "kind": kind, "speakers": speakers}
        )

    def _elsewhere(self) -> list[int]:
        """The ranks of other machines."""
        here = self._hosts[self._rank]
        return [rank for rank, host in enumerate(self._hosts) if host != here]

    def _without_store(self, error: RuntimeError) -> str:
        """What this rank knows when the store is gone."""
        away = self._elsewhere()
        others = f" of {_listed(away)}{_on(away, self._hosts)}" if away else ""
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"rank {self._rank}{_on([self._rank], self._hosts)} lost the store at {address} ({first_line(error)}): "
            f"the process or machine that holds it ended, or the network{others} was cut."
        )

    def _accept(self, text: str, exit_code: int, kind: str = "", *, told: bool) -> None:
        error = CollectiveError(text)
        error.exit_code, error.kind, error.told = exit_code, kind, True
        if not told:
            say(text)
            note = threading.Thread(target=self.on_verdict, args=(error,), daemon=True)
            note.start()

        self._limit = time.monotonic() + GRACE_S
        self._verdict = error
        self._decided.set()


def lost_rank(error: Exception, where: str) -> CollectiveError:
    """The error of a rank (`where`) that only knows that a collective failed; NCCL's last line has the reason."""
    return CollectiveError(
        f"{where}: a collective failed, often because a rank ended or cannot be reached: {' '.join(str(error).split())}"
    )


def lost_another_rank(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone.

    NCCL raises DistError. gloo raises only RuntimeError, with these texts.
    """
    from torch.distributed import DistError

    signs = ("gloo/transport", "Connection closed by peer")
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def exit_code_of(error: BaseException, contract: Contract) -> int:
    """Exit code of a process that this error ends: that of the ranks' verdict, if there is one.

    If another rank is the cause, waits for the verdict.
    """
    if verdict := contract.verdict(error):
        return verdict.exit_code
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    if isinstance(error, OSError) and error.errno in ADVICE:
        return NotWritten.exit_code
    if lost_another_rank(error):
        return CollectiveError.exit_code
    return getattr(error, "exit_code", 1)


class Stacks:
    """The stack file of this rank; removed at the end if it is empty.

    `kill -USR1 PID` does not need the interpreter, so it works even while a call blocks the main thread forever. A
    scheduler that sends SIGUSR1 as a warning does not end the run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)

    def dump_unless_called_again(self, seconds: float) -> None:
        """Write the stacks from a C thread unless called again within `seconds`: some call holds the interpreter."""
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def dump(self, why: str) -> None:
        """Append a line with the time and `why`, then the stacks of all threads."""
        self._file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """Stop answering SIGUSR1."""
        if self._file.closed:
            return
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)
        self._file.close()
        with contextlib.suppress(OSError):  # deleted, or the folder has another file
            if self.path.stat().st_size == 0:
                self.path.unlink()
                self.path.parent.rmdir()


def _limit_waits(port: int) -> None:
    """Limit every wait of this process for the store at `port` to SILENT_S.

    When a link is cut or a machine loses power, torch would wait for an answer forever.
    """
    limit = struct.pack("ll", int(SILENT_S), 0)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                address = connection.getpeername()
                if isinstance(address, tuple) and address[1] == port:
                    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def watch(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    hosts: Sequence[str] = (),
) -> Contract:
    """This rank's contract, watched from now on over a separate store connection with separate keys.

    `hosts`: the machine of every rank.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    own = PrefixStore("contract/watch", store.clone())
    own.set_timeout(timedelta(seconds=SILENT_S))
    _limit_waits(int(os.environ.get("MASTER_PORT", "0")))
    contract = Contract(rank, world_size, own, timeout_s=timeout_s, hosts=hosts)
    contract.server = store
    contract.watcher.start()
    return contract
