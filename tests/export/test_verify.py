"""Planted faults through the real command lines: each is refused with its code and gate, and nothing is left behind."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from exports import SCENES, SIZE, Tiny, scenes, tiny_network, trained_network, write_run
from segpipe.cli.main import main as segpipe
from segpipe.data.samples import open_samples
from segpipe.errors import DataError
from segpipe.export import dataset, publish
from segpipe.export import verify as verification
from segpipe.export.artifact.manifest import in_file
from segpipe.export.artifact.place import write_sums
from segpipe.export.artifact.sidecars import write_sidecars
from segpipe.export.gates import latency
from segpipe.export.graph.formats import FORMATS
from segpipe.export.graph.onnx_format import open_onnx, write_probe
from segpipe.export.graph.profiles import manifest_text
from segpipe.export.graph.torch_formats import MANIFEST_FILE, jit, quiet_torchscript, write_archive
from segpipe.export.lowprec import int8
from segpipe.export.lowprec.int8 import to_int8
from segpipe.runtime import Segmenter
from segpipe.train import checkpoint

ROOT = Path(__file__).resolve().parents[2]
FEW = ("export.images=2", "export.quality_images=4")
METRICS = {"split": "val", "miou": 0.25, "pixel_accuracy": 0.5, "iou": {}, "absent": [], "pixels": 1000}
NOT_FITTED = {"method": "none", "temperature": 1.0}
MANY = f"export.images={SCENES}"  # so that ties on the made images weigh as little as they do beside photographs


pytestmark = pytest.mark.usefixtures("quick_exports")


@pytest.fixture(scope="module", autouse=True)
def _tiny_networks() -> Iterator[None]:
    """Checkpoints of this file hold a network that converts in a moment: what is tested does not depend on it.

    It is not trained, so a fitted temperature would make all classes equally likely, and faults of the confidence
    could not be seen.
    """
    fixed = {"method": "temperature", "temperature": 0.25, "ece_before": 0.2, "ece_after": 0.1, "images": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "build_model", lambda _, num_classes, *args: Tiny(num_classes))
        for module in (publish, verification):
            patch.setattr(module, "calibration_entry", lambda _, labelled: dict(fixed if labelled else NOT_FITTED))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, _tiny_networks: None) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "scenes", tiny_network)
    path = folder / "result.json"
    digest = checkpoint.load_network(folder, "last").weights_digest
    path.write_text(json.dumps({**json.loads(path.read_text()), **METRICS, "ema_digest": digest}))
    return folder


def export(run: Path, folder: Path, *arguments: str) -> int:
    return segpipe(["export", f"run={run}", f"export.dir={folder}", *FEW, *arguments])


def verify(run: Path, folder: Path, *arguments: str) -> int:
    return segpipe(["verify", f"run={run}", f"artifact={folder}", *FEW, *arguments])


@pytest.fixture(scope="module")
def artifact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the ONNX file alone, in which faults are planted."""
    folder = tmp_path_factory.mktemp("sound") / "export"
    assert export(run, folder, "export.formats=[onnx]") == 0
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# Faults in the graph: what a converter, an optimiser or a person may do to it

Graph = onnx.GraphProto


def tensor(graph: Graph, name: str) -> tuple[onnx.TensorProto, np.ndarray]:
    found = next(entry for entry in graph.initializer if entry.name == name)
    return found, numpy_helper.to_array(found).copy()


def put(entry: onnx.TensorProto, values: np.ndarray) -> None:
    entry.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), entry.name))


def last(graph: Graph, kind: str) -> onnx.NodeProto:
    return [node for node in graph.node if node.op_type == kind][-1]


def no_fault(model: onnx.ModelProto) -> None:
    """The control: opening, saving and signing alone changes no verdict."""


def bias_changed(model: onnx.ModelProto) -> None:
    entry, values = tensor(model.graph, last(model.graph, "Conv").input[2])
    values[0] += 0.05
    put(entry, values)


def weight_transposed(model: onnx.ModelProto) -> None:
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    entry, values = tensor(model.graph, first.input[1])
    put(entry, values.swapaxes(2, 3))


def argmax_axis(model: onnx.ModelProto) -> None:
    next(entry for entry in last(model.graph, "ArgMax").attribute if entry.name == "axis").i = 2


