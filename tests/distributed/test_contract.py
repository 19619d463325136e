"""Different collectives on different ranks are found in time and named on both sides: simulated, and over gloo."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import held_port
from ranks import PATIENCE_S, PRELOADED
from segpipe import processes
from segpipe.data.loader import ShardBatch
from segpipe.distributed import contract as watch
from segpipe.distributed import group as meeting
from segpipe.distributed.contract import RING, CallLog, Contract, first_difference
from segpipe.distributed.group import Group
from segpipe.errors import CollectiveError, DataError
from segpipe.run.tracking import failure, note_failure
from segpipe.settings.config import Config
from segpipe.train import step as gradients
from segpipe.train.forward import AllHeads, Norms
from segpipe.train.recorder import Watch

pytestmark = pytest.mark.slow

FAR = 10**6


@pytest.fixture(autouse=True)
def nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(error: CollectiveError) -> None:
        raise AssertionError("nothing hangs here")

    monkeypatch.setattr(watch, "say", watch.say)  # restored after `Ranks`
    monkeypatch.setattr(watch, "end_process", end)


class Ranks:
    """Contracts of several ranks in this process, which look when told to."""

    def __init__(self, number: int, timeout_s: float = FAR) -> None:
        self.said: list[str] = []
        self.noted: list[str] = []
        self.store = dist.HashStore()
        watch.say = self.said.append  # type: ignore[assignment]
        self.contracts = [
            Contract(rank, number, self.store, timeout_s=timeout_s)
            for rank in range(number)
        ]
        for contract in self.contracts:
            contract.on_verdict = lambda error: self.noted.append(str(error))

    def enter(self, op: str, *sizes: int) -> None:
        for contract, size in zip(self.contracts, sizes, strict=True):
            contract.enter(op, torch.empty(size))

    def look(self, times: int = 4, ranks: slice = slice(None)) -> None:
        for _ in range(times):
            for contract in self.contracts[ranks]:
                contract.look()


def test_ranks_that_agree_are_left_alone() -> None:
    ranks = Ranks(3, timeout_s=0)
    for step in range(2 * RING):
        ranks.enter("all_reduce", 2, 2, 2)
        if step % 100 == 0:
            ranks.look()
    total = sum(contract.ticket() for contract in ranks.contracts)
    ranks.contracts[0].settle(total)
    ranks.look()
    ranks.enter("all_reduce", 2, 2, 2)
    assert ranks.said == []


def test_shapes_that_differ_are_named_with_their_ranks_and_line() -> None:
    ranks = Ranks(3)
    ranks.enter("all_reduce", 7, 7, 7)
    ranks.enter("all_reduce", 2, 3, 2)
    ranks.look()
    assert len(ranks.said) == 1
    assert "collective 2 is not the same" in ranks.said[0]
    assert re.search(
        r"ranks 0, 2: all_reduce float32 \[2\] at test_contract.py:\d+ enter",
        ranks.said[0],
    )
    assert re.search(
        r"rank 1: all_reduce float32 \[3\] at test_contract.py:\d+ enter", ranks.said[0]
    )
    for contract in ranks.contracts:
        with pytest.raises(CollectiveError, match="collective 2") as caught:
            contract.enter("barrier")
        assert caught.value.told
    assert ranks.noted == ranks.said  # for failure.json


def test_two_live_ranks_that_differ_are_enough() -> None:
    """The third may have died of what the two sent it: gloo ends a process that receives more than it asked for."""
    one, other, behind = {1: 1, 2: 2, 3: 3}, {1: 1, 2: 2, 3: 9}, {1: 1, 2: 2}
    number, _ = first_difference({0: one, 1: behind, 2: other})
    assert other[number] != one[number]
    assert not first_difference({0: one, 1: behind, 2: one})
    assert not first_difference({0: {600: 7}, 1: {1: 1}})  # too long ago to tell


def test_calls_in_another_order_or_from_another_line_are_named() -> None:
    ranks = Ranks(2)
    first, second = ranks.contracts
    first.enter("gather")
    first.enter("barrier")
    second.enter("barrier")
    second.enter("gather")
    ranks.look()
    assert re.search(
        r"collective 1 .* rank 0: gather at \S+:\d+ \w+; rank 1: barrier at",
        ranks.said[0],
    )

    ranks = Ranks(2)
    ranks.contracts[0].enter("barrier")
    ranks.contracts[1].enter("barrier")
    ranks.look()
    assert len(ranks.said) == 1, "the same op of two branches is a wrong order"


def test_the_rolling_number_sees_order_and_repetition() -> None:
    numbers = set()
    for ops in ("ab", "ba", "aab", "abb", "a", "b", ""):
        log = CallLog()
        for op in ops:
            log.add(op)
        numbers.add(log.rolling)
    assert len(numbers) == 7


def test_a_rank_that_does_not_come_is_named_with_what_is_awaited() -> None:
    ranks = Ranks(3, timeout_s=0)
    ranks.enter("all_reduce", 2, 2, 2)
    for contract in ranks.contracts[:2]:
        contract.enter("all_to_all", torch.empty(5))
    ranks.look(times=6)
    assert re.search(
        r"collective 2, all_to_all float32 \[5\] at .*, was not reached by rank 2",
        ranks.said[0],
    )
    assert "last seen after 1, all_reduce float32 [2] at" in ranks.said[0]
    assert "ranks 0, 1 waited" in ranks.said[0]

    patient = Ranks(3)
    patient.contracts[0].enter("barrier")
    patient.look(times=9)
    assert patient.said == []


def test_time_in_which_the_whole_job_was_suspended_is_not_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-Z, or a scheduler: the rank that the other waits for could not work either."""
    now = 0.0
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now))
    ranks = Ranks(2, timeout_s=600)
    ranks.contracts[0].enter("barrier")
    ranks.look(times=2)
    now = 700.0  # rank 1 has the turn
    ranks.look(times=1)
    while not ranks.said:
        now += 1
        ranks.look(times=1)
    assert now == pytest.approx(1300, abs=10)


