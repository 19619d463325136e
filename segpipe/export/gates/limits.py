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
    confidence_levels: int = 1  # difference within which `confidence_share` lie
    confidence_share: float = CONFIDENCE_SHARE["fp32"]  # of the cells of each image
    normalised: float = 1e-5  # largest difference of the normalised image
    # Fall of mIoU, and of each class, in points of 100; with `both_ways` also a rise
    miou_points: float = 0.01
    class_points: float = 0.05
    critical_points: float = math.inf  # fall of a class of export.critical_classes
    both_ways: bool = True
    # Whether masks of generated images are judged, on which a network may say anything
    made_images: bool = True
    relative_latency: float = math.inf  # processor time over that of the fp32 file


FP32 = Limits()
_REDUCED = replace(
    FP32,
    image_agreement=0.0,
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
    """Verdict of a gate, a key of GATES. `message` is one line: the finding, and the limit when it failed."""

    gate: str
    passed: bool
    figures: dict[str, Any]
    message: str

    @classmethod
    def of(
        cls, gate: str, failure: str, figures: dict[str, Any], finding: str
    ) -> GateResult:
        """Result of a gate that failed for the reason `failure`, or passed without one."""
        return cls(gate, not failure, figures, failure or finding)

    @property
    def name(self) -> str:
        """Name in reports, such as `G2 logits`."""
        title, _ = GATES[self.gate]
        return title


def gate_integrity(problems: Sequence[str]) -> GateResult:
    """G1: the file is whole, loadable, and what the manifest says."""
    failure = f"G1 integrity: {'; '.join(problems)}" if problems else ""
    figures = {"problems": list(problems)}
    return GateResult.of("G1", failure, figures, "checker, loader and manifest agree")
