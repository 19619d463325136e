"""The benchmark of random faults: what it compares, what it finds unsound, and when it passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tables import CAMVID

from benchmarks import chaos
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
    assert chaos.kept(killed, alone) == {"checkpoint_step": 0, "equal": None}
    write(alone / "last.pt", state, 4)
    write(killed / "last.pt", state, 0)  # stopped before its first update
    assert chaos.kept(killed, alone) == {"checkpoint_step": 0, "equal": None}
    write(killed / "last.pt", state, 2)
    write(alone / "step_000002.pt", state, 2)
    write(alone / "last.pt", state, 4)
    assert chaos.kept(killed, alone) == {"checkpoint_step": 2, "equal": True}
    write(killed / "last.pt", state, 4)  # the end, of which no other file is kept
    assert chaos.kept(killed, alone) == {"checkpoint_step": 4, "equal": True}
    write(killed / "last.pt", state, 3)
    assert chaos.kept(killed, alone) == {"checkpoint_step": 3, "equal": False}


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
    assert chaos.kept(killed, alone) == {"checkpoint_step": 2, "equal": False}


def fault(**changes: Any) -> dict[str, Any]:
    row = {
        "fault": "killed_rank", "met": True, "writing": False, "seconds": 1.0, "left": [], "code": 9,
        "traceback": False, "said": "rank 1 was killed by signal 9", "checkpoint_step": 2, "equal": True,
    }  # fmt: skip
    return {**row, **changes}


@pytest.mark.parametrize(
    ("changes", "sound"),
    [
        ({}, True),
        ({"equal": None}, True),
        ({"code": -9, "said": ""}, True),
        ({"code": 0, "said": ""}, True),
        ({"said": ""}, False),
        ({"left": ["the launcher"]}, False),
        ({"traceback": True}, False),
        ({"equal": False}, False),
    ],
)
def test_a_fault_must_end_named_and_leave_nothing_but_equal_bits(
    changes: dict[str, Any], sound: bool
) -> None:
    row = fault(**changes)
    assert chaos.is_sound(row) is sound
    found = chaos.verdict([fault(), row], [{"equal": True}])
    assert found["passed"] is sound
    assert found["unsound"] == ([] if sound else [row])


@pytest.mark.parametrize(
    ("rows", "ends"),
    [([], [True]), ([fault()], []), ([fault()], [True, False])],
)
def test_it_passes_only_with_faults_and_equal_ends(
    rows: list[dict[str, Any]], ends: list[bool]
) -> None:
    assert not chaos.verdict(rows, [{"equal": end} for end in ends])["passed"]


def test_a_traceback_is_ours_when_it_goes_through_our_code() -> None:
    own = f'Traceback (most recent call last):\n  File "{chaos.ROOT}/segpipe/files.py", line 3, in read\nOSError\n'
    installed = own.replace("/segpipe/files.py", "/.venv/lib/torch/run.py")
    dump = own.replace("Traceback (most recent call last)", "Thread 0x1")
    assert chaos.has_traceback(f"said before\n{own}")
    assert not chaos.has_traceback(installed)
    assert not chaos.has_traceback(dump)