@pytest.mark.parametrize(("silent", "others"), [(2, slice(0, 2)), (0, slice(1, 3))])
def test_a_silent_rank_is_named(
    silent: int, others: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is rank 0, which compares, the others compare in turns."""
    ranks = Ranks(3)
    ranks.look(times=1)
    ranks.enter("all_reduce", 2, 2, 3)
    ranks.look(times=1)
    monkeypatch.setattr(watch, "ANSWERS_S", 0.05)
    monkeypatch.setattr(watch, "TURN_S", 0.01)
    for _ in range(100):
        ranks.look(times=1, ranks=others)
        time.sleep(0.002)
    assert ranks.said[0].endswith(
        f"No answer from rank {silent}: ended, stopped, or inside a call that holds the interpreter."
    )


def test_a_difference_that_is_no_longer_remembered_is_not_called_agreement() -> None:
    ranks = Ranks(2)
    ranks.enter("all_reduce", 2, 3)
    for _ in range(RING + 1):
        ranks.enter("barrier", 1, 1)
    ranks.look()
    assert "an earlier one differs" in ranks.said[0]
    # gloo ends the process that receives more than it expects: of two ranks, one is left to tell.
    alone = watch.diagnose({1: {1: "all_reduce at a.py:1 f"}}, (1, 1), ("", ""))
    assert "the same on all ranks that answered" in alone
    assert "or that of a rank without an answer" in alone


def test_a_failure_of_one_rank_ends_all_with_its_exit_code() -> None:
    ranks = Ranks(2)
    telling = threading.Thread(
        target=ranks.contracts[1].fail, args=(MemoryError("no room"),)
    )
    telling.start()
    while telling.is_alive():
        ranks.look(times=1)
    with pytest.raises(CollectiveError, match="rank 1: MemoryError: no room") as caught:
        ranks.contracts[0].enter("barrier")
    assert caught.value.exit_code == 1
    assert caught.value.told
    assert ranks.said == ["rank 1: MemoryError: no room"], (
        "its traceback may name no rank"
    )


def test_an_error_of_ours_is_said_once_by_the_rank_that_has_it(tmp_path: Path) -> None:
    """What a rank of another machine records has its kind, too."""
    ranks = Ranks(2)
    telling = threading.Thread(
        target=ranks.contracts[1].fail, args=(DataError("torn"),)
    )
    telling.start()
    while telling.is_alive():
        ranks.look(times=1)
    with pytest.raises(CollectiveError, match="rank 1: DataError: torn") as caught:
        ranks.contracts[0].enter("barrier")
    assert ranks.said == [], "launch prints it"
    note_failure(SimpleNamespace(run_dir=tmp_path), caught.value)  # type: ignore[arg-type]
    assert failure(tmp_path).kind == "DataError"


@pytest.mark.parametrize(("wrong", "says"), [((0, 1, 2), 0), ((1, 2), None), ((2,), 2)])
def test_of_the_ranks_with_one_error_one_reports_it(
    wrong: tuple[int, ...], says: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 if it has the error, too; of the others, whichever is first."""
    ranks, told = Ranks(3), list[int]()
    monkeypatch.setattr(watch, "ANSWERS_S", 0.2)

    def fail(rank: int) -> None:
        with suppress(CollectiveError):
            ranks.contracts[rank].fail(DataError("not on this machine"))
            told.append(rank)

    # Rank 0 is the last one.
    threads = [threading.Thread(target=fail, args=(rank,)) for rank in wrong[::-1]]
    for thread in threads:
        thread.start()
        ranks.look(times=1)
    while any(thread.is_alive() for thread in threads):
        ranks.look(times=1)
    assert len(told) == 1
    assert says in (told[0], None)


@pytest.mark.parametrize(("lost", "others"), [(2, slice(0, 2)), (0, slice(1, 3))])
def test_a_rank_that_ended_without_a_word_is_named_by_those_that_lost_it(
    lost: int, others: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend only reports a closed connection; all calls up to there are the same."""
    ranks = Ranks(3)
    ranks.enter("all_reduce", 2, 2, 2)
    ranks.look(times=1)
    monkeypatch.setattr(watch, "ANSWERS_S", 0.05)
    monkeypatch.setattr(watch, "REPORT_S", 0.0)
    caught: list[CollectiveError] = []

    def fail(contract: Contract) -> None:
        try:
            contract.enter("barrier")
            contract.fail(RuntimeError("Connection closed by peer"))
        except CollectiveError as error:
            caught.append(error)

    threads = [
        threading.Thread(target=fail, args=(contract,))
        for contract in ranks.contracts[others]
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ranks.look(times=1, ranks=others)
        time.sleep(0.002)
    words = rf"collective 2, barrier at \S+ fail, was not reached by rank {lost}, last seen after 1, all_reduce"
    assert [bool(re.match(words, str(error))) for error in caught] == [True, True], (
        caught
    )
    assert all(
        f"No answer from rank {lost}: ended" in str(error) and error.told
        for error in caught
    )
    assert len(ranks.said) == 1


def test_a_rank_that_nobody_answers_says_that_it_lost_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "REPORT_S", 0.0)
    monkeypatch.setattr(watch, "ANSWER_S", 0.0)
    for error in (
        RuntimeError("Connection closed by peer"),
        # The last line has the reason, which here is no other rank.
        dist.DistBackendError(
            "NCCL error\nLast error:\nError while creating shared memory"
        ),
    ):
        told = f"rank 0: a collective failed, often because.*{str(error)[-20:]}"
        with pytest.raises(CollectiveError, match=told):
            Ranks(2).contracts[0].fail(error)


def test_nobody_waits_for_a_verdict_when_the_store_is_gone(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "ANSWER_S", 60.0)

    class Gone:
        def clone(self) -> dist.HashStore:
            return self  # type: ignore[return-value]

        def set(self, *_: object) -> None:
            raise RuntimeError("the store went with its process")

        add = set

    contract = Contract(0, 2, Gone())  # type: ignore[arg-type]
    contract.watcher.start()
    begun = time.monotonic()
    contract.fail(
        RuntimeError("Connection closed by peer")
    )  # raises nothing: launch says the rest
    assert time.monotonic() - begun < 30
    contract.close()


def test_where_torch_ddp_communicates_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that hangs before such a place has made fewer calls than those that hang inside."""
    monkeypatch.setattr(
        gradients, "DistributedDataParallel", lambda network, **_: network
    )
    monkeypatch.setattr(
        AllHeads, "forward", lambda self, image: {"main": self.model.weight}
    )
    monkeypatch.setattr(gradients, "tree_over_ranks", lambda flat, group: flat)
    group = Group(0, 2, torch.device("cpu"))
    seen: list[list[str]] = []

    def ops() -> list[str]:
        return [call.text.partition(" at ")[0] for call in group.contract.log.last()]

    def loss(network: nn.Module, *_: object, **__: object) -> dict[str, torch.Tensor]:
        seen.append(ops())
        return {"total": network.model.weight.sum()}

    loss.config, loss.group = Config(), group
    loss.state = SimpleNamespace(
        model=nn.Linear(2, 1), scaler=SimpleNamespace(scale=lambda value: value), step=0
    )
    loss.norms = Norms(loss.state.model)
    loss.watch = Watch(group, loss.state)
    loss.guard = SimpleNamespace(check=lambda step, shard: None)
    both = gradients.DdpGradients(loss)
    batch = ShardBatch(0, 0, *(torch.zeros(1) for _ in range(4)))
    both([batch], torch.tensor(1))
    assert seen == [["wrap of DDP"]], "a rank that sleeps in its forward pass is here"
    assert ops() == [*seen[0], "backward of DDP"]


def test_recording_a_call_costs_microseconds() -> None:
    contract, tensor = Contract(), torch.empty(4, 5)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(100):
            contract.enter("all_reduce", tensor)
        return (time.perf_counter() - start) / 100

    assert min(seconds() for _ in range(20)) < 100e-6  # 3 us where nothing else runs


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers that look often, and wait long for an answer."""
    monkeypatch.setattr(processes, "PERIOD_S", 0.02)
    monkeypatch.setattr(processes, "HURRY_S", 0.005)
    monkeypatch.setattr(watch, "ANSWERS_S", 5.0)


def in_threads(number: int, work: Callable[[Contract], None]) -> list[str]:
    """The error of every rank after `work` on ranks that are threads."""
    store, errors = dist.HashStore(), [""] * number
    contracts = [
        watch.watch(store, rank, number, timeout_s=5) for rank in range(number)
    ]

    def run(rank: int) -> None:
        try:
            work(contracts[rank])
        except CollectiveError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for contract in reversed(contracts):  # rank 0 waits for the others
        contract.close()
    return errors


def test_tickets_that_differ_stop_all_ranks(fast: None) -> None:
    tickets: dict[int, int] = {}
    both = threading.Barrier(2)

    def work(contract: Contract) -> None:
        contract.enter("gather", torch.empty(1 + contract._rank))
        tickets[contract._rank] = contract.ticket()
        both.wait()
        contract.settle(sum(tickets.values()))

    errors = in_threads(2, work)
    assert all(
        re.search(
            r"rank 0: gather float32 \[1\] .* rank 1: gather float32 \[2\]", error
        )
        for error in errors
    )


def test_rank_0_which_keeps_the_store_goes_last(fast: None) -> None:
    store, began = dist.HashStore(), []
    first, other = (watch.watch(store, rank, 2, timeout_s=FAR) for rank in range(2))
    late = threading.Timer(1.5, lambda: (began.append(True), other.close()))
    late.start()
    first.close()
    assert began
    late.join()


def test_garbage_in_the_sum_is_no_agreement() -> None:
    contract = Contract(0, 2)
    contract.enter("all_reduce", torch.empty(3))
    ticket = contract.ticket()
    contract.settle(2 * ticket)
    with pytest.raises(CollectiveError):
        contract.settle(4 * ticket)  # another multiple of the number of ranks
    with pytest.raises(CollectiveError, match=r"all_reduce float32 \[3\]"):
        contract.settle(2 * ticket + 1)


CARD = {
    "rank": 0,
    "host": "a",
    "pid": 1,
    "problem": "",
    "same": {"WORLD_SIZE": 2, "config": None},
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"same": {"WORLD_SIZE": 3, "config": None}},
            "WORLD_SIZE = 3 on rank 1 (host b, process 2), but 2 on rank 0 (host a, process 1)",
        ),
        (
            {"same": {"WORLD_SIZE": 2, "config": "x"}},
            "config = x on rank 1 (host b, process 2), but None",
        ),
        (
            {"rank": 0},
            "RANK = 0 was given twice: to rank 0 (host a, process 1) and to rank 0 (host b, process 2)",
        ),
        ({}, ""),
    ],
)
def test_ranks_that_cannot_be_one_run_are_named(
    change: dict[str, Any], named: str
) -> None:
    found = meeting.conflict(
        [CARD, {**CARD, "rank": 1, "host": "b", "pid": 2, **change}]
    )
    assert found.startswith(named)
    assert bool(found) == bool(named)


def test_a_held_port_is_for_a_store_alone() -> None:
    """No other process gets it in between, and an early client is refused instead of waiting."""
    with held_port() as port:
        with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
            stranger.bind(("localhost", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("localhost", port))
        kept = dist.TCPStore(
            "localhost", port, None, True, timedelta(seconds=60), wait_for_workers=False
        )
        kept.set("key", "value")
        assert (
            dist.TCPStore("localhost", port, None, False, timedelta(seconds=60)).get(
                "key"
            )
            == b"value"
        )


# Processes, forked from one that has imported torch: one scenario alone, then all others at once.


def agree(contract: Contract, rank: int) -> None:
    for _ in range(20):
        _sum(contract, 4)


def other_shape(contract: Contract, rank: int) -> None:
    _sum(contract, 4)
    _say("next")
    for _ in range(1000):  # gloo may call the first a success, and hang in the next
        _sum(contract, 5 if rank == 1 else 4)
        time.sleep(0.01)


def asleep(contract: Contract, rank: int) -> None:
    _sum(contract, 4)
    if rank == 1:
        time.sleep(60)
    _sum(contract, 4)


def holds_interpreter(contract: Contract, rank: int) -> None:
    _sum(contract, 4)
    time.sleep(2)  # in which its watcher tells that it has been there
    while rank == 1:
        ctypes.PyDLL(None).sleep(60)
    _sum(contract, 4)


def killed(contract: Contract, rank: int) -> None:
    _sum(contract, 4)
    if rank == 1:
        contract.fail(MemoryError("planted"))
        os._exit(1)
    _sum(contract, 4)


def lost(contract: Contract, rank: int) -> None:
    _sum(contract, 4)
    time.sleep(2)  # in which its watcher tells that it has been there
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _sum(contract, 4)


def _sum(contract: Contract, size: int) -> None:
    tensor = torch.ones(size)
    contract.enter("all_reduce", tensor)
    dist.all_reduce(tensor)


def _say(text: str) -> None:
    print(f"{time.time():.3f} {text}", file=sys.stderr, flush=True)


SCENARIOS: dict[str, Callable[[Contract, int], None]] = {
    "agree": agree,
    "other_shape": other_shape,
    "asleep": asleep,
    "holds_interpreter": holds_interpreter,
    "killed": killed,
    "lost": lost,
}
MEETINGS: dict[str, list[dict[str, str]]] = {
    "twice": [{"RANK": "0"}, {"RANK": "1"}, {"RANK": "1"}],
    "counts": [{"RANK": "0"}, {"RANK": "1"}, {"RANK": "2", "WORLD_SIZE": "4"}],
    "missing": [{"RANK": "0"}, {"RANK": "2"}],
    "nobody": [{"RANK": "1"}],
}
NUMBERS = {
    **dict.fromkeys(SCENARIOS, 3),
    **{name: len(cards) for name, cards in MEETINGS.items()},
}  # of processes


def _train(name: str, rank: int, port: int, folder: Path) -> int:
    """One rank of a scenario; the exit code."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    watch.GRACE_S = 2.0
    if (
        name != "other_shape"
    ):  # its seconds are promised; the others share the machine with 25 more processes
        watch.ANSWERS_S = 3.0
    watch.say = _say  # type: ignore[assignment]
    store, _ = meeting.meet({}, 60)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("torch", store),
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=60),
    )
    timeout_s = 3.0 if name in ("asleep", "holds_interpreter") else 60.0
    contract = watch.watch(store, rank, 3, timeout_s=timeout_s)
    contract.keep_stacks(folder / name)
    try:
        try:
            SCENARIOS[name](contract, rank)
        except RuntimeError as error:  # gloo, when another process is gone
            contract.fail(error)
            return (
                1  # as launch does when the reason went with the process that kept it
            )
    except CollectiveError as error:
        return error.exit_code
    finally:
        dist.destroy_process_group()
        contract.close()
    return 0


