"""Ranks for tests: a pool of gloo processes that runs all jobs of a module, and threads that need no processes."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import runs
from benchmarks.measure import held_port
from segpipe.settings.config import Config

PATIENCE_S = 300.0  # for all the work of a pool, on a loaded machine
THREAD_PATIENCE_S = 120.0  # for the other threads to reach a collective
Work = Callable[..., Any]
# What a rank would import for itself, again and again.
PRELOADED = [
    "segpipe.train.engine", "segpipe.run.launch", "segpipe.settings.compose", "matplotlib.figure", "onnxruntime",
    "pytest", "psutil",
]  # fmt: skip


def trained_by(num_ranks: int, folder: Path, *changes: str) -> None:
    """Let ranks train the tiny run of `runs.settings(folder, *changes)` as torchrun starts them."""
    assert launched(num_ranks, _train, str(folder), changes) == [0] * num_ranks


def _train(rank: int, folder: str, changes: tuple[str, ...]) -> int:
    return runs.run(Path(folder), *changes)


def forked(work: Work, *arguments: Any, stderr: Path | None = None) -> Any:
    """A process of its own group, as a shell starts it, that ends with the code that `work` returns.

    It is forked from the server, so that nothing is imported again.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(
        target=_lead, args=(work, arguments, stderr, runs.COMPOSED)
    )
    process.start()
    return process


def _lead(
    work: Work,
    arguments: tuple[Any, ...],
    stderr: Path | None,
    composed: dict[tuple[str, ...], Config],
) -> None:
    runs.COMPOSED.update(composed)
    gc.freeze()
    os.setsid()
    with open(stderr or os.devnull, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(work(*arguments))


def wait_for(happened: Callable[[], bool], process: Any) -> None:
    """Return once `happened()`; fail when the process, which is `forked`, ends first."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gloo(num_ranks: int, work: Work, *arguments: Any) -> list[Any]:
    """Results of `work(rank, *arguments)` on every rank of a gloo group; `work` is a function of a module.

    The ranks are forked from one process, which imports torch once for all the groups of a test process.
    """
    return launched(num_ranks, _joined, work, *arguments)


def launched(num_ranks: int, work: Work, *arguments: Any) -> list[Any]:
    """As `gloo`, but the ranks find the environment of torchrun and join no group: `work` is a whole run.

    They write to the stdout and stderr that this process has now.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    mine, theirs = context.Pipe()
    driver = context.Process(
        target=_drive,
        args=(num_ranks, work, arguments, theirs),
        kwargs={"outputs": _Outputs(), "composed": runs.COMPOSED},
    )
    driver.start()
    theirs.close()  # so that `poll` returns when the driver dies
    if not mine.poll(2 * PATIENCE_S):
        driver.kill()
        raise AssertionError("the ranks do not answer")
    by_rank: list[Any] = mine.recv()
    driver.join()
    failed = [
        f"rank {rank}: {error}" for rank, (_, error) in enumerate(by_rank) if error
    ]
    assert not failed, "\n".join(failed)
    return [answer for answer, _ in by_rank]


class _Outputs:
    """Stdout and stderr for a process that is forked from the server, which has those of its first test."""

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(number) for number in (1, 2)]

    def __setstate__(self, sent: list[Any]) -> None:
        for number, output in zip((1, 2), sent, strict=True):
            os.dup2(output.detach(), number)


def _drive(
    num_ranks: int,
    work: Work,
    arguments: tuple[Any, ...],
    pipe: Connection,
    *,
    outputs: _Outputs,
    composed: dict[tuple[str, ...], Config],
) -> None:
    runs.COMPOSED.update(composed)  # else every rank composes what this run is given
    torch.set_num_threads(1)
    gc.freeze()  # what all ranks have imported is not walked by each
    context = mp.get_context("fork")
    pairs = [context.Pipe() for _ in range(num_ranks)]
    with held_port() as port:
        ranks = [
            context.Process(
                target=_serve,
                args=(rank, num_ranks, port, work, arguments, pairs[rank][1]),
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + PATIENCE_S
        answers = [
            mine.recv()
            if mine.poll(max(0.0, deadline - time.monotonic()))
            else (None, "no answer")
            for mine, _ in pairs
        ]
        for process in ranks:
            process.join(10)
            process.kill()
    pipe.send(answers)


def _serve(
    rank: int,
    num_ranks: int,
    port: int,
    work: Work,
    arguments: tuple[Any, ...],
    pipe: Connection,
) -> None:
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
    )
    os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    try:
        pipe.send((work(rank, *arguments), ""))
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))


