"""Tiny training runs for tests, in this process or by the command line: settings, start, results."""

from __future__ import annotations

import copy
import functools
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
from numpy.random import Generator

from benchmarks.measure import kill_with_children
from segpipe import plugins
from segpipe.cli import api
from segpipe.cli.main import main as segpipe
from segpipe.data import Sample, scenes
from segpipe.data.scenes import paint_scene
from segpipe.ledger import inputs
from segpipe.run import report
from segpipe.run.pages import Points, chart
from segpipe.settings.compose import CommandLine, composed, unquoted
from segpipe.settings.config import Config

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "model=fast_scnn", "data=synthetic", "data.size=[64,96]", "data.num_train=16", "data.num_val=4", "data.workers=0",
    "augment.crop_size=[64,64]", "train.steps=3", "train.progress=false", "compute.device=cpu", "compute.shards=2",
    "compute.samples_per_shard=2", "compute.threads=1", "export.enabled=false", "augment.check=false",
)  # fmt: skip
DIGESTS = ("weights_digest", "ema_digest", "miou")
PATIENCE_S = (
    480.0  # for a process on a loaded machine; shorter than the timeout of a test
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def settings(folder: Path, *changes: str) -> list[str]:
    """Command-line settings of a tiny run in `folder`; `changes` override the defaults."""
    parts = (*TINY, f"run.root={folder.parent}", f"run.name={folder.name}", *changes)
    return [
        f"{key}={value}"
        for key, value in dict(part.split("=", 1) for part in parts).items()
    ]


FOLDER = ("run.root", "run.name")
COMPOSED: dict[tuple[str, ...], Config] = {}
PAINTED: dict[tuple[int, ...], Sample] = {}
DRAWN: dict[tuple[object, ...], str] = {}
hashed_once = functools.cache(inputs.source_hashes)


def run(folder: Path, *changes: str) -> int:
    """Exit code of a run inside this process, whose global state is restored."""
    with (
        torch_restored(),
        scenes_painted_once(),
        charts_drawn_once(),
        settings_composed_once(),
        mock.patch.object(inputs, "source_hashes", hashed_once),
    ):
        return segpipe(["train", *settings(folder, *changes)])


@contextmanager
def scenes_painted_once() -> Iterator[None]:
    """Runs of one process read the same few scenes, and to paint them takes longer than to train on them."""

    def paint(rng: Generator, size: tuple[int, int]) -> Sample:
        state = rng.bit_generator.state["state"]
        key = *size, *state["key"].tolist(), *state["counter"].tolist()
        if key not in PAINTED:
            PAINTED[key] = paint_scene(rng, size)
        image, target = PAINTED[key]
        return image.copy(), target.copy()

    with mock.patch.object(scenes, "paint_scene", paint):
        yield


@contextmanager
def settings_composed_once() -> Iterator[None]:
    """Runs whose settings differ in the folder alone share what Hydra composes, a tenth of a tiny run."""

    def compose(line: CommandLine) -> Config:
        pairs = [text.partition("=") for text in line.overrides]
        place = {key: unquoted(text) for key, _, text in pairs if key in FOLDER}
        others = [
            text for text in line.overrides if text.partition("=")[0] not in place
        ]
        if len(place) < len(FOLDER) or "$" in "".join(others):
            return composed(line)
        key = str(Path.cwd()), *others
        if key not in COMPOSED:
            COMPOSED[key] = composed(line)
        config = copy.deepcopy(COMPOSED[key])
        config.run.root, config.run.name = (place[key] for key in FOLDER)
        plugins.trust(path for _, path in config.import_paths)
        return config

    with mock.patch.object(api, "composed", compose):
        yield


@contextmanager
def charts_drawn_once() -> Iterator[None]:
    """Reports of later runs show the first curves of each kind, which take a fifth of a tiny run to draw."""

    def draw(title: str, lines: Mapping[str, Points], **given: Any) -> str:
        key = title, *(label for label, points in lines.items() if points)
        if key not in DRAWN:
            DRAWN[key] = chart(title, lines, **given)
        return DRAWN[key]

    with mock.patch.object(report, "chart", draw):
        yield


SWITCHES: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
)


@contextmanager
def torch_restored() -> Iterator[None]:
    """Restore the switches of torch and OpenCV and the environment."""
    threads, cv2_threads = torch.get_num_threads(), cv2.getNumThreads()
    deterministic = torch.get_deterministic_debug_mode()
    switches, environment = (
        [getattr(where, name) for where, name in SWITCHES],
        dict(os.environ),
    )
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(deterministic)
        torch.set_num_threads(threads)
        cv2.setNumThreads(cv2_threads)
        for (where, name), value in zip(SWITCHES, switches, strict=True):
            setattr(where, name, value)
        os.environ.clear()
        os.environ.update(environment)


def start(*command: str) -> subprocess.Popen[str]:
    """A Python process in its own process group, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(
    process: subprocess.Popen[str], timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Output and exit code of a process. One that hangs is killed with all its children and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_with_children(process)
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"not done after {timeout_s} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Output and exit code of `python ARGUMENTS`."""
    return finished(start(*arguments))


def script(name: str, *arguments: str) -> int:
    """Exit code of a file in scripts/, run inside this process."""
    with (
        mock.patch.object(sys, "argv", [name, *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    return int(str(ended.value.code))


def wait_for(
    happened: Callable[[], bool],
    process: subprocess.Popen[str],
    timeout_s: float = PATIENCE_S,
) -> None:
    """Return once `happened()`; fail when the process ends first."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def result(folder: Path) -> dict[str, Any]:
    """Content of result.json."""
    return dict(json.loads((folder / "result.json").read_text()))


def outcome(folder: Path) -> dict[str, Any]:
    """Results that must not depend on how a run was started, interrupted or divided among processes."""
    found = result(folder)
    return {key: found[key] for key in DIGESTS}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl, to which a run may be writing; empty without the file."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def updates(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl that belong to updates."""
    return [line for line in metrics(folder) if line["kind"] == "train"]


def write_camvid(
    root: Path, *, num_train: int = 8, num_val: int = 2, size: Sequence[int] = (72, 96)
) -> Path:
    """A valid data set of noise in the layout of CamVid."""
    noise = np.random.Generator(np.random.Philox(1))
    for split, num in (("train", num_train), ("val", num_val)):
        for folder, high, shape in (
            (split, 256, (*size, 3)),
            (f"{split}annot", 12, tuple(size)),
        ):
            (root / folder).mkdir(parents=True)
            for number in range(num):
                cv2.imwrite(
                    str(root / folder / f"frame{number:02d}.png"),
                    noise.integers(0, high, shape, np.uint8),
                )
    return root
