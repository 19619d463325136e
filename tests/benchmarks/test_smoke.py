"""Every benchmark still runs: each id of benchmarks/run.py once, at the sizes of --smoke."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import cv2
import numpy as np
import pytest

import runs
from benchmarks import cluster, run
from segpipe.cli.main import main as segpipe

pytestmark = pytest.mark.slow
DRIVES = ("0001TP", "0006R0", "0016E5")


@pytest.fixture(scope="module")
def exported(quick_exports: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its export, trained for three updates."""
    folder = tmp_path_factory.mktemp("runs") / "exported"
    assert runs.run(folder, "export.enabled=true") == 0
    return folder


@pytest.fixture(autouse=True)
def _torch_restored() -> Iterator[None]:
    with runs.torch_restored():
        yield


def camvid(folder: Path) -> Path:
    """A folder as CamVid's, with one small frame of each drive in each split."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for kind, depth in ((split, (3,)), (f"{split}annot", ())):
            (folder / kind).mkdir(parents=True)
            for drive in DRIVES:
                pixels = random.integers(0, 12, (192, 256, *depth), np.uint8)
                cv2.imwrite(str(folder / kind / f"{drive}_{split}.png"), pixels)
    return folder


def settings_of(claim: str, exported: Path, folder: Path) -> list[str]:
    """What a benchmark has to be told."""
    if claim == "rare":
        return ["--camvid", str(camvid(folder / "camvid"))]
    if claim == "C8":
        return [f"run={exported}", "sizes=[64x96]"]
    if claim == "runtime":
        return [f"artifact={exported / 'export'}"]
    if claim == "desync":
        return ["ranks=2", "compute.shards=2"]
    return [f"run={exported}"] if claim == "engines" else []


def alone(folder: Path, name: str) -> int:
    """As in benchmarks.cluster, but inside this process."""
    with runs.torch_restored():
        os.environ |= cluster.NEXT
        return segpipe(["train", *cluster.by_itself(folder, name)])


# Whose verdict holds at any size; those of the others depend on time.
PROMISES = ("bits", "plants", "attacks", "augment", "chaos", "trace")
# The rest is what tests/cli/test_gpu_check.py and test_gpu_bits.py try out.
TRIED = [claim for claim in run.CLAIMS if claim not in run.GOALS or claim == "G2"]
TRIED.sort(key="trace".__eq__)  # last: it follows every call, those of imports too


@pytest.mark.parametrize("claim", TRIED)
def test_every_benchmark_runs(
    claim: str,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module = import_module(f"benchmarks.{run.CLAIMS[claim][1]}")
    if claim == "cluster":
        monkeypatch.setattr(module, "alone", alone)
    if claim == "rare":
        monkeypatch.setitem(module.SMOKE, "FOLDER", tmp_path / "runs")
    for name, value in module.SMOKE.items():  # main sets them too; this puts them back
        monkeypatch.setattr(module, name, value)
    out = tmp_path / "result.json"
    told = settings_of(claim, exported, tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["run.py", claim, *told, "--smoke", "--out", str(out)]
    )
    assert run.main() == 0, capsys.readouterr()
    found = json.loads(out.read_text())
    assert found["smoke"]
    assert {"what", "machine", "passed"} <= found.keys()
    assert "${" not in found["what"]
    assert found["passed"] or claim not in PROMISES, found
    assert all(row["passed"] for row in found.get("faults", ())), found  # but for time