def _joined(rank: int, work: Work, *arguments: Any) -> Any:
    dist.init_process_group("gloo")
    try:
        return work(rank, *arguments)
    finally:
        dist.destroy_process_group()


class Loopback:
    """The collectives of `segpipe.distributed.reduce` among threads, in place of `torch.distributed`.

    A process group is the tuple of its ranks; None is all of them. What an asynchronous collective received arrives in
    `wait`, and is NaN before, so that nobody can use it early.
    """

    def __init__(self, num_ranks: int) -> None:
        self.everyone = tuple(range(num_ranks))
        self._mine, self._lock = threading.local(), threading.Lock()
        self._given: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Results of `work(rank)` on all ranks. When one raises, all end, and its error is raised."""
        with ThreadPoolExecutor(len(self.everyone)) as pool:
            futures = [pool.submit(self._serve, work, rank) for rank in self.everyone]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(
            errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)
        ):
            raise error
        return [future.result() for future in futures]

    def _serve(self, work: Callable[[int], Any], rank: int) -> Any:
        self._mine.rank = rank
        try:
            return work(rank)
        except BaseException:
            with self._lock:
                for barrier in self._barriers.values():
                    barrier.abort()
            raise

    def exchange(
        self, tensors: Sequence[Tensor], ranks: tuple[int, ...] | None = None
    ) -> list[list[Tensor]]:
        """Copies of every rank's tensors, in the order of the ranks."""
        group = ranks or self.everyone
        with self._lock:
            barrier = self._barriers.setdefault(
                group, threading.Barrier(len(group), timeout=THREAD_PATIENCE_S)
            )
        self._given[group, self._mine.rank] = [tensor.clone() for tensor in tensors]
        barrier.wait()
        found = [self._given[group, rank] for rank in group]
        barrier.wait()
        return found

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: tuple[int, ...] | None = None,
        async_op: bool = False,
    ) -> Any:
        """As that of torch.distributed; a rank sends chunks of one length."""
        ranks = group or self.everyone
        place = ranks.index(self._mine.rank)
        chunks = [
            given.view(len(ranks), -1)[place]
            for (given,) in self.exchange([input], group)
        ]
        assert output_split_sizes in (None, [len(chunk) for chunk in chunks])
        assert input_split_sizes in (None, [input.numel() // len(ranks)] * len(ranks))
        output.fill_(torch.nan)
        work = _Received(output, torch.cat(chunks))
        return work if async_op else work.wait()

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        group: tuple[int, ...] | None = None,
        async_op: bool = False,
    ) -> Any:
        """As `all_gather_into_tensor` of torch.distributed."""
        found = torch.cat(
            [given for (given,) in self.exchange([input], group)]
        ).view_as(output)
        output.fill_(torch.nan)
        work = _Received(output, found)
        return work if async_op else work.wait()

    def data_parallel(self, network: nn.Module, **_: Any) -> nn.Module:
        """`network` whose gradients become means over the ranks at the end of a backward, as with torch's DDP."""
        parameters = [
            parameter for parameter in network.parameters() if parameter.requires_grad
        ]
        ready: list[nn.Parameter] = []

        def on_grad_ready(parameter: nn.Parameter) -> None:
            ready.append(parameter)
            if len(ready) == len(parameters):
                ready.clear()
                found = self.exchange(
                    [p.grad for p in parameters if p.grad is not None]
                )
                for p, *grads in zip(parameters, *found, strict=True):
                    p.grad = torch.stack(grads).mean(0)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(on_grad_ready)  # type: ignore[arg-type]
        return network


class _Received:
    def __init__(self, output: Tensor, received: Tensor) -> None:
        self._output, self._received = output, received

    def wait(self) -> None:
        self._output.copy_(self._received)
