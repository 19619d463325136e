"""Small networks that export quickly, with images and classes, for the tests of export."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from runs import scenes_painted_once
from segpipe.cli.main import main as segpipe
from segpipe.data.catalog import ClassTable
from segpipe.data.samples import open_samples
from segpipe.export import publish
from segpipe.export.dataset import GateInputs, check_set
from segpipe.export.verify_report import ExportReport
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config, to_mapping
from segpipe.settings.groups import ExportConfig
from segpipe.train import checkpoint
from segpipe.train.checkpoint import TrainedNetwork

NUM_CLASSES = 5
CLASSES = ClassTable(
    name="toy",
    names=tuple(f"class_{index}" for index in range(NUM_CLASSES)),
    palette=tuple((50 * index, 255 - 50 * index, 128) for index in range(NUM_CLASSES)),
    train_ids={index: index for index in range(NUM_CLASSES)},
)


def structured(count: int, size: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    """Colored blobs with noise: neighbouring pixels resemble each other, as in a photograph."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (count, 6, 9, 3), dtype=np.uint8)
    smooth = (
        cv2.resize(image, size[::-1], interpolation=cv2.INTER_CUBIC) for image in coarse
    )
    return [
        np.clip(image + generator.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
        for image in smooth
    ]


SIZE = (64, 96)
IMAGES = structured(4, SIZE)
NAMES = [f"scene_{index}" for index in range(4)]
BOTH = ("onnx", "torchscript")


class Tiny(SegmentationNet):
    """A network that converts quickly, for tests that do not depend on the network."""

    output_stride = 4

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 5, 4, 2), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.classifier = nn.Conv2d(8, num_classes, 3, padding=1)
        self.train_only = nn.ModuleDict({"aux": nn.Conv2d(8, num_classes, 1)})

    def logits(self, image: torch.Tensor, *, aux: bool) -> dict[str, torch.Tensor]:
        return {"main": self.classifier(self.body(image))}


def tiny_network(classes: ClassTable = CLASSES) -> TrainedNetwork:
    """The same network at every call."""
    model = Tiny(classes.num_classes).eval()
    return TrainedNetwork(
        model, Preprocess(), Config(), classes, ema_digest="4567", step=7
    )


def trained_network(
    name: str, size: tuple[int, int], classes: ClassTable = CLASSES
) -> TrainedNetwork:
    """A network whose BatchNorms have seen images and have weights of their own, as after a training."""
    torch.manual_seed(0)
    model = build_model(name, classes.num_classes).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
            module.momentum = None
    images = torch.from_numpy(np.stack(structured(4, size, seed=1)))
    with torch.no_grad():
        model.logits(Preprocess()(images), aux=True)
        spread = model.eval()(Preprocess()(images)).std()
    for name_of, module in model.named_modules():
        if (
            isinstance(module, nn.Conv2d)
            and module.out_channels == classes.num_classes
            and "train_only" not in name_of
        ):
            module.weight.data.mul_(4.0 / spread)
            nn.init.normal_(module.bias, 0.0, 0.1)
    config = Config()
    config.model.name = name
    config.export.images = 4
    return TrainedNetwork(
        model.eval(), Preprocess(), config, classes, ema_digest="0123abcd", step=7
    )


SCENES = 40  # of the validation split of a written run


def scenes(size: tuple[int, int] = SIZE) -> Config:
    """The configuration of a run on synthetic scenes."""
    config = Config()
    config.data.size, config.data.num_val, config.data.num_train = list(size), SCENES, 4
    config.train.steps = 7
    return config


def write_run(
    folder: Path,
    make: Callable[[ClassTable], TrainedNetwork],
    config: Config | None = None,
) -> Path:
    """The folder of a run on synthetic scenes, or as `config` says, with last.pt of the network that `make` gives for
    their classes."""
    config = config or scenes()
    trained = make(open_samples(config.data, "val", 0).classes)
    weights = trained.model.state_dict()
    folder.mkdir(parents=True)
    checkpoint.save(
        folder / "last.pt",
        {
            "step": 7,
            "config": to_mapping(config),
            "classes": asdict(trained.classes),
            "fingerprint": {},
            "model": weights,
            "ema": weights,
            "optimizer": {},
            "scaler": {},
            "best_miou": 0.0,
        },
    )
    # Else the export would ask git, whose answer may change between two exports.
    (folder / "result.json").write_text(
        json.dumps({"git": {"commit": "0123456789abcdef", "dirty": False}})
    )
    return folder


def export_run(
    trained: TrainedNetwork,
    images: Sequence[np.ndarray],
    out_dir: Path,
    formats: Sequence[str] = BOTH,
    *,
    names: Sequence[str] = (),
    labelled: Any = None,
    settings: ExportConfig | None = None,
    **given: Any,
) -> ExportReport:
    """The export of these images, called image_000000 and so on without names."""
    settings = replace(settings or ExportConfig(), formats=list(formats))
    names = names or [f"image_{index:06d}" for index in range(len(images))]
    inputs = GateInputs(check_set(images, names), labelled, settings)
    return publish.export_run(trained, inputs, out_dir, **given)


FEW = ("export.images=2", "export.quality_images=4")


def export(run: Path, folder: Path, *arguments: str) -> int:
    """Exit code of `segpipe export`, on few images unless told otherwise."""
    with scenes_painted_once():
        return segpipe(
            ["export", f"run={run}", f"export.dir={folder}", *FEW, *arguments]
        )


def verify(run: Path, folder: Path, *arguments: str) -> int:
    """Exit code of `segpipe verify`, on few images unless told otherwise."""
    with scenes_painted_once():
        return segpipe(["verify", f"run={run}", f"artifact={folder}", *FEW, *arguments])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Of what a command printed."""
    captured = capsys.readouterr()
    return (captured.err or captured.out).strip().splitlines()[-1]


class FakeSamples:
    """`sizes[i]` is the (height, width) of image i."""

    def __init__(self, images: list[np.ndarray]) -> None:
        self.images = images
        self.classes = CLASSES

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"scene_{index}"

    def size(self, index: int) -> tuple[int, int]:
        height, width, _ = self.images[index].shape
        return height, width

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.images[index], np.zeros(
            self.images[index].shape[:2], dtype=np.uint8
        )
