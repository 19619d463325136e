"""The findings of an audit line by line, the verdict they give, and the report as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from segpipe.errors import CHECKED_IN_PART, ConfigError, listed
from segpipe.files import to_json, write_atomically

PASSED, FAILED, NOTED, UNCHECKED = "passed", "failed", "noted", "not checked"
EXIT_CODES = {
    "passed": 0,
    "passed in part": CHECKED_IN_PART,
    "failed": 13,
    "cannot audit": 2,
}


class Line(NamedTuple):
    """The result of one check. `noted`: something changed that does not make the audit fail."""

    part: str
    status: str
    text: str


def shortened(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return listed(names, joint="; ")


@dataclass(frozen=True)
class Audit:
    """All lines, from the images to the exported file, and how the replayed spans were chosen."""

    run: str
    lines: tuple[Line, ...]
    obstacle: str  # why nothing could be replayed; empty when spans were
    seed: int  # of the choice of the spans
    replayed: int  # updates
    updates: int  # of the run
    seconds: float

    @property
    def verdict(self) -> str:
        """Passed, passed in part, failed or cannot audit.

        In part: nothing is wrong, but not every update was trained again. Failed: the run is not repeatable, or
        something was altered.
        """
        if any(line.status == FAILED for line in self.lines):
            return "failed"
        if self.obstacle:
            return "cannot audit"
        whole = self.replayed >= self.updates and all(
            line.status != UNCHECKED for line in self.lines
        )
        return "passed" if whole else "passed in part"

    @property
    def exit_code(self) -> int:
        """0 passed, 14 passed in part, 13 failed, 2 cannot audit."""
        return EXIT_CODES[self.verdict]

    @property
    def sentence(self) -> str:
        """The verdict with its reason."""
        reasons = {
            "failed": "; ".join(
                f"{line.part}: {line.text}"
                for line in self.lines
                if line.status == FAILED
            ),
            "cannot audit": self.obstacle,
        }
        share = f"{self.replayed} of {self.updates} updates ({self.replayed / max(self.updates, 1):.0%})"
        return f"{self.verdict}: {reasons.get(self.verdict, f'{share} were trained again and gave the same bits')}"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        lines = [line._asdict() for line in self.lines]
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            **asdict(self),
            "lines": lines,
        }


def check_folder(folder: Path) -> None:
    """Raises ConfigError when no report can be written to `folder`, before minutes are spent on the audit."""
    existing = next(
        each for each in (folder, *folder.absolute().parents) if each.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"out = {folder}, but nothing can be written to {existing}. Set out=FOLDER for the report."
        )


def write_audit(audit: Audit, folder: Path) -> Path:
    """`report.json` in the folder, written. Raises CheckpointError when the disk is full."""
    path = folder / "report.json"
    write_atomically(path, to_json(audit.to_json()))
    return path
