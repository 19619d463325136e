"""`Group.together`: an error of one rank ends all of them, and one of them reports it."""

from __future__ import annotations

import re
import time
import types
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import gloo
from segpipe.distributed import group as group_module
from segpipe.distributed.contract import Contract
from segpipe.distributed.group import Group, join
from segpipe.distributed.reduce import RankSum
from segpipe.errors import CheckpointError, ConfigError, DataError, SegpipeError
from segpipe.settings.groups import ComputeConfig


class Ranks(Group):
    """One rank of three; the others have the given errors."""

    others: tuple[SegpipeError | None, ...] = ()

    def gather(self, item: Any) -> list[Any]:
        entries: list[Any] = [(error, "theirs") for error in self.others]
        entries.insert(self.rank, item)
        return entries


def rank(number: int, *others: SegpipeError | None) -> Ranks:
    group = Ranks(number, number, 3, torch.device("cpu"))
    object.__setattr__(group, "others", others)
    return group


def full() -> None:
    raise CheckpointError("no space left")


def _late(rank: int) -> list[float]:
    """Seconds waited in a sum of counts and in one of gradients, to each of which rank 1 comes 0.5 s late."""
    group, waited = Group(rank, 2, torch.device("cpu")), []
    gradients = RankSum(group, leaves=2)
    for action in (
        lambda: group.sum_tensor(torch.ones(1, dtype=torch.int64)),
        lambda: (gradients.start([torch.ones(8)]), gradients.finish()),
    ):
        before = group.contract.waited_s
        time.sleep(0.5 * rank)
        action()
        waited.append(group.contract.waited_s - before)
        dist.barrier()
    return waited


def test_the_ranks_that_wait_for_a_slow_one_count_the_seconds() -> None:
    for fast, slow in zip(*gloo(2, _late), strict=True):
        assert fast > 0.3 > slow + 0.1


def test_what_works_everywhere_raises_nowhere() -> None:
    found = rank(1, None, None).together(lambda: "own")
    assert found == ["theirs", "own", "theirs"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all_and_names_the_rank(number: int) -> None:
    """Rank 0 reports it, which may be on another machine."""
    for errors, says in (
        ((DataError("torn"), None), "torn" if number else "rank 1: torn"),
        ((None, DataError("torn")), "rank 1: torn" if number > 1 else "rank 2: torn"),
    ):
        with pytest.raises(DataError) as caught:
            rank(number, *errors).together(lambda: None)
        assert (str(caught.value), caught.value.common) == (says, True)


def test_of_several_errors_all_ranks_raise_that_of_the_lowest_rank() -> None:
    with pytest.raises(CheckpointError, match="no space left"):
        rank(0, DataError("torn"), None).together(full)
    with pytest.raises(DataError, match="torn"):
        rank(2, DataError("torn"), None).together(full)


def test_an_error_that_is_not_ours_is_left_to_the_contract() -> None:
    def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rank(0, None, None).together(bug)


@pytest.mark.parametrize(
    ("gpus", "rank", "backend", "shared"),
    [
        (
            ["a", "b", "c"],
            0,
            "nccl",
            [],
        ),  # also where a launcher shows each rank its own GPU alone
        (["a", "b", "a"], 1, "gloo", [0, 2]),
        (["a", "a", "a"], 0, "gloo", [0, 1, 2]),
        (["", "", ""], 1, "gloo", []),
    ],
)
def test_nccl_is_taken_where_no_two_ranks_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    rank: int,
    backend: str,
    shared: list[int],
) -> None:
    """All ranks must take the same, whatever each of them sees. Here one GPU is visible to each."""
    made: list[str] = []
    # In the order of arrival.
    cards = [
        {"rank": place, "gpu": gpus[place], "host": "a", "machine": "a-1"}
        for place in (1, 0, 2)
    ]
    known = {
        "RANK": rank,
        "WORLD_SIZE": 3,
        "MASTER_ADDR": "x",
        "MASTER_PORT": 1,
        "LOCAL_RANK": rank,
    }
    for name, value in known.items():
        monkeypatch.setenv(name, str(value))
    asked: list[Any] = []

    def meet(*given: Any) -> tuple[Any, Any]:
        asked.extend(given)
        return dist.HashStore(), cards

    monkeypatch.setattr(group_module, "meet", meet)
    monkeypatch.setattr(
        group_module.dist, "init_process_group", lambda name, **given: made.append(name)
    )
    monkeypatch.setattr(group_module, "watch", lambda *given, **named: Contract())
    monkeypatch.setattr(group_module, "_subgroups", lambda *given: ())
    if gpus[rank]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: types.SimpleNamespace(uuid=gpus[rank], name="NVIDIA H200"),
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        join(ComputeConfig(), {"configuration": "x"})
    assert made == [backend]
    device = "cuda" if gpus[rank] else "cpu"
    timeout_s = ComputeConfig().timeout_s
    assert asked == [{"configuration": "x", "device": device}, timeout_s, gpus[rank]]
    assert [str(shared) in str(warning.message) for warning in told] == [True] * (
        bool(shared) and rank == 0
    )
    assert group_module.sharing(cards) == shared


