"""Rewrites before quantisation: the same function, and only where they apply."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import Builder
from onnx import TensorProto, helper

from segpipe.export.graph.lowprec import (
    gather_stem,
)
from segpipe.runtime import make_session

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
    return make_session(model.SerializeToString()).run(None, {"image": IMAGE})[0]


@pytest.mark.parametrize("bias", [True, False])
def test_the_outputs_are_the_same(bias: bool) -> None:
    model = stem(3, bias=bias, strides=[2, 2], pads=[1, 1, 1, 1])
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
        (3, {"strides": [2, 2], "pads": [0, 0, 1, 1]}),
        (5, {"strides": [2, 2], "pads": [2, 2, 2, 2]}),
        (1, {"strides": [2, 2], "pads": [0, 0, 0, 0]}),
    ],
)
def test_another_convolution_stays(kernel: int, others: dict[str, Any]) -> None:
    model = stem(kernel, **others)
    before = model.SerializeToString()
    assert not gather_stem(model.graph)
    assert model.SerializeToString() == before
