"""`segpipe check-augment`: whether augmentation is a pure function of sample and key."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from segpipe.checks.clause import Clause
from segpipe.checks.data_contract import purity_clauses
from segpipe.determinism import flags
from segpipe.errors import ImpureAugmentError
from segpipe.run.console import CONSOLE
from segpipe.settings.check import check
from segpipe.settings.compose import compose


def main(overrides: list[str]) -> int:
    """Exit code: that of an impure augmentation if a probe fails.

    Prints a table of the transforms and the pipeline, then what was found and what to do.
    """
    config = compose(overrides)
    check(config, world_size=1)
    flags.apply(config.compute.threads, config.compute.mode)
    with CONSOLE.status("checking the augmentation"):
        found = list(purity_clauses(config))
    return ImpureAugmentError.exit_code if show(found, "augment") else 0


def show(found: list[Clause], what: str) -> bool:
    """Whether a check failed. Prints a table of the checks, then what is wrong and what to do."""
    CONSOLE.print(table(found))
    broken = [clause for clause in found if clause.problem]
    for clause in broken:
        CONSOLE.print(f"{clause.part}, {clause.name}: {clause.problem}", markup=False)
    result = f"{len(broken)} failed" if broken else "all passed"
    checks = "check" if len(found) == 1 else "checks"
    CONSOLE.print(f"{len(found)} {checks} of {what}: {result}")
    return bool(broken)


def table(found: list[Clause]) -> Table:
    """One row for each clause."""
    rows = Table("part", "check", "", "note")
    for clause in found:
        verdict = "[bold red]failed[/]" if clause.problem else "[green]passed[/]"
        rows.add_row(clause.part, escape(clause.name), verdict, escape(clause.note))
    return rows