@pytest.mark.parametrize(
    ("name", "asked", "backend"),
    [
        ("NVIDIA H200", "", "nccl"),
        ("NVIDIA H200 MIG 1g.18gb", "", "gloo"),
        ("NVIDIA H200 MIG 1g.18gb", "1", "nccl"),
    ],
)
def test_instances_of_gpus_meet_over_gloo_unless_nccl_is_told_to_take_them(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: str, backend: str
) -> None:
    made: list[str] = []
    known = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for key, value in {**known, "LOCAL_RANK": 0, group_module.SEVERAL: asked}.items():
        monkeypatch.setenv(key, str(value))

    def meet(same: Any, timeout_s: float, gpu: str) -> tuple[Any, Any]:
        other = "b" if gpu != "MIG" else gpu
        cards = [
            {"rank": 0, "gpu": gpu, "host": "a", "machine": "a-1"},
            {"rank": 1, "gpu": other, "host": "a", "machine": "a-1"},
        ]
        return dist.HashStore(), cards

    found = types.SimpleNamespace(uuid="a", name=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(group_module, "meet", meet)
    monkeypatch.setattr(group_module, "watch", lambda *given, **named: Contract())
    monkeypatch.setattr(group_module, "_subgroups", lambda *given: ())
    monkeypatch.setattr(
        dist, "init_process_group", lambda kind, **given: made.append(kind)
    )
    with warnings.catch_warnings(action="ignore"):
        join(ComputeConfig(), {})
    assert made == [backend]


def test_a_gpu_that_torch_cannot_use_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With both versions and the fix; not where the user has hidden the GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines, nodes = ["NVRM 535.1"], list[str]()
    monkeypatch.setattr(group_module, "proc_lines", lambda name: lines)
    monkeypatch.setattr(group_module, "glob", lambda pattern: nodes)
    message = rf"= auto, but torch {re.escape(torch.__version__)}.*NVRM 535\.1.*=cpu"
    with pytest.raises(ConfigError, match=message):
        group_module.choose_device("auto", 0)
    assert group_module.choose_device("cpu", 0).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert group_module.choose_device("auto", 0).type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    lines.clear()
    assert group_module.choose_device("auto", 0).type == "cpu"
    with pytest.raises(ConfigError, match=r"compute\.device = cuda.*no driver"):
        group_module.choose_device("cuda", 0)
    nodes.append("/dev/nvidia0")
    with pytest.raises(ConfigError, match=r"auto.*/dev/nvidia0"):
        group_module.choose_device("auto", 0)


def test_every_group_of_ranks_has_the_timeout_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without one NCCL takes 600 s, and its watchdog ends the process before the cause is named."""
    asked: list[Any] = []

    def subgroups(ranks: list[list[int]], *, timeout: timedelta) -> tuple[Any, Any]:
        asked.append((ranks, timeout.total_seconds()))
        return dist.ProcessGroup.__new__(dist.ProcessGroup), None

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", subgroups)
    monkeypatch.setattr(Group, "gather", lambda self, item: [item] * 4)
    group = Group(0, 4, torch.device("cpu"))
    within, across = group_module._subgroups(group, 2, timedelta(seconds=33))
    assert (within.size, across.size) == (2, 2)
    assert asked == [([[0, 1], [2, 3]], 33.0), ([[0, 2], [1, 3]], 33.0)]
