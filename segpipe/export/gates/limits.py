"""The gates: what was compared against the limits, as verdicts in a line each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from segpipe.export.gates.comparison import Comparison, Sigma

MAX_CLASSES = 255  # ids 0..254: 255 in a mask says "no answer"


@dataclass(frozen=True)
class Limits:
    """How far a file may be from the reference; None where it is measured and not judged."""

    logits_sigma: float | None = 1e-3  # largest difference of a logit
    agreement: float = 0.9999  # equal pixels of the whole check set
    image_agreement: float | None = 0.999  # equal pixels of each image
    margin_sigma: float | None = 2e-3  # a pixel may differ where the reference's two best classes are this close
    confidence_levels: int | None = 1  # rounding
    normalised: float = 1e-5  # largest difference of the normalised image
    miou_points: float = 0.01  # that mIoU may fall, in points of 100; and rise, with `both_ways`
    class_points: float | None = 0.05  # the same for each class
    critical_points: float | None = None  # that a class of export.critical_classes may fall
    both_ways: bool = True
    relative_latency: float | None = None  # p50 over that of the fp32 file


FP32 = Limits()
LIMITS = {
    "fp32": FP32,
    "fp16": Limits(
        logits_sigma=3e-2,
        agreement=0.995,
        image_agreement=None,
        margin_sigma=6e-2,
        confidence_levels=None,
        miou_points=0.1,
        class_points=None,
        both_ways=False,
    ),
    "int8": Limits(
        logits_sigma=None,
        agreement=0.97,
        image_agreement=None,
        margin_sigma=None,
        confidence_levels=None,
        miou_points=1.0,
        class_points=None,
        critical_points=2.0,
        both_ways=False,
        relative_latency=0.9,
    ),
}


@dataclass(frozen=True)
class GateResult:
    """A gate's verdict; `message` says in a line what was found, and against which limit when it failed."""

    name: str
    passed: bool
    figures: dict[str, Any]
    message: str


def gate_integrity(problems: Sequence[str]) -> GateResult:
    """G1: the file is whole, alone, loadable, and what the manifest says."""
    message = "checker, loader and manifest agree" if not problems else f"G1 integrity: {'; '.join(problems)}"
    return GateResult("G1 integrity", not problems, {"problems": list(problems)}, message)


def gate_logits(
    comparisons: Sequence[Comparison], sigma: Sigma, limits: Limits = FP32, foreign: Sequence[str] = ()
) -> GateResult:
    """G2: no logit is further from the reference's than `limits.logits_sigma`, none is NaN or infinite.

    `foreign` names stored tensors that are not those of the trained network: a file with one fails.
    """
    worst = max(comparisons, key=lambda entry: entry.relative(sigma))
    relative, limit = worst.relative(sigma), limits.logits_sigma
    figures = {
        "max_sigma": relative if math.isfinite(relative) else None,
        "limit_sigma": limit,
        "worst": worst.name,
    }
    passed = math.isfinite(relative) and (limit is None or relative <= limit) and not foreign
    if passed:
        message = f"largest difference {relative:.1e} sigma" + ("" if limit is not None else ", not judged")
    elif math.isfinite(relative) and limit is not None and relative > limit:
        message = f"G2 logits differ by {relative:.2g} > {limit:g} sigma (worst: {worst.name})"
    elif math.isfinite(relative):
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        message = f"G2 logits come from other weights: {', '.join(foreign[:3])}{more} differ from the checkpoint's"
    elif math.isfinite(worst.logits_difference):
        message = "G2 logits of the trained network are the same everywhere, which compares with nothing"
    else:
        message = f"G2 logits are NaN or infinite (worst: {worst.name})"
    return GateResult("G2 logits", passed, figures, message)


def gate_mask(comparisons: Sequence[Comparison], sigma: Sigma, limits: Limits = FP32) -> GateResult:
    """G3: masks agree but for pixels at which the reference itself was close to a tie, and confidences to a level."""
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
    failures = [
        text
        for failed, text in (
            (agreement < limits.agreement, f"mask agreement {_percent(agreement, limits.agreement)} {where}"),
            (lowest < image_limit, f"mask agreement {_percent(lowest, image_limit)} {where}"),
            (unexplained > 0, f"mask differs where the reference is {margin:g} sigma from a tie {where}"),
            (levels > levels_limit, f"confidence differs by {levels} > {levels_limit} levels"),
        )
        if failed
    ]
    tie = ", each near a tie" if limits.margin_sigma is not None else ""
    equal = f"{differing} of {pixels} pixels differ{tie}" if differing else "all pixels equal"
    message = f"G3 {failures[0]}" if failures else equal
    return GateResult("G3 mask", not failures, figures, message)


def gate_preprocessing(comparisons: Sequence[Comparison], limits: Limits = FP32) -> GateResult:
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
    return GateResult("G4 preprocessing", passed, figures, message)


def gate_latency(
    p50_ms: float, *, budget_ms: float, fp32_p50_ms: float | None = None, limits: Limits = FP32
) -> GateResult:
    """Latency: p50 on one thread within `budget_ms` (0 for none), and within the share of the fp32 file's it may take.

    The figures hold limits alone: equal exports have equal reports but for `latency`.
    """
    share = limits.relative_latency if fp32_p50_ms is not None else None
    figures = {"budget_ms": budget_ms, "share_of_fp32": share}
    if 0 < budget_ms < p50_ms:
        message = f"latency p50 {p50_ms:.1f} ms > {budget_ms:g} ms of export.latency_budget_ms, 1 thread"
    elif share is not None and fp32_p50_ms is not None and p50_ms > share * fp32_p50_ms:
        message = f"latency p50 is {p50_ms / fp32_p50_ms:.2f} > {share:g} of the fp32 file's: no win, so no file"
    else:
        limit = f"within {budget_ms:g} ms" if budget_ms else "no budget"
        return GateResult("latency", True, figures, limit + (f", at most {share:g} of fp32" if share else ""))
    return GateResult("latency", False, figures, message)


def _percent(share: float, limit: float) -> str:
    # Rounded down, so that 99.9899 % is not printed as 99.99 % < 99.99 %.
    return f"{math.floor(share * 1e4) / 100:.2f} % < {limit * 100:g} %"
