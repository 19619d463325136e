"""C8: every form is timed and judged on labels, and the claim fails where it does not hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks import export_speed, run
from exports import CLASSES, IMAGES, SIZE, tiny_network
from segpipe.errors import ConfigError

FORMS = {"eager fp32", "torchscript", "onnx fp32", "onnx fp16", "onnx int8"}


class Labelled:
    """The images with what the network itself says of them as labels: fp32 reaches an mIoU of 1."""

    classes = CLASSES

    def __init__(self) -> None:
        trained = tiny_network()
        with torch.no_grad():
            images = torch.from_numpy(np.stack(IMAGES))
            logits = torch.nn.functional.interpolate(
                trained.model(trained.preprocess(images)), SIZE, mode="bilinear"
            )
        self.targets = logits.argmax(1).to(torch.uint8).numpy()

    def __len__(self) -> int:
        return len(IMAGES)

    def name(self, index: int) -> str:
        return f"scene_{index}"

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return IMAGES[index], self.targets[index]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_form_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_speed, "FP32_LIMIT", 0.0)
    monkeypatch.setattr(export_speed, "INT8_LIMIT", 0.0)
    monkeypatch.setattr(export_speed, "POINTS", 100.0)
    found = export_speed.compare(tiny_network(), Labelled(), IMAGES, repeats=3)
    assert found["latency"].keys() == found["miou"].keys() == FORMS
    assert (
        found["times_as_fast_as_eager"].keys()
        == found["size_mib"].keys()
        == FORMS - {"eager fp32"}
    )
    assert (
        found["miou"]["eager fp32"]
        == found["miou"]["torchscript"]
        == found["miou"]["onnx fp32"]
        == 1.0
    )
    assert 0 < found["points_lost"]["onnx int8"] < 20
    assert found["passed"]
    assert "of fp32's time" in found["verdict"]
    assert json.loads(json.dumps(found)) == found


def test_every_size_is_timed_and_its_operators_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = export_speed._scaled(IMAGES, "32x64")
    assert {frame.shape for frame in frames} == {(32, 64, 3)}
    for limit, fast in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(export_speed, "INT8_LIMIT", limit)
        monkeypatch.setattr(export_speed, "FP32_LIMIT", 0.0)
        found = export_speed.speed(tiny_network(), frames, repeats=2)
        assert found["fast"] is fast
    assert found["operators"].keys() == {"onnx fp32", "onnx int8"}
    assert all(
        0 < sum(shares.values()) <= 1.01 for shares in found["operators"].values()
    )
    with pytest.raises(ConfigError, match="sizes = 12, but HEIGHTxWIDTH"):
        export_speed._scaled(IMAGES, "12")


@pytest.mark.parametrize(
    ("limit", "value"),
    [("FP32_LIMIT", 1e9), ("INT8_LIMIT", 1e9), ("POINTS", -100.0), ("FRAMES", 32)],
)
def test_each_limit_is_one(
    limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(runs: dict[str, object], *_: object) -> dict[str, object]:
        return {
            "latency": {name: {"median_ms": 1.0} for name in runs},
            "times_as_fast_as_eager": {name: {"low": 1.0} for name in runs},
            "verdict": "a win",
        }

    forms = dict.fromkeys(sorted(FORMS))
    monkeypatch.setattr(export_speed, "forms", lambda *_: (forms, {}))
    monkeypatch.setattr(export_speed, "timed", timed)
    monkeypatch.setattr(export_speed, "quality_of", lambda *_: 0.5)
    for name, reached in {
        "FP32_LIMIT": 0.0,
        "INT8_LIMIT": 0.0,
        "POINTS": 100.0,
        limit: value,
    }.items():
        monkeypatch.setattr(export_speed, name, reached)
    found = export_speed.compare(tiny_network(), Labelled(), IMAGES, repeats=1)
    assert found["passed"] is (limit == "FRAMES"), "the control: no limit at all"
    assert found["verdict"].endswith(
        "an export refuses it" if limit == "POINTS" else "a win"
    )


def test_the_verdict_follows_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(int8: float) -> dict[str, object]:
        times = {
            "eager fp32": 4.0,
            "onnx fp32": 2.0,
            "onnx int8": int8,
        }
        monkeypatch.setattr(
            export_speed.measuring,
            "interleaved",
            lambda *_, **__: {name: [time] * 5 for name, time in times.items()},
        )
        return export_speed.timed({}, IMAGES[0], 5)

    assert str(timed(1.0)["verdict"]).endswith("a win")
    assert "refuses it" in str(timed(1.9)["verdict"])
    assert timed(1.0)["times_as_fast_as_eager"]["onnx int8"]["ratio"] == 4.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["C8"], 2, "run is missing"),
        (["C8", "run=nowhere", "modle=x"], 2, "modle"),
        (["C9", "run=nowhere"], 2, "C9 takes no run=nowhere"),
    ],
)
def test_the_command(
    arguments: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    try:
        given = run.main()
    except SystemExit as error:
        given = error.code
    assert given == code
    assert message in capsys.readouterr().err