def _meet(name: str, place: int, port: int, folder: Path) -> int:
    """One process of a meeting; the exit code."""
    known = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ.update({**known, **MEETINGS[name][place]})
    meeting.LINGER_S = 5.0  # ranks that began later read why, too
    try:
        meeting.meet({}, 8)
    except CollectiveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _fork(
    work: Callable[..., int], name: str, place: int, port: int, folder: Path
) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(folder / f"{name}_{place}.log", os.O_WRONLY | os.O_CREAT), 2)
        code = 99
        try:
            code = work(name, place, port, folder)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(code)
    return pid


def _drive(folder: Path, pipe: Connection) -> None:
    """Run all scenarios, the one whose seconds are promised first and alone; sends the exit codes of each."""
    torch.set_num_threads(1)
    alone = _run(["other_shape"], folder)
    pipe.send(
        {**alone, **_run([name for name in NUMBERS if name not in alone], folder)}
    )


def _run(names: list[str], folder: Path) -> dict[str, dict[int, int]]:
    """Exit codes of the processes of some scenarios, all at once."""
    codes: dict[str, dict[int, int]] = {name: {} for name in names}
    with ExitStack() as held:
        ports = {name: held.enter_context(held_port()) for name in names}
        running = {
            _fork(
                _train if name in SCENARIOS else _meet, name, place, ports[name], folder
            ): (name, place)
            for name in names
            for place in range(NUMBERS[name])
        }
        deadline = time.monotonic() + PATIENCE_S
        while running and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.01)
                holding = [
                    pid
                    for pid, where in running.items()
                    if where == ("holds_interpreter", 1)
                ]
                if holding and len(codes["holds_interpreter"]) == 2:
                    os.kill(holding[0], signal.SIGKILL)
                continue
            name, place = running.pop(pid)
            codes[name][place] = os.waitstatus_to_exitcode(status)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    return codes


