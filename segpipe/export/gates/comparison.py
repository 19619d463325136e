"""Side-by-side comparison of a file and the trained network, image by image, and the gates on it: G2 to G4.

The reference is the eager deploy model on one CPU thread. Differences of logits are measured in its sigma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from segpipe.errors import listed
from segpipe.export.gates.limits import FP32, GateResult, Limits, Sigma
from segpipe.export.graph.profiles import Answer, Image, Run, Runner

if TYPE_CHECKING:
    from segpipe.export.dataset import Check


@dataclass(frozen=True)
class ImageComparison:
    """One image through reference and file. `margins`: reference top-1 minus top-2 logit at the differing pixels."""

    name: str
    is_real: bool  # from the data set, or a degraded copy
    logits_difference: float  # largest; infinite when either side holds NaN or infinity
    margins: NDArray[np.float32]
    reference_mask: NDArray[Any]
    mask: NDArray[Any]
    # Number of cells by the difference of their confidence in levels; empty where the file has no confidence
    confidence: NDArray[np.int64]
    normalised_difference: float = 0.0  # largest; infinite as above

    def confidence_levels(self, share: float) -> int:
        """Levels within which this share of the cells differs."""
        needed = share * self.confidence.sum()
        return int(np.searchsorted(np.cumsum(self.confidence), needed))

    @property
    def confidence_mean(self) -> float:
        """Mean difference in levels."""
        levels = np.arange(len(self.confidence))
        return float(levels @ self.confidence / max(self.confidence.sum(), 1))

    @property
    def agreement(self) -> float:
        """Share of equal pixels."""
        return 1.0 - self.margins.size / self.mask.size

    def relative(self, sigma: Sigma) -> float:
        """Largest logit difference in sigma; infinite when sigma is 0 or not finite."""
        scale = sigma.of(is_real=self.is_real)
        if not (scale > 0 and math.isfinite(scale)):
            return math.inf
        return self.logits_difference / scale

    def unexplained(self, sigma: Sigma, margin_sigma: float) -> int:
        """Number of differing pixels whose reference was not within `margin_sigma` of a tie; NaN margins count."""
        explained = self.margins <= margin_sigma * sigma.of(is_real=self.is_real)
        return int(np.count_nonzero(~explained))


@dataclass
class Moments:
    """Running count, sum and sum of squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: NDArray[np.float32]) -> None:
        """Adds `values`."""
        self.count += values.size
        self.total += float(values.sum(dtype=np.float64))
        self.squares += float(np.square(values, dtype=np.float64).sum())

    @property
    def sigma(self) -> float:
        """Standard deviation of all values; NaN without any."""
        if self.count == 0:
            return math.nan
        mean = self.total / self.count
        return math.sqrt(max(self.squares / self.count - mean * mean, 0.0))


@dataclass
class Candidate:
    """An opened file and its probe, with the comparisons so far. After an error (`broken`) nothing more is compared."""

    probe: Run
    shipped: Run
    comparisons: list[ImageComparison] = field(default_factory=list)
    broken: str = ""


def as_trained(reference: Run, preprocess: nn.Module) -> Run:
    """`reference`, with the normalised image taken from the training module rather than from its own graph."""

    def run(image: Image) -> Answer:
        with torch.no_grad():
            normalised = preprocess(torch.from_numpy(image.copy())[None])[0].numpy()
        return reference(image)._replace(normalised=normalised)

    return run


def compare(
    reference: Run,
    candidates: Sequence[Candidate],
    checks: Sequence[Check],
    batch_size: int = 1,
) -> Sigma:
    """Sigma of the check set, after filling the comparisons of all candidates.

    Works batch by batch, since full-resolution logits are large. The reference always gets single images; candidates
    get `batch_size` at a time, the last batch possibly fewer.
    """
    everything, real = Moments(), Moments()
    for start in range(0, len(checks), batch_size):
        batch = checks[start : start + batch_size]
        expected = [reference(check.image) for check in batch]
        for check, answer in zip(batch, expected, strict=True):
            assert answer.logits is not None
            everything.add(answer.logits)
            if check.is_real:
                real.add(answer.logits)
        for candidate in candidates:
            if not candidate.broken:
                _compare_batch(batch, expected, candidate)
    return Sigma(everything.sigma, real.sigma if real.count else everything.sigma)


