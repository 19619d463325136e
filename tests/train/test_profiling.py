"""`segpipe profile`: spans, advice, and a whole profile of a tiny run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from segpipe.cli.main import main
from segpipe.settings.config import Config, from_mapping
from segpipe.train import profiling
from segpipe.train.profiling import SpanCost, Spans, StepProfile, advice

CPU = torch.device("cpu")


def found(**shares: float) -> StepProfile:
    """A profile in which these parts have these shares of an update of 100 ms."""
    parts = [SpanCost(name, 100 * share, share) for name, share in shares.items()]
    return StepProfile(
        100.0, 80.0, parts, read_ms=30.0, augment_ms=20.0, repeated=0.0, advice=[]
    )


def said(profile: StepProfile, config: Config | None = None) -> str:
    precise = (
        from_mapping({"train": {"precision": "bf16"}}) if config is None else config
    )
    return " ".join(advice(profile, precise, CPU, batch=8))


def test_advice_names_the_bottleneck_and_what_to_set() -> None:
    assert said(found(forward=0.5, backward=0.4)).startswith("Nothing stands out")
    waiting = said(
        found(data=0.5, forward=0.5)
    )  # 8 samples of 50 ms in 50 ms of computation
    assert "Loader-bound: 50%" in waiting
    assert "data.workers=8 (now 2)" in waiting
    many = from_mapping({"data": {"workers": 16}, "train": {"precision": "bf16"}})
    assert "lack cores" in said(found(data=0.5, forward=0.5), many)
    assert "loss.stride=2" in said(found(loss=0.3))
    assert "compute.samples_per_shard" in said(found(reduction=0.2))
    assert "compute.ledger=false" in said(found(ledger=0.05))
    assert said(found(data=0.05, loss=0.2, reduction=0.05, ledger=0.02)).startswith(
        "Nothing stands out"
    )


def test_spans_are_measured_once() -> None:
    spans = Spans(CPU)
    for name in ("add", "sum", "add"):
        with spans(name):
            time.sleep(0.001)
    seconds = spans.take()
    assert seconds["add"] >= 0.002
    assert 0.001 <= seconds["sum"] < seconds["add"]
    assert spans.take() == {}


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
    parts = {part["name"]: part for part in profile["parts"]}
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
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1, abs=0.01)
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
