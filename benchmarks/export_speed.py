"""C8: what an exported file costs and keeps: latency, mIoU and size of eager, TorchScript and ONNX in fp32, fp16, int8.

One CPU thread, batch 1, in turns, by processor time. Besides the run's network at the size of its data, every network
is timed at every size of `sizes`, for speed alone: the run's with its weights, the others with fresh ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from benchmarks import measure as measuring
from segpipe.cli.commands import RUN, WHICH
from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import Samples
from segpipe.data.samples import open_samples
from segpipe.errors import ConfigError
from segpipe.export.artifact.manifest import describe
from segpipe.export.dataset import spread
from segpipe.export.graph.formats import FORMATS
from segpipe.export.graph.lowprec import to_fp16, to_int8
from segpipe.export.graph.network import DeployModel, Run, run_eager
from segpipe.export.graph.onnx_format import open_onnx
from segpipe.models import build_model
from segpipe.models.preprocess import Preprocess
from segpipe.native import one_thread
from segpipe.settings.compose import Setting, parse, with_settings
from segpipe.settings.config import SETTINGS, Config
from segpipe.train.checkpoint import TrainedNetwork, load_network
from segpipe.train.metrics import confusion, miou

EAGER, FP32, FP16, INT8 = "eager fp32", "onnx fp32", "onnx fp16", "onnx int8"
FP32_LIMIT, INT8_LIMIT = 1.25, 3.0  # times as fast as eager, at least
POINTS = 1.0  # of mIoU that int8 may lose
FASTER = 0.9  # int8 must take at most this share of what fp32 takes, else an export refuses it
FRAMES = 32  # for calibration
SMOKE = {"FRAMES": 2, "NETWORKS": []}
NETWORKS = ("fast_scnn", "ddrnet23_slim", "pidnet_s")
SIZES = Setting(
    "sizes", ["360x480", "512x1024"], "HEIGHTxWIDTH at which every network is timed"
)

Image = NDArray[np.uint8]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Latency, mIoU and size of every form of the run's network; latency of the other networks."""
    of_data = (SETTINGS["data.root"], SETTINGS["data.split"])
    settings = parse(given.settings, (RUN, WHICH, SIZES, *of_data))
    trained = load_network(Path(settings["run"]), settings["which"])
    config = with_settings(trained.config, settings)
    samples = open_samples(config.data, config.data.split, config.seed)
    size = samples.read(0)[0].shape[:2]
    spread_frames = spread(open_samples(config.data, "train", config.seed), FRAMES)
    frames = [image for image in spread_frames if image.shape[:2] == size]
    if not frames:
        raise ConfigError(
            f"data.root = {config.data.root} has no training image of {size}, but int8 needs frames."
        )
    load = [os.getloadavg()[0]]
    found = compare(trained, samples, frames, given.repeats or 40)
    tables = {
        f"{name} {text}": speed(
            _network(name, trained, samples.classes),
            _scaled(frames, text),
            given.repeats or 20,
        )
        for name in NETWORKS
        for text in settings["sizes"]
    }
    load.append(os.getloadavg()[0])
    return {
        "what": f"{trained.config.model.name}, {size[0]}x{size[1]}, batch 1, one CPU thread, processor time",
        "machine": measuring.machine(),
        "load_average": [
            round(value, 1) for value in load
        ],  # before and after; an idle machine begins near 0
        **found,
        "speed": tables,
        "short": [name for name, entry in tables.items() if not entry["fast"]],
        "passed": found["passed"] and all(entry["fast"] for entry in tables.values()),
        "limits": {
            "fp32_over_eager": FP32_LIMIT,
            "int8_over_eager": INT8_LIMIT,
            "int8_points": POINTS,
        },
    }


def compare(
    trained: TrainedNetwork, samples: Samples, frames: Sequence[Image], repeats: int
) -> dict[str, Any]:
    """`speed`, and what each form keeps of the mIoU; whether C8 holds for this network."""
    with TemporaryDirectory() as folder, one_thread():
        runs, sizes = forms(trained, frames, Path(folder))
        quality = {
            name: quality_of(run, samples, frames[0].shape)
            for name, run in runs.items()
        }
        lost = {
            name: round(100 * (quality[EAGER] - value), 3)
            for name, value in quality.items()
        }
        found = timed(runs, frames[0], repeats)
    reached = found["times_as_fast_as_eager"]
    if lost[INT8] > POINTS:
        found["verdict"] = (
            f"{INT8} loses {lost[INT8]:g} points of mIoU: more than {POINTS:g}, an export refuses it"
        )
    return {
        **found,
        "size_mib": sizes,
        "miou": {name: round(value, 5) for name, value in quality.items()},
        "points_lost": lost,
        "passed": measuring.holds(reached[FP32], at_least=FP32_LIMIT)
        and measuring.holds(reached[INT8], at_least=INT8_LIMIT)
        and lost[INT8] <= POINTS,
    }


