"""Limits of the gates per precision, the unit of logits, and the result of a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from segpipe.errors import ExportMismatch, IntegrityError, LatencyError, QualityError
from segpipe.runtime.artifact import CONFIDENCE_SHARE

MAX_CLASSES = 255  # ids 0..254: 255 in a mask means no answer
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
    """How far a file may be from the reference. An infinite limit: measured, not judged."""

    logits_sigma: float = 1e-3  # largest difference of a logit
    agreement: float = 0.9999  # equal pixels over the whole check set
    image_agreement: float = 0.999  # equal pixels of each image
    # A pixel may differ where the reference's top two classes are this close.
    margin_sigma: float = 2e-3
    confidence_levels: float = 1  # difference within which `confidence_share` lie
    confidence_share: float = CONFIDENCE_SHARE["fp32"]  # of the cells of each image
    confidence_mean: float = math.inf  # mean difference on real images and copies
    normalised: float = 1e-5  # largest difference of the normalised image
    # Fall of mIoU, and of each class, in points of 100; with `both_ways` also a rise
    miou_points: float = 0.01
    class_points: float = 0.05
    critical_points: float = math.inf  # fall of a class of export.critical_classes
    calibration_points: float = math.inf  # growth of the expected calibration error
    both_ways: bool = True
    # Whether masks of generated images are judged, on which a network may say anything
    made_images: bool = True
    relative_latency: float = math.inf  # processor time over that of the fp32 file


FP32 = Limits()
_REDUCED = Limits(
    image_agreement=0.0,
    margin_sigma=math.inf,
    confidence_levels=math.inf,
    class_points=math.inf,
    both_ways=False,
    made_images=False,
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
        calibration_points=1.0,
    ),
    "int8": replace(
        _REDUCED,
        logits_sigma=math.inf,
        agreement=0.97,
        confidence_share=CONFIDENCE_SHARE["int8"],
        confidence_mean=8.0,
        miou_points=1.0,
        critical_points=2.0,
        calibration_points=5.0,
        relative_latency=0.9,
    ),
}


@dataclass(frozen=True)
class GateResult:
    """Verdict of a gate, a key of GATES. `message` is one line: the finding, and the limit when it failed."""

    gate: str
    passed: bool
    figures: dict[str, Any]
    message: str
    shape: str = ""  # of the images, unless it is the exported one

    @property
    def name(self) -> str:
        """Name in reports, such as `G2 logits, 32x144`."""
        title, _ = GATES[self.gate]
        return f"{title}, {self.shape}" if self.shape else title


def gate_integrity(problems: Sequence[str]) -> GateResult:
    """G1: the file is whole, alone, loadable, and what the manifest says."""
    message = "checker, loader and manifest agree"
    if problems:
        message = f"G1 integrity: {'; '.join(problems)}"
    return GateResult("G1", not problems, {"problems": list(problems)}, message)
