"""`segpipe compare`: whether two runs hold the same bits, and where they first differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from segpipe.errors import SegpipeError
from segpipe.ledger.divergence import Comparison, compare, not_comparable
from segpipe.ledger.reader import read_run
from segpipe.run.console import progress

COLORS = {"differs": "red", "equal": "green", "not recorded": "dim"}


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    found = compared(given)
    if given["json"]:
        print(json.dumps(found.to_json()))
    else:
        show(found, Console(emoji=False))
    return found.exit_code


def compared(given: dict[str, Any]) -> Comparison:
    """The comparison that the command shows."""
    a, b = Path(given["a"]), Path(given["b"])
    try:
        if given["replay"]:
            return replayed(a, b)
        return compare(read_run(a), read_run(b))
    except SegpipeError as error:
        return not_comparable(str(error))


def replayed(a: Path, b: Path) -> Comparison:
    """The comparison of two run folders after training both again up to the first difference."""
    # It imports torch, which a comparison without replay does not need.
    from segpipe.audit.replay import compare_again

    with progress("training again", console=Console(stderr=True)) as show:
        return compare_again(a, b, show)


def show(found: Comparison, console: Console) -> None:
    """Print the comparison as sentences, and a table of the first step that differs."""
    lines = [found.sentence]
    if found.processes:
        lines.append(f"processes: {found.processes[0]} in A, {found.processes[1]} in B")
    for title, values in (
        ("environment", found.fingerprint),
        ("setting", found.recipe),
    ):
        lines += [
            f"{title} {name}: {here} in A, {there} in B"
            for name, (here, there) in values.items()
        ]
    lines += [found.inputs] if found.inputs else []
    lines += [f"note: {note}" for note in found.notes]
    lines += [found.replay] if found.replay else []
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.verdict == "diverged":
        table = Table(
            "stage", "field", "", title=f"step {found.step}", title_justify="left"
        )
        for cell in found.fields:
            table.add_row(
                cell["stage"],
                cell["field"],
                f"[{COLORS[cell['state']]}]{cell['state']}",
            )
        console.print(table)
    if found.advice:
        console.print(found.advice, markup=False, highlight=False, soft_wrap=True)
