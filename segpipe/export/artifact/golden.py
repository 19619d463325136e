"""Golden frames: images with the trained network's answers, so that any machine and language can check itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from segpipe.export.gates.limits import FP32, Sigma
from segpipe.export.graph.network import DeployModel, run_eager
from segpipe.native import one_thread

if TYPE_CHECKING:
    from segpipe.export.gates.check_set import Check
    from segpipe.export.gates.comparison import ImageComparison

FOLDER = "golden"
# How far another machine's answers may be from these.
TOLERANCE = {
    "image_agreement": FP32.image_agreement,
    "confidence_levels": FP32.confidence_levels,
}
_IMAGES = 2
_LOGITS = 64
_PATCH = 16
_DECODERS = 3  # levels by which two JPEG decoders may differ


def golden_entry(checks: Sequence[Check]) -> dict[str, Any]:
    """`golden` of the manifest: names of the frames, and the tolerance."""
    return {"images": [check.name for check in _chosen(checks)], **TOLERANCE}


def write_golden(model: DeployModel, checks: Sequence[Check], folder: Path) -> None:
    """Writes golden/*.npy below `folder`: the arrays of `golden_arrays`."""
    (folder / FOLDER).mkdir()
    for name, array in golden_arrays(
        model, np.stack([check.image for check in _chosen(checks)])
    ).items():
        np.save(folder / FOLDER / f"{name}.npy", array, allow_pickle=False)


def golden_arrays(
    model: DeployModel, images: NDArray[np.uint8]
) -> dict[str, NDArray[Any]]:
    """Arrays by name for frames uint8 (n, H, W, 3), the same frames in every profile.

    image (n, H, W, 3), mask (n, H, W) and, where the profile has it, confidence (n, h, w) uint8; logits float32 (64,)
    at logits_index int64 (64, 4), rows of (image, class, row, column); preprocess_input uint8 (1, 16, 16, 3) from the
    middle of the first image, and preprocess_output float32 (1, 3, 16, 16).
    """
    with one_thread(), torch.no_grad():
        run = run_eager(model)
        answers = [run(image) for image in images]
        patch = _middle(images[:1])
        normalised = model.preprocess(torch.from_numpy(patch)).numpy()
    confidence = [
        answer.confidence for answer in answers if answer.confidence is not None
    ]
    logits = np.stack(
        [answer.logits for answer in answers if answer.logits is not None]
    )
    generator = np.random.Generator(np.random.Philox(key=1))
    index = np.stack(
        [generator.integers(0, size, _LOGITS) for size in logits.shape], axis=1
    )
    arrays = {
        "image": images,
        "mask": np.stack([answer.mask for answer in answers]).astype(np.uint8),
        **({"confidence": np.stack(confidence)} if confidence else {}),
        "logits": logits[tuple(index.T)],
        "logits_index": index,
        "preprocess_input": patch,
        "preprocess_output": normalised,
    }
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def golden_problems(
    model: DeployModel, folder: Path, entry: Mapping[str, Any], sigma: Sigma
) -> list[str]:
    """What in golden/ differs from the trained network's answers; `entry` is `golden` of the manifest.

    Answers may differ as far as those of an fp32 file on another machine.
    """
    wrong = [f"golden.{name} = {entry[name]}, but {limit} is required" for name, limit in TOLERANCE.items()
             if entry[name] != limit]  # fmt: skip
    try:
        found = {
            path.stem: np.load(path, allow_pickle=False)
            for path in sorted((folder / FOLDER).iterdir())
        }
        expected = golden_arrays(model, found["image"])
    except (
        Exception
    ) as error:  # numpy and torch raise many types for arrays that do not fit
        return [
            *wrong,
            f"{FOLDER}/ cannot be compared ({type(error).__name__}: {error})",
        ]
    if len(found["image"]) != len(entry["images"]):
        wrong.append(
            f"{FOLDER}/image.npy has {len(found['image'])} frames, but the manifest {len(entry['images'])}"
        )
    return wrong + [
        f"{FOLDER}/{name}.npy differs from what the trained network gives"
        for name in sorted(expected.keys() | found.keys())
        if name not in found
        or name not in expected
        or not _agree(name, expected[name], found[name], sigma)
    ]


def golden_frame_problems(
    folder: Path, manifest: Mapping[str, Any], checks: Sequence[Check]
) -> tuple[list[str], str]:
    """Golden frames that are not those of the check set, and the name of one that is not here to be compared."""
    names, chosen = (
        manifest["golden"]["images"],
        [check.name for check in _chosen(checks)],
    )
    if manifest["check_images"] == [check.name for check in checks] and names != chosen:
        return [f"golden.images = {names}, but they are {chosen}"], ""
    there = {check.name: check.image for check in checks}
    if absent := [name for name in names if name not in there]:
        return [], f"golden frame {absent[0]} is not among the check images here"
    frames = np.load(folder / FOLDER / "image.npy", allow_pickle=False).astype(np.int64)
    expected = np.stack([there[name] for name in names])
    same = (
        frames.shape == expected.shape and np.abs(frames - expected).max() <= _DECODERS
    )
    return (
        []
        if same
        else [f"{FOLDER}/image.npy does not hold the images that golden.images names"]
    ), ""


def _agree(
    name: str, expected: NDArray[Any], found: NDArray[Any], sigma: Sigma
) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if name == "mask":
        return bool(
            (found == expected).mean((1, 2)).min() >= (FP32.image_agreement or 0.0)
        )
    limits = {
        "confidence": FP32.confidence_levels or 0,
        "logits": (FP32.logits_sigma or 0.0) * sigma.everything,
        "preprocess_output": FP32.normalised,
    }
    return bool(
        np.abs(found.astype(np.float64) - expected).max() <= limits.get(name, 0.0)
    )


def golden_figures(
    checks: Sequence[Check], comparisons: Sequence[ImageComparison]
) -> dict[str, Any]:
    """How far a file of reduced precision is from the golden answers here; another machine may be no further."""
    names = {check.name for check in _chosen(checks)}
    found = [entry for entry in comparisons if entry.name in names]
    return {
        "golden_agreement": min(entry.agreement for entry in found),
        "golden_confidence_levels": max(entry.confidence_difference for entry in found),
    }


def _chosen(checks: Sequence[Check]) -> list[Check]:
    """Real frames; without any, generated ones that are not constant."""
    real = [check for check in checks if check.is_real]
    return (
        real or [check for check in checks if not check.name.startswith("constant")]
    )[:_IMAGES]


def _middle(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    row, column = (max(0, (size - _PATCH) // 2) for size in images.shape[1:3])
    return images[:, row : row + _PATCH, column : column + _PATCH].copy()
