"""Golden frames: images with the trained network's answers, to check any machine and any language against."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segpipe.export.gates.comparison import FP32, LIMITS, Check, ImageComparison
from segpipe.export.graph.network import Array, DeployModel, run_eager
from segpipe.native import one_thread

GOLDEN = "golden"  # the folder
_IMAGES = 2
_LOGITS = 64  # values, enough to detect a wrong resize or class order
_PATCH = 16  # rows and columns of the preprocessing example
_DECODERS = 3  # levels by which two JPEG decoders may differ


def golden_entry(checks: Sequence[Check]) -> dict[str, Any]:
    """Entry `golden` of the manifest: names of the frames, and how far fp32 answers of another machine may differ."""
    return {
        "images": [check.name for check in golden_checks(checks)],
        "image_agreement": FP32.image_agreement,
        "confidence_levels": FP32.confidence_levels,
    }


def golden_checks(checks: Sequence[Check]) -> list[Check]:
    """The golden frames: real ones; if there are none, generated ones that are not constant."""
    real = [check for check in checks if check.is_real]
    varied = [check for check in checks if not check.name.startswith("constant")]
    return (real or varied)[:_IMAGES]


def write_golden(model: DeployModel, checks: Sequence[Check], folder: Path) -> None:
    """Writes golden/*.npy below `folder`: the arrays of `golden_arrays`."""
    (folder / GOLDEN).mkdir(exist_ok=True)
    images = np.stack([check.image for check in golden_checks(checks)])
    for name, array in golden_arrays(model, images).items():
        np.save(folder / GOLDEN / f"{name}.npy", array, allow_pickle=False)


def golden_arrays(model: DeployModel, images: Array) -> dict[str, Array]:
    """Arrays by name for frames uint8 (n, H, W, 3), which are the same in every profile.

    image (n, H, W, 3), mask (n, H, W) and, if the profile has it, confidence (n, h, w) uint8; logits float32 (64,)
    at logits_index int64 (64, 4), rows of (image, class, row, column); preprocess_input uint8 (1, 16, 16, 3) from the
    middle of the first image, and preprocess_output float32 (1, 3, 16, 16).
    """
    height, width = images.shape[1:3]
    row = max(0, (height - _PATCH) // 2)
    column = max(0, (width - _PATCH) // 2)
    patch = images[:1, row : row + _PATCH, column : column + _PATCH].copy()

    with one_thread(), torch.no_grad():
        run = run_eager(model)
        answers = [run(image) for image in images]
        normalised = model.preprocess(torch.from_numpy(patch)).numpy()

    logits = np.stack([np.asarray(answer.logits) for answer in answers])
    # The same 64 positions for all logits of this shape
    generator = np.random.Generator(np.random.Philox(key=1))
    places = [generator.integers(0, size, _LOGITS) for size in logits.shape]
    masks = np.stack([answer.mask for answer in answers])

    arrays = {
        "image": images,
        "mask": masks.astype(np.uint8),
        "logits": logits[tuple(places)],
        "logits_index": np.stack(places, axis=1),
        "preprocess_input": patch,
        "preprocess_output": normalised,
    }
    if answers[0].confidence is not None:
        maps = [np.asarray(answer.confidence) for answer in answers]
        arrays["confidence"] = np.stack(maps)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def golden_problems(
    model: DeployModel, folder: Path, checks: Sequence[Check]
) -> Iterator[str]:
    """Differences of golden/ from the golden frames of the check set and the trained network's answers to them.

    The tolerance is that of an fp32 file on another machine.
    """
    try:
        found = {
            path.stem: np.load(path, allow_pickle=False)
            for path in sorted((folder / GOLDEN).glob("*.npy"))
        }
        expected = golden_arrays(model, found["image"])
    # numpy and torch raise many types for arrays that do not fit.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        yield f"{GOLDEN}/ cannot be compared ({reason}). Copy the whole folder again, or export again"
        return
    expected["image"] = np.stack([check.image for check in golden_checks(checks)])
    # One pixel in a thousand of each mask may differ. Arrays without a limit, such as the logit positions, must be
    # equal.
    limits = {
        "image": _DECODERS,
        "confidence": FP32.confidence_levels,
        "logits": FP32.logits_sigma * float(expected["logits"].std()),
        "preprocess_output": FP32.normalised,
    }
    for name, array in expected.items():
        one = found.get(name, np.zeros(0))
        is_close = (one.shape, one.dtype) == (array.shape, array.dtype)
        if is_close:
            close = np.abs(one.astype(np.float64) - array) <= limits.get(name, 0.0)
            agreement = close.reshape(len(close), -1).mean(1)
            lowest = FP32.image_agreement if name == "mask" else 1.0
            is_close = bool((agreement >= lowest).all())
        if not is_close:
            yield f"{GOLDEN}/{name}.npy differs from what the trained network gives"


def golden_figures(
    checks: Sequence[Check], comparisons: Sequence[ImageComparison], precision: str
) -> dict[str, Any]:
    """How far a file of reduced precision is from the golden answers here; other machines may add a small tolerance."""
    names = {check.name for check in golden_checks(checks)}
    golden = [entry for entry in comparisons if entry.name in names]
    share = LIMITS[precision].confidence_share
    return {
        "golden_agreement": min(entry.agreement for entry in golden),
        "golden_confidence_levels": max(
            entry.confidence_levels(share) for entry in golden
        ),
    }
