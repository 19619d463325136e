"""Timings are interleaved, warmed up and judged by an interval; each claim can be asked for by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure

ROOT = Path(__file__).resolve().parents[1]


def test_every_arm_runs_in_every_round_in_changing_order() -> None:
    calls: list[str] = []
    arms = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    prepared: list[str] = []
    seconds = measure.interleaved(arms, repeats=8, prepare=prepared.append)
    assert {name: len(found) for name, found in seconds.items()} == {"a": 8, "b": 8, "c": 8}
    rounds = ["".join(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(rounds) == 9  # one to warm up
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert prepared == calls


def test_ratio_is_that_of_the_rounds_and_its_interval_holds_it() -> None:
    below = [1.0, 2.0, 4.0, 8.0] * 5  # a machine that slows down and recovers
    above = [1.1 * second for second in below]
    found = measure.ratio(above, below)
    assert found == {"ratio": 1.1, "low": 1.1, "high": 1.1}
    noisy = measure.ratio([second * (1.3 if place % 2 else 0.9) for place, second in enumerate(below)], below)
    assert noisy["low"] < noisy["high"]
    assert noisy["low"] <= noisy["ratio"] <= noisy["high"]


def test_summary_is_in_milliseconds() -> None:
    assert measure.summary([0.001, 0.002, 0.003]) == {"n": 3, "median_ms": 2.0, "p25_ms": 1.5, "p75_ms": 2.5}


def test_machine_names_what_a_figure_belongs_to() -> None:
    found = measure.machine()
    assert {"torch", "cpu", "cores", "git", "threads"} <= found.keys()


@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_the_command_names_its_claims(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "benchmarks/run.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (2 if arguments else 0)
    assert all(name in done.stdout + done.stderr for name in ("C9", "bits", "crash"))
