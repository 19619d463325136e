"""The report of an export or a verification: figures, status, and the error of a refusal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ExportMismatch
from segpipe.export.gates.limits import GATES, GateResult, Sigma, gate_integrity
from segpipe.settings.groups import ENOUGH_IMAGES

if TYPE_CHECKING:
    from segpipe.export.graph.profiles import Manifest

EAGER, FOLDER = "eager", "the folder"  # what is judged besides the model files
# First words of a refusal
NOT_EXPORTED = "EXPORT REJECTED"
NOT_VERIFIED = "ARTIFACT REFUSED"
# Values of `status`
VERIFIED = "verified"
FEW_IMAGES = "VERIFIED_FEW_IMAGES"
UNVERIFIED = "UNVERIFIED_REAL_DATA"
FLAT = "UNVERIFIED_FLAT_NETWORK"
ANSWERS_ONLY = "VERIFIED_BY_ANSWERS"
REJECTED = "rejected"


def caveat(status: str, real_images: int) -> str:
    """What a status lacks, as half a sentence; empty for verified."""
    few = f"compared on {real_images} real images, verified needs {ENOUGH_IMAGES}"
    flat = "the network is too flat to show planted faults, so its gates prove little; train it longer"
    return {
        UNVERIFIED: "compared on generated images only",
        FLAT: flat,
        FEW_IMAGES: few,
    }.get(status, "")


def refusal(
    verdict: str, failed: Sequence[tuple[str, GateResult]], see: str
) -> ExportMismatch:
    """Error that names every failed gate (file name, result); its class and exit code are those of the worst one.

    The gates are in its attribute `failed`.
    """
    failed_gates = {gate.gate for _, gate in failed}
    error = next(error for gate, (_, error) in GATES.items() if gate in failed_gates)
    findings = "; ".join(
        f"{gate.message} in {name}" if name else gate.message for name, gate in failed
    )
    return error(f"{verdict}: {one_line(findings)} - see {see}", failed=failed)


def integrity_refusal(
    verdict: str, problems: Sequence[str], see: str
) -> ExportMismatch:
    """Error of G1 for the first three problems of the artifact as a whole."""
    return refusal(verdict, [("", gate_integrity(problems[:3]))], see)


def one_line(text: str) -> str:
    """`text` without line ends, of which messages of checkers and loaders have many."""
    return " ".join(text.split())


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
    # By file of reduced precision that is not published: why
    dropped: dict[str, str] = field(default_factory=dict)
    # What verify could not compute again, and why
    not_repeated: list[str] = field(default_factory=list)

    @property
    def free(self) -> dict[str, dict[str, Any]]:
        """Free axes of the files; empty for files of one shape."""
        axes: dict[str, dict[str, Any]] = self.manifest["io"].get("free", {})
        return axes

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
        power = self.gates.get(EAGER, [])
        if any(gate.figures.get("without_effect") for gate in power):
            return FLAT
        if self.not_repeated:
            return ANSWERS_ONLY
        return VERIFIED if self.real_images >= ENOUGH_IMAGES else FEW_IMAGES

    def drop_reduced(self) -> list[str]:
        """Names of the files of reduced precision that failed; their reason moves from `gates` to `dropped`."""
        names = []
        for name, entry in list(self.files.items()):
            # The gates of another engine stand under "model.int8.onnx (openvino)".
            keys = [key for key in self.gates if key.startswith(name)]
            failed = [
                gate for key in keys for gate in self.gates[key] if not gate.passed
            ]
            if entry["precision"] != "fp32" and failed:
                self.dropped[name] = one_line(failed[0].message)
                names.append(name)
                del self.files[name]
                for key in keys:
                    del self.gates[key]
                    self.latency.pop(key, None)
        return names

    def line(self, subject: str) -> str:
        """Last line of a command that succeeds, such as `EXPORT verified: model.onnx in runs/NAME/export`."""
        line = f"{subject} {self.status}: {', '.join(self.files)} in {self.folder}"
        notes = self.not_repeated or [caveat(self.status, self.real_images)]
        notes = notes + [f"{name} refused: {why}" for name, why in self.dropped.items()]
        return one_line("; ".join([line, *filter(None, notes)]))
