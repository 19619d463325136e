"""fp16: the network and nothing else is rounded, the file is in all else the one it came from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import write_graph
from onnx import TensorProto, helper, numpy_helper

from exports import IMAGES
from segpipe.errors import ExportError
from segpipe.export.graph.lowprec import placed_nodes, to_fp16, to_int8
from segpipe.export.graph.onnx_format import open_onnx

SIGMA_LIMIT, AGREEMENT = 3e-2, 0.995  # the fp16 gates


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    to_fp16(write_graph(folder / "fp32.onnx"), folder / "fp16.onnx")
    return folder


def difference(
    folder: Path, image: np.ndarray, other: np.ndarray
) -> tuple[float, float]:
    """Largest difference of the logits in sigma, and share of equal pixels: fp32 of `image`, fp16 of `other`."""
    expected, found = (
        open_onnx(folder / "fp32.onnx")(image),
        open_onnx(folder / "fp16.onnx")(other),
    )
    assert expected.logits is not None
    assert found.logits is not None
    largest = float(
        np.abs(expected.logits - found.logits).max() / expected.logits.std()
    )
    return largest, float((expected.mask == found.mask).mean())


def test_answers_are_those_of_fp32_within_the_gates(folder: Path) -> None:
    for image in IMAGES:
        largest, equal = difference(folder, image, image)
        assert 0 < largest <= SIGMA_LIMIT
        assert equal >= AGREEMENT
    largest, equal = difference(
        folder, IMAGES[0], np.ascontiguousarray(IMAGES[0][..., ::-1])
    )
    assert largest > SIGMA_LIMIT, "the control: BGR is found out"
    assert equal < AGREEMENT


def test_the_network_alone_is_fp16(folder: Path) -> None:
    model = onnx.load(folder / "fp16.onnx")
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    kinds = {
        entry.name: entry.type.tensor_type.elem_type
        for entry in (*inferred.value_info, *inferred.output)
    }
    kinds |= {tensor.name: tensor.data_type for tensor in inferred.initializer}
    for node in model.graph.node:
        if node.op_type in ("Conv", "BatchNormalization", "Relu", "Concat"):
            assert {kinds[name] for name in (*node.input, *node.output)} == {
                TensorProto.FLOAT16
            }, node.name
        if node.op_type in ("Softmax", "ArgMax", "Mul"):
            assert kinds[node.input[0]] == TensorProto.FLOAT, node.name
    assert sum(node.op_type == "Cast" for node in model.graph.node) == 3 + 2, (
        "one cast in, one out"
    )


def test_all_else_is_as_it_was(folder: Path) -> None:
    before, after = onnx.load(folder / "fp32.onnx"), onnx.load(folder / "fp16.onnx")
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)
    assert list(after.opset_import) == list(before.opset_import)
    assert list(after.metadata_props) == list(before.metadata_props)
    assert [node.op_type for node in after.graph.node if node.op_type != "Cast"] == [
        node.op_type for node in before.graph.node if node.op_type != "Cast"
    ]
    sizes = {
        name: (folder / f"{name}.onnx").stat().st_size for name in ("fp32", "fp16")
    }
    assert sizes["fp16"] < sizes["fp32"]
    assert {path.name for path in folder.iterdir()} == {"fp32.onnx", "fp16.onnx"}


def test_the_same_bytes_every_time(folder: Path, tmp_path: Path) -> None:
    to_fp16(folder / "fp32.onnx", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (folder / "fp16.onnx").read_bytes()


def test_a_constant_of_both_parts_has_two_types(folder: Path, tmp_path: Path) -> None:
    """As 1 in the variance of model.standardize and in the 1 - x of pidnet_s."""
    model = onnx.load(folder / "fp32.onnx")
    node = next(node for node in model.graph.node if "fuse_relu" in node.output)
    node.op_type = "Sub"
    node.input.append("levels")
    onnx.save(model, tmp_path / "fp32.onnx")
    to_fp16(tmp_path / "fp32.onnx", tmp_path / "fp16.onnx")
    half = onnx.load(tmp_path / "fp16.onnx")
    onnx.checker.check_model(half, full_check=True)
    kinds = {
        tensor.data_type for tensor in half.graph.initializer if "levels" in tensor.name
    }
    assert kinds == {TensorProto.FLOAT, TensorProto.FLOAT16}


def test_a_weight_that_fp16_cannot_hold_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    model = onnx.load(folder / "fp32.onnx")
    weight = next(
        tensor for tensor in model.graph.initializer if tensor.name == "fuse_weight"
    )
    weight.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(weight) * 1e6, weight.name)
    )
    onnx.save(model, tmp_path / "large.onnx")
    with pytest.raises(ExportError, match=r"fuse_weight reaches .* 65504"):
        to_fp16(tmp_path / "large.onnx", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_a_network_without_convolutions_is_no_file_of_reduced_precision(
    tmp_path: Path,
) -> None:
    values = helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 3, 4, 4))
    nodes = [helper.make_node("Relu", ["image"], ["image"])]
    graph = helper.make_graph(nodes, "main_graph", [values], [values])
    onnx.save(helper.make_model(graph), tmp_path / "fp32.onnx")
    with pytest.raises(ExportError, match="no convolution"):
        to_fp16(tmp_path / "fp32.onnx", tmp_path / "fp16.onnx")
    with pytest.raises(ExportError, match=r"no convolution .* Leave int8 out"):
        to_int8(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", IMAGES)


def test_the_network_lies_between_the_convolutions(folder: Path) -> None:
    graph = onnx.load(folder / "fp32.onnx").graph
    names = [node.output[0] for node, is_inside in placed_nodes(graph) if is_inside]
    assert names[0] == "stem"
    assert names[-1] == "head"
    assert {"shortcut", "pooled", "upsampled", "joined"} <= set(names)
    others = {node.output[0] for node in graph.node} - set(names)
    assert others == {
        "turned", "wide", "scaled", "normalised", "probability", "largest", "level", "rounded", "confidence",
        "logits", "class", "mask",
    }  # fmt: skip
