"""Common interface to a run or an exported folder: an image in, class ids and their confidence out."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segpipe.distributed.health import is_out_of_memory
from segpipe.errors import (
    ConfigError,
    DataError,
    ExportMismatch,
    IntegrityError,
    OutOfMemory,
)
from segpipe.files import file_sha256
from segpipe.predict.inference import SMALLEST, Inference, answers
from segpipe.runtime.artifact import MANIFEST, ArtifactError, read_artifact
from segpipe.runtime.engines import EngineError
from segpipe.runtime.frames import Pixels, enlarged
from segpipe.runtime.session import Session
from segpipe.train.checkpoint import TrainedNetwork

Answer = tuple[Pixels, NDArray[np.float32]]  # ids (H, W), their probability (H, W)


# By exit code of the runtime's error
_ERRORS = {2: ConfigError, 4: ExportMismatch, 7: IntegrityError}


@dataclass(frozen=True)
class Predictor:
    """A network's predict function, and what its answers depend on."""

    predict: Callable[[Pixels], Answer]  # of an image (H, W, 3)
    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    model: dict[str, Any]  # digests of the network
    settings: dict[str, Any]  # of the inference


def _checked(image: Pixels) -> Pixels:
    """The image in memory as torch needs it: contiguous, unlike BGR[..., ::-1], and writable, unlike Pillow's."""
    if not isinstance(image, np.ndarray):
        raise DataError(
            f"an image of type {type(image).__name__}, but a numpy array was needed."
        )
    if image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise DataError(
            f"an image of {image.dtype} {image.shape}, but uint8 (height, width, 3) in RGB was needed."
        )
    return np.require(image, requirements=["C", "W"])


def of_network(
    trained: TrainedNetwork, device: torch.device, how: Inference
) -> Predictor:
    """Predictor with the averaged network of a run."""
    parts = trained.model.to(device), trained.preprocess.to(device)
    classes = trained.classes

    def predict(image: Pixels) -> Answer:
        image = _checked(image)
        height, width, _ = image.shape
        if min(height, width) < SMALLEST:
            raise DataError(
                f"an image of {height}x{width} is too small: at least {SMALLEST}x{SMALLEST} was needed."
            )
        try:
            batch = torch.from_numpy(image[None]).to(device)
            ids, confidence = answers(*parts, batch, how)
            return ids[0].cpu().numpy(), confidence[0].cpu().numpy()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"an image of {height}x{width} does not fit into the memory of {device}. Leave out larger scales of "
                "tta=, or make the image smaller."
            ) from error

    return Predictor(
        predict,
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
    """Predictor with the ONNX file of an exported folder, after checking its golden frames on this machine.

    Raises IntegrityError for an altered or malformed folder, ExportMismatch when its file gives different answers on
    this machine than where it was exported, ConfigError for a missing provider or precision or a wrong folder. Its
    `predict` raises DataError for an image that does not have the exported size. Prints a warning for an export that is
    not verified.
    """
    try:
        artifact = read_artifact(folder, precision=precision)
        session = Session(artifact, threads=threads, providers=(provider,))
        session.self_test()
    except (ArtifactError, EngineError) as error:
        raise _ERRORS[error.exit_code](str(error)) from error
    if artifact.caveat:
        print(f"warning: {artifact.caveat}", file=sys.stderr)
    height, width, _ = artifact.frame
    corners = artifact.manifest["align_corners"]

    def predict(image: Pixels) -> Answer:
        image = _checked(image)
        if image.shape != artifact.frame:
            raise DataError(
                f"an image of {image.shape[0]}x{image.shape[1]}, but the file takes {height}x{width}. Resize it, or "
                "set run=, which takes any size."
            )
        ids, confidence = session.run(image)
        ids, levels = (
            enlarged(each, height, width, align_corners=corners)
            for each in (ids, confidence)
        )
        return ids, np.divide(levels, 255, dtype=np.float32)

    classes = artifact.manifest["classes"]
    return Predictor(
        predict,
        tuple(entry["name"] for entry in classes),
        tuple(tuple(entry["color"]) for entry in classes),
        {
            "ema_digest": artifact.manifest["source"]["ema_digest"],
            "artifact": artifact.model_id,
            "manifest_sha256": file_sha256(folder / MANIFEST),
        },
        {"precision": precision},
    )
