"""Limits of the gates per precision, the unit of logits, and the result of a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    margin_sigma: float | None = (
        2e-3  # a pixel may differ where the reference's top two classes are this close
    )
    confidence_levels: int | None = 1  # largest difference; of fp32, rounding
    confidence_mean: float | None = (
        None  # mean difference on real images and their copies, in levels
    )
    normalised: float = 1e-5  # largest difference of the normalised image
    miou_points: float = (
        0.01  # fall of mIoU in points of 100; with `both_ways` also a rise
    )
    class_points: float | None = 0.05  # the same for each class
    calibration_points: float | None = (
        None  # growth of the expected calibration error in points of 100
    )
    critical_points: float | None = None  # fall of a class of export.critical_classes
    both_ways: bool = True
    made_images: bool = True  # whether masks of generated images are judged, on which a network may say anything
    relative_latency: float | None = None  # processor time over that of the fp32 file


FP32 = Limits()
_REDUCED = Limits(
    image_agreement=None,
    margin_sigma=None,
    confidence_levels=None,
    class_points=None,
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
        miou_points=0.1,
        calibration_points=1.0,
    ),
    "int8": replace(
        _REDUCED,
        logits_sigma=None,
        agreement=0.97,
        confidence_mean=8.0,
        miou_points=1.0,
        calibration_points=5.0,
        critical_points=2.0,
        relative_latency=0.9,
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
    message = (
        f"G1 integrity: {'; '.join(problems)}"
        if problems
        else "checker, loader and manifest agree"
    )
    return GateResult("G1", not problems, {"problems": list(problems)}, message)
