"""What came out of an export or of a verification, and the error that a failed one ends with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segpipe.errors import ExportMismatch, IntegrityError, LatencyError, QualityError
from segpipe.export.gates.comparison import Sigma
from segpipe.export.gates.limits import GateResult
from segpipe.export.graph.convert import Manifest
from segpipe.settings.config import ENOUGH_IMAGES

EAGER = "eager"
NOT_EXPORTED, NOT_VERIFIED = "EXPORT REJECTED", "ARTEFACT REFUSED"  # how the last line of a refusal begins
VERIFIED, FEW_IMAGES = "verified", "VERIFIED_FEW_IMAGES"
UNVERIFIED, REJECTED = "UNVERIFIED_REAL_DATA", "rejected"
# By the first word of a gate's name; the first of these that failed decides.
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
    """What a status leaves to be wished, as half a sentence; empty for verified."""
    if status == UNVERIFIED:
        return "compared on made images alone"
    if status == FEW_IMAGES:
        return f"compared on {real_images} real images, and verified needs {ENOUGH_IMAGES}"
    return ""


@dataclass
class ExportReport:
    """Figures of an export: `gates` and `files` by file name, `latency` by file name; "eager" is the reference."""

    folder: Path
    manifest: Manifest
    sigma: Sigma = field(default_factory=lambda: Sigma(math.nan, math.nan))
    images: list[str] = field(default_factory=list)
    real_images: int = 0
    gates: dict[str, list[GateResult]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    latency: dict[str, dict[str, float | int]] = field(default_factory=dict)

    @property
    def free(self) -> dict[str, dict[str, Any]]:
        """Lengths that the files leave open, by axis; empty for files of one shape."""
        found: dict[str, dict[str, Any]] = self.manifest["io"].get("free", {})
        return found

    @property
    def passed(self) -> bool:
        """Whether every gate of every file passed."""
        return all(gate.passed for gates in self.gates.values() for gate in gates)

    @property
    def status(self) -> str:
        """verified; VERIFIED_FEW_IMAGES below 16 real ones; UNVERIFIED_REAL_DATA without any; rejected."""
        if not self.passed:
            return REJECTED
        if not self.real_images:
            return UNVERIFIED
        return VERIFIED if self.real_images >= ENOUGH_IMAGES else FEW_IMAGES

    def line(self, subject: str) -> str:
        """The last line of a command that ends well, such as `EXPORT verified: model.onnx in runs/NAME/export`."""
        few = caveat(self.status, self.real_images)
        return f"{subject} {self.status}: {', '.join(self.files)} in {self.folder}{f'; {few}' if few else ''}"

    def failed(self) -> list[tuple[str, GateResult]]:
        """Gates that failed, with the names of their files."""
        return [(name, gate) for name, gates in self.gates.items() for gate in gates if not gate.passed]

    def error(self, verdict: str, see: str) -> ExportMismatch:
        """The error of a failed export; its line names every failed gate, its exit code is that of the gravest."""
        words = {gate.name.split()[0] for _, gate in self.failed()}
        kind = next(kind for word, kind in _ERRORS.items() if word in words)
        # On one line: what checkers and loaders raise has many.
        told = " ".join("; ".join(f"{gate.message} in {name}" for name, gate in self.failed()).split())
        return kind(f"{verdict}: {told} - see {see}")
