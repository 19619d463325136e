"""Ranks with different bits stop within one step, and the message names the tensor and the rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import plants
from ranks import launched
from segpipe.determinism import flags
from segpipe.distributed.contract import Contract
from segpipe.errors import CollectiveError, ConfigError, DivergenceError
from segpipe.ledger.divergence import Comparison, compare
from segpipe.ledger.reader import read_run
from segpipe.settings.config import Config
from segpipe.train.checkpoint import common_fingerprint, load
from segpipe.train.recorder import Watch, first_disagreement


def test_the_first_tensor_and_the_minority_are_named() -> None:
    same = {"weights": {"stem.weight": 1, "head.weight": 2}, "ema": {"stem.weight": 3}}
    ranks = [dict(same) for _ in range(16)]
    ranks[11] = {
        "weights": {"stem.weight": 1, "head.weight": -7},
        "ema": {"stem.weight": 9},
    }
    said = first_disagreement(ranks)
    assert (
        "head.weight (weights): 15 of 16 ranks have 0000000000000002, but rank 11 fffffffffffffff9"
        in said
    )
    said = first_disagreement([same, {**same, "ema": {"stem.weight": 4}}])
    assert "stem.weight (ema)" in said
    assert "no side has a majority" in said
    assert first_disagreement([same, same]).startswith("No tensor differs now")


@pytest.mark.parametrize("mode", ["elastic", "audit", "ddp", "off"])
def test_ranks_that_compute_the_loss_otherwise_are_refused_where_bits_are_promised(
    mode: str,
) -> None:
    config = Config()
    config.compute.mode, config.loss.backend = mode, "plain"

    def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own, own, {**own, flags.LOSS: "torch"}]

    group: Any = SimpleNamespace(
        device=torch.device("cpu"), world_size=3, gather=gather
    )
    if mode == "off":
        assert common_fingerprint(config, group, "plain")[1] == [
            "rank 2: loss torch, rank 0: plain"
        ]
    else:
        with pytest.raises(
            ConfigError,
            match=r"loss.backend = plain is torch on rank 2 and plain on rank 0",
        ):
            common_fingerprint(config, group, "plain")


class Ranks:
    """A group of `world_size` ranks seen from rank 0, of which one may hold another digest, or have called more."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, world_size: int) -> None:
        self.world_size, self.contract = world_size, Contract(0, world_size)
        self.other_digest: int | None = None
        self.other_call = 0

    def sum_tensor(self, own: Tensor) -> Tensor:
        total = own * self.world_size
        if self.other_digest is not None:
            total[-1] += self.other_digest - int(own[-1])
        total[-2] += self.other_call
        return total

    def gather(self, item: Any) -> list[Any]:
        return [
            *[item] * (self.world_size - 1),
            {"weights": {"head.weight": 99}},
        ]

    def barrier(self) -> None:
        pass


class Replica(Watch):
    state_digest = torch.tensor(-(2**62))

    def state_parts(self) -> dict[str, dict[str, int]]:
        return {"weights": {"head.weight": 2}}


def agreement(ranks: Ranks) -> Replica:
    return Replica(ranks, SimpleNamespace(step=7))  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 16])
def test_a_digest_that_differs_stops_in_the_same_step(
    world_size: int,
) -> None:
    ranks = Ranks(world_size)
    found = agreement(ranks)
    for number in range(3):  # digests of any size: the sum wraps around
        found.state_digest = torch.tensor(2**62 + number)
        assert found.sum([3, 1]).tolist() == [3 * world_size, world_size]
    ranks.other_digest = (2**62 + 2) ^ 1
    with pytest.raises(
        DivergenceError,
        match=rf"step 7: .*head\.weight \(weights\).*rank {world_size - 1}",
    ):
        found.sum([3, 0])
    assert DivergenceError.exit_code == 5


def test_a_gpu_is_not_waited_for_and_the_next_call_that_waits_stops() -> None:
    ranks = Ranks(2)
    ranks.device = torch.device("meta")  # whose values the host cannot read
    found = agreement(ranks)
    with pytest.raises(RuntimeError, match="meta"):
        found.sum([3])
    found.sum([3], wait=False)

    ranks = Ranks(2)
    found = agreement(ranks)
    found._unequal |= True  # as an earlier call left it
    with pytest.raises(DivergenceError):
        found.sum([3])


def test_calls_that_differ_stop_too() -> None:
    ranks = Ranks(2)
    found = agreement(ranks)
    ranks.other_call = 1
    with pytest.raises(CollectiveError, match="ranks have made different calls"):
        found.sum([1])


