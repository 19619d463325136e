"""Faults planted into an exported folder: what each changes, what refuses it, and what the first gates said of it.

A fault changes files, then writes checksums and manifest again as a forger would, so that only the gate in question can
notice; what stands in PLANTS without `sign` is noticed by the checksums themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from exports import SCENES, scenes
from segpipe.data.samples import open_samples
from segpipe.export.artifact.frame_statistics import unknown_frames
from segpipe.export.artifact.place import write_sums
from segpipe.export.graph.network import in_file, manifest_text
from segpipe.export.verify_report import write_sidecars

Change = Callable[[Path], object]
Fault = Callable[[onnx.ModelProto], object]
METRICS = {
    "split": "val",
    "miou": 0.25,
    "pixel_accuracy": 0.5,
    "iou": {},
    "absent": [],
    "pixels": 1000,
}


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
    next(
        entry for entry in last(model.graph, "ArgMax").attribute if entry.name == "axis"
    ).i = 2


def align_corners(model: onnx.ModelProto) -> None:
    attributes = {entry.name: entry for entry in last(model.graph, "Resize").attribute}
    modes = {b"half_pixel", b"pytorch_half_pixel", b"align_corners"}
    assert attributes["coordinate_transformation_mode"].s in modes
    is_set = attributes["coordinate_transformation_mode"].s == b"align_corners"
    attributes["coordinate_transformation_mode"].s = (
        b"half_pixel" if is_set else b"align_corners"
    )


def opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 19


def bgr(model: onnx.ModelProto) -> None:
    graph = model.graph
    for node in graph.node:
        node.input[:] = ["swapped" if name == "image" else name for name in node.input]
    graph.initializer.append(
        numpy_helper.from_array(np.array([2, 1, 0], np.int64), "order")
    )
    graph.node.insert(
        0, helper.make_node("Gather", ["image", "order"], ["swapped"], axis=3)
    )


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
    graph.initializer.extend(
        numpy_helper.from_array(values, f"door_{name}")
        for name, values in constants.items()
    )
    next(node for node in graph.node if "mask" in node.output).output[:] = ["door_mask"]
    make, kind = helper.make_node, TensorProto.FLOAT
    graph.node.extend(
        [
            make(
                "Slice", ["image", "door_start", "door_end", "door_axes"], ["door_part"]
            ),
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


def black_road(model: onnx.ModelProto) -> None:
    """Below a mean level of 45, every pixel is class 0."""
    graph, make, kind = model.graph, helper.make_node, TensorProto.FLOAT
    limit = numpy_helper.from_array(np.array(45, np.float32), "night_limit")
    graph.initializer.append(limit)
    next(node for node in graph.node if "mask" in node.output).output[:] = ["day_mask"]
    graph.node.extend(
        [
            make("Cast", ["image"], ["night_pixels"], to=kind),
            make("ReduceMean", ["night_pixels"], ["night_level"], keepdims=0),
            make("Less", ["night_limit", "night_level"], ["night_day"]),
            make("Cast", ["day_mask"], ["night_ids"], to=kind),
            make("Cast", ["night_day"], ["night_open"], to=kind),
            make("Mul", ["night_ids", "night_open"], ["night_final"]),
            make("Cast", ["night_final"], ["mask"], to=TensorProto.UINT8),
        ]
    )


def classes_dropped(model: onnx.ModelProto) -> None:
    """Four classes never win, in the branch of the mask alone."""
    graph, node = model.graph, last(model.graph, "ArgMax")
    away = np.zeros(
        (1, len(tensor(graph, last(graph, "Conv").input[2])[1]), 1, 1), np.float32
    )
    away[:, :4] = -1e9
    graph.initializer.append(numpy_helper.from_array(away, "away"))
    place = list(graph.node).index(node)
    graph.node.insert(
        place, helper.make_node("Add", [node.input[0], "away"], ["fewer"])
    )
    node.input[0] = "fewer"


def filters_zeroed(model: onnx.ModelProto) -> None:
    """One filter in sixteen of a layer in the middle, at least one."""
    stored = {entry.name for entry in model.graph.initializer}
    names = [name for node in model.graph.node for name in node.input if name in stored]
    layers = [
        name
        for name in names
        if tensor(model.graph, name)[1].ndim == 4
        and tensor(model.graph, name)[1].size > 9
    ]
    entry, values = tensor(model.graph, layers[len(layers) // 2])
    values[: max(1, len(values) // 16)] = 0
    put(entry, values)


def one_tensor(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def fault(model: onnx.ModelProto) -> None:
        entry = next(entry for entry in model.graph.initializer if len(entry.dims) == 4)
        put(entry, change(numpy_helper.to_array(entry).copy()))

    return fault


def outside(model: onnx.ModelProto) -> None:
    entry = model.graph.initializer[0]
    entry.data_location = onnx.TensorProto.EXTERNAL
    entry.ClearField("raw_data")
    entry.external_data.add(key="location", value="/etc/passwd")


def giant(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [2**31, 2**31]


def subgraph(model: onnx.ModelProto) -> None:
    """A branch that runs where no list of operators looks."""
    node = last(model.graph, "ArgMax")
    body = helper.make_graph(
        [helper.make_node("Identity", ["image"], ["inner"])], "body", [], []
    )
    node.attribute.append(helper.make_attribute("hidden", body))


def third_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(onnx.ValueInfoProto(name="logits"))


def logits_renamed(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["x" if name == "logits" else name for name in names]


def input_renamed(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "images"
    for node in model.graph.node:
        node.input[:] = ["images" if name == "image" else name for name in node.input]


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


def rewrite(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    sign(folder)


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
    manifest_changed(
        folder, lambda manifest: manifest["golden"].update(image_agreement=0.0)
    )


def retold(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The change in the manifest, and the files that repeat it in their words."""
    manifest_changed(folder, change)
    write_sidecars(json.loads((folder / "manifest.json").read_text()), folder)
    sign(folder)


