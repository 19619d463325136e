"""A run or an exported folder as one thing: an image of any size in, class ids and their confidence out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from segpipe.distributed.health import is_out_of_memory
from segpipe.errors import ConfigError, ExportMismatch, IntegrityError, OutOfMemory
from segpipe.files import sha256
from segpipe.predict.inference import Inference, Size, answers, segment
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


def of_network(
    trained: TrainedNetwork, device: torch.device, how: Inference
) -> Predictor:
    """The averaged network of a run."""
    parts = trained.model.to(device), trained.preprocess.to(device)
    classes = trained.classes

    def batch(images: Sequence[Pixels]) -> torch.Tensor:
        return torch.from_numpy(np.stack(images)).to(device)

    def predict(image: Pixels) -> Answer:
        ids, confidence = answers(*parts, batch([image]), how)
        return ids[0].cpu().numpy(), confidence[0].cpu().numpy()

    def ids_of(images: Sequence[Pixels]) -> list[Pixels]:
        try:
            return list(segment(*parts, batch(images), how).cpu().numpy())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            height, width, _ = images[0].shape
            raise OutOfMemory(
                f"{len(images)} images of {height}x{width} do not fit into the memory of {device}. Set a smaller "
                f"batch=, or cut them with tile=, for example tile=512x1024."
            ) from error

    return Predictor(
        predict,
        ids_of,
        classes.names,
        classes.palette,
        {"ema_digest": trained.ema_digest, "step": trained.step},
        {**how.described, "precision": how.precision},
    )


def of_exported(
    folder: Path,
    *,
    precision: str = "fp32",
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
) -> Predictor:
    """The file of an exported folder, after it repeated its golden frames on this machine.

    An image of a size that the file takes is answered as a robot answers it. Any other one is scaled to the exported
    size, and its mask back.

    Raises IntegrityError for an altered or foreign folder, ExportMismatch when its file gives other answers on this
    machine than where it was exported, ConfigError for a provider that is not there, or for a run.
    """
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise ConfigError(
            f"provider = {provider}, but this onnxruntime has {', '.join(available)}. Choose one of them."
        )
    is_run = any((folder / name).is_file() for name in ("config.json", "last.pt"))
    if is_run and not (folder / MANIFEST).is_file():
        raise ConfigError(
            f"artifact = {folder} is a run. Set artifact={folder / 'export'}, which segpipe export writes, or "
            f"run={folder}."
        )
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

    scaled: list[Size] = []

    def predict(image: Pixels) -> Answer:
        if not artifact.shapes.fits(image.shape) and not scaled:
            height, width, _ = artifact.shapes.frame
            scaled.append((height, width))
            print(
                f"images of other sizes than {height}x{width} are scaled to it, and their masks back",
                file=sys.stderr,
            )
        return _answer(artifact, session, image)

    classes = artifact.manifest["classes"]
    return Predictor(
        predict,
        lambda images: [predict(image)[0] for image in images],
        tuple(entry["name"] for entry in classes),
        tuple(tuple(entry["color"]) for entry in classes),
        {
            "ema_digest": artifact.manifest["source"]["ema_digest"],
            "artifact": artifact.model_id,
            "manifest_sha256": sha256(folder / MANIFEST),
        },
        {"precision": precision},
    )


def _answer(artifact: Artifact, session: Session, image: Pixels) -> Answer:
    """Class ids and their probability, which the file gives in 255 steps at its output stride."""
    size = (image.shape[0], image.shape[1])
    if not artifact.shapes.fits(image.shape):
        height, width, _ = artifact.shapes.frame
        shrinks = size[0] * size[1] > height * width
        kind = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        image = _scaled(image, (height, width), kind)
    ids, confidence = session.run(np.ascontiguousarray(image))
    full = _scaled(confidence, size, cv2.INTER_NEAREST)
    ids = _scaled(ids, size, cv2.INTER_NEAREST)
    return ids, np.divide(full, 255, dtype=np.float32)


def _scaled(array: NDArray[Any], size: Size, kind: int) -> NDArray[Any]:
    """The array at (height, width) `size`, which OpenCV counts the other way round."""
    if array.shape[:2] == size:
        return array
    return np.asarray(cv2.resize(array, (size[1], size[0]), interpolation=kind))
