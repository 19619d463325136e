"""A pool of gloo processes for a test module: made once, all its jobs at once, torch imported once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.measure import held_port

PATIENCE_S = 300.0  # for all the work of a pool, on a machine that others load
Work = Callable[..., Any]


def gloo(num_ranks: int, work: Work, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returned on every rank of a gloo group; `work` is a function of a module.

    The ranks are forked from one fresh process, which has imported torch for all of them.
    """
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    driver = context.Process(target=_drive, args=(num_ranks, work, arguments, theirs))
    driver.start()
    theirs.close()  # so that the end of the driver is seen, should it die
    if not mine.poll(2 * PATIENCE_S):
        driver.kill()
        raise AssertionError("the ranks do not answer")
    by_rank: list[Any] = mine.recv()
    driver.join()
    failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(by_rank) if error]
    assert not failed, "\n".join(failed)
    return [answer for answer, _ in by_rank]


def _drive(num_ranks: int, work: Work, arguments: tuple[Any, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    pairs = [context.Pipe() for _ in range(num_ranks)]
    with held_port() as port:
        ranks = [
            context.Process(target=_serve, args=(rank, num_ranks, port, work, arguments, pairs[rank][1]))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + PATIENCE_S
        answers = [
            mine.recv() if mine.poll(max(0.0, deadline - time.monotonic())) else (None, "no answer")
            for mine, _ in pairs
        ]
        for process in ranks:
            process.join(10)
            process.kill()
    pipe.send(answers)


def _serve(rank: int, num_ranks: int, port: int, work: Work, arguments: tuple[Any, ...], pipe: Connection) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    try:
        pipe.send((work(rank, *arguments), ""))
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()
