"""Temperature scaling: makes the confidence, softmax of logits / temperature, as accurate as it claims to be.

Source: Guo et al., On Calibration of Modern Neural Networks, arXiv:1706.04599.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

from segpipe import IGNORE_INDEX
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key

if TYPE_CHECKING:
    from segpipe.export.graph.profiles import Image
    from segpipe.train.checkpoint import TrainedNetwork

PIXELS = 2048  # per image, so that a large data set fits into memory
BINS = 15
LOWEST, HIGHEST = 0.02, 50.0  # temperature
_EXACT = 1e-9  # relative error of the fit
_SAME = 1e-3  # relative: what another processor may change
_SAMPLE = 1.5  # factor: what another number of labelled images may change

Logits = NDArray[np.float32]
Target = NDArray[np.uint8]


@dataclass(frozen=True)
class Calibration:
    """The fitted temperature, and the expected calibration error (0 to 1) at temperature 1 and at the fitted one."""

    temperature: float
    ece_before: float
    ece_after: float
    images: int


def calibration_entry(
    trained: TrainedNetwork, labelled: Iterable[tuple[Image, Target]] | None
) -> dict[str, Any]:
    """`calibration` of the manifest; without labels, temperature 1. Call it inside `one_thread`."""
    if labelled is None:
        return {"method": "none", "temperature": 1.0}
    fitted = fit_temperature(_logits(trained, labelled), ignore_index=IGNORE_INDEX)
    return {"method": "temperature", **asdict(fitted)}


def calibration_problems(
    claimed: Mapping[str, Any], fitted: Mapping[str, Any], *, without_data: bool = False
) -> tuple[list[str], str]:
    """What is wrong with `calibration` of a manifest, and why it could not be fitted again, if it could not.

    fitted: what `calibration_entry` gives now. without_data: whether the manifest says that it was exported without.
    """
    temperature, wanted = claimed["temperature"], fitted["temperature"]
    if claimed["method"] == "none":
        if temperature != 1.0:
            return [
                f"calibration.temperature = {temperature}, but it was not fitted"
            ], ""
        known = fitted["method"] != "none" and not without_data
        return (
            [f"calibration.method = none, but the labelled images give {wanted}"]
            if known
            else []
        ), ""
    if not LOWEST <= temperature <= HIGHEST:
        return [
            f"calibration.temperature = {temperature} is not within {LOWEST} to {HIGHEST}"
        ], ""
    claimed_images, images = claimed.get("images"), fitted.get("images", "no")
    wrong = [
        f"calibration.temperature = {temperature}, but the {images} labelled images give {wanted}"
    ]
    if claimed_images != images:
        # They say how many were used: no number of images may excuse another temperature altogether.
        far = (
            fitted["method"] != "none"
            and not 1 / _SAMPLE <= temperature / wanted <= _SAMPLE
        )
        reason = f"the temperature was fitted on {claimed_images} labelled images, and there are {images} here"
        return (wrong, "") if far else ([], reason)
    if not abs(temperature - wanted) <= _SAME * wanted:
        return wrong, ""
    errors = [
        name
        for name in ("ece_before", "ece_after")
        if not abs(claimed[name] - fitted[name]) <= _SAME
    ]
    return [
        f"calibration.{name} = {claimed[name]}, but the labelled images give {fitted[name]}"
        for name in errors
    ], ""


def fit_temperature(
    logits_and_targets: Iterable[tuple[Logits, Target]], *, ignore_index: int
) -> Calibration:
    """Temperature in 0.02..50 with the least negative log-likelihood of the targets.

    Shapes: logits float32 (C, h, w) at the output stride, where the exported file computes its confidence; target
    uint8 (H, W), read at the pixel in the center of each cell. At most 2048 labelled pixels per image are used, drawn
    by the index of the image only. Raises DataError when no pixel is labelled, a target is no class, or logits are not
    finite.
    """
    scores: list[NDArray[np.float64]] = []
    labels: list[NDArray[np.int64]] = []
    for index, (logits, target) in enumerate(logits_and_targets):
        score, label = _pixels(index, logits, target, ignore_index)
        scores.append(score)
        labels.append(label)
    if not sum(map(len, labels)):
        raise DataError(
            f"{len(labels)} images have no labelled pixel, but the confidence is calibrated on labels. Choose a "
            "data.split with labels."
        )
    score, label = np.concatenate(scores), np.concatenate(labels)
    temperature = _most_likely(score, label)
    before, after = (
        calibration_error(score / value, label) for value in (1.0, temperature)
    )
    return Calibration(temperature, before, after, len(labels))


def calibration_error(score: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Expected calibration error of the largest softmax probability. Shapes: logits float64 (n, C), label (n,)."""
    return error_of(in_bins(_softmax(score).max(1), score.argmax(1) == label))