def _network(name: str, trained: TrainedNetwork, classes: ClassTable) -> TrainedNetwork:
    """The trained network if it is this one, else one with fresh weights."""
    if name == trained.config.model.name:
        return trained
    torch.manual_seed(0)
    model = build_model(name, classes.num_classes).eval()
    return TrainedNetwork(
        model, Preprocess(), Config(), classes, ema_digest="untrained", step=0
    )


def _scaled(frames: Sequence[Image], size: str) -> list[Image]:
    """The frames in `size`, HEIGHTxWIDTH. Raises ConfigError for another text."""
    height, _, width = size.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ConfigError(
            f"sizes = {size}, but HEIGHTxWIDTH was needed, such as 360x480."
        )
    return [
        np.asarray(cv2.resize(frame, (int(width), int(height))), np.uint8)
        for frame in frames
    ]


def speed(
    network: TrainedNetwork, frames: Sequence[Image], repeats: int
) -> dict[str, Any]:
    """Latency at the frames' size, whether both limits hold, and where the time goes; nothing about mIoU."""
    with TemporaryDirectory() as folder, one_thread():
        runs, sizes = forms(network, frames, Path(folder))
        found = timed(runs, frames[0], repeats)
        reached = found["times_as_fast_as_eager"]
        return {
            **found,
            "size_mib": sizes,
            "fast": reached[FP32]["low"] >= FP32_LIMIT
            and reached[INT8]["low"] >= INT8_LIMIT,
            "operators": {
                name: operators(_path(Path(folder), name), frames[0])
                for name in (FP32, INT8)
            },
        }


def operators(path: Path, image: Image) -> dict[str, float]:
    """Share of onnxruntime's time by kind of operator, the five largest, over ten runs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = 1, True
    options.profile_file_prefix = str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    for _ in range(10):
        session.run(None, {"image": image[None]})
    spent: Counter[str] = Counter()
    for entry in json.loads(Path(session.end_profiling()).read_text()):
        if entry.get("cat") == "Node" and entry["name"].endswith("_kernel_time"):
            spent[entry["args"]["op_name"]] += entry["dur"]
    return {
        name: round(value / spent.total(), 3) for name, value in spent.most_common(5)
    }


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_')}.onnx"


def forms(
    trained: TrainedNetwork, frames: Sequence[Image], folder: Path
) -> tuple[dict[str, Run], dict[str, float]]:
    """The network in every form, ready to run, and the size of each file in MiB. Call it inside `one_thread`."""
    model = DeployModel(trained)
    size = (frames[0].shape[0], frames[0].shape[1])
    paths = {name: _path(folder, name) for name in (FP32, FP16, INT8)}
    script = folder / "model.torchscript.pt"
    manifest = describe(trained, model, size)
    FORMATS["onnx"].write(model, manifest, paths[FP32], folder / "probe.onnx")
    FORMATS["torchscript"].write(model, manifest, script, folder / "probe.pt")
    to_fp16(paths[FP32], paths[FP16])
    to_int8(paths[FP32], paths[INT8], frames)
    runs = {
        EAGER: run_eager(model),
        "torchscript": FORMATS["torchscript"].open(script, model.profile),
    }
    runs |= {name: open_onnx(path) for name, path in paths.items()}
    files = {"torchscript": script, **paths}
    return runs, {
        name: round(path.stat().st_size / 2**20, 2) for name, path in files.items()
    }


def timed(runs: dict[str, Run], image: Image, repeats: int) -> dict[str, Any]:
    """Latency of every form, ratios to eager, int8's ratio to fp32, and what follows for it."""
    arms = {name: (lambda run=run: run(image)) for name, run in runs.items()}
    seconds = measuring.interleaved(arms, repeats=repeats, clock=time.process_time)
    over_fp32 = measuring.ratio(seconds[INT8], seconds[FP32])
    return {
        "latency": {
            name: measuring.summary(values) for name, values in seconds.items()
        },
        "times_as_fast_as_eager": {
            name: measuring.ratio(seconds[EAGER], values)
            for name, values in seconds.items()
            if name != EAGER
        },
        "int8_over_fp32": over_fp32,
        "verdict": f"{INT8} takes {over_fp32['ratio']:.2f} of fp32's time: "
        + (
            "a win"
            if over_fp32["ratio"] <= FASTER
            else f"more than {FASTER}, an export refuses it"
        ),
    }


def quality_of(run: Run, samples: Samples, shape: tuple[int, ...]) -> float:
    """mIoU, 0 to 1, over the samples of `shape`."""
    classes = samples.classes.num_classes
    total = torch.zeros(classes, classes, dtype=torch.int64)
    for index in range(len(samples)):
        image, target = samples.read(index)
        if image.shape == shape:
            total += confusion(
                torch.from_numpy(run(image).mask.copy()),
                torch.from_numpy(target),
                classes,
            )
    return miou(total)
