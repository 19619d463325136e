"""`segpipe describe` against counts by hand, and its errors."""

import json
from pathlib import Path

import pytest

from runs import torch_restored
from segpipe.cli.main import main


def test_counts_are_those_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    with torch_restored():
        assert (
            main(
                [
                    "describe",
                    "model=pidnet_s",
                    "size=64x128",
                    "classes=11",
                    "runs=1",
                    "json=true",
                ]
            )
            == 0
        )
    found = json.loads(capsys.readouterr().out)
    # 47.19 GMAC at 1024x2048 with 19 classes; the last layer has 128 x classes weights at stride 8.
    assert found["macs"] == pytest.approx((47.194e9 - 8 * 128 * 2**15) / 256, rel=1e-3)
    assert found["parameters"] == 7_625_715 - 8 * 129
    assert found["latency_ms"] > 0


@pytest.mark.parametrize("size", ["64", "64x", "16x64"])
def test_a_size_that_is_none_is_refused(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", f"size={size}"]) == 2
    assert f"size = '{size}'" in capsys.readouterr().err


def test_a_network_of_features_alone_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no train_only."""
    (tmp_path / "featuresalone.py").write_text(
        "from torch import nn\n"
        "from segpipe.models.layers import SegmentationNet\n"
        "class Net(SegmentationNet):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.body = nn.Conv2d(3, num_classes, 8, stride=8)\n"
        "    def features(self, image):\n"
        "        return self.body(image), {}\n"
        "class Broken(Net):\n"
        "    def features(self, image):\n"
        "        return self.body(image[0, 0, 0]), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = ("model.name=featuresalone:Net", "size=64x64", "runs=0")
    assert main(["describe", *asked]) == 0, capsys.readouterr()
    assert main(["describe", asked[0][:-3] + "Broken", *asked[1:]]) == 2
    told = capsys.readouterr().err
    assert "featuresalone.py, line 11" in told
    assert "RuntimeError: Expected 3D" in told
