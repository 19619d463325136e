"""Timings are interleaved, warmed up and judged by an interval; each claim can be asked for by its name."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from artifacts import write_artifact

from benchmarks import measure, runtime
from segpipe.errors import SegpipeError

ROOT = Path(__file__).resolve().parents[2]


def test_every_arm_runs_in_every_round_in_changing_order() -> None:
    calls: list[str] = []
    arms = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    prepared: list[str] = []
    seconds = measure.interleaved(arms, repeats=8, prepare=prepared.append)
    assert {name: len(found) for name, found in seconds.items()} == {
        "a": 8,
        "b": 8,
        "c": 8,
    }
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
    noisy = measure.ratio(
        [second * (1.3 if place % 2 else 0.9) for place, second in enumerate(below)],
        below,
    )
    assert noisy["low"] < noisy["high"]
    assert noisy["low"] <= noisy["ratio"] <= noisy["high"]


def test_summary_is_in_milliseconds() -> None:
    assert measure.summary([0.001, 0.002, 0.003]) == {
        "n": 3,
        "median_ms": 2.0,
        "p25_ms": 1.5,
        "p75_ms": 2.5,
    }


def test_machine_names_what_a_figure_belongs_to() -> None:
    found = measure.machine()
    assert {"torch", "cpu", "cores", "code", "clean", "threads"} <= found.keys()


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    if not shutil.which("git"):
        pytest.skip("needs git")
    alone = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
    }
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    } | alone

    def call(*arguments: str) -> str:
        command = ["git", *who, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return call


def test_code_is_named_by_what_it_is_and_not_by_its_commit(
    git: Callable[..., str], tmp_path: Path
) -> None:
    for name in (
        "segpipe/a.py",
        "benchmarks/b.py",
        "benchmarks/results/c.json",
        "docs/d.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    first, commit = measure.code(tmp_path), git("rev-parse", "HEAD")
    assert first == {"code": git("rev-parse", "HEAD:segpipe"), "clean": True}
    git("commit", "--quiet", "--amend", "-m", "another")
    assert git("rev-parse", "HEAD") != commit
    assert measure.code(tmp_path) == first
    for free in (
        "benchmarks/results/c.json",
        "benchmarks/results/new.json",
        "docs/d.md",
    ):
        (tmp_path / free).write_text("2")
        assert measure.code(tmp_path) == first
    for counts in ("segpipe/a.py", "segpipe/new.py", "benchmarks/b.py"):
        before = (tmp_path / counts).read_text() if (tmp_path / counts).exists() else ""
        (tmp_path / counts).write_text("2")
        assert measure.code(tmp_path) == {**first, "clean": False}
        (tmp_path / counts).write_text(before) if before else (
            tmp_path / counts
        ).unlink()
    git("commit", "--quiet", "--allow-empty", "-m", "three")
    assert measure.code(tmp_path) == first


def test_code_without_git_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure.code(tmp_path) == {"code": None, "clean": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.code(ROOT) == {"code": None, "clean": None}


def test_peak_memory_is_of_the_process_and_not_of_its_parent() -> None:
    """The control beside it, ru_maxrss, survives fork and exec."""
    held = b"\1" * (300 << 20)
    code = (
        "import resource; from benchmarks import measure; "
        "print(measure.peak_resident_mib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    peak, inherited = map(int, found.stdout.split())
    assert 0 < peak < 300 <= inherited, (peak, inherited, len(held))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_the_command_names_its_claims(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/run.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (2 if arguments else 0)
    assert all(
        name in done.stdout + done.stderr
        for name in ("C9", "runtime", "augment", "bits", "chaos")
    )


def test_an_artifact_is_timed_with_its_machine(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "artifact")
    found = runtime.measure(
        argparse.Namespace(settings=[f"artifact={folder}"], repeats=20)
    )
    added = found["overhead"]
    assert 0 < added["low_ms"] <= added["median_ms"] <= added["high_ms"]
    assert (added["n"], found["overhead_limit_ms"]) == (20, runtime.OVERHEAD_MS)
    assert found["passed"] == (
        found["memory_flat"] is not False and added["high_ms"] <= runtime.OVERHEAD_MS
    )
    assert found["statuses"] == {"OK": 30}  # 10 to warm up
    assert {"engine", "torch", "cpu", "code"} <= found["machine"].keys()
    assert str(tmp_path) not in json.dumps(found)


@pytest.mark.slow
def test_an_artifact_is_timed_without_torch() -> None:
    """As on a robot; the machine, which needs torch, is asked afterwards."""
    code = (
        "import sys; from benchmarks import runtime; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "settings", [[], ["artifact="], ["run=x"], ["artifact=nowhere"]]
)
def test_an_artifact_that_is_not_there_is_a_sentence(settings: list[str]) -> None:
    with pytest.raises(SegpipeError, match=r"names no artifact|nowhere"):
        runtime.measure(argparse.Namespace(settings=settings, repeats=1))
