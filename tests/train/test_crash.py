"""The benchmark that kills runs: which processes it kills, what it compares, and when it passes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import CAMVID

from benchmarks import crash
from segpipe.settings.config import from_mapping
from segpipe.train.checkpoint import save, snapshot
from segpipe.train.state import TrainState, build_state

CONFIG = from_mapping({"model": {"name": "fast_scnn"}})
OTHER = from_mapping({"data": {"workers": 0}, "run": {"name": "other"}})


@pytest.fixture(scope="module")
def state() -> TrainState:
    return build_state(CONFIG, CAMVID, torch.device("cpu"))


def write(path: Path, state: TrainState, step: int) -> None:
    path.parent.mkdir(exist_ok=True)
    state.step = step
    config = OTHER if path.parent.name == "killed" else CONFIG
    save(path, snapshot(state, config, CAMVID, {}))


def test_what_a_kill_left_is_compared_with_the_same_step(
    tmp_path: Path, state: TrainState
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert crash.kept(killed, alone) == {"checkpoint_step": 0, "equal": None}
    write(killed / "last.pt", state, 2)
    write(alone / "step_000002.pt", state, 2)
    write(alone / "last.pt", state, 4)
    assert crash.kept(killed, alone) == {"checkpoint_step": 2, "equal": True}
    write(killed / "last.pt", state, 4)  # the end, of which no other file is kept
    assert crash.kept(killed, alone) == {"checkpoint_step": 4, "equal": True}
    write(killed / "last.pt", state, 3)
    assert crash.kept(killed, alone) == {"checkpoint_step": 3, "equal": False}


@pytest.mark.parametrize("part", ["model", "ema"])
def test_control_one_weight_that_differs_is_found(
    tmp_path: Path, state: TrainState, part: str
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    write(alone / "step_000002.pt", state, 2)
    weight = next((state.model if part == "model" else state.ema.model).parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight[(0,) * weight.dim()] += 1e-3
    write(killed / "last.pt", state, 2)
    with torch.no_grad():
        weight.copy_(before)
    assert crash.kept(killed, alone) == {"checkpoint_step": 2, "equal": False}


def test_every_rank_is_killed_and_the_writer_in_half_of_the_writes() -> None:
    chance = random.Random(0)
    drawn = [crash.victim(4, chance) for _ in range(400)]
    writes = [rank for rank, during in drawn if during == "checkpoint"]
    assert (
        {rank for rank, during in drawn if during == "training"}
        == set(writes)
        == {0, 1, 2, 3}
    )
    assert 0.4 < writes.count(0) / len(writes) < 0.6
    assert {rank for rank, _ in (crash.victim(1, chance) for _ in range(20))} == {0}


def kill(**changes: Any) -> dict[str, Any]:
    return {"rank": 1, "during": "checkpoint", "equal": True, **changes}


@pytest.mark.parametrize(
    ("kills", "end", "passes"),
    [
        ([kill(), kill(rank=0, during="training")], True, True),
        ([kill(), kill(equal=None)], True, True),
        ([kill(), kill(equal=False)], True, False),
        ([kill(equal=None)], True, False),
        ([kill(during="training")], True, False),
        ([kill()], False, False),
        ([], True, False),
    ],
)
def test_it_passes_when_all_that_was_compared_is_equal(
    kills: list[dict[str, Any]], end: bool, passes: bool
) -> None:
    found = crash.verdict([{"kills": kills, "equal": end}])
    assert found["passed"] is passes
    assert found["kills"] == len(kills) == sum(found["kills_by_rank"].values())
