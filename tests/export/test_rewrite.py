"""Rewrites before quantisation: the same function, and only where they apply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import Builder, write_graph
from onnx import TensorProto, helper

from exports import IMAGES
from segpipe.export.graph.onnx_format import open_onnx, open_session
from segpipe.export.lowprec.rewrite import (
    fold_batchnorm,
    gather_stem,
    norms_as_convolutions,
)

# BatchNorm


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("change", [fold_batchnorm, norms_as_convolutions])
def test_the_graph_computes_the_same(
    change: Callable[[onnx.GraphProto], int], tmp_path: Path
) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    norms = operators(model).count("BatchNormalization")
    assert change(model.graph) == norms == 2
    assert operators(model).count("BatchNormalization") == 0
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "after.onnx")
    for image in IMAGES:
        before, after = (
            open_onnx(tmp_path / f"{name}.onnx")(image).logits
            for name in ("before", "after")
        )
        assert before is not None
        assert after is not None
        np.testing.assert_allclose(after, before, atol=2e-5 * before.std())


def test_control_a_deleted_batchnorm_changes_the_answer(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    norm = next(
        node for node in model.graph.node if node.op_type == "BatchNormalization"
    )
    following = next(node for node in model.graph.node if norm.output[0] in node.input)
    following.input[0] = norm.input[0]
    model.graph.node.remove(norm)
    onnx.save(model, tmp_path / "after.onnx")
    before, after = (
        open_onnx(tmp_path / f"{name}.onnx")(IMAGES[0]).logits
        for name in ("before", "after")
    )
    assert before is not None
    assert after is not None
    assert np.abs(before - after).max() > 0.01 * before.std()


def test_a_convolution_that_others_read_stays(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    shortcut = next(
        node
        for node in model.graph.node
        if node.op_type == "Add" and node.output[0] == "shortcut"
    )
    shortcut.input[1] = "stem"  # before its BatchNorm
    assert fold_batchnorm(model.graph) == 1
    assert operators(model).count("BatchNormalization") == 1
    onnx.checker.check_model(model, full_check=True)


def test_a_batchnorm_before_a_convolution_stays(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    norm = next(node for node in model.graph.node if node.output[0] == "project_norm")
    norm.input[0] = "depthwise_relu"
    assert fold_batchnorm(model.graph) == 1


# The first convolution

IMAGE = (
    np.random.Generator(np.random.Philox(key=1))
    .normal(0, 1, (1, 3, 14, 24))
    .astype(np.float32)
)


def stem(
    kernel: int,
    *,
    bias: bool = True,
    width: int = 24,
    read_twice: bool = False,
    **attributes: Any,
) -> Any:
    made = Builder()
    made.conv("image", "stem", (16, 3, kernel, kernel), bias=bias)
    del made.nodes[-1].attribute[:]
    made.nodes[-1].attribute.extend(
        helper.make_attribute(name, value) for name, value in attributes.items()
    )
    made.relu("stem")
    if read_twice:
        made.node("Sigmoid", ["stem"], "other")
    entry = helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 3, 14, width))
    outputs = [helper.make_tensor_value_info("stem_relu", TensorProto.FLOAT, None)]
    graph = helper.make_graph(made.nodes, "stem", [entry], outputs, made.weights)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def outputs(model: onnx.ModelProto) -> Any:
    return open_session(model).run(None, {"image": IMAGE})[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "pads"),
    [
        (3, [0, 0, 0, 0]),
        (3, [1, 1, 1, 1]),
        (5, [2, 2, 2, 2]),
        (7, [3, 3, 3, 3]),
        (1, [0, 0, 0, 0]),
        (3, [0, 0, 1, 1]),
    ],
)
def test_the_outputs_are_the_same(kernel: int, pads: list[int], bias: bool) -> None:
    model = stem(kernel, bias=bias, strides=[2, 2], pads=pads)
    before = outputs(model)
    assert gather_stem(model.graph)
    del model.graph.value_info[:]
    onnx.checker.check_model(model, full_check=True)
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    weight = next(
        tensor for tensor in model.graph.initializer if tensor.name == conv.input[1]
    )
    assert list(weight.dims[:2]) == [16, 12]
    after = outputs(model)
    assert after.shape == before.shape
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert np.abs(before).max() > 0.1, "the control: zeros would agree"


@pytest.mark.parametrize(
    ("kernel", "others"),
    [
        (3, {"strides": [1, 1], "pads": [1, 1, 1, 1]}),
        (3, {"strides": [2, 2], "pads": [1, 1, 1, 1], "width": 23}),
        (3, {"strides": [2, 1], "pads": [1, 1, 1, 1]}),
        (3, {"strides": [2, 2], "pads": [2, 2, 2, 2], "dilations": [2, 2]}),
        (3, {"strides": [2, 2], "pads": [2, 1, 2, 1]}),
        (3, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ],
)
def test_another_convolution_stays(kernel: int, others: dict[str, Any]) -> None:
    model = stem(kernel, **others)
    before = model.SerializeToString()
    assert not gather_stem(model.graph)
    assert model.SerializeToString() == before
