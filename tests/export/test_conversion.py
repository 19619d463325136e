"""A file that differs from its conversion, or holds what no conversion needs, is refused before it is loaded."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from plants import records

from exports import SIZE, tiny_network
from segpipe.export.artifact import conversion
from segpipe.export.artifact.conversion import (
    conversion_problems,
    harmful,
    other_versions,
)
from segpipe.export.artifact.manifest import describe, in_file
from segpipe.export.artifact.origin import Origin
from segpipe.export.graph.formats import FORMATS
from segpipe.export.graph.network import deploy_model
from segpipe.export.graph.profiles import Manifest

KINDS = ("onnx", "torchscript", "pt2")
Plant = Callable[[Path], None]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    trained = tiny_network()
    entries = {"calibration": {"method": "none", "temperature": 1.0}}
    return describe(trained, deploy_model(trained), SIZE, Origin(), entries)


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, manifest: Manifest
) -> tuple[Path, Path]:
    """Two conversions of one checkpoint, in all formats."""
    folders = (tmp_path_factory.mktemp("shipped"), tmp_path_factory.mktemp("again"))
    for folder in folders:
        for kind in KINDS:
            path = folder / FORMATS[kind].file_name()
            model, inside = deploy_model(tiny_network()), in_file(manifest, "fp32")
            FORMATS[kind].write(model, SIZE, inside, path, folder / f"probe.{kind}")
    return folders


def test_a_manifest_has_the_hash_of_the_settings_as_the_checkpoint_has_them(
    manifest: Manifest,
) -> None:
    """Those of an earlier version may have others; a run that was never saved has its own."""
    trained = replace(tiny_network(), config_hash="0f")
    found = describe(trained, deploy_model(trained), SIZE, Origin(), {})
    assert (found["source"]["config_hash"], len(manifest["source"]["config_hash"])) == (
        "0f",
        32,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_two_conversions_are_equal_and_hold_nothing_else(
    made: tuple[Path, Path], kind: str
) -> None:
    shipped, again = (folder / FORMATS[kind].file_name() for folder in made)
    assert conversion_problems(shipped, again, kind, "fp32") == []
    assert harmful(shipped, again, kind) == []


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
    assert conversion_problems(copy, made[1] / "model.onnx", "onnx", "fp32") == []
    graph(lambda model: tensor(model, lambda values: values * np.float32(1 + 1e-4)))(
        copy
    )
    assert conversion_problems(copy, made[1] / "model.onnx", "onnx", "fp32")


def test_other_weights_are_harmless_and_not_the_conversion(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copy(made[0] / "model.torchscript.pt", tmp_path))
    records(lambda name, data: bytes(len(data)) if name.endswith("/data/0") else data)(
        copy
    )
    again = made[1] / copy.name
    assert (
        harmful(copy, again, "torchscript") == []
    )  # the gates compare stored tensors and answers
    (found,) = conversion_problems(copy, again, "torchscript", "fp32")
    assert "record data/0 has other bytes" in found


def test_two_folders_in_one_archive_are_refused(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    """torch reads the first folder; the clean records stand in the second."""
    copy = tmp_path / "model.torchscript.pt"
    with zipfile.ZipFile(made[0] / copy.name) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(
                name,
                data.replace(b"torch.relu(", b"torch.neg(")
                if "/code/" in name
                else data,
            )
        for name, data in content.items():
            archive.writestr(f"zz/{name.partition('/')[2]}", data)
    assert conversion_problems(copy, made[1] / copy.name, "torchscript", "fp32")
    assert harmful(copy, made[1] / copy.name, "torchscript")


@pytest.mark.parametrize("kind", ["torchscript", "pt2"])
def test_two_directories_in_one_archive_are_refused(
    made: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    """torch takes the place of the directory from the end record, Python the bytes before it."""
    name = FORMATS[kind].file_name()
    clean = (made[0] / name).read_bytes()
    altered = Path(shutil.copy(made[0] / name, tmp_path / "altered.zip"))
    records(
        lambda record, data: (
            data[:-1] + b"\x01" if record.endswith(("/data/0", "weight_0")) else data
        )
    )(altered)
    evil = altered.read_bytes()
    end = evil.rindex(
        b"PK\x05\x06"
    )  # the end record, with size and place of the directory
    copy = tmp_path / name
    copy.write_bytes(evil[:end] + clean[: clean.rindex(b"PK\x05\x06")] + evil[end:])
    found = conversion_problems(copy, made[1] / name, kind, "fp32")
    assert found, "some parser sees other records"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.opset_import.add(domain="evil", version=1), "opsets"),
        (
            lambda model: model.graph.initializer[0].external_data.add(
                key="location", value="x"
            ),
            "outside the file",
        ),
        (
            lambda model: model.graph.initializer[0].float_data.append(1.0),
            "stored in another way",
        ),
        (
            lambda model: model.graph.initializer[0].metadata_props.add(
                key="a", value="b"
            ),
            "its initializer is another",
        ),
        (
            lambda model: model.graph.quantization_annotation.add(tensor_name="x"),
            "its quantization_annotation is",
        ),
        (
            lambda model: model.graph.metadata_props.add(key="a", value="b"),
            "its metadata_props is another",
        ),
        (
            lambda model: model.metadata_props.add(key="a", value="b"),
            "its metadata_props is another",
        ),
        (
            lambda model: setattr(model, "producer_name", "evil"),
            "its producer_name is another",
        ),
        (lambda model: setattr(model, "domain", "evil"), "its domain is another"),
        (
            lambda model: setattr(model.graph, "doc_string", "evil"),
            "its doc_string is another",
        ),
        (
            lambda model: model.MergeFromString(b"\xc2\x3e\x04evil"),
            "its unknown field is another",
        ),  # field 1000
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
    (found,) = conversion_problems(copy, made[1] / "model.onnx", "onnx", "fp32")
    assert words in found


def test_bytes_that_a_reader_drops_are_refused(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    """The producer twice: readers keep the second."""
    content = (made[0] / "model.onnx").read_bytes()
    name = onnx.load_from_string(content).producer_name.encode()
    copy = tmp_path / "model.onnx"
    copy.write_bytes(b"\x12\x04evil" + content)
    assert onnx.load(copy).producer_name.encode() == name
    (found,) = conversion_problems(copy, made[1] / "model.onnx", "onnx", "fp32")
    assert "not those that onnx writes" in found


@pytest.mark.parametrize(
    ("name", "kind", "precision", "share"),
    [
        ("conv1_scale", np.float32, "int8", 0.05), ("classifier.weight", np.float32, "int8", 1e-5),
        ("conv1_bias_quantized", np.int32, "int8", 0.05), ("shape", np.int64, "fp32", 0.0),
        ("weight", np.float32, "fp32", 1e-5), ("weight", np.float16, "fp16", 1e-3),
    ],
)  # fmt: skip
def test_only_what_a_calibration_gives_may_move_by_more_than_rounding(
    name: str, kind: type, precision: str, share: float
) -> None:
    assert conversion._allowed(name, np.dtype(kind), precision) == share


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
    found = list(
        conversion._value_difference(name, change(values), values, precision="int8")
    )
    assert found == ([] if same else [f"tensor {name} has other values"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.graph.sparse_initializer.add(), "sparse tensors"),
        (
            lambda model: setattr(node(model, "Relu"), "domain", "evil"),
            "it uses evil.Relu",
        ),
        (
            lambda model: node(model, "Relu").attribute.append(
                onnx.helper.make_attribute(
                    "value",
                    onnx.TensorProto(
                        name="x",
                        data_type=1,
                        external_data=[{"key": "location", "value": "/etc/passwd"}],
                    ),
                )
            ),
            "stored outside the file",
        ),
    ],
)
def test_what_a_list_of_operators_would_not_show(
    made: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[onnx.ModelProto], object],
    words: str,
) -> None:
    copy = Path(shutil.copy(made[0] / "model.onnx", tmp_path))
    model = onnx.load(copy)
    change(model)
    copy.write_bytes(model.SerializeToString())
    (found,) = harmful(copy, made[1] / "model.onnx", "onnx")
    assert words in found


def test_one_record_with_two_contents_is_refused(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copy(made[0] / "model.pt2", tmp_path))
    with (
        zipfile.ZipFile(copy, "a") as archive,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        archive.writestr(archive.namelist()[0], b"other")
    assert (
        "two contents"
        in conversion_problems(copy, made[1] / copy.name, "pt2", "fp32")[0]
    )
    assert "two contents" in harmful(copy, made[1] / copy.name, "pt2")[0]


def test_equal_values_of_another_type_are_another_tensor() -> None:
    (found,) = conversion._value_difference(
        "w", np.ones(3, np.float32), np.ones(3, np.float16), precision="fp32"
    )
    assert found == "tensor w is float32 (3,) instead of float16 (3,)"


def test_a_compressed_record_is_refused(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    """A megabyte of zeros is a thousand bytes, so the size of the file would say nothing."""
    copy = tmp_path / "model.torchscript.pt"
    with (
        zipfile.ZipFile(made[0] / copy.name) as archive,
        zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    assert (
        "a record is compressed" in harmful(copy, made[1] / copy.name, "torchscript")[0]
    )


def test_other_versions_are_named(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other_versions(manifest) == {}
    monkeypatch.setattr(conversion, "version", lambda name: "9.9")
    assert (
        other_versions(manifest)["torch"]
        == f"torch {manifest['versions']['torch']}, here 9.9"
    )
