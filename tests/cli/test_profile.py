"""`segpipe profile`: spans, and a whole profile of a tiny run."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function

from segpipe.cli import speed
from segpipe.cli.main import main
from segpipe.train import checkpoint
from segpipe.train.recorder import spent

CPU = torch.device("cpu")


def test_the_time_of_a_part_is_that_inside_its_span() -> None:
    """On a busy machine a sleep may take long, so it is measured inside the spans and around them."""
    inside: Counter[str] = Counter()
    around: Counter[str] = Counter()
    with profile() as trace:
        for name in ("copy", "loss", "copy", "of the user"):
            before = time.perf_counter()
            with record_function(name):
                begun = time.perf_counter()
                time.sleep(0.002)
                inside[name] += time.perf_counter() - begun
            around[name] += time.perf_counter() - before
    found = spent(trace, CPU)
    assert found.keys() == {"copy", "loss"}
    for name, seconds in found.items():  # torch's clock is another
        assert 0.95 * inside[name] <= seconds <= 1.05 * around[name]


def test_a_run_is_profiled_and_leaves_nothing_but_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "TIMED", 2)
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    state_of = checkpoint.state_of
    # As of a CPU without bf16 instructions, where a profile takes minutes.
    monkeypatch.setattr(
        checkpoint, "state_of", lambda *given: (*state_of(*given)[:2], ["slow here"])
    )
    overrides = [
        "data=synthetic", "data.size=[64,96]", "data.num_train=8", "augment.crop_size=[64,64]", "data.workers=0",
        "model=fast_scnn", "compute.device=cpu", "compute.threads=1", "compute.shards=2", "compute.samples_per_shard=2",
        f"run.root={tmp_path}", "run.name=one",
    ]  # fmt: skip
    assert main(["profile", *overrides]) == 0
    told = capsys.readouterr().out
    silent = os.environ.get("KINETO_LOG_LEVEL") == "6"  # read when torch is imported
    assert silent != Path("/proc/driver/nvidia").exists()
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
    assert all(name in told for name in ("slow here", *parts))
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "one_profile" / "trace.json").read_text())[
            "traceEvents"
        ]
    }
    assert {"forward", "backward", "ledger"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["one_profile"]
