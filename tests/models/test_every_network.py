"""Every network in MODELS: after a short training with the real command, its exported files pass every gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runs import run, updates
from segpipe.models import MODELS

FILES = ("model.onnx", "model.torchscript.pt")
GATES = [
    "G1 integrity",
    "G2 logits",
    "G3 mask",
    "G4 preprocessing",
    "G5 quality",
    "latency",
]
SHORT = (
    "data.size=[64,96]", "augment.crop_size=[64,96]", "data.num_train=32", "data.num_val=16", "train.steps=50",
    "compute.shards=1", "compute.samples_per_shard=4", "optim.name=adamw", "optim.lr=0.004", "optim.warmup_steps=5",
    "ema.decay=0.8", "checkpoint.every=0", "export.enabled=true", "export.formats=[onnx,torchscript]",
)  # fmt: skip
MORE = {
    "timm": ("model.args.encoder=mobilenetv4_conv_small_035",)
}  # which expects another normalization than ours


@pytest.mark.usefixtures("quick_exports")
@pytest.mark.parametrize("name", MODELS)
def test_its_files_pass_after_a_short_training(name: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", f"model={name}", *SHORT, *MORE.get(name, ())) == 0
    losses = [line["loss"] for line in updates(tmp_path / "run")]
    assert losses[-1] < 0.9 * losses[0], "the network has learned something"
    report = json.loads(
        (tmp_path / "run" / "export" / "verify_report.json").read_text()
    )
    assert report["gates"]["eager"]["G6 power"]["passed"]
    for file in FILES:
        assert list(report["gates"][file]) == GATES
        assert all(gate["passed"] for gate in report["gates"][file].values())
        assert report["gates"][file]["G2 logits"]["max_sigma"] <= 1e-3
        assert report["gates"][file]["G3 mask"]["images"] >= 16
