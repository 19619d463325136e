"""Draws the pictures of the README: python docs/images/draw.py RUN, the folder that `make train` prints.

result.jpg: validation images, targets and predictions of the run. predict.jpg: frames of a synthetic drive, and of the
video that `segpipe predict` makes of it. divergence.svg: two short runs on the same images, of
which the second has one changed pixel in one mask, compared by `segpipe compare`. race.svg: the start of what `make
race-demo` prints. speed.svg: figures of benchmarks/results.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cv2
import numpy as np
import torch
import yaml
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from segpipe.data import scenes
from segpipe.data.samples import open_samples
from segpipe.data.scenes import Canvas
from segpipe.keys import generator, sample_key
from segpipe.predict.inference import Inference, segment
from segpipe.predict.job import read_frames
from segpipe.predict.outputs import blend
from segpipe.run.pages import COLORS, GREY
from segpipe.train.checkpoint import load_network

HERE = Path(__file__).parent
SHOWN = (5, 21)  # validation images
SCENE, FRAMES, FPS = (
    5,
    36,
    12.0,
)  # the street of the drive, which no training image shows
STILLS = (0, 17, 35)  # frames of the drive


def draw_result(run: Path) -> None:
    """One row per image: image, target, prediction."""
    trained = load_network(run, "last")
    samples = open_samples(trained.config.data, "val", trained.config.seed)
    rows = []
    for index in SHOWN:
        image, target = samples.read(index)
        pred = segment(
            trained.model,
            trained.preprocess,
            torch.from_numpy(image)[None],
            Inference(),
        )[0].numpy()
        rows.append(
            np.hstack(
                [
                    image,
                    *(
                        blend(image, ids, samples.classes.palette)
                        for ids in (target, pred)
                    ),
                ]
            )
        )
    cv2.imwrite(
        str(HERE / "result.jpg"),
        np.vstack(rows)[..., ::-1],
        [cv2.IMWRITE_JPEG_QUALITY, 90],
    )


def draw_predict(run: Path) -> None:
    """Frames of a drive on top, the same frames of its overlay video below."""
    size = load_network(run, "last").config.data.size
    with tempfile.TemporaryDirectory() as made:
        drive, out = Path(made) / "drive.avi", Path(made) / "out"
        writer = cv2.VideoWriter(
            str(drive), cv2.VideoWriter.fourcc(*"MJPG"), FPS, (size[1], size[0])
        )
        for frame in _drive((size[0], size[1])):
            writer.write(np.ascontiguousarray(frame[..., ::-1]))
        writer.release()
        command = [
            sys.executable,
            "-m",
            "segpipe",
            "predict",
            f"run={run}",
            f"source={drive}",
            f"out={out}",
        ]
        subprocess.run(command, check=True)
        rows = [
            np.hstack(
                [
                    frame
                    for number, frame in enumerate(read_frames(str(path)))
                    if number in STILLS
                ]
            )
            for path in (drive, out / "overlays" / "drive.mp4")
        ]
    picture = np.vstack(rows)[..., ::-1]
    cv2.imwrite(str(HERE / "predict.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 88])


def _drive(size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """One street, by a camera that drives to the right lane and turns."""
    for share in np.linspace(0, 1, FRAMES).tolist():

        class Moved(Canvas):
            def __init__(self, *given: Any, share: float = share) -> None:
                super().__init__(*given)
                self.view["side"] += 3.0 * share - 1.5
                self.view["heading"] += 0.05 * (share - 0.5)
                self.view["column"] += 0.1 * self.view["focal"] * (share - 0.5)
                self.view["focal"] *= 1 + 0.25 * share

        with patch.object(scenes, "Canvas", Moved):
            key = sample_key(0, 0, SCENE, "scene/val")
            yield scenes.paint_scene(generator(key), size)[0]


def draw_divergence(run: Path) -> None:
    """The terminal's output of a comparison, as SVG."""
    config = load_network(run, "last").config
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for split in ("train", "val"):
            samples = open_samples(config.data, split, config.seed)
            for kind in ("images", "masks"):
                (folder / "data" / kind / split).mkdir(parents=True)
            for index in range(8):
                for kind, pixels in zip(
                    ("images", "masks"), samples.read(index), strict=True
                ):
                    path = folder / "data" / kind / split / f"street_{index:03d}.png"
                    cv2.imwrite(
                        str(path), pixels[..., ::-1] if pixels.ndim == 3 else pixels
                    )
        table = {
            "names": list(samples.classes.names),
            "palette": [list(color) for color in samples.classes.palette],
        }
        (folder / "data" / "classes.yaml").write_text(yaml.safe_dump(table))
        _train(folder, "A")
        mask = folder / "data" / "masks" / "train" / "street_006.png"
        ids = cv2.imread(str(mask), cv2.IMREAD_UNCHANGED)
        ids[120, 200] = (ids[120, 200] + 1) % 10
        cv2.imwrite(str(mask), ids)
        _train(folder, "B")
        shown = subprocess.run(
            [sys.executable, "-m", "segpipe", "compare", "runs/A", "runs/B"],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100"},
        )  # fmt: skip
    _terminal("segpipe compare runs/A runs/B", shown.stdout, "divergence.svg")


