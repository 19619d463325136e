"""int8: convolutions in eight bits, what decides in fp32, the same bytes every time."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import PLANES, Builder, write_graph
from onnx import TensorProto, helper, numpy_helper

from exports import SIZE, structured
from segpipe.errors import ConfigError, ExportError
from segpipe.export.graph import lowprec
from segpipe.export.graph.lowprec import activation_ranges, to_int8
from segpipe.export.graph.onnx_format import open_onnx

pytestmark = pytest.mark.slow

FRAMES = structured(6, SIZE, seed=3)
IMAGES = structured(4, SIZE, seed=4)
AGREEMENT = 0.97  # the int8 gate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    write_graph(folder / "fp32.onnx")
    to_int8(folder / "fp32.onnx", folder / "int8.onnx", FRAMES)
    return folder


def agreement(expected: Path, found: Path) -> float:
    one, other = open_onnx(expected), open_onnx(found)
    return float(np.mean([one(image).mask == other(image).mask for image in IMAGES]))


def test_masks_agree_on_frames_that_were_not_calibrated_on(
    folder: Path, tmp_path: Path
) -> None:
    assert AGREEMENT <= agreement(folder / "fp32.onnx", folder / "int8.onnx") < 1
    model = onnx.load(folder / "int8.onnx")
    scale = next(
        tensor
        for tensor in model.graph.initializer
        if tensor.name == "fuse_weight_scale"
    )
    factor = np.linspace(0.5, 2, PLANES, dtype=np.float32)
    scale.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(scale) * factor, scale.name)
    )
    onnx.save(model, tmp_path / "wrong.onnx")
    wrong = agreement(folder / "fp32.onnx", tmp_path / "wrong.onnx")
    assert wrong < AGREEMENT, "the control: wrong scales of one layer are found out"


def test_convolutions_are_int8_but_not_the_first_nor_what_decides(folder: Path) -> None:
    graph = onnx.load(folder / "int8.onnx").graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    readers = {name: node for node in graph.node for name in node.input}
    found = []
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        data, kernel = (makers.get(name) for name in node.input[:2])
        if node.output[0] in ("stem", "head"):
            assert weights[node.input[1]].data_type == TensorProto.FLOAT
            continue
        assert data is not None
        assert kernel is not None
        assert data.op_type == kernel.op_type == "DequantizeLinear", node.name
        assert weights[data.input[2]].data_type == TensorProto.UINT8
        assert weights[kernel.input[0]].data_type == TensorProto.INT8
        largest = int(
            np.abs(numpy_helper.to_array(weights[kernel.input[0]]).astype(int)).max()
        )
        assert largest <= 64, (
            "7 bits, so that no sum overflows on a CPU with AVX2 alone"
        )
        assert weights[kernel.input[1]].dims == [PLANES], "a scale per channel"
        assert readers[node.output[0]].op_type == "QuantizeLinear", (
            "the ReLU is in the range"
        )
        found.append(node.name)
    assert len(found) == 5
    others = [node.op_type for node in graph.node]
    assert others.count("BatchNormalization") == 0, "folded"
    assert others.count("Relu") == 1, "behind the stem"
    for node in graph.node:
        if node.op_type in ("Softmax", "ArgMax"):
            assert makers[node.input[0]].op_type in ("Conv", "Resize"), (
                "no eight bits in between"
            )


def in_int8(made: Builder, logits: str) -> list[str]:
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, *SIZE, 3))
    out = helper.make_tensor_value_info(made.relu(logits), TensorProto.FLOAT, None)
    graph = helper.make_graph(made.nodes, "early", [image], [out], made.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    named = lowprec._named(model).graph
    chosen = lowprec._quantized_nodes(named)
    return [node.output[0] for node in named.node if node.name in chosen]


def layers(made: Builder, x: str, read: int, **written: int) -> str:
    """Convolutions, by their names and the channels that they write; the first reads `read`."""
    for name, channels in written.items():
        x = made.conv(x, name, (channels, read, 3, 3))
        read = channels
    return x


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"a": 8, "b": 16, "c": 17, "d": 32, "e": 8, "f": 8}, ["d", "e", "f"]),
        ({"a": 64, "b": 8, "c": 8}, ["b", "c"]),
        ({"a": 8, "b": 16, "c": 16}, ["a", "b", "c"]),  # no wider layer
    ],
)
def test_the_first_layers_stay_in_fp32_while_they_read_few_channels(
    written: dict[str, int], expected: list[str]
) -> None:
    made = Builder()
    x = made.node("Transpose", ["image"], "turned", perm=[0, 3, 1, 2])
    x = layers(made, x, 3, **written)
    head = made.conv(x, "head", (5, [*written.values()][-1], 1, 1))
    assert in_int8(made, head) == expected


def test_a_wider_branch_does_not_end_the_first_layers_of_another() -> None:
    made = Builder()
    x = made.node("Transpose", ["image"], "turned", perm=[0, 3, 1, 2])
    wide = layers(made, x, 3, wide_first=32, wide=8)
    slim = layers(made, x, 3, slim_first=8, slim=8)
    short = made.node("Add", [slim, "slim_first"], "shortcut")
    both = made.node("Add", [wide, short], "both")
    found = in_int8(made, made.conv(both, "head", (5, 8, 1, 1)))
    assert found == ["wide", "both"]


def test_the_file_is_a_valid_one_with_the_same_face(folder: Path) -> None:
    before, after = (
        onnx.load(folder / "fp32.onnx"),
        onnx.load(folder / "int8.onnx"),
    )
    onnx.checker.check_model(after, full_check=True)
    assert list(after.opset_import) == list(before.opset_import)
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)


def test_nothing_else_is_left_behind_or_said(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.chdir(elsewhere)
    root = logging.getLogger()
    before = (list(root.handlers), root.level, root.manager.disable)
    to_int8(folder / "fp32.onnx", tmp_path / "again.onnx", FRAMES)
    assert (tmp_path / "again.onnx").read_bytes() == (
        folder / "int8.onnx"
    ).read_bytes(), "the same bytes every time"
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in folder.iterdir()} == {
        "fp32.onnx",
        "int8.onnx",
    }
    assert (list(root.handlers), root.level, root.manager.disable) == before
    assert capfd.readouterr() == ("", "")


def test_the_quantizer_may_log_and_nobody_hears(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(
        root, "handlers", []
    )  # as in a process that has not set up logging
    with lowprec._silent_logging():
        logging.warning("please consider something")
    assert root.handlers == []
    assert capfd.readouterr() == ("", "")


def test_other_frames_give_another_file(folder: Path, tmp_path: Path) -> None:
    to_int8(folder / "fp32.onnx", tmp_path / "other.onnx", FRAMES[:1])
    assert (tmp_path / "other.onnx").read_bytes() != (folder / "int8.onnx").read_bytes()


@pytest.fixture(scope="module")
def model(folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / "fp32.onnx")


def test_ranges_cover_every_image(model: onnx.ModelProto) -> None:
    found = activation_ranges(model, ["wide", "normalised", "stem_relu"], IMAGES)
    levels = np.stack(IMAGES)
    low, high = np.quantile(levels, (0.001, 0.999))
    assert found["wide"][0] == 0
    assert found["wide"][1] == pytest.approx(high, abs=0.5)  # two bins of the histogram
    assert found["normalised"][0] == pytest.approx(low / 57.0 - 2.1, abs=0.05)
    assert found["normalised"][1] == pytest.approx(high / 57.0 - 2.1, abs=0.05)
    assert found["stem_relu"][0] == 0, "0 is in every range"
    dark = [image // 4 for image in IMAGES]
    assert activation_ranges(model, ["wide"], dark)["wide"][1] < found["wide"][1] / 2
    last = activation_ranges(model, ["wide"], [*dark, IMAGES[0]])["wide"][1]
    assert last > 0.9 * found["wide"][1], "the last image counts too"


def test_a_rare_outlier_does_not_widen_a_range(model: onnx.ModelProto) -> None:
    calm = np.full((*SIZE, 3), 60, np.uint8)
    one = calm.copy()
    one[0, 0, 0] = 255
    many = calm.copy()
    many[:16] = 255
    assert activation_ranges(model, ["wide"], [one, calm, calm, calm])["wide"][1] < 70
    assert activation_ranges(model, ["wide"], [many] * 4)["wide"][1] > 250, (
        "the control: frequent values count"
    )


def test_an_activation_of_zeros_has_a_range(model: onnx.ModelProto) -> None:
    low, high = activation_ranges(model, ["wide"], [np.zeros((*SIZE, 3), np.uint8)])[
        "wide"
    ]
    assert (low, high) == (0.0, 0.0)


def test_unusable_requests(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibration frames"):
        to_int8(folder / "fp32.onnx", tmp_path / "out.onnx", [])
    model = onnx.load(folder / "fp32.onnx")
    weight = next(
        tensor for tensor in model.graph.initializer if tensor.name == "stem_weight"
    )
    weight.CopyFrom(
        numpy_helper.from_array(
            np.full_like(numpy_helper.to_array(weight), np.nan), weight.name
        )
    )
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(ExportError, match="int8 needs finite ones"):
        to_int8(tmp_path / "broken.onnx", tmp_path / "out.onnx", FRAMES)
    assert not (tmp_path / "out.onnx").exists()
