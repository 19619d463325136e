"""Result of an export or a verification: figures, status, and the error of a refusal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ExportMismatch, IntegrityError, LatencyError, QualityError
from segpipe.export.gates.limits import GateResult, Sigma, gate_integrity
from segpipe.settings.groups import ENOUGH_IMAGES

if TYPE_CHECKING:
    from segpipe.export.graph.profiles import Manifest

EAGER = "eager"
NOT_EXPORTED, NOT_VERIFIED = (
    "EXPORT REJECTED",
    "ARTIFACT REFUSED",
)  # first words of a refusal
VERIFIED, FEW_IMAGES = "verified", "VERIFIED_FEW_IMAGES"
UNVERIFIED, FLAT, REJECTED = (
    "UNVERIFIED_REAL_DATA",
    "UNVERIFIED_FLAT_NETWORK",
    "rejected",
)
ANSWERS_ONLY = "VERIFIED_BY_ANSWERS"
# The first gate in this order that failed decides the error.
_ERRORS: dict[str, type[ExportMismatch]] = {
    "G1": IntegrityError,
    "G2": ExportMismatch,
    "G3": ExportMismatch,
    "G4": ExportMismatch,
    "G6": ExportMismatch,
    "G5": QualityError,
    "latency": LatencyError,
}


def caveat(status: str, real_images: int) -> str:
    """What a status lacks, as half a sentence; empty for verified."""
    if status == UNVERIFIED:
        return "compared on generated images only"
    if status == FLAT:
        return "the network is too flat to show planted faults, so its gates prove little; train it longer"
    if status == FEW_IMAGES:
        return f"compared on {real_images} real images, verified needs {ENOUGH_IMAGES}"
    return ""


def refusal(
    verdict: str, failed: Sequence[tuple[str, GateResult]], see: str
) -> ExportMismatch:
    """Error that names every failed gate (file name, result); its class and exit code are those of the worst one.

    The gates are in its attribute `failed`.
    """
    gates = {gate.gate for _, gate in failed}
    kind = next(kind for gate, kind in _ERRORS.items() if gate in gates)
    findings = "; ".join(
        f"{gate.message} in {name}" if name else gate.message for name, gate in failed
    )
    # On one line: messages of checkers and loaders have many.
    return kind(f"{verdict}: {' '.join(findings.split())} - see {see}", failed=failed)


def integrity_refusal(
    verdict: str, problems: Sequence[str], see: str
) -> ExportMismatch:
    """Error of G1 for the first three problems of the artifact as a whole."""
    return refusal(verdict, [("", gate_integrity(problems[:3]))], see)


@dataclass
class ExportReport:
    """Figures of an export: `gates`, `files` and `latency` by file name; the reference is called "eager"."""

    folder: Path
    manifest: Manifest
    sigma: Sigma = field(default_factory=lambda: Sigma(math.nan, math.nan))
    images: list[str] = field(default_factory=list)
    real_images: int = 0
    gates: dict[str, list[GateResult]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    latency: dict[str, dict[str, float | int]] = field(default_factory=dict)
    answers_only: str = ""  # why the files were not compared with a conversion of today, if they were not

    @property
    def free(self) -> dict[str, dict[str, Any]]:
        """Free axes of the files; empty for files of one shape."""
        found: dict[str, dict[str, Any]] = self.manifest["io"].get("free", {})
        return found

    @property
    def failed(self) -> list[tuple[str, GateResult]]:
        """File names and results of the gates that failed."""
        return [
            (name, gate)
            for name, gates in self.gates.items()
            for gate in gates
            if not gate.passed
        ]

    @property
    def passed(self) -> bool:
        """Whether every gate of every file passed."""
        return not self.failed

    @property
    def status(self) -> str:
        """verified; VERIFIED_FEW_IMAGES below 16 real images; rejected; UNVERIFIED_REAL_DATA without real images;
        UNVERIFIED_FLAT_NETWORK when a control of G6 has no effect on this network; VERIFIED_BY_ANSWERS if something
        could not be computed again."""
        if not self.passed:
            return REJECTED
        if not self.real_images:
            return UNVERIFIED
        if any(
            gate.figures.get("without_effect") for gate in self.gates.get(EAGER, [])
        ):
            return FLAT
        if self.answers_only:
            return ANSWERS_ONLY
        return VERIFIED if self.real_images >= ENOUGH_IMAGES else FEW_IMAGES

    def line(self, subject: str) -> str:
        """Last line of a command that succeeds, such as `EXPORT verified: model.onnx in runs/NAME/export`."""
        note = self.answers_only or caveat(self.status, self.real_images)
        return f"{subject} {self.status}: {', '.join(self.files)} in {self.folder}{f'; {note}' if note else ''}"