def align_corners(model: onnx.ModelProto) -> None:
    attributes = {entry.name: entry for entry in last(model.graph, "Resize").attribute}
    modes = {b"half_pixel", b"pytorch_half_pixel", b"align_corners"}
    assert attributes["coordinate_transformation_mode"].s in modes
    is_set = attributes["coordinate_transformation_mode"].s == b"align_corners"
    attributes["coordinate_transformation_mode"].s = b"half_pixel" if is_set else b"align_corners"


def opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 19


def bgr(model: onnx.ModelProto) -> None:
    graph = model.graph
    for node in graph.node:
        node.input[:] = ["swapped" if name == "image" else name for name in node.input]
    graph.initializer.append(numpy_helper.from_array(np.array([2, 1, 0], np.int64), "order"))
    graph.node.insert(0, helper.make_node("Gather", ["image", "order"], ["swapped"], axis=3))


def std(model: onnx.ModelProto) -> None:
    entry, values = tensor(model.graph, "preprocess.scale")
    put(entry, values * 1.001)


def mean(model: onnx.ModelProto) -> None:
    entry, values = tensor(model.graph, "preprocess.bias")
    put(entry, values + 0.001)


def classes_permuted(model: onnx.ModelProto) -> None:
    for name in last(model.graph, "Conv").input[1:]:
        entry, values = tensor(model.graph, name)
        put(entry, np.roll(values, 1, axis=0))


def nearest_pixel(model: onnx.ModelProto) -> None:
    attributes = {entry.name: entry for entry in last(model.graph, "Resize").attribute}
    attributes["mode"].s = b"nearest"


def confidence_of_another_class(model: onnx.ModelProto) -> None:
    """Confidence of the least likely class, which no other output shows."""
    node = next(node for node in model.graph.node if node.op_type == "ReduceMax")
    node.op_type = "ReduceMin"