def test_without_digests_and_alone_nothing_is_compared() -> None:
    ranks = Ranks(2)
    assert Watch(ranks, None).sum([4]).tolist() == [8]  # type: ignore[arg-type]
    alone = agreement(Ranks(1))
    assert alone.sum([4]).tolist() == [4]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Runs of two processes: without a fault, with faults on rank 1 alone, and inside the network in shard 1."""
    folder = tmp_path_factory.mktemp("two")
    return folder, launched(2, _planted, folder)[0]


def _planted(rank: int, folder: Path) -> dict[str, str]:
    """What each run said when it stopped, on rank 0."""
    fewer = ("compute.shards=2", "train.precision=fp32", "data.num_val=1")
    plants.RANK, plants.SHARD, plants.RECIPE = 1, 1, (*plants.RECIPE, *fewer)
    names = ["", "reduced", "weight", "forward"]
    job = plants.Job(2, folder, names, 1, 1, plants.RECIPE)
    told: list[tuple[str, str]] = []
    queue = SimpleNamespace(put=told.append)
    plants._rank(rank, job, int(os.environ["MASTER_PORT"]), queue)
    return dict(told)


@pytest.mark.parametrize("plant", ["reduced", "weight"])
def test_one_rank_that_drifts_away_ends_the_run(
    said: tuple[Path, dict[str, str]], plant: str
) -> None:
    folder, stopped = said
    assert stopped[""] == ""  # the control
    assert stopped[plant].startswith(
        f"step {plants.STEP + 1}: ranks that must hold the same bits differ."
    )
    assert "rank 1 " in stopped[plant]
    assert plants.LAYER in stopped[plant]
    assert not (folder / plant / "last.pt").exists()
    assert load(folder / "baseline" / "last.pt")["step"] == 4


SAMPLE = plants.Order(0, 64, 16, 2).shard(plants.STEP, plants.SHARD)[plants.ROW][1]
SAID = f"The first tensor that differs is {plants.LAYER}: but rank {plants.RANK} 00."


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (
            "pixel",
            {"stage": "augment", "shard": plants.SHARD, "sample": SAMPLE},
        ),
        ("lr", {"stage": "optimizer"}),
        ("ema", {"stage": "bn_ema", "layer": plants.LAYER}),
        (
            "forward",
            {"stage": "forward", "shard": plants.SHARD, "layer": plants.NORM},
        ),
    ],
)
def test_a_plant_is_named_only_when_all_of_it_is_right(
    plant: str, found: dict[str, Any]
) -> None:
    """The judgement of `benchmarks/run.py plants`: whatever is changed in what was said is a problem."""
    one = plants.PLANTS[plant]
    right = Comparison("diverged", "", step=plants.STEP, **found)
    assert plants.problems(one, right, "") == []
    assert plants.problems(one, right, SAID)
    changes = {
        "verdict": "identical",
        "step": 3,
        "stage": "decode",
        "shard": 3,
        "sample": 63,
    }
    for name, value in {**changes, **({"layer": "head"} if one.layer else {})}.items():
        wrong = replace(right, **{name: value})
        assert plants.problems(one, wrong, ""), name


def test_a_plant_on_one_rank_is_named_only_by_the_run_and_the_comparison() -> None:
    one = plants.PLANTS["weight"]
    sentence = f"B: step 2: rank {plants.RANK} in session 0 differs from rank 0"
    right = Comparison("identical_up_to", sentence)
    assert plants.problems(one, right, SAID) == []
    assert plants.problems(one, replace(right, verdict="identical"), SAID)
    assert plants.problems(one, replace(right, sentence="identical"), SAID)
    for other in (
        "",
        f"{plants.LAYER} on rank 1 00",
        f"head.weight, rank {plants.RANK} 00",
    ):
        assert plants.problems(one, right, other), other


def test_another_environment_is_named_only_as_what_it_is() -> None:
    package = plants.PLANTS["package"]
    right = Comparison(
        "identical", "", fingerprint={"albumentations": ("2.0.8", "2.0.9")}
    )
    assert plants.problems(package, right, "") == []
    for wrong in (replace(right, fingerprint={}), replace(right, verdict="diverged")):
        assert plants.problems(package, wrong, "")


def test_a_plant_inside_the_network_is_named(
    said: tuple[Path, dict[str, str]],
) -> None:
    folder, plant = said[0], "forward"
    found = compare(read_run(folder / "baseline"), read_run(folder / plant))
    assert (found.step, found.stage, found.shard) == (plants.STEP, plant, 1)
    assert found.layer == plants.NORM