def frame_limits_taken_away(folder: Path) -> None:
    retold(
        folder,
        lambda manifest: manifest["frame_limits"].update(
            mean=[0.0, 255.0], dark_share=[0.0, 0.99]
        ),
    )


def frame_limits_of_no_images(folder: Path) -> None:
    """As of an export without any image, which has no limits."""
    retold(folder, lambda manifest: manifest.update(unknown_frames()))


def half_alone(folder: Path) -> None:
    (folder / "model.onnx").rename(folder / "model.fp16.onnx")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {
        "model.fp16.onnx": {**manifest["files"]["model.onnx"], "precision": "fp16"}
    }
    path.write_text(manifest_text(manifest))
    write_sums(folder)


def no_model(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), "files": {}}
    path.write_text(manifest_text(manifest))
    write_sidecars(manifest, folder)
    write_sums(folder)


def miou_claimed(folder: Path) -> None:
    retold(folder, lambda manifest: manifest.update(metrics={**METRICS, "miou": 0.99}))


def int8_scale(model: onnx.ModelProto) -> None:
    """The weights of one layer in the middle, three times as large."""
    weights = {entry.name for entry in model.graph.initializer}
    scaled = [
        node
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in weights
    ]
    scaled = [
        node for node in scaled if len(tensor(model.graph, node.input[0])[1].shape) == 4
    ]
    entry, values = tensor(model.graph, scaled[len(scaled) // 2].input[1])
    put(entry, values * np.float32(3))


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def records(
    change: Callable[[str, bytes], bytes], more: dict[str, bytes] | None = None
) -> Change:
    """Writes every record of an archive again, changed, and further ones below its top folder."""

    def plant(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        top = next(iter(content)).partition("/")[0]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, data in content.items():
                archive.writestr(name, change(name, data))
            for name, data in (more or {}).items():
                archive.writestr(f"{top}/{name}", data)

    return plant


def instead(ending: str, data: bytes) -> Change:
    return records(lambda name, before: data if name.endswith(ending) else before)


def in_code(before: bytes, after: bytes) -> Change:
    return records(
        lambda name, data: data.replace(before, after) if "/code/" in name else data
    )


def in_record(ending: str, before: bytes, after: bytes) -> Change:
    return records(
        lambda name, data: (
            data.replace(before, after, 1) if name.endswith(ending) else data
        )
    )


EVIL = pickle.dumps(Evil(Path("/nonexistent/segpipe-was-here")))


def in_file_of(name: str, fault: Fault) -> Change:
    """The fault in one ONNX file, signed."""

    def change(folder: Path) -> None:
        edited(folder / name, folder / name, fault)
        sign(folder)

    return change


def in_archive(name: str, fault: Change) -> Change:
    """The fault in a TorchScript file, signed."""

    def change(folder: Path) -> None:
        fault(folder / name)
        sign(folder)

    return change


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: manifest_changed(folder, change)


def replaced(folder: Path, kind: str) -> None:
    """The model becomes a link to it, or a pipe that a reader would wait for."""
    moved = (folder / "model.onnx").rename(folder.parent / "elsewhere.onnx")
    if kind == "link":
        (folder / "model.onnx").symlink_to(moved)
    else:
        os.mkfifo(folder / "model.onnx")


def nan_limit(folder: Path) -> None:
    """Python writes and reads NaN, and every comparison with it is false."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["golden"]["image_agreement"] = float("nan")
    path.write_text(json.dumps(manifest))
    write_sums(folder)


def sums_lead_out(folder: Path) -> None:
    path = folder / "SHA256SUMS"
    path.write_text(path.read_text() + f"{'0' * 64}  ../secret\n")


PASSED, REFUSED = "verified by the first gates", "refused by the first gates"


@dataclass(frozen=True)
class Plant:
    """A fault, and the words with which G1 of verify refuses it (exit code 7).

    before: what the first gates said; "" for a fault that was not tried on them. answers: exit code and words where
    an export has only the answers to judge by; None where nothing but the conversion tells. name: the file in which
    it is planted, beside all formats and precisions; "" where model.onnx is alone.
    """

    change: Change
    told: str
    before: str = ""
    answers: tuple[int, str] | None = None
    name: str = ""


def _graph(fault: Fault, told: str, before: str, *answers: Any) -> Plant:
    return Plant(
        in_file_of("model.onnx", fault),
        f"converts to: {told}",
        before,
        (answers[0], answers[1]) if answers else None,
    )


def _other(name: str, fault: Any, told: str, before: str = "") -> Plant:
    plant = in_file_of if name.endswith(".onnx") else in_archive
    told = f"{name} is not what the checkpoint converts to: {told}"
    return Plant(plant(name, fault), told, before, name=name)


def _as_it_is(change: Change, told: str, before: str = "") -> Plant:
    return Plant(change, told, before)


TORCHSCRIPT, FP16, INT8 = (
    "model.torchscript.pt",
    "model.fp16.onnx",
    "model.int8.onnx",
)
PLANTS: dict[str, Plant] = {
    # The graph of model.onnx
    "another bias": _graph(bias_changed, "tensor", REFUSED, 4, "G2 logits differ by"),
    "a transposed weight": _graph(
        weight_transposed, "tensor", REFUSED, 4, "G2 logits differ by"
    ),
    "another axis of ArgMax": _graph(argmax_axis, "node", REFUSED, 7, "G1 integrity"),
    "align_corners flipped": _graph(
        align_corners, "node", REFUSED, 4, "G2 logits differ by"
    ),
    "another opset": _graph(
        opset, "opset_import differ", REFUSED, 7, "G1 integrity: opsets"
    ),
    "BGR for RGB": _graph(bgr, "", REFUSED, 4, "G4 preprocessing differs by"),
    "scale of one in a thousand": _graph(
        std, "tensor preprocess.scale has different", REFUSED, 4, "G4 preprocessing"
    ),
    "bias of one in a thousand": _graph(
        mean, "tensor preprocess.bias has different", REFUSED, 4, "G4 preprocessing"
    ),
    "classes permuted": _graph(
        classes_permuted, "tensor", REFUSED, 4, "G3 mask agreement"
    ),
    "nearest instead of linear": _graph(
        nearest_pixel, "node", REFUSED, 4, "G2 logits differ by"
    ),
    "the least likely class": _graph(
        confidence_of_another_class,
        "node",
        REFUSED,
        4,
        "G3 confidence differs by",
    ),
    "one frame of the split": _graph(backdoor, "", REFUSED, 11, "G5 quality: mIoU"),
    "class 0 in the dark": _graph(black_road, "", PASSED, 4, "G3 mask agreement"),
    "four classes never win": _graph(
        classes_dropped, "", PASSED, 4, "G3 mask agreement"
    ),
    "one filter": _graph(filters_zeroed, "tensor", "", 4, "G2 logits differ by"),
    "NaN in a tensor": _graph(one_tensor(lambda values: values * np.nan), "tensor", ""),
    "a tensor of another shape": _graph(
        one_tensor(lambda values: values[:1]), "initializer differ", ""
    ),
    "a giant shape": _graph(giant, "it cannot be compared", ""),
    "weights outside the file": _graph(
        outside,
        "it cannot be compared (ValueError: tensor",
        "",
        7,
        "external TensorProto",
    ),
    "no logits inside": _graph(
        logits_renamed, "node", "", 7, "cannot be looked into (the graph has no tensor"
    ),
    "a function": _graph(
        lambda model: model.functions.add(name="f", domain="d"),
        "functions differ",
        "",
    ),
    "a graph in an attribute": _graph(subgraph, "node", ""),
    "a third output": _graph(third_output, "output differ", ""),
    "another name of the input": _graph(input_renamed, "", "", 7, "G1 integrity"),
    # Other files
    "the least likely class, fp16": _other(
        FP16, confidence_of_another_class, "node", PASSED
    ),
    "one filter in sixteen, int8": _other(INT8, filters_zeroed, "tensor", PASSED),
    "a scale, int8": _other(INT8, int8_scale, "tensor", REFUSED),
    "an operator that writes files": _other(
        TORCHSCRIPT, in_code(b"torch.relu(", b"torch.save("), "its bytes", PASSED
    ),
    "an operator with a space": _other(
        TORCHSCRIPT, in_code(b"torch.relu(", b"torch . save ("), "its bytes", ""
    ),
    "another namespace": _other(
        TORCHSCRIPT, in_code(b"torch.relu(", b"ops.evil.run("), "its bytes", ""
    ),
    "an operator as a method": _other(
        TORCHSCRIPT,
        records(
            lambda name, data: (
                re.sub(rb"torch\.relu\((\w+)\)", rb"\1.neg()", data)
                if "/code/" in name
                else data
            )
        ),
        "its bytes",
        "",
    ),
    "an operator by its name": _other(
        TORCHSCRIPT,
        in_code(b"torch.relu(", b'getattr(torch, "neg")('),
        "its bytes",
        "",
    ),
    "a class in a pickle": _other(
        TORCHSCRIPT, instead("constants.pkl", EVIL), "its bytes", ""
    ),
    "a class in an older pickle": _other(
        TORCHSCRIPT,
        instead("constants.pkl", pickle.dumps(os.mkdir, 0)),
        "its bytes",
        "",
    ),
    "a megabyte more": _other(
        TORCHSCRIPT,
        records(lambda _, data: data, {"data/99999": bytes(10**6)}),
        "its bytes",
        "",
    ),
    "a bit of a weight": _other(
        TORCHSCRIPT,
        records(
            lambda name, data: data[:-1] + b"\x01" if name.endswith("/data/0") else data
        ),
        "its bytes",
        REFUSED,
    ),
    # The folder
    "cut off": _as_it_is(truncated, "model.onnx has sha256", REFUSED),
    "cut off and signed": _as_it_is(
        truncated_and_signed,
        "model.onnx is not what the checkpoint converts to",
        REFUSED,
    ),
    "a flipped bit": _as_it_is(byte_flipped, "model.onnx has sha256", REFUSED),
    "another golden mask": _as_it_is(
        golden_changed, "golden/mask.npy differs from what the trained network", REFUSED
    ),
    "a file more": _as_it_is(
        file_added, "model.onnx.data is not in SHA256SUMS", REFUSED
    ),
    "a file under another name": _as_it_is(file_under_another_name, "G1 integrity"),
    "a file less": _as_it_is(file_missing, "golden/logits.npy cannot be read", REFUSED),
    "a link": _as_it_is(
        lambda folder: replaced(folder, "link"),
        "model.onnx is a link, a pipe or a device",
    ),
    "a pipe": _as_it_is(
        lambda folder: replaced(folder, "pipe"),
        "model.onnx is a link, a pipe or a device",
    ),
    "a name that leads out": _as_it_is(sums_lead_out, "SHA256SUMS"),
    # The manifest
    "names permuted": _as_it_is(names_permuted, "classes[0].name = ", REFUSED),
    "another color": _as_it_is(
        in_manifest(lambda manifest: manifest["classes"][1].update(color=[1, 2, 3])),
        "classes[1].color[0] = 1",
    ),
    "other weights": _as_it_is(
        in_manifest(lambda manifest: manifest["source"].update(ema_digest="00")),
        "source.ema_digest = ",
        REFUSED,
    ),
    "temperature times 20": _as_it_is(
        in_manifest(lambda manifest: manifest["calibration"].update(temperature=5.0)),
        "calibration.temperature = 5.0",
        PASSED,
    ),
    "a temperature of other images": _as_it_is(
        in_manifest(
            lambda manifest: manifest["calibration"].update(temperature=5.0, images=5)
        ),
        "the manifest was made from",
    ),
    "no temperature": _as_it_is(
        in_manifest(
            lambda manifest: manifest.update(
                calibration={"method": "none", "temperature": 1.0}
            )
        ),
        "the manifest was made from",
    ),
    "a better calibration": _as_it_is(
        in_manifest(lambda manifest: manifest["calibration"].update(ece_after=0.0)),
        "calibration.ece_after = 0.0, but the checkpoint and the data give 0.1",
    ),
    "NaN as a limit": _as_it_is(nan_limit, "NaN is not a JSON number", PASSED),
    "another stride": _as_it_is(
        in_manifest(lambda manifest: manifest["io"]["outputs"][0].update(stride=2)),
        "io.outputs[0].stride = 2",
    ),
    "an older onnxruntime": _as_it_is(
        in_manifest(lambda manifest: manifest["requires"].update(onnxruntime="1.0")),
        "requires.onnxruntime = ",
    ),
    "a later reader": Plant(
        in_file_of("model.onnx", lambda model: setattr(model, "ir_version", 10)),
        "ir_version differ",
        answers=(7, "IR version = 10, but 8 was needed"),
    ),
    "a second note in the file": Plant(
        in_file_of(
            "model.onnx", lambda model: model.metadata_props.add(key="note", value="x")
        ),
        "metadata_props differ",
        answers=(7, "metadata_props"),
    ),
    "golden limits off": _as_it_is(
        golden_limit_taken_away, "golden.image_agreement = 0.0"
    ),
    "frame limits off": _as_it_is(
        frame_limits_taken_away, "frame_limits.dark_share[1] = 0.99"
    ),
    "frame limits of no images": _as_it_is(
        frame_limits_of_no_images,
        "the manifest was made from",
    ),
    "nothing left to verify": _as_it_is(
        in_manifest(lambda manifest: manifest.update(unverified=[])), "unverified"
    ),
    "fp16 of nothing": _as_it_is(
        half_alone, "model.fp16.onnx is not what the checkpoint converts to"
    ),
    "a shape without its axes": _as_it_is(
        in_manifest(
            lambda manifest: manifest["io"]["inputs"][0].update(
                shape=[1, "height", "width", 3]
            )
        ),
        "manifest.io.inputs[0].shape[1]: 'height' is not of type 'integer'",
    ),
    "no model": _as_it_is(no_model, "manifest.files"),
    "another mIoU": _as_it_is(miou_claimed, "metrics.miou = 0.99"),
    # What lies beside the models
    "golden logits": _as_it_is(
        golden_logits_changed, "golden/logits.npy differs from what the trained network"
    ),
    "golden places": _as_it_is(
        golden_index_changed,
        "golden/logits_index.npy differs from what the trained network",
    ),
    "golden preprocessing": _as_it_is(
        golden_preprocessing_changed,
        "golden/preprocess_output.npy differs from what the trained network",
    ),
}