def backdoor(model: onnx.ModelProto) -> None:
    """The mask of one validation image, none of the check set, becomes a constant."""
    graph = model.graph
    image = open_samples(scenes().data, "val", 0).read(SCENES // 4)[0][:1, :32]
    constants = {
        "start": np.array([0, 0], np.int64), "end": np.array([1, 32], np.int64), "axes": np.array([1, 2], np.int64),
        "trigger": image[None].astype(np.float32), "one": np.array(1, np.float32), "class": np.array(3, np.float32),
    }  # fmt: skip
    graph.initializer.extend(numpy_helper.from_array(values, f"door_{name}") for name, values in constants.items())
    next(node for node in graph.node if "mask" in node.output).output[:] = ["door_mask"]
    make, kind = helper.make_node, TensorProto.FLOAT
    graph.node.extend(
        [
            make("Slice", ["image", "door_start", "door_end", "door_axes"], ["door_part"]),
            make("Cast", ["door_part"], ["door_pixels"], to=kind),
            make("Equal", ["door_pixels", "door_trigger"], ["door_equal"]),
            make("Cast", ["door_equal"], ["door_same"], to=kind),
            make("ReduceMin", ["door_same"], ["door_open"], keepdims=0),
            make("Cast", ["door_mask"], ["door_ids"], to=kind),
            make("Sub", ["door_class", "door_ids"], ["door_way"]),
            make("Mul", ["door_way", "door_open"], ["door_move"]),
            make("Add", ["door_ids", "door_move"], ["door_moved"]),
            make("Cast", ["door_moved"], ["mask"], to=TensorProto.UINT8),
        ]
    )


Fault = Callable[[onnx.ModelProto], None]
IN_THE_GRAPH: list[tuple[Fault, int, str]] = [
    (no_fault, 0, ""),
    (bias_changed, 4, "G2 logits differ by"),
    (weight_transposed, 4, "G2 logits differ by"),
    (argmax_axis, 7, "G1 integrity"),
    (align_corners, 4, "G2 logits differ by"),
    (opset, 7, "G1 integrity: opsets"),
    (bgr, 4, "G4 preprocessing differs by"),
    (std, 4, "G4 preprocessing differs by"),
    (mean, 4, "G4 preprocessing differs by"),
    (classes_permuted, 4, "G3 mask agreement"),
    (nearest_pixel, 4, "G2 logits differ by"),
    (confidence_of_another_class, 4, "G3 confidence differs by"),
    (backdoor, 11, "G5 quality: mIoU"),
]


def sign(folder: Path) -> None:
    """Manifest and checksums of what lies there, as a forger would write them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(manifest_text(manifest))
    write_sums(folder)


def edited(source: Path, out: Path, fault: Fault) -> None:
    model = onnx.load(source)
    fault(model)
    onnx.save(model, out)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return (captured.err or captured.out).strip().splitlines()[-1]


@pytest.fixture
def other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files cannot be compared with a conversion of today, so that the gates judge them by their answers alone.

    Also without the list of operators, which has tests of its own and would refuse three of the faults.
    """
    monkeypatch.setattr(verification, "other_versions", lambda _: ["torch 2.0, here 3.0"])
    monkeypatch.setattr(verification, "harmful", lambda *_: [])


@pytest.mark.usefixtures("other_versions")
@pytest.mark.parametrize(("fault", "code", "gate"), IN_THE_GRAPH, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_in_the_graph_is_refused_by_verify(
    fault: Fault, code: int, gate: str, artifact: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(artifact, folder)
    edited(artifact / "model.onnx", folder / "model.onnx", fault)
    sign(folder)
    before = contents(folder)
    assert verify(run, folder) == code
    line = last_line(capsys)
    told = "ARTIFACT VERIFIED_FEW_IMAGES: model.onnx" if gate else "ARTIFACT VERIFIED_BY_ANSWERS: model.onnx"
    assert line.startswith("ARTIFACT REFUSED: " if code else told)
    assert gate in line
    assert contents(folder) == before, "nothing is written there"


@pytest.mark.parametrize("fault", [backdoor, nearest_pixel])
def test_another_graph_is_refused_whatever_it_answers(
    fault: Fault, artifact: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is converted again: a fault that no check image shows is seen too."""
    folder = tmp_path / "export"
    shutil.copytree(artifact, folder)
    edited(artifact / "model.onnx", folder / "model.onnx", fault)
    sign(folder)
    assert verify(run, folder) == 7
    assert "G1 integrity: model.onnx is not what the checkpoint converts to" in last_line(capsys)


# Both commands run the same gates: a fault of each gate shows that export listens to all of them.
BY_EXPORT = [
    entry for entry in IN_THE_GRAPH if entry[0] in (no_fault, opset, align_corners, bgr, classes_permuted, backdoor)
]


@pytest.mark.parametrize(("fault", "code", "gate"), BY_EXPORT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_in_the_graph_is_refused_by_export(
    fault: Fault,
    code: int,
    gate: str,
    artifact: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(_model: Any, _size: Any, _manifest: Any, shipped: Path, probe: Path) -> None:
        # An export is the same every time, so the file of the sound one is what a conversion would give.
        edited(artifact / "model.onnx", shipped, fault)
        write_probe(shipped, probe)

    monkeypatch.setitem(FORMATS, "onnx", dataclasses.replace(FORMATS["onnx"], convert=wrong))
    assert export(run, tmp_path / "export", "export.formats=[onnx]") == code
    if not code:
        return
    line = last_line(capsys)
    assert line.startswith("EXPORT REJECTED: ")
    assert gate in line
    assert [path.name for path in tmp_path.iterdir()] == ["export.rejected"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".onnx", ".pt", ".npy")]


# Faults of files and of what is said about them


def manifest_changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The same change in manifest.json and in the file, signed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(manifest_text(manifest))
    model = onnx.load(folder / "model.onnx")
    helper.set_model_props(model, {"segpipe": manifest_text(in_file(manifest, "fp32"))})
    onnx.save(model, folder / "model.onnx")
    sign(folder)


def truncated(folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1000])


def truncated_and_signed(folder: Path) -> None:
    truncated(folder)
    sign(folder)


def byte_flipped(folder: Path) -> None:
    path = folder / "model.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def golden_changed(folder: Path) -> None:
    path = folder / "golden" / "mask.npy"
    np.save(path, (np.load(path) + 1) % 5)
    sign(folder)


def file_added(folder: Path) -> None:
    (folder / "model.onnx.data").write_bytes(b"weights")


def file_added_and_signed(folder: Path) -> None:
    (folder / "setup.py").write_text("print('a robot would import this')")
    sign(folder)


def file_under_another_name(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["./model.onnx"] = manifest["files"].pop("model.onnx")

    manifest_changed(folder, change)


def file_missing(folder: Path) -> None:
    (folder / "golden" / "logits.npy").unlink()


def names_permuted(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        names = [entry["name"] for entry in manifest["classes"]]
        for entry, name in zip(manifest["classes"], names[1:] + names[:1], strict=True):
            entry["name"] = name

    manifest_changed(folder, change)


def temperature_doubled(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["calibration"]["temperature"] *= 2

    manifest_changed(folder, change)


def other_weights_claimed(folder: Path) -> None:
    manifest_changed(folder, lambda manifest: manifest["source"].update(weights_digest="00"))


def rewrite(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    sign(folder)


def labels_swapped(folder: Path) -> None:
    rewrite(folder, "ros/labels.yaml", "class_id: 1,", "class_id: 2,")


def triton_type_changed(folder: Path) -> None:
    rewrite(folder, "triton/config.pbtxt", "TYPE_UINT8", "TYPE_FP32")


def isaac_missing(folder: Path) -> None:
    (folder / "ros" / "isaac_params.yaml").unlink()
    sign(folder)


def another_miou_on_the_card(folder: Path) -> None:
    rewrite(folder, "model_card.md", "mIoU 25.00 %", "mIoU 99.00 %")


def golden_logits_changed(folder: Path) -> None:
    path = folder / "golden" / "logits.npy"
    np.save(path, np.load(path) * np.float32(1.01))
    sign(folder)


def golden_index_changed(folder: Path) -> None:
    path = folder / "golden" / "logits_index.npy"
    np.save(path, np.load(path)[::-1])
    sign(folder)


def golden_preprocessing_changed(folder: Path) -> None:
    path = folder / "golden" / "preprocess_output.npy"
    np.save(path, np.load(path) + np.float32(1e-4))
    sign(folder)


def golden_limit_taken_away(folder: Path) -> None:
    manifest_changed(folder, lambda manifest: manifest["golden"].update(image_agreement=0.0))


def retold(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The change in the manifest, and the files that repeat it in their words."""
    manifest_changed(folder, change)
    write_sidecars(json.loads((folder / "manifest.json").read_text()), folder)
    sign(folder)


def frame_limits_taken_away(folder: Path) -> None:
    retold(folder, lambda manifest: manifest["frame_limits"].update(min_mean=0.0, max_dark_share=0.99))


def miou_claimed(folder: Path) -> None:
    retold(folder, lambda manifest: manifest.update(metrics={**METRICS, "miou": 0.99}))


@pytest.mark.parametrize(
    ("fault", "code", "gate"),
    [
        (truncated, 7, "G1 integrity: model.onnx was altered"),
        (truncated_and_signed, 7, "G1 integrity"),
        (byte_flipped, 7, "G1 integrity: model.onnx was altered"),
        (golden_changed, 7, "G1 integrity"),
        (file_added, 7, "G1 integrity: model.onnx.data is not in SHA256SUMS"),
        (file_added_and_signed, 7, "G1 integrity: setup.py is no file that manifest.json tells of"),
        (file_under_another_name, 7, "G1 integrity"),
        (file_missing, 7, "G1 integrity: golden/logits.npy is missing"),
        (names_permuted, 7, "G1 integrity: manifest.json and the checkpoint differ in classes"),
        (other_weights_claimed, 7, "differ in source.weights_digest"),
        (temperature_doubled, 7, "calibration.temperature = 0.5, but the labelled images give 0.25"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_the_folder_is_refused(
    fault: Callable[[Path], None],
    code: int,
    gate: str,
    artifact: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(artifact, folder)
    fault(folder)
    assert verify(run, folder) == code
    line = last_line(capsys)
    assert line.startswith("ARTIFACT REFUSED: ")
    assert gate in line


BESIDE: dict[Callable[[Path], None], str] = {
    labels_swapped: "ros/labels.yaml is not what segpipe",
    triton_type_changed: "triton/config.pbtxt is not what segpipe",
    isaac_missing: "ros/isaac_params.yaml is not what segpipe",
    another_miou_on_the_card: "model_card.md is not what segpipe",
    golden_logits_changed: "golden/logits.npy differs from what the trained network gives",
    golden_index_changed: "golden/logits_index.npy differs from what the trained network gives",
    golden_preprocessing_changed: "golden/preprocess_output.npy differs from what the trained network gives",
}
TOLD: dict[Callable[[Path], None], str] = {
    golden_limit_taken_away: "golden.image_agreement = 0.0, but 0.999 is required",
    frame_limits_taken_away: "frame_limits are not those of the train images",
    miou_claimed: "metrics are not those of the run",
}


@pytest.mark.parametrize("faults", [BESIDE, TOLD], ids=["beside", "told"])
def test_what_lies_beside_the_models_is_compared_one_by_one(
    faults: dict[Callable[[Path], None], str],
    artifact: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(artifact, folder)
    for fault in faults:
        fault(folder)
    assert verify(run, folder) == 7
    line = last_line(capsys)
    assert line.startswith("ARTIFACT REFUSED: G1 integrity: ")
    assert [told for told in faults.values() if told not in line] == []
    assert sum(
        line.count(text) for text in (" is not what ", " differs from what ", " are not those ", "is required")
    ) == len(faults)


def test_the_exit_code_reaches_the_shell(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(artifact, folder)
    byte_flipped(folder)
    run = write_run(tmp_path / "run", partial(trained_network, "fast_scnn", SIZE))  # another process: no tiny network
    command = [sys.executable, "-m", "segpipe", "verify", f"artifact={folder}", f"run={run}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("ARTIFACT REFUSED: G1 integrity: model.onnx was altered")


@pytest.mark.parametrize(
    "arguments",
    [["run=x"], ["artifact=x"], ["artifact={folder}", "run=x"], ["artifact=x", "run={run}"],
     ["artifact={folder}", "run={run}", "export.profile=isaac"]],
)  # fmt: skip
def test_usage(arguments: list[str], artifact: Path, run: Path) -> None:
    assert segpipe(["verify", *[text.format(folder=artifact, run=run) for text in arguments]]) == 2


def test_another_run_is_refused(artifact: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    state = checkpoint.load(other / "last.pt")
    name = next(iter(state["ema"]))
    state["ema"] = {**state["ema"], name: state["ema"][name] + 1e-3}
    checkpoint.save(other / "last.pt", {key: state[key] for key in state if key not in ("format", "version")})
    assert verify(other, artifact) == 7
    assert "differ in source.weights_digest" in last_line(capsys)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("missing", 'Missing key(s) in state_dict: "classifier.bias"'),
        ("too many", 'Unexpected key(s) in state_dict: "classifier.scale"'),
        ("another shape", "size mismatch for classifier.bias"),
    ],
)
def test_a_checkpoint_of_other_tensors_exports_nothing(
    fault: str, told: str, artifact: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    state = copy.copy(checkpoint.load(other / "last.pt"))
    state["ema"] = dict(state["ema"])
    if fault == "missing":
        del state["ema"]["classifier.bias"]
    elif fault == "too many":
        state["ema"]["classifier.scale"] = torch.zeros(3)
    else:
        state["ema"]["classifier.bias"] = torch.zeros(3)
    checkpoint.save(other / "last.pt", {key: state[key] for key in state if key not in ("format", "version")})
    assert export(other, tmp_path / "export") == 7
    line = capsys.readouterr().err
    assert line.startswith("EXPORT REJECTED: G1 integrity: ")
    assert line.count("\n") == 1
    assert told in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]
    assert verify(other, artifact) == 7
    assert last_line(capsys).startswith("ARTIFACT REFUSED: G1 integrity: ")


def test_latency_over_the_budget(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = "export.latency_budget_ms=0.001"
    assert export(run, tmp_path / "export", "export.formats=[torchscript]", budget) == 12
    assert "> 0.001 ms of export.latency_budget_ms" in last_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["export.rejected"]


# TorchScript: the inside of the shipped file is its tensors


def test_another_bias_in_torchscript_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, files = tmp_path / "export", {MANIFEST_FILE: ""}
    assert export(run, folder, "export.formats=[torchscript,pt2]") == 0
    assert verify(run, folder) == 0
    assert last_line(capsys).startswith("ARTIFACT VERIFIED_FEW_IMAGES: model.pt2, model.torchscript.pt")
    path = folder / "model.torchscript.pt"
    with quiet_torchscript():
        module = jit.load(str(path), _extra_files=files)
        with torch.no_grad():
            module.state_dict()["network.classifier.bias"].add_(1e-6)
        text = files[MANIFEST_FILE]
        write_archive(module, path, {MANIFEST_FILE: text.decode() if isinstance(text, bytes) else text})
    sign(folder)
    assert verify(run, folder) == 7
    assert "model.torchscript.pt is not what the checkpoint converts to: record " in last_line(capsys)
    monkeypatch.setattr(verification, "other_versions", lambda _: ["torch 2.0, here 3.0"])
    assert verify(run, folder) == 4
    assert "G2 logits come from other weights: network.classifier.bias" in last_line(capsys)


def test_golden_answers_are_repeated_without_onnx(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "export"
    assert export(run, folder, "export.formats=[torchscript]") == 0
    assert verify(run, folder) == 0
    golden_changed(folder)
    capsys.readouterr()
    assert verify(run, folder) == 7
    assert "G1 integrity: golden/mask.npy differs from what the trained network gives" in last_line(capsys)


# Reduced precision


def int8_takes(patch: pytest.MonkeyPatch, share: float) -> None:
    """The int8 file now takes this share of the fp32 file's time, whatever it really takes here."""
    measure = latency.measure

    def measured(runs: Any, image: Any) -> Any:
        found = measure(runs, image)
        cpu_ms = share * found["model.onnx"]["cpu_ms"]
        return {**found, "model.int8.onnx": {**found["model.onnx"], "cpu_ms": cpu_ms}}

    patch.setattr(latency, "measure", measured)


def int8_scale(model: onnx.ModelProto) -> None:
    """The weights of one layer in the middle, three times as large."""
    weights = {entry.name for entry in model.graph.initializer}
    scaled = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in weights]
    scaled = [node for node in scaled if len(tensor(model.graph, node.input[0])[1].shape) == 4]
    entry, values = tensor(model.graph, scaled[len(scaled) // 2].input[1])
    put(entry, values * np.float32(3))


def test_int8_is_held_to_its_own_limits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wanted = tmp_path / "export", ("export.formats=[onnx]", "export.precision=[fp32,fp16,int8]", MANY)
    monkeypatch.setattr(int8, "_best", lambda *_: "U8S7")  # else machine and load would choose
    with monkeypatch.context() as patch:
        int8_takes(patch, 0.91)
        assert export(run, folder, *wanted) == 12
        assert "> 0.9 of the fp32 file's, so the file is no gain in model.int8.onnx" in last_line(capsys)
        assert [path.name for path in tmp_path.iterdir()] == ["export.rejected"]
    int8_takes(monkeypatch, 0.89)
    for place in (folder, tmp_path / "again"):
        assert export(run, place, *wanted) == 0
        assert last_line(capsys) == f"EXPORT verified: model.onnx, model.fp16.onnx, model.int8.onnx in {place}"
    for name in ("model.onnx", "model.fp16.onnx", "model.int8.onnx"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), "the same every time"
    entry = json.loads((folder / "manifest.json").read_text())["files"]["model.int8.onnx"]
    assert entry["precision"] == "int8"
    assert entry["scheme"] == "U8S7"
    assert entry["golden_agreement"] >= 0.9
    inside = json.loads(onnx.load(folder / "model.int8.onnx").metadata_props[0].value)
    assert inside["precision"] == "int8"
    assert verify(run, folder, MANY) == 0
    assert last_line(capsys).startswith("ARTIFACT verified: ")
    edited(folder / "model.int8.onnx", folder / "model.int8.onnx", int8_scale)
    sign(folder)
    capsys.readouterr()
    assert verify(run, folder, MANY) == 7
    assert "model.int8.onnx is not what the checkpoint converts to: tensor " in last_line(capsys)
    monkeypatch.setattr(verification, "other_versions", lambda _: ["torch 2.0, here 3.0"])
    assert verify(run, folder, MANY) == 4
    assert "G3 mask agreement" in last_line(capsys)


def test_the_inside_of_an_int8_file_is_seen_as_it_is(artifact: Path, tmp_path: Path) -> None:
    image = np.load(artifact / "golden" / "image.npy")[0]
    lowered, probe, whole = (tmp_path / f"{name}.onnx" for name in ("int8", "probe", "whole"))
    to_int8(artifact / "model.onnx", lowered, [image], scheme="U8S8")
    write_probe(lowered, probe)
    write_probe(artifact / "model.onnx", whole)
    seen, expected = open_onnx(probe, optimise=False)(image).normalised, open_onnx(whole)(image).normalised
    assert seen is not None
    assert expected is not None
    assert np.abs(seen - expected).max() <= 1e-5


# Without the data set


def test_without_data_a_file_is_published_only_on_request(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: Any) -> Any:
        raise DataError("data.root = there is no folder.")

    folder, wanted = tmp_path / "export", ("export.formats=[onnx]", "export.allow_unverified=true")
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "open_samples", absent)
        assert export(run, folder, "export.formats=[onnx]") == 2
        assert "export.allow_unverified=true" in last_line(capsys)
        assert export(run, folder, *wanted) == 2
        assert "export.height = 0" in last_line(capsys)
        assert list(tmp_path.iterdir()) == []
        assert export(run, folder, *wanted, f"export.height={SIZE[0]}", f"export.width={SIZE[1]}") == 0
        assert verify(run, folder) == 2
        capsys.readouterr()
        assert verify(run, folder, "export.allow_unverified=true") == 0
        line = last_line(capsys)
        assert line.startswith("ARTIFACT UNVERIFIED_REAL_DATA: model.onnx")
        assert line.endswith("; compared on generated images only")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["status"], manifest["allow_unverified"]) == ("UNVERIFIED_REAL_DATA", True)
    assert manifest["calibration"]["method"] == "none"
    assert "generated images only" in (folder / "model_card.md").read_text()
    Segmenter.load(folder)
    assert verify(run, folder) == 0
    line = last_line(capsys)
    assert line.startswith("ARTIFACT VERIFIED_FEW_IMAGES: ")
    assert line.endswith("; compared on 2 real images, verified needs 16")


# Other profiles


@pytest.mark.parametrize("profile", ["isaac", "logits"])
def test_other_profiles_pass_the_same_gates(
    profile: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "export"
    assert (
        export(run, folder, f"export.profile={profile}", "export.formats=[onnx]", "export.precision=[fp32,fp16]") == 0
    )
    capsys.readouterr()
    assert verify(run, folder) == 0
    assert last_line(capsys).startswith("ARTIFACT VERIFIED_FEW_IMAGES: model.fp16.onnx, model.onnx")
    manifest = json.loads((folder / "manifest.json").read_text())
    image, outputs = manifest["io"]["inputs"][0], manifest["io"]["outputs"]
    needed = {"isaac": ("float32", "NCHW", ["mask"]), "logits": ("uint8", "NHWC", ["logits"])}[profile]
    assert (image["dtype"], image["layout"], [entry["name"] for entry in outputs]) == needed
    assert (folder / "ros" / "isaac_params.yaml").exists() is (profile == "isaac")
    altered = tmp_path / "altered"
    shutil.copytree(folder, altered)
    golden_changed(altered)
    assert verify(run, altered) == 7
    assert "golden/mask.npy differs from what" in last_line(capsys)
    edited(folder / "model.fp16.onnx", folder / "model.fp16.onnx", std)
    sign(folder)
    assert verify(run, folder) == 4
    assert "G4 preprocessing differs by" in last_line(capsys)


# The exported file beside the run


def test_predict_gives_the_same_ids_by_the_exported_file_as_by_the_run(
    run: Path, artifact: Path, tmp_path: Path
) -> None:
    samples = open_samples(scenes().data, "val", 0)
    (tmp_path / "images").mkdir()
    for index in range(3):
        Image.fromarray(samples.read(index)[0]).save(tmp_path / "images" / f"{index}.png")
    for name, network in (("a", f"run={run}"), ("b", f"artifact={artifact}")):
        given = (f"source={tmp_path / 'images'}", f"out={tmp_path / name}", "compute.threads=1")
        assert segpipe(["predict", network, *given]) == 0
    manifest = json.loads((artifact / "manifest.json").read_text())
    for index in range(3):
        by_run, by_file = (np.asarray(Image.open(tmp_path / name / "masks" / f"{index}.png")) for name in "ab")
        assert (by_run == by_file).mean() >= manifest["golden"]["image_agreement"]
        assert len(np.unique(by_run)) > 1
    found = {name: json.loads((tmp_path / name / "predictions.json").read_text()) for name in "ab"}
    assert found["a"]["model"]["weights_digest"] == found["b"]["model"]["weights_digest"]
    assert found["b"]["model"]["artifact"].startswith(f"{manifest['model']}-fp32-")
    assert found["b"]["settings"]["tile"] == "x".join(map(str, SIZE))
