"""Limits of the gates per precision, the unit of logits, and the result of a gate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from segpipe.errors import ExportMismatch, IntegrityError, LatencyError, QualityError
from segpipe.export.graph.network import Answer, Image, Run
from segpipe.runtime.artifact import BF16_LEVELS, CONFIDENCE_SHARE

# Gates by id, in the order in which a failure decides the error: title and error.
GATES: dict[str, tuple[str, type[ExportMismatch]]] = {
    "G1": ("G1 integrity", IntegrityError),
    "G2": ("G2 logits", ExportMismatch),
    "G3": ("G3 mask", ExportMismatch),
    "G4": ("G4 preprocessing", ExportMismatch),
    "G6": ("G6 power", ExportMismatch),
    "G5": ("G5 quality", QualityError),
    "latency": ("latency", LatencyError),
}


@dataclass(frozen=True)
class Check:
    """An image of the check set: `is_real` when it comes from the data set.

    is_scene: a real image or a degraded copy of one, which a camera may see.
    """

    name: str
    image: Image
    is_real: bool = True
    is_scene: bool = True


@dataclass(frozen=True)
class Sigma:
    """Standard deviation of the reference logits over the whole check set, and over its real images.

    The unit for logit differences, since absolute limits do not carry over between networks. Real images use the
    smaller of the two: with untrained weights, the logits of noise and checkerboard were 30 times those of photographs,
    which would have hidden faults on photographs.
    """

    everything: float
    real: float

    def of(self, *, is_real: bool) -> float:
        """Unit for the differences of an image."""
        return min(self.everything, self.real) if is_real else self.everything


@dataclass(frozen=True)
class Limits:
    """How far a file may be from the reference. An infinite limit is measured, not judged."""

    logits_sigma: float = 1e-3  # largest difference of a logit
    agreement: float = 0.9999  # equal pixels over the whole check set
    image_agreement: float = 0.999  # equal pixels of each image
    # A pixel may differ where the reference's top two classes are this close.
    margin_sigma: float = 2e-3
    confidence_levels: int = 1  # allowed difference for `confidence_share` of the cells
    confidence_share: float = CONFIDENCE_SHARE["fp32"]  # of the cells of each image
    normalised: float = 1e-5  # largest difference of the normalised image
    # Drop of mIoU, and of each class's IoU, in percentage points; with `both_ways` also a rise
    miou_points: float = 0.01
    class_points: float = 0.05
    critical_points: float = math.inf  # drop of a class in export.critical_classes
    both_ways: bool = True
    # Whether masks of generated images are judged, where any answer of a network is arbitrary
    made_images: bool = True
    relative_latency: float = math.inf  # CPU time divided by that of the fp32 file


FP32 = Limits()
_REDUCED = replace(
    FP32, image_agreement=0.0, class_points=math.inf, both_ways=False, made_images=False
)
LIMITS = {
    "fp32": FP32,
    "fp16": replace(
        _REDUCED,
        logits_sigma=3e-2,
        agreement=0.995,
        margin_sigma=6e-2,
        confidence_levels=2,
        confidence_share=CONFIDENCE_SHARE["fp16"],
        miou_points=0.1,
    ),
    # For an engine. bf16 has three bits fewer than fp16: eight times its limits. fast_scnn after 195 steps on street
    # scenes, in OpenVINO 2026.4: 0.08 sigma, 99.80 % equal, 14 levels
    "bf16": replace(
        _REDUCED,
        logits_sigma=0.24,
        agreement=0.995,
        margin_sigma=0.48,
        confidence_levels=BF16_LEVELS,
        confidence_share=CONFIDENCE_SHARE["bf16"],
        miou_points=0.1,
    ),
    "int8": replace(
        _REDUCED,
        logits_sigma=math.inf,
        agreement=0.97,
        margin_sigma=math.inf,
        # fast_scnn after 500 steps on CamVid: 23 levels
        confidence_levels=32,
        confidence_share=CONFIDENCE_SHARE["int8"],
        miou_points=1.0,
        critical_points=2.0,
        relative_latency=0.9,
    ),
}


@dataclass(frozen=True)
class GateResult:
    """Verdict of a gate (a key of GATES): failed for the reason `failure`, or passed if that is empty."""

    gate: str
    failure: str
    figures: dict[str, Any]
    finding: str

    @property
    def passed(self) -> bool:
        """Whether the gate passed."""
        return not self.failure

    @property
    def message(self) -> str:
        """One line: the finding, or the failure with its limit."""
        return f"{self.gate} {self.failure}" if self.failure else self.finding

    @property
    def name(self) -> str:
        """Name in reports, such as `G2 logits`."""
        title, _ = GATES[self.gate]
        return title


def gate_integrity(problems: Sequence[str]) -> GateResult:
    """G1: the file is intact, loads, and matches the manifest."""
    failure = f"integrity: {'; '.join(problems)}" if problems else ""
    finding = "checker, loader and manifest agree"
    return GateResult("G1", failure, {"problems": problems}, finding)


@dataclass(frozen=True)
class ImageComparison:
    """Reference and file on one image. `margins`: reference top-1 minus top-2 logit at the differing pixels."""

    name: str
    is_real: bool  # from the data set, or a degraded copy
    logits_difference: float  # largest; infinite when either side is not finite
    margins: NDArray[np.float32]
    pixels: int
    # Histogram of the confidence differences of cells, by level; empty when the file has no confidence
    confidence: NDArray[np.int64]
    normalised_difference: float = 0.0  # largest; infinite as above

    def confidence_levels(self, share: float) -> int:
        """Largest difference in levels among this share of the cells."""
        needed = share * self.confidence.sum()
        return int(np.searchsorted(np.cumsum(self.confidence), needed))

    @property
    def agreement(self) -> float:
        """Share of equal pixels."""
        return 1.0 - self.margins.size / self.pixels

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
class Candidate:
    """An opened file and its probe, with the comparisons so far. An error (`broken`) ends the comparison."""

    probe: Run
    shipped: Run
    comparisons: list[ImageComparison] = field(default_factory=list)
    broken: str = ""


def as_trained(reference: Run, preprocess: nn.Module) -> Run:
    """`reference`, with the normalised image taken from the training module instead of its own graph."""

    def run(image: Image) -> Answer:
        with torch.no_grad():
            normalised = preprocess(torch.from_numpy(image.copy())[None])[0].numpy()
        return reference(image)._replace(normalised=normalised)

    return run


def compare(
    reference: Run, candidates: Sequence[Candidate], checks: Sequence[Check]
) -> Sigma:
    """Compares all candidates on these images, adds the results to them, and returns sigma."""
    moments = []
    for check in checks:
        expected = reference(check.image)
        assert expected.logits is not None
        logits = expected.logits.astype(np.float64)
        moments.append((logits.size, logits.sum(), np.square(logits).sum()))
        for candidate in candidates:
            if candidate.broken:
                continue
            try:
                probed = candidate.probe(check.image)
                shipped = candidate.shipped(check.image)
                found = compare_answers(check, expected, probed, shipped)
                candidate.comparisons.append(found)
            # The libraries raise many types; a file that does not run is refused.
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                candidate.broken = f"{reason} (on {check.name})"
    real = [row for row, check in zip(moments, checks, strict=True) if check.is_real]
    return Sigma(_spread(moments), _spread(real or moments))


def _spread(moments: Sequence[tuple[float, ...]]) -> float:
    """Standard deviation from (count, sum, sum of squares) of each image."""
    count, total, squares = np.sum(moments, axis=0)
    return float(np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0.0)))


def compare_answers(
    check: Check, expected: Answer, probe: Answer, shipped: Answer
) -> ImageComparison:
    """ImageComparison of one image: logits and normalised image of the probe, mask and confidence of the shipped file.

    Raises ValueError when the shape of an answer differs from the reference's.
    """
    for found in (probe, shipped):
        for name, one, other in zip(Answer._fields, expected, found, strict=True):
            # numpy would broadcast a mask of one row or column.
            if one is not None and other is not None and one.shape != other.shape:
                raise ValueError(
                    f"{name} has shape {other.shape}, but the reference has {one.shape}"
                )
    assert expected.logits is not None
    # Reference logits at the differing pixels, (C, n), sorted over the classes.
    ranked = np.sort(expected.logits[:, expected.mask != shipped.mask], axis=0)
    confidence = np.zeros(0, dtype=np.int64)
    if expected.confidence is not None and shipped.confidence is not None:
        levels = np.abs(expected.confidence.astype(np.int16) - shipped.confidence)
        confidence = np.bincount(levels.ravel(), minlength=256)
    return ImageComparison(
        name=check.name,
        is_real=check.is_scene,
        logits_difference=_difference(expected.logits, probe.logits),
        margins=ranked[-1] - ranked[-2] if len(ranked) > 1 else ranked[-1],
        pixels=expected.mask.size,
        confidence=confidence,
        normalised_difference=_difference(expected.normalised, probe.normalised),
    )


def _difference(expected: Any, found: Any) -> float:
    """Largest absolute difference; infinite when a side is missing or not finite."""
    if expected is None or found is None:
        return math.inf
    largest = float(np.abs(expected - found).max())
    return largest if math.isfinite(largest) else math.inf


def gate_logits(
    comparisons: Sequence[ImageComparison], sigma: Sigma, limits: Limits = FP32
) -> GateResult:
    """G2: no logit differs by more than `limits.logits_sigma`, and none is NaN or infinite."""
    worst = max(comparisons, key=lambda entry: entry.relative(sigma))
    relative, limit = worst.relative(sigma), limits.logits_sigma
    failure = ""
    if not math.isfinite(worst.logits_difference):
        failure = f"logits are NaN or infinite (worst: {worst.name})"
    elif not math.isfinite(relative):
        failure = (
            "logits of the trained network are constant, so there is nothing to compare"
        )
    elif not relative <= limit:
        failure = (
            f"logits differ by {relative:.2g} > {limit:g} sigma (worst: {worst.name})"
        )
    figures = {"max_sigma": relative, "limit_sigma": limit, "worst": worst.name}
    judged = ", not judged" if math.isinf(limit) else ""
    finding = f"largest difference {relative:.1e} sigma{judged}"
    return GateResult("G2", failure, figures, finding)


def gate_mask(
    comparisons: Sequence[ImageComparison], sigma: Sigma, limits: Limits = FP32
) -> GateResult:
    """G3: masks agree except where the reference is close to a tie, and confidence agrees within its limit."""
    if not limits.made_images:
        scenes = [entry for entry in comparisons if entry.is_real]
        comparisons = scenes or comparisons
    margin, share = limits.margin_sigma, limits.confidence_share
    unexplained = [entry.unexplained(sigma, margin) for entry in comparisons]
    pairs = zip(unexplained, comparisons, strict=True)
    most, worst = max(pairs, key=lambda pair: (pair[0], pair[1].margins.size))
    pixels = sum(entry.pixels for entry in comparisons)
    differing = sum(entry.margins.size for entry in comparisons)
    agreement = 1.0 - differing / pixels
    lowest = min(entry.agreement for entry in comparisons)
    levels = max(entry.confidence_levels(share) for entry in comparisons)

    where = f"(worst: {worst.name}, {most} unexplained pixels)"
    failure = ""
    if not agreement >= limits.agreement:
        failure = f"mask agreement {_percent(agreement, limits.agreement)} {where}"
    elif not lowest >= limits.image_agreement:
        failure = f"mask agreement {_percent(lowest, limits.image_agreement)} {where}"
    elif most:
        failure = f"mask differs where the reference is more than {margin:g} sigma from a tie {where}"
    elif not levels <= limits.confidence_levels:
        failure = f"confidence differs by {levels} > {limits.confidence_levels} levels at more than {1 - share:.1%}"
    figures = {
        "agreement": agreement,
        "worst_image_agreement": lowest,
        "unexplained_pixels": sum(unexplained),
        "confidence_levels": levels,
        "confidence_share": share,
        "worst": worst.name,
        "images": len(comparisons),
    }
    part = f"{differing} of {pixels} pixels differ"
    finding = part if differing else "all pixels equal"
    return GateResult("G3", failure, figures, finding)


def _percent(share: float, limit: float) -> str:
    # Rounded down, so that 99.9899 % is not printed as 99.99 % < 99.99 %.
    return f"{math.floor(share * 1e4) / 100:.2f} % < {limit * 100:g} %"


def gate_preprocessing(
    comparisons: Sequence[ImageComparison], limits: Limits = FP32
) -> GateResult:
    """G4: the graph normalises the decoded image as training does."""
    worst = max(comparisons, key=lambda entry: entry.normalised_difference)
    found, limit = worst.normalised_difference, limits.normalised
    failure = ""
    if not found <= limit:
        failure = (
            f"preprocessing differs by {found:.2g} > {limit:.2g} (worst: {worst.name})"
        )
    figures = {"max_difference": found, "limit": limit, "worst": worst.name}
    finding = f"largest difference of the normalised image {found:.1e}"
    return GateResult("G4", failure, figures, finding)
