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
    from segpipe.export.gates.check_set import Check


@dataclass(frozen=True)
class ImageComparison:
    """One image through reference and file. `margins`: reference top-1 minus top-2 logit at the differing pixels."""

    name: str
    is_real: bool
    logits_difference: float  # largest; infinite when either side holds NaN or infinity
    confidence_difference: (
        int  # largest, in grey levels; 0 where the file has no confidence
    )
    margins: NDArray[np.float32]
    reference_mask: NDArray[Any]
    mask: NDArray[Any]
    normalised_difference: float = 0.0  # largest; infinite as above
    confidence_mean: float = 0.0  # mean difference, in grey levels
    is_copy: bool = False  # a degraded copy of a real image

    @property
    def agreement(self) -> float:
        """Share of equal pixels."""
        return 1.0 - self.margins.size / self.mask.size

    def relative(self, sigma: Sigma) -> float:
        """Largest logit difference in sigma; infinite when sigma is 0 or not finite."""
        scale = sigma.of(is_real=self.is_real or self.is_copy)
        return (
            self.logits_difference / scale
            if scale > 0 and math.isfinite(scale)
            else math.inf
        )

    def unexplained(self, sigma: Sigma, margin_sigma: float) -> int:
        """Number of differing pixels whose reference was not within `margin_sigma` of a tie; NaN margins count."""
        return int(
            np.count_nonzero(
                ~(
                    self.margins
                    <= margin_sigma * sigma.of(is_real=self.is_real or self.is_copy)
                )
            )
        )


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
        probed, shipped = (
            _answers(candidate.probe, images),
            _answers(candidate.shipped, images),
        )
        found = [
            compare_answers(*entry)
            for entry in zip(batch, expected, probed, shipped, strict=True)
        ]
    except (
        Exception
    ) as error:  # the libraries raise many types; a file that does not run is refused
        candidate.broken = f"{type(error).__name__}: {error} (on {', '.join(check.name for check in batch)})"
    else:
        candidate.comparisons += found


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
    levels = np.zeros(1)
    if expected.confidence is not None and shipped.confidence is not None:
        levels = np.abs(
            expected.confidence.astype(np.int16) - shipped.confidence.astype(np.int16)
        )
    return ImageComparison(
        name=check.name,
        is_real=check.is_real,
        is_copy=check.is_copy,
        logits_difference=_difference(expected.logits, probe.logits),
        confidence_difference=int(levels.max()),
        confidence_mean=float(levels.mean()),
        margins=margins,
        reference_mask=expected.mask,
        mask=shipped.mask,
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
    is_finite = math.isfinite(relative)
    figures = {
        "max_sigma": relative if is_finite else None,
        "limit_sigma": limit,
        "worst": worst.name,
    }
    passed = is_finite and (limit is None or relative <= limit) and not changed_tensors
    if passed:
        message = f"largest difference {relative:.1e} sigma" + (
            "" if limit is not None else ", not judged"
        )
    elif is_finite and limit is not None and relative > limit:
        message = f"G2 logits differ by {relative:.2g} > {limit:g} sigma (worst: {worst.name})"
    elif is_finite:
        message = f"G2 logits come from other weights: {listed(changed_tensors, 3)} not as in the checkpoint"
    elif math.isfinite(worst.logits_difference):
        message = "G2 logits of the trained network are constant, so there is nothing to compare"
    else:
        message = f"G2 logits are NaN or infinite (worst: {worst.name})"
    return GateResult("G2", passed, figures, message)


def gate_mask(
    comparisons: Sequence[ImageComparison], sigma: Sigma, limits: Limits = FP32
) -> GateResult:
    """G3: masks agree except where the reference itself is close to a tie, and confidence agrees to a level."""
    if not limits.made_images:
        comparisons = [
            entry for entry in comparisons if entry.is_real or entry.is_copy
        ] or comparisons
    margin = limits.margin_sigma if limits.margin_sigma is not None else math.inf
    levels_limit = (
        limits.confidence_levels if limits.confidence_levels is not None else math.inf
    )
    image_limit = limits.image_agreement or 0.0
    worst = max(
        comparisons,
        key=lambda entry: (entry.unexplained(sigma, margin), entry.margins.size),
    )
    pixels = sum(entry.mask.size for entry in comparisons)
    differing = sum(entry.margins.size for entry in comparisons)
    agreement = 1.0 - differing / pixels
    lowest = min(entry.agreement for entry in comparisons)
    unexplained = sum(entry.unexplained(sigma, margin) for entry in comparisons)
    levels = max(entry.confidence_difference for entry in comparisons)
    real = [
        entry for entry in comparisons if entry.is_real or entry.is_copy
    ] or comparisons
    mean_level = sum(entry.confidence_mean for entry in real) / len(real)
    mean_limit = (
        limits.confidence_mean if limits.confidence_mean is not None else math.inf
    )
    figures = {
        "agreement": agreement,
        "worst_image_agreement": lowest,
        "unexplained_pixels": unexplained,
        "confidence_levels": levels,
        "confidence_mean": mean_level,
        "worst": worst.name,
        "images": len(comparisons),
    }
    where = (
        f"(worst: {worst.name}, {worst.unexplained(sigma, margin)} unexplained pixels)"
    )
    failures = []
    if agreement < limits.agreement:
        failures.append(
            f"mask agreement {_percent(agreement, limits.agreement)} {where}"
        )
    if lowest < image_limit:
        failures.append(f"mask agreement {_percent(lowest, image_limit)} {where}")
    if unexplained:
        failures.append(
            f"mask differs where the reference is more than {margin:g} sigma from a tie {where}"
        )
    if levels > levels_limit:
        failures.append(f"confidence differs by {levels} > {levels_limit} levels")
    if not mean_level <= mean_limit:
        failures.append(
            f"confidence differs by {mean_level:.1f} > {mean_limit:g} levels on average"
        )
    tie = ", each near a tie" if limits.margin_sigma is not None else ""
    equal = (
        f"{differing} of {pixels} pixels differ{tie}"
        if differing
        else "all pixels equal"
    )
    return GateResult(
        "G3", not failures, figures, f"G3 {failures[0]}" if failures else equal
    )


def gate_preprocessing(
    comparisons: Sequence[ImageComparison], limits: Limits = FP32
) -> GateResult:
    """G4: the normalised image inside the graph is the one that training makes of the decoded image."""
    worst = max(comparisons, key=lambda entry: entry.normalised_difference)
    found = worst.normalised_difference
    figures = {
        "max_difference": found if math.isfinite(found) else None,
        "limit": limits.normalised,
        "worst": worst.name,
    }
    passed = found <= limits.normalised
    if passed:
        message = f"largest difference of the normalised image {found:.1e}"
    else:
        message = f"G4 preprocessing differs by {found:.2g} > {limits.normalised:.2g} (worst: {worst.name})"
    return GateResult("G4", passed, figures, message)


def _percent(share: float, limit: float) -> str:
    # Rounded down, so that 99.9899 % is not printed as 99.99 % < 99.99 %.
    return f"{math.floor(share * 1e4) / 100:.2f} % < {limit * 100:g} %"
