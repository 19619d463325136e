"""Memory of every rank: figures, outliers, growth, and the message when it runs out."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from segpipe.distributed import health
from segpipe.distributed.group import Group
from segpipe.distributed.health import Health, Scene
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


def test_a_rank_that_holds_more_than_the_others_is_named() -> None:
    usual = {"rss_mib": 3000.0, "reserved_mib": 8000.0}
    ranks = [usual, usual, {**usual, "reserved_mib": 9700.0}, usual]
    assert list(health.outliers(ranks).values()) == [
        "rank 2 uses reserved 9700 MiB, the median of the ranks is 8000 MiB: it will be the first to run out."
    ]
    assert health.outliers([usual, {**usual, "reserved_mib": 9500.0}, usual]) == {}, (
        "19 %"
    )
    assert (
        health.outliers([{"rss_mib": 100.0}, {"rss_mib": 300.0}, {"rss_mib": 100.0}])
        == {}
    ), "small"
    assert list(health.outliers([usual, {**usual, "rss_mib": 3700.0}])) == [
        (1, "rss_mib")
    ], "their mean hides it"
    assert health.outliers([usual, {**usual, "rss_mib": 3500.0}]) == {}
    assert health.outliers([usual]) == {}


class TwoRanks(Group):
    """This rank, and another one that holds a GiB more."""

    def gather(self, item: Any) -> list[Any]:
        return [item, {**item, "rss_mib": item["rss_mib"] * 2 + 1024}]


def test_report_lists_ranks_in_order_and_warns_once_of_a_rank() -> None:
    watched = Health(TwoRanks(0, 0, 2, CPU))
    figures, warnings = watched.report(10)
    assert figures["rss_mib"][1] > figures["rss_mib"][0] > 0
    assert figures.keys() == {"rss_mib", "workers_rss_mib", "shm_mib"}
    (warning,) = warnings
    assert warning.startswith("step 10: rank 1 uses rss ")
    assert watched.report(20)[1] == []


def scene() -> Scene:
    net = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    return Scene(3, 120, [(4, 192, 384, 3)], net, CPU, optimizer)


def planted(kind: str) -> BaseException:
    if kind == "cpu":
        return RuntimeError(
            "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
        )
    if kind == "cuda":
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return MemoryError() if kind == "python" else OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("kind", ["cpu", "cuda", "python", "system"])
def test_running_out_of_memory_is_explained(kind: str) -> None:
    error = planted(kind)
    with (
        pytest.raises(OutOfMemory) as caught,
        health.out_of_memory_named(scene()),
    ):
        raise error
    text = str(caught.value)
    for part in (
        "step 120: the memory of the machine ran out on rank 3, with image batches [4, 192, 384, 3].",
        str(error)[:30] or "MemoryError",
        "Weights take 4.0 MiB",
        "the optimizer 8.0 MiB",
        "augment.crop_size",
        "rss_mib",
    ):
        assert part in text


def test_other_errors_pass() -> None:
    with (
        pytest.raises(RuntimeError, match="shapes cannot"),
        health.out_of_memory_named(scene()),
    ):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.slow
@pytest.mark.slow
def test_memory_that_really_runs_out_is_explained() -> None:
    """The address space of this process is limited for a moment."""
    used = psutil.Process().memory_info().vms
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    try:
        with (
            pytest.raises(OutOfMemory, match="you tried to allocate"),
            health.out_of_memory_named(scene()),
        ):
            torch.empty(2**32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