def _terminal(command: str, output: str, name: str) -> None:
    """A command and its output as SVG."""
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(output))
    svg = console.export_svg(title="")
    (HERE / name).write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    )  # no web fonts


def draw_race() -> None:
    """The bug that an ordinary trainer does not notice, and the refusal: the first two parts of the demo."""
    demo = HERE.parents[1] / "examples" / "race" / "demo.py"
    with tempfile.TemporaryDirectory() as made:
        shown = subprocess.run(
            [sys.executable, str(demo), made],
            capture_output=True, text=True, check=True,
            env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100"},
        )  # fmt: skip
    lines = shown.stdout.splitlines()
    third = next(place for place, line in enumerate(lines) if "─ 3" in line)
    kept = [line for line in lines[:third] if "outcomes.png" not in line]
    _terminal("make race-demo", "\n".join(kept), "race.svg")


# Bars of speed.svg: file in benchmarks/results, place of the figure in it, and what it compares.
SPEEDS = (
    ("c2", "times_as_fast/torchvision", "samples from a pack / torchvision's recipe"),
    ("c7", "threads/2/over_ours/torchvision", "validation after the logits / torchvision"),
    ("c7", "threads/2/over_ours/pidnet", "the same / PIDNet"),
    ("c5", "threads/2/recipe_over/native", "upsampling and loss / interpolate + cross_entropy"),
    ("c8", "times_as_fast_as_eager/onnx int8 U8S7", "exported fast_scnn, int8 / eager torch"),
    ("c6", "speedup_over_pidnet_style_fp32/segpipe bf16", "update of PIDNet-S, bf16 / PIDNet-style, fp32"),
    ("c8", "times_as_fast_as_eager/onnx fp32", "exported fast_scnn, fp32 / eager torch"),
    ("c1", "times_as_fast/torchvision", "samples from PNG files / torchvision's recipe"),
    ("c6", "speedup_over_pidnet_style_fp32/segpipe fp32", "update of PIDNet-S, fp32 / PIDNet-style, fp32"),
)  # fmt: skip


def draw_speed() -> None:
    """How many times as fast as recipes of others, with intervals."""
    names, values, errors = [], [], []
    for file, place, name in SPEEDS:
        path = HERE.parents[1] / "benchmarks" / "results" / f"{file}_2cores.json"
        found: Any = json.loads(path.read_text())
        for key in place.split("/"):
            found = found[key]
        names.append(f"{file.upper()}  {name}")
        values.append(found["ratio"])
        errors.append((found["ratio"] - found["low"], found["high"] - found["ratio"]))
    grey = {"text.color": GREY, "xtick.color": GREY, "ytick.color": GREY}
    with rc_context({**grey, "axes.edgecolor": GREY, "svg.hashsalt": "segpipe"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(
            names, values, xerr=np.transpose(errors), color=COLORS[0], ecolor=GREY
        )
        axes.bar_label(bars, [f" {value:.1f}" for value in values], padding=6)
        axes.set_xscale("log")
        axes.set_xlim(1, 100)
        axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        axes.invert_yaxis()
        axes.set_title("times as fast, 2 CPU cores; bars with 95 % intervals")
        figure.savefig(HERE / "speed.svg", transparent=True, metadata={"Date": None})


def _train(folder: Path, name: str) -> None:
    settings = (
        "data=folder", "data.root=data", "data.workers=0", "augment.crop_size=[192,384]", "augment.scale=[1,1]",
        "train.steps=6",
        "compute.samples_per_shard=2", "compute.shards=1", "compute.threads=1", "compute.device=cpu",
        "export.enabled=false", "augment.check=false", f"run.name={name}",
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "segpipe", "train", *settings],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    draw_divergence(Path(sys.argv[1]))
    draw_result(Path(sys.argv[1]))
    draw_predict(Path(sys.argv[1]))
    draw_race()
    draw_speed()