class Outcome:
    """What the processes of all scenarios left behind."""

    def __init__(self, folder: Path, codes: dict[str, dict[int, int]]) -> None:
        self.folder, self.codes = folder, codes

    def text(self, name: str) -> str:
        logs = sorted(self.folder.glob(f"{name}_[0-9].log"))
        return "".join(log.read_text() for log in logs)

    def stacks(self, name: str) -> dict[str, str]:
        return {
            path.stem: path.read_text()
            for path in (self.folder / name / "stacks").glob("rank*.txt")
        }


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("contract")
    mine, theirs = mp.Pipe()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    driver = context.Process(target=_drive, args=(folder, theirs))
    driver.start()
    theirs.close()  # so that the end of the driver is seen, should it die
    assert mine.poll(3 * PATIENCE_S)
    codes = mine.recv()
    driver.join()
    return Outcome(folder, codes)


def test_processes_that_agree_end_well(outcome: Outcome) -> None:
    assert outcome.codes["agree"] == {0: 0, 1: 0, 2: 0}, outcome.text("agree")
    assert outcome.text("agree") == ""
    assert not (outcome.folder / "agree" / "stacks").exists()


def test_processes_with_another_shape_end_within_two_seconds(outcome: Outcome) -> None:
    """gloo itself reports success on some ranks, and waits for ever on the others."""
    text = outcome.text("other_shape")
    assert outcome.codes["other_shape"] == {0: 9, 1: 9, 2: 9}, text
    assert re.search(
        r"ranks 0, 2: all_reduce float32 \[4\] at test_contract.py:\d+ _sum", text
    )
    assert re.search(
        r"rank 1: all_reduce float32 \[5\] at test_contract.py:\d+ _sum", text
    )
    assert text.count("is not the same on all ranks") == 1
    began = [float(time) for time in re.findall(r"([\d.]+) next", text)]
    named = re.search(r"([\d.]+) collective 2 is not", text)
    assert named is not None
    assert float(named[1]) - max(began) < 2.0
    assert all(
        "other_shape" in stack for stack in outcome.stacks("other_shape").values()
    )
    assert sorted(outcome.stacks("other_shape")) == ["rank00", "rank01", "rank02"]


