"""`segpipe profile`: spans, advice, and a whole profile of a tiny run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function

from segpipe.cli.main import main
from segpipe.settings.config import Config, from_mapping
from segpipe.train import profiling
from segpipe.train.profiling import advice, spent

CPU = torch.device("cpu")


def said(config: Config | None = None, **parts_ms: float) -> str:
    """Advice for parts of an update of 100 ms with 8 samples of 50 ms each."""
    precise = from_mapping({"train": {"precision": "bf16"}})
    found = {"update_ms": 100.0, "parts": parts_ms, "sample_ms": 50.0}
    return " ".join(advice(found, config or precise, batch=8))


def test_advice_names_the_bottleneck_and_what_to_set() -> None:
    assert said(forward=50, backward=40).startswith("Nothing stands out")
    waiting = said(data=50, forward=50)  # 8 samples of 50 ms in 50 ms of computation
    assert waiting.startswith("data 50%: ")
    assert "data.workers=8" in waiting
    assert "loss.stride=2" in said(loss=30)
    assert "compute.samples_per_shard" in said(reduction=20)
    assert "compute.ledger=false" in said(ledger=5)
    slight = said(data=5, loss=20, reduction=5, ledger=2)
    assert slight.startswith("Nothing stands out")


def test_the_time_of_a_part_is_that_inside_its_span() -> None:
    with profile() as trace:
        for name in ("copy", "loss", "copy", "of the user"):
            with record_function(name):
                time.sleep(0.002)
    found = spent(trace, CPU)
    assert found.keys() == {"copy", "loss"}
    assert found["copy"] >= 0.004
    assert 0.002 <= found["loss"] < found["copy"]


def test_a_run_is_profiled_and_leaves_nothing_but_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiling, "TIMED", 2)
    overrides = [
        "data=synthetic", "data.size=[64,96]", "data.num_train=8", "augment.crop_size=[64,64]", "data.workers=0",
        "model=fast_scnn", "compute.device=cpu", "compute.threads=1", "compute.shards=2", "compute.samples_per_shard=2",
        "train.precision=bf16", f"run.root={tmp_path}", "run.name=one",
    ]  # fmt: skip
    assert main(["profile", *overrides]) == 0
    told = capsys.readouterr().out
    profile = json.loads((tmp_path / "one_profile" / "profile.json").read_text())
    parts = profile["parts"]
    assert {
        "data",
        "copy",
        "forward",
        "loss",
        "backward",
        "reduction",
        "clip",
        "optimizer",
        "average",
        "ledger",
    } <= set(parts)
    assert sum(parts.values()) == pytest.approx(profile["update_ms"], rel=0.01)
    assert all(name in told for name in parts)
    assert profile["advice"][0] in told
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "one_profile" / "trace.json").read_text())[
            "traceEvents"
        ]
    }
    assert {"forward", "backward", "ledger"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["one_profile"]