def _compare_batch(
    batch: Sequence[Check], expected: Sequence[Answer], candidate: Candidate
) -> None:
    images = [check.image for check in batch]
    try:
        probed = _answers(candidate.probe, images)
        shipped = _answers(candidate.shipped, images)
        candidate.comparisons += [
            compare_answers(*answers)
            for answers in zip(batch, expected, probed, shipped, strict=True)
        ]
    except (
        Exception
    ) as error:  # the libraries raise many types; a file that does not run is refused
        names = ", ".join(check.name for check in batch)
        candidate.broken = f"{type(error).__name__}: {error} (on {names})"


def _answers(run: Run, images: Sequence[Image]) -> list[Answer]:
    if len(images) == 1:
        return [run(images[0])]
    assert isinstance(run, Runner), "a plain Run takes one image at a time"
    return run.batch(images)


def compare_answers(
    check: Check, expected: Answer, probe: Answer, shipped: Answer
) -> ImageComparison:
    """ImageComparison of one image: logits and normalised image of the probe, mask and confidence of the shipped file.

    Raises ValueError when an answer has another shape than the reference's.
    """
    _require_shapes(expected, probe)
    _require_shapes(expected, shipped)
    assert expected.logits is not None
    # Reference logits at the differing pixels, (C, n), sorted over the classes.
    ranked = np.sort(expected.logits[:, expected.mask != shipped.mask], axis=0)
    margins = ranked[-1] - ranked[-2] if len(ranked) > 1 else ranked[-1]
    confidence = np.zeros(0, dtype=np.int64)
    if expected.confidence is not None and shipped.confidence is not None:
        levels = np.abs(expected.confidence.astype(np.int16) - shipped.confidence)
        confidence = np.bincount(levels.ravel(), minlength=256)
    return ImageComparison(
        name=check.name,
        is_real=check.is_scene,
        logits_difference=_difference(expected.logits, probe.logits),
        margins=margins,
        reference_mask=expected.mask,
        mask=shipped.mask,
        confidence=confidence,
        normalised_difference=_difference(expected.normalised, probe.normalised),
    )


def _require_shapes(expected: Answer, found: Answer) -> None:
    # numpy would broadcast a mask of one row or column.
    for name, wanted, given in zip(Answer._fields, expected, found, strict=True):
        if wanted is not None and given is not None and wanted.shape != given.shape:
            raise ValueError(
                f"{name} has shape {given.shape}, but the reference has {wanted.shape}"
            )


def _difference(
    expected: NDArray[np.float32] | None, found: NDArray[np.float32] | None
) -> float:
    """Largest absolute difference; infinite when a side is missing or not finite."""
    if (
        expected is None
        or found is None
        or not (np.isfinite(expected).all() and np.isfinite(found).all())
    ):
        return math.inf
    return float(np.abs(expected - found).max())


def gate_logits(
    comparisons: Sequence[ImageComparison],
    sigma: Sigma,
    limits: Limits = FP32,
    changed_tensors: Sequence[str] = (),
) -> GateResult:
    """G2: no logit differs by more than `limits.logits_sigma`, and none is NaN or infinite.

    changed_tensors: stored tensors that differ from the checkpoint's; a file with any fails.
    """
    worst = max(comparisons, key=lambda entry: entry.relative(sigma))
    relative, limit = worst.relative(sigma), limits.logits_sigma
    failure = ""
    if not math.isfinite(worst.logits_difference):
        failure = f"are NaN or infinite (worst: {worst.name})"
    elif not math.isfinite(relative):
        failure = "of the trained network are constant, so there is nothing to compare"
    elif not relative <= limit:
        failure = f"differ by {relative:.2g} > {limit:g} sigma (worst: {worst.name})"
    elif changed_tensors:
        failure = f"come from other weights: {listed(changed_tensors, 3)} not as in the checkpoint"
    figures = {
        "max_sigma": _number(relative),
        "limit_sigma": _number(limit),
        "worst": worst.name,
    }
    message = f"largest difference {relative:.1e} sigma"
    if math.isinf(limit):
        message += ", not judged"
    if failure:
        message = f"G2 logits {failure}"
    return GateResult("G2", not failure, figures, message)


