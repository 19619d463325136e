"""A hand-made exported folder whose ONNX file gives known answers, and fails or is slow where the image says so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from segpipe.runtime.artifact import FORMAT
from segpipe.runtime.frames import QUANTITIES

SIZE = (32, 48)
GREEN_FAILS, BLUE_REPEATS = (
    200,
    64,
)  # of the first pixel: the run fails from 200 on, and takes blue * 64 products


def toy_manifest() -> dict[str, Any]:
    height, width = SIZE
    outputs = {"mask": [1, height, width], "confidence": [1, height // 4, width // 4]}
    return {
        "format": FORMAT,
        "model": "toy",
        "source": {"ema_digest": "0123"},
        "align_corners": False,
        "classes": [
            {"id": 0, "name": "low", "color": [0, 0, 255]},
            {"id": 1, "name": "high", "color": [255, 0, 0]},
        ],
        "io": {
            "inputs": [
                {"name": "image", "dtype": "uint8", "shape": [1, height, width, 3]}
            ],
            "outputs": [
                {"name": name, "dtype": "uint8", "shape": shape}
                for name, shape in outputs.items()
            ],
        },
        "status": "verified",
        "files": {"model.onnx": {"format": "onnx", "precision": "fp32"}},
        "golden": {"image_agreement": 0.999, "confidence_levels": 1},
        "frame_limits": {
            **{name: [-1000.0, 1000.0] for name in QUANTITIES},
            "mean": [10, 245],
            "dark_share": [0, 0.5],
            "bright_share": [0, 0.5],
            "upright_weights": [0.0] * 12,
        },
    }


def toy_model(manifest: dict[str, Any]) -> bytes:
    """mask = red // 128, confidence = every fourth red; the first pixel's green makes it fail and its blue slow."""
    constants = {
        "from_red": [0], "to_red": [1], "channel": [3], "start": [0, 0], "end": list(SIZE), "axes": [1, 2],
        "four": [4, 4], "green": [0, 0, 0, 1], "green_end": [1, 1, 1, 2], "blue": [0, 0, 0, 2],
        "blue_end": [1, 1, 1, 3], "scalar": [1],
        "repeats": BLUE_REPEATS, "fails": GREEN_FAILS, "corner": [0, 0], "corner_end": [1, 1], "corner_axes": [0, 1],
    }  # fmt: skip
    initializers = [
        numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in constants.items()
    ]
    initializers += [
        numpy_helper.from_array(np.eye(128, dtype=np.float32), "eye"),
        numpy_helper.from_array(np.array([0.0], np.float32), "zero"),
        numpy_helper.from_array(np.array(128.0, np.float32), "half"),
        numpy_helper.from_array(np.array(True), "go"),
    ]

    def value(name: str, kind: int, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_in"], ["go_out"]),
            helper.make_node("MatMul", ["x_in", "eye"], ["x_out"]),
        ],
        "body",
        [
            value("turn", TensorProto.INT64, []),
            value("go_in", TensorProto.BOOL, []),
            value("x_in", 1, [128, 128]),
        ],
        [value("go_out", TensorProto.BOOL, []), value("x_out", 1, [128, 128])],
    )
    node = helper.make_node
    nodes = [
        node("Cast", ["image"], ["numbers"], to=TensorProto.FLOAT),
        node("Cast", ["image"], ["whole"], to=TensorProto.INT64),
        node("Slice", ["numbers", "from_red", "to_red", "channel"], ["red_4d"]),
        node("Squeeze", ["red_4d", "channel"], ["red"]),
        node("Div", ["red", "half"], ["halves"]),
        node("Floor", ["halves"], ["ids"]),
        node("Slice", ["whole", "green", "green_end"], ["green_4d"]),
        node("Reshape", ["green_4d", "scalar"], ["green_level"]),
        node("Div", ["green_level", "fails"], ["place"]),
        node("Gather", ["zero", "place"], ["nothing"]),  # out of range for a high level
        node("Slice", ["whole", "blue", "blue_end"], ["blue_4d"]),
        node("Reshape", ["blue_4d", "scalar"], ["blue_level"]),
        node("Mul", ["blue_level", "repeats"], ["turns"]),
        node("Loop", ["turns", "go", "eye"], ["product"], body=body),
        node("Slice", ["product", "corner", "corner_end", "corner_axes"], ["one"]),
        node("Mul", ["ids", "one"], ["same_ids"]),
        node("Add", ["same_ids", "nothing"], ["final"]),
        node("Cast", ["final"], ["mask"], to=TensorProto.UINT8),
        node("Slice", ["red", "start", "end", "axes", "four"], ["thin_red"]),
        node("Cast", ["thin_red"], ["confidence"], to=TensorProto.UINT8),
    ]
    described = {
        kind: [
            value(entry["name"], TensorProto.UINT8, entry["shape"])
            for entry in manifest["io"][kind]
        ]
        for kind in ("inputs", "outputs")
    }
    graph = helper.make_graph(
        nodes, "toy", described["inputs"], described["outputs"], initializers
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    helper.set_model_props(model, {"segpipe": json.dumps(manifest)})
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def answer(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return image[..., 0] // 128, image[::4, ::4, 0]


def frame(seed: int, *, green: int = 0, blue: int = 0) -> np.ndarray:
    image = np.random.default_rng(seed).integers(30, 220, (*SIZE, 3), dtype=np.uint8)
    image[0, 0] = (100, green, blue)
    return image


def write_sums(folder: Path) -> None:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    )
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in files
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def write_artifact(folder: Path, manifest: dict[str, Any] | None = None) -> Path:
    manifest = manifest or toy_manifest()
    (folder / "golden").mkdir(parents=True)
    images = np.stack([frame(0), frame(1)])
    for part, arrays in (
        ("image", images),
        ("mask", np.stack([answer(image)[0] for image in images])),
        ("confidence", np.stack([answer(image)[1] for image in images])),
    ):
        np.save(folder / "golden" / f"{part}.npy", arrays)
    (folder / "model.onnx").write_bytes(toy_model(toy_manifest()))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_sums(folder)
    return folder
