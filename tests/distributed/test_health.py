"""Memory of a process: figures, and the message when it runs out."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from typing import Any

import psutil
import pytest
import torch

from segpipe.distributed import health
from segpipe.errors import OutOfMemory

CPU = torch.device("cpu")


def test_host_figures_are_those_of_the_system() -> None:
    figures = health.sample(CPU)
    assert figures["rss_mib"] == pytest.approx(
        psutil.Process().memory_info().rss / 2**20, rel=0.05
    )
    shared = torch.zeros(16 * 2**18).share_memory_()  # 16 MiB in /dev/shm
    shared.fill_(1.0)
    assert health.sample(CPU)["shm_mib"] - figures["shm_mib"] == pytest.approx(
        16, abs=1
    )


def test_loader_processes_are_counted() -> None:
    before = health.sample(CPU)["workers_rss_mib"]
    context = multiprocessing.get_context("fork")
    ready, asked = context.Barrier(3), context.Event()
    children = [context.Process(target=_hold, args=(ready, asked)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns of any thread
        for child in children:
            child.start()
    try:
        ready.wait(60)
        held = (
            sum(psutil.Process(child.pid).memory_info().rss for child in children)
            / 2**20
        )
        assert health.sample(CPU)["workers_rss_mib"] - before == pytest.approx(
            held, rel=0.1
        )
    finally:
        asked.set()
        for child in children:
            child.join()
    assert health.sample(CPU)["workers_rss_mib"] == before, (
        "those that have ended hold nothing"
    )


def _hold(ready: Any, asked: Any) -> None:
    ready.wait(60)
    asked.wait(60)


def planted(kind: str) -> BaseException:
    if kind == "cpu":
        return RuntimeError(
            "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
        )
    if kind == "cuda":
        return torch.OutOfMemoryError("an allocator of another package")
    return MemoryError() if kind == "python" else OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("kind", ["cpu", "cuda", "python", "system"])
def test_running_out_of_memory_is_explained(kind: str) -> None:
    error = planted(kind)
    with (
        pytest.raises(OutOfMemory) as caught,
        health.out_of_memory_named(3, CPU, lambda: 120),
    ):
        raise error
    text = str(caught.value)
    for part in (
        "step 120: the memory of the machine ran out on rank 3.",
        str(error)[:30] or "MemoryError",
        "augment.crop_size",
        "rss_mib",
    ):
        assert part in text


def test_other_errors_pass() -> None:
    with (
        pytest.raises(RuntimeError, match="shapes cannot"),
        health.out_of_memory_named(0, CPU, lambda: 0),
    ):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.slow
def test_memory_that_really_runs_out_is_explained() -> None:
    """The address space of this process is limited for a moment."""
    used = psutil.Process().memory_info().vms
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    try:
        with (
            pytest.raises(OutOfMemory, match="you tried to allocate"),
            health.out_of_memory_named(0, CPU, lambda: 0),
        ):
            torch.empty(2**32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
