"""The TensorRT example against a stand-in for tensorrt whose engines are onnxruntime's: rules, gates, golden frames."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from exports import FEW, export

PATH = (
    Path(__file__).resolve().parents[2] / "examples" / "tensorrt" / "verify_engine.py"
)
pytestmark = [
    pytest.mark.usefixtures("quick_exports", "tiny_networks"),
    pytest.mark.slow,
]
_KINDS = {
    "tensor(float)": np.float32,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_engine", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    """ICudaEngine and IExecutionContext in one, on host memory."""

    def __init__(
        self, content: bytes, change: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self.session = onnxruntime.InferenceSession(content)
        self.change = change
        self.values = {
            value.name: value
            for value in (*self.session.get_inputs(), *self.session.get_outputs())
        }
        self.places: dict[str, int] = {}
        self.num_io_tensors = len(self.values)
        self.create_execution_context = lambda: self
        self.get_tensor_name = list(self.values).__getitem__
        self.get_tensor_mode = lambda name: "INPUT" if name == "image" else "OUTPUT"
        self.get_tensor_dtype = lambda name: self.values[name].type
        self.get_tensor_shape = lambda name: self.values[name].shape
        self.set_tensor_address = self.places.__setitem__

    def _view(self, name: str) -> np.ndarray:
        kind, shape = np.dtype(_KINDS[self.values[name].type]), self.values[name].shape
        size = int(np.prod(shape)) * kind.itemsize
        return np.frombuffer(
            (ctypes.c_char * size).from_address(self.places[name]), kind
        ).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        names = [name for name in self.values if name != "image"]
        answers = self.session.run(names, {"image": self._view("image")})
        for name, answer in zip(names, answers, strict=True):
            self._view(name)[...] = self.change(answer) if name == "mask" else answer
        return True


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch, example: ModuleType) -> SimpleNamespace:
    """tensorrt of version 10, as far as the example uses it."""
    made = SimpleNamespace(
        __version__="10.9", __spec__=importlib.machinery.ModuleSpec("tensorrt", None), cleared=[], flags=[],
        change=lambda mask: mask, parses=True, built=[],
    )  # fmt: skip
    config = SimpleNamespace(clear_flag=made.cleared.append)
    network = SimpleNamespace(content=b"")

    def parse(content: bytes) -> bool:
        network.content = content
        return bool(made.parses)

    builder = SimpleNamespace(
        create_network=lambda flags: (made.flags.append(flags), network)[1],
        create_builder_config=lambda: config,
        # No two builds are equal: kernels are chosen by their time.
        build_serialized_network=lambda network, _: (
            made.built.append(
                network.content + b"\xa2\x06\x01" + bytes([len(made.built)])
            ),
            made.built[-1],
        )[1],
    )
    made.Logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, _: None})
    made.Builder = lambda _: builder
    made.OnnxParser = lambda *_: SimpleNamespace(
        parse=parse, get_error=lambda _: "no such operator"
    )
    made.Runtime = lambda _: SimpleNamespace(
        deserialize_cuda_engine=lambda plan: Engine(plan, made.change)
    )
    made.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    made.BuilderFlag = SimpleNamespace(TF32="TF32")
    made.TensorIOMode = SimpleNamespace(INPUT="INPUT")
    made.nptype = _KINDS.__getitem__
    monkeypatch.setitem(sys.modules, "tensorrt", made)  # type: ignore[arg-type]
    monkeypatch.setattr(example, "DEVICE", "cpu")
    monkeypatch.setattr(example, "ENGINES", {**example.ENGINES})
    from segpipe.export.graph import onnx_format

    monkeypatch.setattr(onnx_format, "ENGINES", example.ENGINES)
    return made


@pytest.fixture(scope="module")
def isaac(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("isaac") / "export"
    assert export(run, folder, "export.profile=isaac", "export.formats=[onnx]") == 0
    return folder


def test_a_verified_engine_is_written(
    example: ModuleType,
    trt: SimpleNamespace,
    run: Path,
    isaac: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = tmp_path / "model.plan"
    assert example.main([str(run), str(isaac), str(plan), *FEW]) == 0
    shown = capsys.readouterr().out
    assert "in tensorrt 10.9" in shown
    assert "golden frames: at least 100.0000 % of the pixels equal" in shown
    assert plan.read_bytes() in trt.built
    assert len(trt.built) == 2, (
        "one of the file, which the gates ran and which is written, and one of its probe"
    )
    assert set(trt.cleared) == {"TF32"}
    assert set(trt.flags) == {2}, "types are those of the file"


def test_an_engine_with_other_answers_is_not_written(
    example: ModuleType,
    trt: SimpleNamespace,
    run: Path,
    isaac: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trt.change = lambda mask: np.roll(mask, 1, axis=-1)
    assert example.main([str(run), str(isaac), str(tmp_path / "model.plan"), *FEW]) == 4
    assert "G3 mask agreement" in (told := capsys.readouterr().err)
    assert "in model.onnx (tensorrt)" in told
    assert not list(tmp_path.iterdir())


def test_what_prevents_an_engine_is_named(
    example: ModuleType,
    trt: SimpleNamespace,
    run: Path,
    artifact: Path,
    isaac: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    assert example.main([]) == 2
    assert example.main([str(run), str(artifact)]) == 2, "profile robot"
    assert "Transpose" in (told := capsys.readouterr().err)
    assert (
        "reads uint8, but only a Cast to float may. Export with export.profile=isaac"
        in told
    )
    trt.parses = False
    assert example.main([str(run), str(isaac), *FEW]) == 7
    assert "TensorRT cannot parse it: no such operator" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert example.main([str(run), str(isaac), *FEW]) == 2


def test_rules_of_uint8_and_quantisation(
    example: ModuleType, artifact: Path, isaac: Path
) -> None:
    assert example.rule_problems(onnx.load(isaac / "model.onnx")) == []
    robot = " ".join(example.rule_problems(onnx.load(artifact / "model.onnx")))
    assert "Transpose" in robot
    assert "writes uint8 from a type other than float" in robot, (
        "class ids are integers before they are bytes"
    )
    make = helper.make_node

    def found(*nodes: onnx.NodeProto) -> list[str]:
        image = helper.make_tensor_value_info("image", TensorProto.UINT8, [1, 4])
        out = helper.make_tensor_value_info("out", TensorProto.UINT8, [1, 4])
        scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5])
        zero = helper.make_tensor("zero", TensorProto.UINT8, [], [3])
        graph = helper.make_graph(nodes, "g", [image], [out], [scale, zero])
        return list(
            example.rule_problems(
                helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
            )
        )

    to_float, to_bytes = (
        make("Cast", ["image"], ["x"], to=1),
        make("Cast", ["y"], ["out"], to=2),
    )
    assert found(to_float, make("Relu", ["x"], ["y"]), to_bytes) == []
    assert len(found(make("Cast", ["image"], ["y"], to=6), to_bytes)) == 2, (
        "int32 is no float"
    )
    assert (
        "quantises to uint8"
        in found(to_float, make("QuantizeLinear", ["x", "scale", "zero"], ["out"]))[0]
    )
