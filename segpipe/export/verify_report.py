"""The report of an export or a verification: figures, status, the error of a refusal, and the readable pages."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table

from segpipe.determinism import flags
from segpipe.errors import ExportMismatch
from segpipe.export.gates.comparison import GATES, GateResult, Sigma, gate_integrity
from segpipe.export.graph.network import Manifest
from segpipe.files import plain
from segpipe.settings.groups import ENOUGH_IMAGES

EAGER, FOLDER = "eager", "the folder"  # what is judged besides the model files
# First words of a refusal
NOT_EXPORTED = "EXPORT REJECTED"
NOT_VERIFIED = "ARTIFACT REFUSED"
# Values of `status`
VERIFIED = "verified"
FEW_IMAGES = "VERIFIED_FEW_IMAGES"
UNVERIFIED = "UNVERIFIED_REAL_DATA"
FLAT = "UNVERIFIED_FLAT_NETWORK"
REJECTED = "rejected"
# Names of the files
MARKDOWN = "verify_report.md"
JSON = "verify_report.json"
SIDECARS = ("model_card.md", "ros/labels.yaml")


def caveat(status: str, real_images: int) -> str:
    """Why a status falls short of verified, as a clause; empty for verified."""
    return {
        UNVERIFIED: "compared on generated images only",
        FLAT: "some planted faults have no effect on this network, so the gates prove little; train it longer",
        FEW_IMAGES: f"compared on {real_images} real images; verified needs {ENOUGH_IMAGES}",
        REJECTED: "no model file was published",
    }.get(status, "")


def refusal(
    verdict: str, failed: Sequence[tuple[str, GateResult]], see: str
) -> ExportMismatch:
    """Error that names every failed gate (file name, result); the worst one sets its class and exit code.

    Its attribute `failed` holds the gates.
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
    """`text` on a single line; messages of checkers and loaders span many."""
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
    latency: dict[str, dict[str, float]] = field(default_factory=dict)
    # Reason by file of reduced precision that is not published
    dropped: dict[str, str] = field(default_factory=dict)
    created: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    )

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
        UNVERIFIED_FLAT_NETWORK when a control of G6 has no effect on this network."""
        if not self.passed:
            return REJECTED
        if not self.real_images:
            return UNVERIFIED
        power = self.gates.get(EAGER, [])
        if any(gate.figures.get("without_effect") for gate in power):
            return FLAT
        return VERIFIED if self.real_images >= ENOUGH_IMAGES else FEW_IMAGES

    @property
    def caveat(self) -> str:
        """Why the status falls short of verified."""
        return caveat(self.status, self.real_images)

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """File, gate, verdict and finding of each table row."""
        rows = [
            (name, gate.name, "passed" if gate.passed else "FAILED", gate.message)
            for name, gates in self.gates.items()
            for gate in gates
        ]
        left_out = self.dropped.items()
        return rows + [(name, "", "not published", reason) for name, reason in left_out]

    def drop_reduced(self) -> list[str]:
        """Removes files of reduced precision that failed and returns their names; the reason moves to `dropped`."""
        names = []
        for name, entry in list(self.files.items()):
            # Gates of another engine have a key such as "model.int8.onnx (openvino)".
            keys = [key for key in self.gates if key.startswith(name)]
            failed = [gate for key, gate in self.failed if key in keys]
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
        refused = [f"{name} refused: {why}" for name, why in self.dropped.items()]
        return one_line("; ".join(filter(None, [line, self.caveat, *refused])))

    def to_mapping(self) -> dict[str, Any]:
        """All figures as plain values; equal exports differ only in `created` and `latency`."""
        gates = {
            name: {
                gate.name: {
                    "passed": gate.passed,
                    "message": gate.message,
                    **plain(gate.figures),
                }
                for gate in results
            }
            for name, results in self.gates.items()
        }
        return {
            "status": self.status,
            "created": self.created,
            "check_images": self.images,
            "real_images": self.real_images,
            "sigma": plain(asdict(self.sigma)),  # null before the gates run
            "gates": gates,
            "files": self.files,
            **({"dropped": self.dropped} if self.dropped else {}),
            "latency": {
                "device": "cpu",
                "processor": flags.processor(),
                "threads": 1,
                "files": self.latency,
            },
        }

    def write(self, folder: Path) -> None:
        """Writes verify_report.json and verify_report.md into `folder`."""
        text = json.dumps(self.to_mapping(), indent=1, allow_nan=False)
        (folder / JSON).write_text(text + "\n")
        (folder / MARKDOWN).write_text(render(MARKDOWN, report=self))

    def table(self) -> Table:
        """Table of the gates for the terminal."""
        title = f"Export in {self.folder}: {self.status}"
        shown = Table("file", "gate", "verdict", "finding", title=title)
        for row in self.rows:
            shown.add_row(*row)
        return shown


def write_sidecars(manifest: Manifest, folder: Path) -> None:
    """Writes the model card and ros/labels.yaml below `folder`, which depend only on the manifest.

    They hold no time stamps or latencies, so equal exports have equal files. Source: vision_msgs 4, msg/LabelInfo.msg.
    """
    note = caveat(manifest["status"], manifest["real_images"])
    for name in SIDECARS:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        text = render(path.name, **manifest, caveat=note)
        path.write_text(text, encoding="utf-8")


_TEMPLATES = Environment(
    loader=PackageLoader("segpipe.export.artifact"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # Markdown and YAML
)
_TEMPLATES.filters |= {
    "percent": lambda share: "-" if share is None else f"{100 * share:.2f} %",
    "json": lambda value: json.dumps(value, ensure_ascii=False),
}


def render(template: str, **values: Any) -> str:
    """Text of a template. Raises UndefinedError for a missing value."""
    return _TEMPLATES.get_template(f"{template}.j2").render(values)