def in_bins(
    confidence: NDArray[np.float64], right: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """By 15 equal bins of confidence, float64 (3, 15): pixels, the sum of their confidence, and how many are right."""
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    weights = (np.ones(len(bins)), confidence, right.astype(np.float64))
    return np.array([np.bincount(bins, weight, BINS) for weight in weights])


def error_of(bins: NDArray[np.float64]) -> float:
    """Mean distance between confidence and accuracy over the bins of `in_bins`, 0 to 1; 0 without a pixel."""
    pixels, confidence, right = bins
    return float(np.abs(confidence - right).sum() / max(pixels.sum(), 1))


def at_centers(pixels: NDArray[Any], cells: Sequence[int]) -> NDArray[Any]:
    """The pixel in the center of each of (h, w) `cells`: (H, W) -> (h, w)."""
    places = (
        (2 * np.arange(few) + 1) * many // (2 * few)
        for few, many in zip(cells, pixels.shape, strict=True)
    )
    return pixels[np.ix_(*places)]


def _logits(
    trained: TrainedNetwork, labelled: Iterable[tuple[Image, Target]]
) -> Iterator[tuple[Logits, Target]]:
    device = next(trained.model.parameters()).device
    for image, target in labelled:
        batch = torch.from_numpy(image.copy())[None].to(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            logits = trained.model(trained.preprocess(batch))
        yield logits[0].float().cpu().numpy(), target


def _pixels(
    index: int, logits: Logits, target: Target, ignore_index: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits (n, C) and classes (n,) of the labelled pixels of an image."""
    classes, height, width = logits.shape
    label = at_centers(target, (height, width)).astype(np.int64).ravel()
    place = np.flatnonzero(label != ignore_index)
    if len(place) > PIXELS:
        place = np.sort(
            generator(sample_key(0, 0, index, "calibration")).choice(
                place, PIXELS, replace=False
            )
        )
    label = label[place]
    score = logits.reshape(classes, -1)[:, place].T.astype(np.float64)
    if label.max(initial=0) >= classes:
        raise DataError(
            f"target {index} has class {label.max()}, but the logits have {classes} classes."
        )
    if not np.isfinite(score).all():
        raise DataError(
            f"logits of image {index} are NaN or infinite; no temperature can be fitted."
        )
    return score, label


def _most_likely(score: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """The zero of the loss's slope in 1 / temperature, in which the loss is convex; an end of the scale without one."""
    own = score[np.arange(len(label)), label].mean()

    def slope(temperature: float) -> float:
        return float((_softmax(score / temperature) * score).sum(1).mean() - own)

    if slope(1.0) == 0:
        return 1.0
    if slope(LOWEST) <= 0:
        return LOWEST
    if slope(HIGHEST) >= 0:
        return HIGHEST
    return float(brentq(slope, LOWEST, HIGHEST, xtol=LOWEST * _EXACT, rtol=_EXACT))


def _softmax(score: NDArray[np.float64]) -> NDArray[np.float64]:
    grown = np.exp(score - score.max(1, keepdims=True))
    result: NDArray[np.float64] = grown / grown.sum(1, keepdims=True)
    return result
