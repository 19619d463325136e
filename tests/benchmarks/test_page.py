"""docs/performance.md is what the results say, losses included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_claims, measure, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_that_of_the_results() -> None:
    command = "python -m benchmarks.page > docs/performance.md"
    assert (ROOT / "docs/performance.md").read_text() == page.page(), f"run {command}"


def test_results_name_no_folder_of_a_machine() -> None:
    found = {
        path.name: re.findall(r"/[\w./-]+/(?:bin|lib)/\S+", path.read_text())
        for path in page.RESULTS.iterdir()
    }
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_a_claim_that_is_not_met_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ratio = {"ratio": 1.2, "low": 1.1, "high": 1.31}
    result = {
        "claim": "C6",
        "what": "a | b",
        "speed": ratio,
        "must": 1.3,
        "machine": {"torch": "9"},
        "passed": False,
    }
    (tmp_path / "c6.json").write_text(json.dumps(result))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    row = page.page().splitlines()[-1]
    assert row.startswith("| C6 |")
    assert "a / b" in row
    assert row.endswith("| speed: **1.2** [1.1, 1.31] | 1.3 | **no** | torch 9 |")


def test_a_claim_holds_by_the_end_of_its_interval_that_speaks_against_it() -> None:
    found = {"ratio": 1.4, "low": 1.2, "high": 1.6}
    assert measure.holds(found, at_least=1.2)
    assert not measure.holds(found, at_least=1.3)  # though the median is above
    assert measure.holds(found, at_most=1.6)
    assert not measure.holds(found, at_most=1.5)  # though the median is below


def test_rows_of_a_gpu_become_results_and_lines_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row of a check counts, met or not, and none of another device."""

    def row(check: str, verdict: str, device: str = "cuda", **figures: Any) -> str:
        found = {"check": check, "device": device, "verdict": verdict}
        return json.dumps({**found, "figures": figures})

    machine = {"device": "NVIDIA H200", "torch": "9", "cuda": "13.0", "cpu": "EPYC"}
    lines = (
        row("machine", "passed", fingerprint=machine),
        row("loop", "unfinished"),
        row("loop", "goal missed", images_per_second=401.5),
        row("memory", "passed", over_torchvision=0.7),
        row("determinism", "FAILED"),
        row("loss", "passed", device="cpu"),
        '{"check": "recipes", "dev',
    )
    (tmp_path / "gpu.jsonl").write_text("\n".join(lines))
    folder = tmp_path / "results"
    folder.mkdir()
    files = gpu_claims.written(tmp_path / "gpu.jsonl", folder)
    assert [path.name for path in files] == ["g1_gpu.json", "g7_gpu.json"]
    monkeypatch.setattr(page, "RESULTS", folder)
    loop, memory = page.page().splitlines()[-2:]
    assert loop.startswith("| G1 |")
    assert "images per second: 401.5" in loop
    assert "**no**" in loop
    assert memory.startswith("| G7 |")
    assert "| yes |" in memory
    assert "NVIDIA H200" in loop
