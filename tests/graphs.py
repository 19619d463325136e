"""An exported graph made by hand: what an exporter writes for a small network, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEIGHT, WIDTH, STRIDE, CLASSES, PLANES = 64, 96, 4, 5, 24
METADATA = {"segpipe": '{"model": "by hand"}'}


class Builder:
    """Nodes and weights, one after the other; every method returns the name of the tensor that it adds."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.Generator(np.random.Philox(key=seed))
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, values: Any, dtype: Any = np.float32) -> str:
        self.weights.append(
            numpy_helper.from_array(np.asarray(values, dtype=dtype), name)
        )
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(
            helper.make_node(
                kind, inputs, [output], name=f"node_{output}", **attributes
            )
        )
        return output

    def conv(
        self,
        x: str,
        name: str,
        shape: tuple[int, int, int, int],
        *,
        bias: bool = True,
        **attributes: Any,
    ) -> str:
        spread = np.sqrt(2 / np.prod(shape[1:]))
        inputs = [
            x,
            self.weight(f"{name}_weight", self.random.normal(0, spread, shape)),
        ]
        if bias:
            inputs.append(
                self.weight(f"{name}_bias", self.random.normal(0, 0.1, shape[0]))
            )
        pads = [shape[2] // 2] * 4
        return self.node("Conv", inputs, name, pads=pads, **attributes)

    def relu(self, x: str) -> str:
        return self.node("Relu", [x], f"{x}_relu")

    def resize(self, x: str, name: str, size: tuple[int, int, int, int]) -> str:
        sizes = self.weight(f"{name}_sizes", size, np.int64)
        mode = "align_corners"
        return self.node(
            "Resize",
            [x, "", "", sizes],
            name,
            mode="linear",
            coordinate_transformation_mode=mode,
        )


def write_graph(path: Path, *, is_probe: bool = True) -> Path:
    """`path`, after a file of the deploy model's inputs and outputs was written there.

    It has a depthwise convolution, a shortcut, global pooling with a resize, and a concatenation.
    """
    low = (HEIGHT // STRIDE, WIDTH // STRIDE)
    made = Builder()
    x = _preprocessed(made)
    stem = made.relu(made.conv(x, "stem", (PLANES, 3, 5, 5), strides=[2, 2]))
    down = made.relu(made.conv(stem, "down", (PLANES, PLANES, 3, 3), strides=[2, 2]))
    deep = made.relu(made.conv(down, "depthwise", (PLANES, 1, 3, 3), group=PLANES))
    deep = made.conv(deep, "project", (PLANES, PLANES, 1, 1))
    deep = made.relu(made.node("Add", [deep, down], "shortcut"))
    axes = made.weight("axes", [2, 3], np.int64)
    pooled = made.node("ReduceMean", [deep, axes], "pooled", keepdims=1)
    pooled = made.relu(made.conv(pooled, "context", (PLANES, PLANES, 1, 1)))
    pooled = made.resize(pooled, "upsampled", (1, PLANES, *low))
    joined = made.node("Concat", [deep, pooled], "joined", axis=1)
    joined = made.relu(made.conv(joined, "fuse", (PLANES, 2 * PLANES, 1, 1)))
    _decided(made, made.conv(joined, "head", (CLASSES, PLANES, 3, 3)))
    _save(made, path, low, is_probe=is_probe)
    return path


def _preprocessed(made: Builder) -> str:
    turned = made.node("Transpose", ["image"], "turned", perm=[0, 3, 1, 2])
    wide = made.node("Cast", [turned], "wide", to=TensorProto.FLOAT)
    scale = made.weight("scale", np.full((1, 3, 1, 1), 1 / 57.0))
    bias = made.weight("bias", np.full((1, 3, 1, 1), -2.1))
    return made.node(
        "Add", [made.node("Mul", [wide, scale], "scaled"), bias], "normalised"
    )


def _decided(made: Builder, logits: str) -> None:
    axis = made.weight("class_axis", [1], np.int64)
    probability = made.node("Softmax", [logits], "probability", axis=1)
    largest = made.node("ReduceMax", [probability, axis], "largest", keepdims=0)
    level = made.node(
        "Round",
        [made.node("Mul", [largest, made.weight("levels", 255.0)], "level")],
        "rounded",
    )
    made.node("Cast", [level], "confidence", to=TensorProto.UINT8)
    full = made.resize(logits, "logits", (1, CLASSES, HEIGHT, WIDTH))
    made.node(
        "Cast",
        [made.node("ArgMax", [full], "class", axis=1, keepdims=0)],
        "mask",
        to=TensorProto.UINT8,
    )


def _save(made: Builder, path: Path, low: tuple[int, int], *, is_probe: bool) -> None:
    image = helper.make_tensor_value_info(
        "image", TensorProto.UINT8, (1, HEIGHT, WIDTH, 3)
    )
    outputs = [
        helper.make_tensor_value_info("mask", TensorProto.UINT8, (1, HEIGHT, WIDTH)),
        helper.make_tensor_value_info("confidence", TensorProto.UINT8, (1, *low)),
    ]
    if is_probe:
        outputs.append(
            helper.make_tensor_value_info(
                "logits", TensorProto.FLOAT, (1, CLASSES, HEIGHT, WIDTH)
            )
        )
        outputs.append(
            helper.make_tensor_value_info(
                "normalised", TensorProto.FLOAT, (1, 3, HEIGHT, WIDTH)
            )
        )
    graph = helper.make_graph(made.nodes, "main_graph", [image], outputs, made.weights)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    helper.set_model_props(model, METADATA)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
