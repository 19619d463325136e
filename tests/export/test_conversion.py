"""A file that differs from its conversion is refused before it is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from exports import SIZE, tiny_network
from segpipe.export.artifact.manifest import describe
from segpipe.export.graph import formats
from segpipe.export.graph.formats import FORMATS, ModelFile, conversion_problem
from segpipe.export.graph.network import DeployModel, Manifest, in_file

KINDS = ("onnx", "torchscript")
Plant = Callable[[Path], None]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    trained = tiny_network()
    entries = {"calibration": {"method": "none", "temperature": 1.0}}
    return {**describe(trained, DeployModel(trained), SIZE), **entries}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, manifest: Manifest
) -> tuple[Path, Path]:
    """Two conversions of one checkpoint, in all formats."""
    folders = (tmp_path_factory.mktemp("shipped"), tmp_path_factory.mktemp("again"))
    for folder in folders:
        for kind in KINDS:
            path = folder / FORMATS[kind].file_name()
            model, inside = DeployModel(tiny_network()), in_file(manifest, "fp32")
            FORMATS[kind].write(model, inside, path, folder / f"probe.{kind}")
    return folders


def problem(shipped: Path, made: tuple[Path, Path], kind: str = "onnx") -> str:
    again = made[1] / FORMATS[kind].file_name()
    return conversion_problem(shipped, ModelFile(kind, "fp32", again, again, {}))


def test_a_manifest_has_the_hash_of_the_settings_as_the_checkpoint_has_them(
    manifest: Manifest,
) -> None:
    """Those of an earlier version may have others; a run that was never saved has its own."""
    trained = replace(tiny_network(), config_hash="0f")
    found = describe(trained, DeployModel(trained), SIZE)
    assert (found["source"]["config_hash"], len(manifest["source"]["config_hash"])) == (
        "0f",
        32,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_two_conversions_are_equal(made: tuple[Path, Path], kind: str) -> None:
    shipped, again = (folder / FORMATS[kind].file_name() for folder in made)
    assert problem(shipped, made, kind) == ""
    assert kind == "onnx" or shipped.read_bytes() == again.read_bytes()


def graph(change: Callable[[onnx.ModelProto], object]) -> Plant:
    def plant(path: Path) -> None:
        model = onnx.load(path)
        change(model)
        onnx.save(model, path)

    return plant


def tensor(model: onnx.ModelProto, change: Callable[[np.ndarray], np.ndarray]) -> None:
    entry = next(entry for entry in model.graph.initializer if len(entry.dims) == 4)
    entry.raw_data = change(numpy_helper.to_array(entry)).tobytes()


def node(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(entry for entry in model.graph.node if entry.op_type == kind)


def test_rounding_of_another_processor_is_no_difference(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copy(made[0] / "model.onnx", tmp_path))
    graph(lambda model: tensor(model, lambda values: values * np.float32(1 + 2e-6)))(
        copy
    )
    assert problem(copy, made) == ""
    graph(lambda model: tensor(model, lambda values: values * np.float32(1 + 1e-4)))(
        copy
    )
    assert problem(copy, made)


@pytest.mark.parametrize("kind", ["torchscript"])
def test_a_bit_of_a_weight_is_seen_in_files_that_are_not_opened(
    made: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    copy = Path(shutil.copy(made[0] / FORMATS[kind].file_name(), tmp_path))
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    found = problem(copy, made, kind)
    assert (
        found == f"{copy.name} is not what the checkpoint converts to: its bytes differ"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: model.opset_import.add(domain="evil", version=1),
            "opset_import differ",
        ),
        (
            lambda model: model.graph.initializer[0].external_data.add(
                key="location", value="x"
            ),
            "outside the file",
        ),
        (
            lambda model: model.graph.initializer[0].metadata_props.add(
                key="a", value="b"
            ),
            "initializer differ",
        ),
        (
            lambda model: model.graph.quantization_annotation.add(tensor_name="x"),
            "quantization_annotation differ",
        ),
        (
            lambda model: model.graph.metadata_props.add(key="a", value="b"),
            "metadata_props differ",
        ),
        (
            lambda model: model.metadata_props.add(key="a", value="b"),
            "metadata_props differ",
        ),
        (
            lambda model: setattr(model, "producer_name", "evil"),
            "producer_name differ",
        ),
        (lambda model: setattr(model, "domain", "evil"), "domain differ"),
        (
            lambda model: setattr(model.graph, "doc_string", "evil"),
            "doc_string differ",
        ),
    ],
)
def test_what_readers_may_take_in_two_ways_or_nobody_asked_for_is_refused(
    made: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[onnx.ModelProto], object],
    words: str,
) -> None:
    copy = Path(shutil.copy(made[0] / "model.onnx", tmp_path))
    graph(change)(copy)
    found = problem(copy, made)
    assert words in found


@pytest.mark.parametrize(
    ("name", "change", "same"),
    [
        ("conv_scale", lambda values: values * np.float32(1.049), True),
        (
            "conv_scale",
            lambda values: np.where(values < 0.1, 0, values).astype(values.dtype),
            False,
        ),
        ("conv_scale", lambda values: values * np.float32(np.nan), False),
        ("bias_quantized", lambda values: (values * 1.04).astype(values.dtype), True),
        ("bias_quantized", lambda values: values + np.int32(1), True),
        ("bias_quantized", lambda values: values + np.int32(2), False),
        (
            "bias_quantized",
            lambda values: np.where(np.abs(values) < 100, 0, values).astype(
                values.dtype
            ),
            False,
        ),
        ("weight_quantized", lambda values: values, True),
        (
            "weight_quantized",
            lambda values: np.concatenate([values[:-4], values[-4:] + np.int8(1)]),
            True,
        ),
        (
            "weight_quantized",
            lambda values: np.concatenate([values[:-1], values[-1:] + np.int8(2)]),
            False,
        ),
        ("weight_quantized", lambda values: values + np.int8(1), False),
    ],
)
def test_a_channel_of_small_weights_may_move_no_more_than_another(
    name: str, change: Callable[[np.ndarray], np.ndarray], same: bool
) -> None:
    """A twentieth of the largest scale of a layer is all of the scale of a channel whose weights are small."""
    values = {
        "conv_scale": np.array([1.0, 0.5, 0.04, 0.03], np.float32),
        "bias_quantized": np.array([-10_000, 3000, 40, 7], np.int32),
        "weight_quantized": np.arange(-100, 100, dtype=np.int8).repeat(2),
    }[name]
    assert formats._is_rounding(name, change(values), values, "int8") is same


@pytest.mark.parametrize(
    ("precision", "kind", "share", "same"),
    [
        ("fp32", np.float32, 0.9e-5, True),
        ("fp32", np.float32, 1.1e-5, False),
        ("fp16", np.float16, 0.9e-3, True),
        ("fp16", np.float16, 2.1e-3, False),
        ("int8", np.float32, 1.1e-5, False),
        ("fp32", np.int64, 1e-3, False),
    ],
)
def test_rounding_is_a_share_of_the_largest_value(
    precision: str, kind: type, share: float, same: bool
) -> None:
    values = np.array([1000, 1], kind)
    moved = (values + np.array([1000 * share, 0])).astype(kind)
    assert formats._is_rounding("weight", moved, values, precision) is same
