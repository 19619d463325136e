"""A run or an exported folder as one thing: an image of any size in, class ids and their confidence out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.distributed.watch.health import is_out_of_memory
from segpipe.errors import ConfigError, ExportMismatch, IntegrityError, OutOfMemory
from segpipe.files import sha256
from segpipe.predict.inference import Inference, answers, segment
from segpipe.predict.tiles import Size, Tiling
from segpipe.runtime.artifact import (
    MANIFEST,
    Artifact,
    ArtifactError,
    SelfTestError,
    UnusableError,
    read_artifact,
)
from segpipe.runtime.engines import EngineError
from segpipe.runtime.session import Session

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

Pixels = NDArray[np.uint8]
Answer = tuple[Pixels, NDArray[np.float32]]  # ids (H, W), their probability (H, W)


@dataclass(frozen=True)
class Predictor:
    """A network that answers images, and what its answers depend on."""

    predict: Callable[[Pixels], Answer]  # of an image (H, W, 3)
    segment: Callable[[Sequence[Pixels]], list[Pixels]]  # ids of images of one size
    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    model: dict[str, Any]  # digests of the network
    settings: dict[str, Any]  # of the inference
    note: Callable[[], str] = str  # what to say at the end
    # (256,): what is written for each class id, in place of itself.
    raw_ids: Pixels | None = None


def of_network(
    trained: TrainedNetwork, device: torch.device, how: Inference, *, raw: bool = False
) -> Predictor:
    """The averaged network of a run; with `raw`, masks hold the ids of the data set's masks."""
    network = _Network(trained, device, how)
    classes = trained.classes
    return Predictor(
        network.predict,
        network.segment,
        classes.names,
        classes.palette,
        {"weights_digest": trained.weights_digest, "step": trained.step},
        {
            **how.described,
            "precision": how.precision,
            "ids": "raw" if raw else "train",
        },
        raw_ids=raw_ids(classes.train_ids, classes.num_classes) if raw else None,
    )


class _Network:
    """The network of a run on a device."""

    def __init__(
        self, trained: TrainedNetwork, device: torch.device, how: Inference
    ) -> None:
        self._parts = trained.model.to(device), trained.preprocess.to(device)
        self._device = device
        self._how = how
        self._most = trained.config.data.max_pixels

    def predict(self, image: Pixels) -> Answer:
        ids, confidence = answers(*self._parts, self._batch([image]), self._how)
        return ids[0].cpu().numpy(), confidence[0].cpu().numpy()

    def segment(self, images: Sequence[Pixels]) -> list[Pixels]:
        height, width, _ = images[0].shape
        try:
            ids = segment(*self._parts, self._batch(images), self._how)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"{len(images)} images of {height}x{width} do not fit into the memory of {self._device}. Set a smaller "
                f"batch=, or cut them with tile=, for example tile=512x1024."
            ) from error
        return list(ids.cpu().numpy())

    def _batch(self, images: Sequence[Pixels]) -> torch.Tensor:
        height, width, _ = images[0].shape
        if height * width > self._most and self._how.tile is None:
            print(
                f"warning: an image of {height}x{width} has more pixels than data.max_pixels = {self._most}. As a "
                f"whole it takes minutes and gigabytes: cut such images with tile=, for example tile=1024x1024.",
                file=sys.stderr,
            )
            self._most = sys.maxsize  # said once
        return torch.from_numpy(np.stack(images)).to(self._device)


def raw_ids(train_ids: Mapping[int, int], num_classes: int) -> Pixels:
    """The smallest raw id of each class, uint8 (256,). Raises ConfigError for a class that has none from 0 to 255."""
    found = np.full(256, IGNORE_INDEX, np.uint8)
    missing = set(range(num_classes))
    for raw, train in sorted(train_ids.items(), reverse=True):
        if train != IGNORE_INDEX and 0 <= raw < 256:
            found[train] = raw
            missing.discard(train)
    if missing:
        raise ConfigError(
            "ids = raw, but a class of this run has no id from 0 to 255 in the class table. Leave it out."
        )
    return found


