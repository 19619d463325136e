"""Audits a run that somebody else made: compares its evidence, and trains parts of it again.

    python scripts/audit_run.py run=runs/NAME [spans=3] [span_steps=100] [seed=N] [compute.nproc=N] [data.root=FOLDER]
        [data.workers=N] [compute.device=cpu|cuda] [any_environment=true] [out=FOLDER]

The spans between kept checkpoints are chosen at random, unless a seed is given. report.json and report.md go to
runs/NAME/audit, or to `out`. Exit codes: 0 passed, 13 failed (not repeatable, or altered), 2 cannot audit, cannot
write the report, or usage.
"""

import secrets
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.audit.examine import Request, examine
from segpipe.audit.verdict import Audit, check_folder, write_audit
from segpipe.errors import ConfigError, SegpipeError
from segpipe.settings.arguments import parse

NUMBERS = ("spans", "span_steps", "seed", "compute.nproc")
SETTINGS = ("data.root", "data.classes", "data.workers", "data.start_method", "compute.device")
COLOURS = {"passed": "green", "failed": "bold red", "noted": "yellow", "not checked": "dim"}


def requested(arguments: list[str]) -> tuple[Request, Path]:
    """What is to be done, and where the report goes. Raises ConfigError."""
    given = parse(arguments, ("run", *NUMBERS, *SETTINGS, "any_environment", "out"))
    for name in NUMBERS:
        least = int(name in ("spans", "compute.nproc"))
        if not given.get(name, "1").isdecimal() or int(given.get(name, "1")) < least:
            raise ConfigError(f"{name} = {given[name]!r}, but a number from {least} on was needed.")
    numbers = {name.rpartition(".")[2]: int(given[name]) for name in NUMBERS if name in given}
    numbers.setdefault("seed", secrets.randbelow(2**32))
    settings = {name: given[name] for name in SETTINGS if name in given}
    if (anywhere := given.get("any_environment", "false")) not in ("true", "false"):
        raise ConfigError(f"any_environment = {anywhere!r}, but true or false was needed.")
    run = Path(given["run"])
    out = Path(given.get("out", run / "audit"))
    check_folder(out)
    return Request(run, **numbers, any_environment=anywhere == "true", settings=settings), out


def table(audit: Audit) -> Table:
    """One row for each line of the report."""
    found = Table("part", "verdict", "what was found", title=f"audit of {audit.run}", title_justify="left")
    for line in audit.lines:
        found.add_row(line.part, f"[{COLOURS[line.status]}]{line.status}", line.text.replace("[", "\\["))
    return found


def main(arguments: list[str]) -> int:
    """Exit code."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        request, out = requested(arguments)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("audit", total=None)
            audit = examine(
                request,
                lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None),
            )
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(table(audit))
    console.print(f"{audit.sentence}.", markup=False)
    try:
        console.print(f"Report: {write_audit(audit, out)}", markup=False)
    except SegpipeError as error:
        print(f"{error} Set out=FOLDER for the report.", file=sys.stderr)
        return audit.exit_code or 2
    return audit.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