def gate_mask(
    comparisons: Sequence[ImageComparison], sigma: Sigma, limits: Limits = FP32
) -> GateResult:
    """G3: masks agree except where the reference itself is close to a tie, and confidence agrees to a level."""
    scenes = [entry for entry in comparisons if entry.is_real] or comparisons
    if not limits.made_images:
        comparisons = scenes

    def unexplained(entry: ImageComparison) -> int:
        return entry.unexplained(sigma, limits.margin_sigma)

    worst = max(comparisons, key=lambda entry: (unexplained(entry), entry.margins.size))
    pixels = sum(entry.mask.size for entry in comparisons)
    differing = sum(entry.margins.size for entry in comparisons)
    agreement = 1.0 - differing / pixels
    lowest = min(entry.agreement for entry in comparisons)
    share = limits.confidence_share
    levels = max(entry.confidence_levels(share) for entry in comparisons)
    mean_level = sum(entry.confidence_mean for entry in scenes) / len(scenes)
    figures = {
        "agreement": agreement,
        "worst_image_agreement": lowest,
        "unexplained_pixels": sum(map(unexplained, comparisons)),
        "confidence_levels": levels,
        "confidence_share": share,
        "confidence_mean": mean_level,
        "worst": worst.name,
        "images": len(comparisons),
    }
    where = f"(worst: {worst.name}, {unexplained(worst)} unexplained pixels)"
    failure = ""
    if not agreement >= limits.agreement:
        failure = f"mask agreement {_percent(agreement, limits.agreement)} {where}"
    elif not lowest >= limits.image_agreement:
        failure = f"mask agreement {_percent(lowest, limits.image_agreement)} {where}"
    elif figures["unexplained_pixels"]:
        failure = f"mask differs where the reference is more than {limits.margin_sigma:g} sigma from a tie {where}"
    elif not levels <= limits.confidence_levels:
        failure = f"confidence differs by {levels} > {limits.confidence_levels} levels at more than {1 - share:.1%}"
    elif not mean_level <= limits.confidence_mean:
        failure = f"confidence differs by {mean_level:.1f} > {limits.confidence_mean:g} levels on average"
    message = "all pixels equal"
    if differing:
        message = f"{differing} of {pixels} pixels differ"
    if differing and math.isfinite(limits.margin_sigma):
        message += ", each near a tie"
    if failure:
        message = f"G3 {failure}"
    return GateResult("G3", not failure, figures, message)


def gate_preprocessing(
    comparisons: Sequence[ImageComparison], limits: Limits = FP32
) -> GateResult:
    """G4: the normalised image inside the graph is the one that training makes of the decoded image."""
    worst = max(comparisons, key=lambda entry: entry.normalised_difference)
    difference, limit = worst.normalised_difference, limits.normalised
    passed = difference <= limit
    figures = {
        "max_difference": _number(difference),
        "limit": limit,
        "worst": worst.name,
    }
    message = f"largest difference of the normalised image {difference:.1e}"
    if not passed:
        message = f"G4 preprocessing differs by {difference:.2g} > {limit:.2g} (worst: {worst.name})"
    return GateResult("G4", passed, figures, message)


def _number(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def _percent(share: float, limit: float) -> str:
    # Rounded down, so that 99.9899 % is not printed as 99.99 % < 99.99 %.
    return f"{math.floor(share * 1e4) / 100:.2f} % < {limit * 100:g} %"