class Exported:
    """The file of an exported folder, after it repeated its golden frames on this machine.

    An image of a size that the file takes is answered as a robot answers it. Any other one is cut into tiles of `tile`
    (the exported size if None), and each pixel gets its id from the tile in which it lies farthest from the edges; an
    image smaller than a tile is padded by its edge pixels. With `resize`, it is scaled to that size and its mask back.
    """

    def __init__(
        self,
        artifact: Artifact,
        session: Session,
        *,
        tile: Size | None,
        overlap: float,
        resize: bool,
    ) -> None:
        height, width, _ = artifact.shapes.frame
        self.artifact = artifact
        self.tile: Size = tile or (height, width)
        self.overlap = overlap
        self.fit = "resize" if resize else "tile"
        self._refitted = 0  # images of sizes that the file does not take
        self._session = session
        if not artifact.shapes.fits((*self.tile, 3)):
            raise ConfigError(
                f"tile = {self.tile[0]}x{self.tile[1]}, but the file in {artifact.folder} takes images of "
                f"{artifact.shapes.describe()}. Leave tile out."
            )

    def predict(self, image: Pixels) -> Answer:
        """Class ids and their probability, which the file gives in 255 steps at its output stride."""
        if self.artifact.shapes.fits(image.shape):
            return self._run(image)
        self._refitted += 1
        return self._resized(image) if self.fit == "resize" else self._in_tiles(image)

    def note(self) -> str:
        """How images of other sizes were answered; empty if there were none."""
        if not self._refitted:
            return ""
        how = {
            "resize": "scaled to it (fit=resize; fit=tile cuts",
            "tile": "cut into tiles of it (fit=tile; fit=resize scales",
        }[self.fit]
        return (
            f"{self._refitted} images or frames do not have the size {self.tile[0]}x{self.tile[1]} that the exported "
            f"file answers. They were {how} them instead)."
        )

    def _run(self, image: Pixels) -> Answer:
        mask, confidence = self._session.run(np.ascontiguousarray(image))
        size = image.shape[:2]
        full = _scaled(confidence, size, cv2.INTER_NEAREST)
        ids = _scaled(mask, size, cv2.INTER_NEAREST)  # export.mask_stride
        return ids, np.divide(full, 255, dtype=np.float32)

    def _resized(self, image: Pixels) -> Answer:
        shrinks = image.shape[0] * image.shape[1] > self.tile[0] * self.tile[1]
        kind = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        ids, confidence = self._run(_scaled(image, self.tile, kind))
        size = image.shape[:2]
        return (
            _scaled(ids, size, cv2.INTER_NEAREST),
            _scaled(confidence, size, cv2.INTER_NEAREST),
        )

    def _in_tiles(self, image: Pixels) -> Answer:
        size = height, width = image.shape[:2]
        rows, columns = max(0, self.tile[0] - height), max(0, self.tile[1] - width)
        image = np.pad(image, ((0, rows), (0, columns), (0, 0)), mode="edge")
        padded = height + rows, width + columns
        tiling = Tiling.of(padded, self.tile, self.overlap)
        # They rise up to the middle, so that no two tie.
        weights = replace(tiling, overlap=1.0).weights()
        ids = np.zeros(padded, np.uint8)
        confidence, best = np.zeros((2, *padded), np.float32)
        for strip in tiling.strips():
            for left in strip.lefts:
                place = np.s_[
                    strip.top : strip.top + self.tile[0], left : left + self.tile[1]
                ]
                better = weights > best[place]
                tile_ids, tile_confidence = self._run(image[place])
                ids[place][better] = tile_ids[better]
                confidence[place][better] = tile_confidence[better]
                best[place][better] = weights[better]
        return ids[: size[0], : size[1]], confidence[: size[0], : size[1]]


def _scaled(array: NDArray[Any], size: Sequence[int], kind: int) -> NDArray[Any]:
    """The array at (height, width) `size`, which OpenCV counts the other way round."""
    return np.asarray(cv2.resize(array, (size[1], size[0]), interpolation=kind))


def load_exported(
    folder: Path,
    *,
    precision: str = "fp32",
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
    tile: Size | None = None,
    overlap: float = 0.25,
    resize: bool = False,
) -> Exported:
    """The exported folder, ready to answer.

    Raises IntegrityError for an altered or foreign folder, ExportMismatch when its file gives other answers on this
    machine than where it was exported, ConfigError for a provider or a tile that does not fit, or for a run.
    """
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise ConfigError(
            f"provider = {provider}, but this onnxruntime has {', '.join(available)}. Choose one of them."
        )
    _check_is_no_run(folder)
    try:
        artifact = read_artifact(folder, precision=precision)
        session = Session(artifact, threads=threads, providers=(provider,))
        session.self_test()
    # EngineError: for example an onnxruntime that is too old for the file.
    except (EngineError, UnusableError) as error:
        raise ConfigError(str(error)) from error
    except SelfTestError as error:
        raise ExportMismatch(str(error)) from error
    except ArtifactError as error:
        raise IntegrityError(str(error)) from error
    return Exported(artifact, session, tile=tile, overlap=overlap, resize=resize)


def _check_is_no_run(folder: Path) -> None:
    is_run = (folder / "config.json").is_file() or (folder / "last.pt").is_file()
    if (folder / MANIFEST).is_file() or not is_run:
        return
    exported = folder / "export"
    fix = f"Export it first: segpipe export run={folder}"
    if exported.is_dir():
        fix = f"Set artifact={exported}"
    raise ConfigError(
        f"artifact = {folder} is a run, but the folder of its export was needed. {fix}; or run={folder}."
    )


def of_exported(exported: Exported, *, precision: str) -> Predictor:
    """The file of an exported folder."""
    manifest, folder = exported.artifact.manifest, exported.artifact.folder
    classes = manifest["classes"]
    return Predictor(
        exported.predict,
        lambda images: [exported.predict(image)[0] for image in images],
        tuple(entry["name"] for entry in classes),
        tuple(tuple(entry["color"]) for entry in classes),
        {
            "weights_digest": manifest["source"]["weights_digest"],
            "artifact": exported.artifact.model_id,
            "manifest_sha256": sha256(folder / MANIFEST),
        },
        {
            "tile": "x".join(map(str, exported.tile)),
            "fit": exported.fit,
            "overlap": exported.overlap,
            "precision": precision,
        },
        exported.note,
    )
