"""What came out of an export or of a verification, and the error that a failed one ends with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segpipe.errors import ExportMismatch, IntegrityError, LatencyError, QualityError
from segpipe.export.comparison import Sigma
from segpipe.export.convert import Manifest
from segpipe.export.gates import GateResult

EAGER = "eager"
VERIFIED, UNVERIFIED, REJECTED = "verified", "UNVERIFIED_REAL_DATA", "rejected"
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
    def passed(self) -> bool:
        """Whether every gate of every file passed."""
        return all(gate.passed for gates in self.gates.values() for gate in gates)

    @property
    def status(self) -> str:
        """verified; UNVERIFIED_REAL_DATA when no image of a data set was at hand; rejected."""
        if not self.passed:
            return REJECTED
        return VERIFIED if self.real_images else UNVERIFIED

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