def test_a_process_that_does_not_come_is_named_after_the_timeout(
    outcome: Outcome,
) -> None:
    text = outcome.text("asleep")
    assert outcome.codes["asleep"] == {0: 9, 1: 9, 2: 9}, text
    assert re.search(
        r"collective 2, all_reduce float32 \[4\] at .* not reached by rank 1, last seen after 1",
        text,
    )
    assert "in asleep" in outcome.stacks("asleep")["rank01"]


def test_a_process_that_holds_the_interpreter_still_shows_its_stack(
    outcome: Outcome,
) -> None:
    text = outcome.text("holds_interpreter")
    assert outcome.codes["holds_interpreter"] == {0: 9, 1: -signal.SIGKILL, 2: 9}, text
    assert re.search(
        r"collective 2, all_reduce float32 \[4\] at .* not reached by rank 1, last seen after 1",
        text,
    )
    assert "No answer from rank 1" in text
    assert "in holds_interpreter" in outcome.stacks("holds_interpreter")["rank01"]


def test_a_process_that_fails_ends_the_others(outcome: Outcome) -> None:
    assert outcome.codes["killed"] == {0: 1, 1: 1, 2: 1}, outcome.text("killed")
    assert re.search(r"rank 1: MemoryError: planted$", outcome.text("killed"), re.M)


def test_a_process_that_is_killed_is_named(outcome: Outcome) -> None:
    text = outcome.text("lost")
    assert outcome.codes["lost"] == {0: 9, 1: -signal.SIGKILL, 2: 9}, text
    assert re.search(
        r"not reached by rank 1, last seen after 1, all_reduce float32 \[4\] at .*No answer from rank 1: e",
        text,
    )


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (
            "twice",
            r"RANK = 1 was given twice: to rank 1 \(host \S+, process \d+\) and to rank 1 \(host",
        ),
        (
            "counts",
            r"WORLD_SIZE = \d on rank \d \(host \S+, process \d+\), but \d on rank",
        ),
        (
            "missing",
            r"ranks \[1\] of WORLD_SIZE = 3 did not connect to MASTER_ADDR:MASTER_PORT = localhost:\d+ within",
        ),
        (
            "nobody",
            r"localhost:\d+ on rank 1, but the address and port of a running rank 0 was needed",
        ),
    ],
)
def test_processes_that_do_not_meet_are_told_why(
    outcome: Outcome, name: str, needed: str
) -> None:
    assert set(outcome.codes[name].values()) == {9}, outcome.text(name)
    assert len(re.findall(needed, outcome.text(name))) == len(MEETINGS[name])
