"""The OpenVINO engine against a stand-in that keeps OpenVINO's names, and against OpenVINO itself where it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import answer, frame, write_artifact
from openvino_stand_in import StandIn

from segpipe.runtime import EngineError, Segmenter, SelfTestError, Status
from segpipe.runtime.__main__ import main

pytestmark = pytest.mark.slow

REAL = importlib.util.find_spec("openvino") is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "export")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "openvino", made)  # type: ignore[arg-type]
    return made


def answered(segmenter: Segmenter, image: np.ndarray) -> bool:
    result = segmenter.infer(image)
    mask, confidence = answer(image)
    return bool(
        result.status is Status.OK
        and np.array_equal(result.mask, mask)
        and np.array_equal(result.confidence, confidence)
    )


def test_the_file_is_compiled_for_fp32_and_the_threads(
    folder: Path, stand_in: StandIn
) -> None:
    segmenter = Segmenter.load(folder, engine="openvino", threads=2)
    assert stand_in.compiled == [
        (
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "f32",
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": 2,
            },
        )
    ]
    assert answered(segmenter, frame(3))
    assert answered(segmenter, np.asfortranarray(frame(4)))
    Segmenter.load(folder, engine="openvino", providers=["GPU"])
    assert stand_in.compiled[-1] == (
        "GPU",
        {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"},
    )


def test_bf16_is_asked_for_by_name_and_held_to_its_own_limits(
    folder: Path, stand_in: StandIn
) -> None:
    stand_in.in_bf16 = True
    with pytest.raises(SelfTestError, match="confidence differs by 8 levels"):
        Segmenter.load(folder, engine="openvino")
    segmenter = Segmenter.load(folder, engine="openvino_bf16")
    assert stand_in.compiled[-1][1]["INFERENCE_PRECISION_HINT"] == "bf16"
    assert segmenter.infer(frame(3)).status is Status.OK
    stand_in.off = 9
    with pytest.raises(SelfTestError, match="99 % and at most 16 were needed"):
        Segmenter.load(folder, engine="openvino_bf16")


def test_a_request_is_canceled_at_the_deadline(folder: Path, stand_in: StandIn) -> None:
    segmenter = Segmenter.load(folder, engine="openvino", deadline_ms=5)
    stand_in.waits = True
    while (
        not stand_in.canceled.is_set()
    ):  # a busy machine may let the deadline pass before the run begins
        assert segmenter.infer(frame(3)).status is Status.DEADLINE
    stand_in.waits, segmenter.deadline_ms = False, 60_000
    assert answered(segmenter, frame(4))


@pytest.mark.parametrize("devices", [["NPU"], ["CPU", "GPU"]])
def test_a_device_that_is_not_here_is_named(
    devices: list[str], folder: Path, stand_in: StandIn
) -> None:
    with pytest.raises(
        EngineError,
        match=rf"providers = {', '.join(devices)}, but openvino .* devices: CPU, GPU",
    ):
        Segmenter.load(folder, engine="openvino", providers=devices)


def test_an_engine_that_is_not_here_is_named(
    folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(["selftest", str(folder), "--engine", "openvino"]) == 2
    assert "pip install openvino." in capsys.readouterr().err
    assert main(["selftest", str(folder), "--engine", "tensorflow"]) == 2
    assert (
        "must be one of onnxruntime, openvino, openvino_bf16" in capsys.readouterr().err
    )


@pytest.mark.skipif(not REAL, reason="openvino is not installed")
@pytest.mark.parametrize("engine", ["openvino", "openvino_bf16"])
def test_openvino_itself(folder: Path, engine: str) -> None:
    segmenter = Segmenter.load(folder, engine=engine, deadline_ms=60_000)
    assert all(answered(segmenter, frame(seed)) for seed in range(4))
    segmenter.deadline_ms = 1
    assert segmenter.infer(frame(5, blue=200)).status is Status.DEADLINE, (
        "canceled inside the run"
    )
    segmenter.deadline_ms = 60_000
    assert answered(segmenter, frame(6))
