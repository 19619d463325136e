"""BatchNorm folded into convolutions: the same function, and only where it is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import write_graph

from exports import IMAGES
from segpipe.export.graph.formats import open_onnx
from segpipe.export.lowprec.fold import fold_batchnorm, norms_as_convolutions


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("change", [fold_batchnorm, norms_as_convolutions])
def test_the_graph_computes_the_same(change: Callable[[onnx.GraphProto], int], tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    norms = operators(model).count("BatchNormalization")
    assert change(model.graph) == norms == 2
    assert operators(model).count("BatchNormalization") == 0
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "after.onnx")
    for image in IMAGES:
        before, after = (open_onnx(tmp_path / f"{name}.onnx")(image).logits for name in ("before", "after"))
        assert before is not None
        assert after is not None
        np.testing.assert_allclose(after, before, atol=2e-5 * before.std())


def test_a_deleted_batchnorm_would_be_noticed(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    norm = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    following = next(node for node in model.graph.node if norm.output[0] in node.input)
    following.input[0] = norm.input[0]
    model.graph.node.remove(norm)
    onnx.save(model, tmp_path / "after.onnx")
    before, after = (open_onnx(tmp_path / f"{name}.onnx")(IMAGES[0]).logits for name in ("before", "after"))
    assert before is not None
    assert after is not None
    assert np.abs(before - after).max() > 0.01 * before.std()


def test_a_convolution_that_others_read_stays(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    shortcut = next(node for node in model.graph.node if node.op_type == "Add" and node.output[0] == "shortcut")
    shortcut.input[1] = "stem"  # before its BatchNorm
    assert fold_batchnorm(model.graph) == 1
    assert operators(model).count("BatchNormalization") == 1
    onnx.checker.check_model(model, full_check=True)


def test_a_batchnorm_before_a_convolution_stays(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "before.onnx"))
    norm = next(node for node in model.graph.node if node.output[0] == "project_norm")
    norm.input[0] = "depthwise_relu"
    assert fold_batchnorm(model.graph) == 1
