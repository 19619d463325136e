"""What an audit found, line by line, as JSON and as a page."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from segpipe.errors import ConfigError
from segpipe.files import write_atomically

PASSED, FAILED, NOTED, UNCHECKED = "passed", "failed", "noted", "not checked"
VERDICTS = {"passed": 0, "failed": 1, "cannot audit": 2}


class Line(NamedTuple):
    """One thing that was looked at. `noted`: another value that explains itself, and fails nothing."""

    part: str
    status: str
    text: str


@dataclass(frozen=True)
class Audit:
    """All lines, from the images to the final file, and how the parts to be trained again were chosen."""

    run: str
    lines: tuple[Line, ...]
    obstacle: str  # why nothing could be trained again; empty when it was
    seed: int  # of the choice of the spans
    replayed: int  # updates
    updates: int  # of the run
    processes: int
    evidence: str  # SHA-256 over all files that were looked at
    seconds: float

    @property
    def verdict(self) -> str:
        """Passed, failed (something is not what it was), or cannot audit."""
        if any(line.status == FAILED for line in self.lines):
            return "failed"
        return "cannot audit" if self.obstacle else "passed"

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 2 cannot audit."""
        return VERDICTS[self.verdict]

    @property
    def sentence(self) -> str:
        """The verdict with its reason."""
        failed = [f"{line.part}: {line.text}" for line in self.lines if line.status == FAILED]
        if failed:
            return f"failed: {'; '.join(failed)}"
        if self.obstacle:
            return f"cannot audit: {self.obstacle}"
        return f"passed: {self.replayed} of {self.updates} updates trained again gave the same bits"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        lines = [line._asdict() for line in self.lines]
        return {"verdict": self.verdict, "sentence": self.sentence, **asdict(self), "lines": lines}


def check_folder(folder: Path) -> None:
    """Raises ConfigError where no report can be written, before minutes are spent on one."""
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"out = {folder}, but nothing can be written to {above}. Set out=FOLDER for the report.")


def write_audit(audit: Audit, folder: Path) -> Path:
    """Write report.json and report.md; returns the page. Raises CheckpointError when the disk is full."""
    write_atomically(folder / "report.json", (json.dumps(audit.to_json(), indent=2) + "\n").encode())
    page = folder / "report.md"
    write_atomically(page, markdown(audit).encode())
    return page


def markdown(audit: Audit) -> str:
    """The report as a page."""
    rows = [f"| {line.part} | {line.status} | {line.text.replace('|', '/')} |" for line in audit.lines]
    return "\n".join(
        [
            f"# Audit of {audit.run}: {audit.verdict}",
            "",
            audit.sentence + ".",
            "",
            "| part | verdict | what was found |",
            "|---|---|---|",
            *rows,
            "",
            f"- Trained again: {audit.replayed} of {audit.updates} updates, by {audit.processes} process"
            f"{'es' * (audit.processes > 1)}, in "
            f"{audit.seconds:.0f} s in all. The spans were chosen by seed {audit.seed}, which chooses them again.",
            f"- Evidence: {audit.evidence} (SHA-256 over all files that were looked at). Where this number was written "
            "down out of reach of those who keep the run, it tells later whether any of them was replaced.",
            "- What an audit can and cannot find: docs/audit.md.",
            "",
        ]
    )
