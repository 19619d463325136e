"""`segpipe audit`: checks the files of a run, trains parts of it again, and writes a report."""

from __future__ import annotations

import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from segpipe.audit.examine import (
    Audit,
    AuditRequest,
    check_folder,
    examine,
    write_audit,
)
from segpipe.cli.commands import COMMANDS
from segpipe.cli.export import verify
from segpipe.errors import SegpipeError
from segpipe.run.console import CONSOLE, progress
from segpipe.settings.config import Config, flat

COLORS = {
    "passed": "green",
    "failed": "bold red",
    "noted": "yellow",
    "not checked": "dim",
}
SETTINGS = COMMANDS["audit"].settings


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    out = Path(given["out"] or Path(given["run"], "audit"))
    check_folder(out)
    with progress("audit") as show:
        audit = examine(
            request(given),
            lambda what, done, total: show(done, total or None, what),
            verify=partial(_verify, given["run"]) if given["verify"] else None,
        )
    CONSOLE.print(table(audit))
    CONSOLE.print(f"{audit.sentence}.")
    try:
        CONSOLE.print(f"Report: {write_audit(audit, out)}")
    except SegpipeError as error:
        print(f"{error} Set out=FOLDER for the report.", file=sys.stderr)
        return audit.exit_code or error.exit_code
    return audit.exit_code


def request(given: dict[str, Any]) -> AuditRequest:
    """What to audit; draws a seed if none is given."""
    return AuditRequest(
        Path(given["run"]),
        seed=secrets.randbelow(2**32) if given["seed"] < 0 else given["seed"],
        spans=given["spans"],
        span_steps=given["span_steps"],
        any_environment=given["any_environment"],
        settings={name: given[name] for name in SETTINGS if name in given},
    )


def _verify(run: str, config: Config, folder: Path) -> str:
    asked = {"run": run, "which": "last", "artifact": str(folder)}
    return verify({**flat(config), **asked}).line("ARTIFACT")


def table(audit: Audit) -> Table:
    """One row for each line of the report."""
    found = Table(
        "part",
        "verdict",
        "finding",
        title=f"audit of {audit.run}",
        title_justify="left",
    )
    for line in audit.lines:
        found.add_row(line.part, Text(line.status, COLORS[line.status]), line.text)
    return found
