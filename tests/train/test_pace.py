"""How often a GPU is waited for: lines of metrics.jsonl and checkpoints by seconds as well as by updates."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from segpipe.settings.config import from_mapping
from segpipe.train import engine
from segpipe.train.engine import Clock


def run_at(step: int, device: str, *, rank: int = 0, rate: float = 0.0) -> Any:
    """A run of one process; the sums over two ranks are those of its own number and `told` by rank 0."""
    told = {0: 0, 1: 7}[rank]
    config = from_mapping({"train": {"log_every": 10, "log_every_s": 2.0}})
    group = SimpleNamespace(device=torch.device(device), is_main=rank == 0)
    return SimpleNamespace(
        config=config,
        group=group,
        state=SimpleNamespace(step=step),
        clock=SimpleNamespace(rate=lambda: rate),
        watch=SimpleNamespace(sum=lambda own: torch.tensor(own) + told),
        saved_at=time.monotonic() - 20,
    )


@pytest.mark.parametrize(
    ("step", "device", "rate", "line"),
    [
        (1, "cuda", 0.0, 10),
        (10, "cuda", 3.0, 20),
        (10, "cuda", 40.0, 90),  # 80 updates are 2 s
        (10, "cuda", 41.0, 100),
        (10, "cpu", 400.0, 20),  # which is never waited for
    ],
)
def test_lines_lie_seconds_apart_on_a_gpu(
    step: int, device: str, rate: float, line: int
) -> None:
    assert engine._next_line(run_at(step, device, rate=rate)) == line


def test_ranks_follow_the_clock_of_rank_0() -> None:
    assert engine._next_line(run_at(10, "cuda", rank=1, rate=400.0)) == 80
    assert engine._long_ago(run_at(10, "cuda", rank=1))


def test_last_pt_is_written_at_most_so_often_on_a_gpu() -> None:
    run = run_at(100, "cuda")
    assert not engine._long_ago(run)
    run.config.checkpoint.every_s = 10.0
    assert engine._long_ago(run)
    assert engine._long_ago(run_at(100, "cpu"))


def test_the_first_line_after_a_resume_has_the_true_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first update of a session is not timed, so it must not be counted either."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    for _ in range(3):
        now[0] += 0.5
        clock.tick()
    assert clock.recent_rate() == 2.0


def test_the_wall_rate_counts_what_the_rate_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    for _ in range(3):
        now[0] += 1.0
        clock.tick()
        with clock.paused():
            now[0] += 3.0
    assert clock.rate() == 1.0
    assert clock.wall_rate() == 0.25
