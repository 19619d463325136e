"""Limits of the gates per precision, and the gates that compare answers: G1 to G4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segpipe.export.gates.comparison import ImageComparison

MAX_CLASSES = 255  # ids 0..254: 255 in a mask means no answer


@dataclass(frozen=True)
class Sigma:
    """Standard deviation of the reference logits over the whole check set, and over its real images.

    It is the unit for differences of logits, since absolute limits do not carry over from one network to the next.
    Real images use their own where it is smaller: untrained weights gave noise and checkerboard 30 times the logits of
    photographs, which would have hidden faults on photographs.
    """

    everything: float
    real: float

    def of(self, *, is_real: bool) -> float:
        """Unit for the differences of an image."""
        return min(self.everything, self.real) if is_real else self.everything


@dataclass(frozen=True)
class Limits:
    """How far a file may be from the reference. None: measured, not judged."""

    logits_sigma: float | None = 1e-3  # largest difference of a logit
    agreement: float = 0.9999  # equal pixels over the whole check set
    image_agreement: float | None = 0.999  # equal pixels of each image
    margin_sigma: float | None = 2e-3  # a pixel may differ where the reference's top two classes are this close
    confidence_levels: int | None = 1  # rounding
    normalised: float = 1e-5  # largest difference of the normalised image
    miou_points: float = 0.01  # fall of mIoU in points of 100; with `both_ways` also a rise
    class_points: float | None = 0.05  # the same for each class
    critical_points: float | None = None  # fall of a class of export.critical_classes
    both_ways: bool = True
    relative_latency: float | None = None  # p50 over that of the fp32 file


FP32 = Limits()
_REDUCED = Limits(image_agreement=None, margin_sigma=None, confidence_levels=None, class_points=None, both_ways=False)
LIMITS = {
    "fp32": FP32,
    "fp16": replace(_REDUCED, logits_sigma=3e-2, agreement=0.995, margin_sigma=6e-2, miou_points=0.1),
    "int8": replace(
        _REDUCED, logits_sigma=None, agreement=0.97, miou_points=1.0, critical_points=2.0, relative_latency=0.9
    ),
}
TITLES = {
    "G1": "G1 integrity",
    "G2": "G2 logits",
    "G3": "G3 mask",
    "G4": "G4 preprocessing",
    "G5": "G5 quality",
    "G6": "G6 power",
    "latency": "latency",
}


@dataclass(frozen=True)
class GateResult:
    """Verdict of a gate, a key of TITLES. `message` is one line: the finding, and the limit when it failed."""

    gate: str
    passed: bool
    figures: dict[str, Any]
    message: str
    shape: str = ""  # of the images, unless it is the exported one

    @property
    def name(self) -> str:
        """Name in reports, such as `G2 logits, 32x144`."""
        return f"{TITLES[self.gate]}, {self.shape}" if self.shape else TITLES[self.gate]


def gate_integrity(problems: Sequence[str]) -> GateResult:
    """G1: the file is whole, alone, loadable, and what the manifest says."""
    message = f"G1 integrity: {'; '.join(problems)}" if problems else "checker, loader and manifest agree"
    return GateResult("G1", not problems, {"problems": list(problems)}, message)


def gate_logits(
    comparisons: Sequence[ImageComparison], sigma: Sigma, limits: Limits = FP32, changed_tensors: Sequence[str] = ()
) -> GateResult:
    """G2: no logit differs by more than `limits.logits_sigma`, and none is NaN or infinite.

    changed_tensors: stored tensors that differ from the checkpoint's; a file with any fails.
    """
    worst = max(comparisons, key=lambda entry: entry.relative(sigma))
    relative, limit = worst.relative(sigma), limits.logits_sigma
    is_finite = math.isfinite(relative)
    figures = {"max_sigma": relative if is_finite else None, "limit_sigma": limit, "worst": worst.name}
    passed = is_finite and (limit is None or relative <= limit) and not changed_tensors
    if passed:
        message = f"largest difference {relative:.1e} sigma" + ("" if limit is not None else ", not judged")
    elif is_finite and limit is not None and relative > limit:
        message = f"G2 logits differ by {relative:.2g} > {limit:g} sigma (worst: {worst.name})"
    elif is_finite:
        more = f" and {len(changed_tensors) - 3} more" if len(changed_tensors) > 3 else ""
        message = f"G2 logits come from other weights: {', '.join(changed_tensors[:3])}{more} not as in the checkpoint"
    elif math.isfinite(worst.logits_difference):
        message = "G2 logits of the trained network are constant, so there is nothing to compare"
    else:
        message = f"G2 logits are NaN or infinite (worst: {worst.name})"
    return GateResult("G2", passed, figures, message)


def gate_mask(comparisons: Sequence[ImageComparison], sigma: Sigma, limits: Limits = FP32) -> GateResult:
    """G3: masks agree except where the reference itself is close to a tie, and confidence agrees to a level."""
    margin = limits.margin_sigma if limits.margin_sigma is not None else math.inf
    levels_limit = limits.confidence_levels if limits.confidence_levels is not None else math.inf
    image_limit = limits.image_agreement or 0.0
    worst = max(comparisons, key=lambda entry: (entry.unexplained(sigma, margin), entry.margins.size))
    pixels = sum(entry.mask.size for entry in comparisons)
    differing = sum(entry.margins.size for entry in comparisons)
    agreement = 1.0 - differing / pixels
    lowest = min(entry.agreement for entry in comparisons)
    unexplained = sum(entry.unexplained(sigma, margin) for entry in comparisons)
    levels = max(entry.confidence_difference for entry in comparisons)
    figures = {
        "agreement": agreement,
        "worst_image_agreement": lowest,
        "unexplained_pixels": unexplained,
        "confidence_levels": levels,
        "worst": worst.name,
        "images": len(comparisons),
    }
    where = f"(worst: {worst.name}, {worst.unexplained(sigma, margin)} unexplained pixels)"
    failures = []
    if agreement < limits.agreement:
        failures.append(f"mask agreement {_percent(agreement, limits.agreement)} {where}")
    if lowest < image_limit:
        failures.append(f"mask agreement {_percent(lowest, image_limit)} {where}")
    if unexplained:
        failures.append(f"mask differs where the reference is more than {margin:g} sigma from a tie {where}")
    if levels > levels_limit:
        failures.append(f"confidence differs by {levels} > {levels_limit} levels")
    tie = ", each near a tie" if limits.margin_sigma is not None else ""
    equal = f"{differing} of {pixels} pixels differ{tie}" if differing else "all pixels equal"
    return GateResult("G3", not failures, figures, f"G3 {failures[0]}" if failures else equal)


def gate_preprocessing(comparisons: Sequence[ImageComparison], limits: Limits = FP32) -> GateResult:
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
