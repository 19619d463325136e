"""`segpipe runs` and `segpipe compare`: a table of runs, and the first difference between two."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from segpipe.cli.commands import Given
from segpipe.errors import ConfigError, SegpipeError
from segpipe.ledger.divergence import Comparison, compare, not_comparable
from segpipe.ledger.reader import read_run
from segpipe.run.console import CONSOLE, table, verdict
from segpipe.run.overview import (
    RecipeGroup,
    Row,
    find_runs,
    grouped,
    print_runs,
    run_table,
    write_overview,
)
from segpipe.settings.config import deciding
from segpipe.settings.setting import nearest


def main(given: Given) -> int:
    """Exit code of `segpipe runs`."""
    by = given["group"]
    recipe = deciding({})
    if by and by not in recipe:
        raise ConfigError(
            f"group = {by} is not a setting that affects training.{nearest(by, recipe)}"
        )
    rows = find_runs(Path(given["root"]), given["runs"])
    groups = grouped(rows, by)
    if given["out"]:
        write_overview(Path(given["out"]), groups)
        print(f"written: {given['out']}")
    elif given["json"]:
        print(json.dumps([_plain(item) for item in (groups if by else rows)]))
    elif by:
        CONSOLE.print(run_table(groups))
    else:
        print_runs(rows)
    return 0


def _plain(item: Row | RecipeGroup) -> dict[str, Any]:
    """An item as plain JSON types."""
    if isinstance(item, Row):
        values = asdict(item)
        del values["folder"]
        return values
    return {
        "mean": item.mean,
        "scores": item.scores,
        "runs": [row.name for row in item.rows],
        "settings": item.settings,
    }


def compare_main(given: Given) -> int:
    """Exit code of `segpipe compare`."""
    found = compared(given)
    if given["json"]:
        print(json.dumps(found.to_json()))
    else:
        _show(found)
    return found.exit_code


def compared(given: Given) -> Comparison:
    """The comparison that the command prints."""
    a, b = Path(given["a"]), Path(given["b"])
    try:
        return compare(read_run(a), read_run(b))
    except SegpipeError as error:
        return not_comparable(str(error))


def _show(found: Comparison) -> None:
    """Print the comparison as sentences, and a table of the first step that differs."""
    lines = [found.sentence]
    if found.processes:
        lines.append(f"processes: {found.processes[0]} in A, {found.processes[1]} in B")
    changed = (("environment", found.fingerprint), ("setting", found.recipe))
    for title, values in changed:
        for name, (here, there) in values.items():
            lines.append(f"{title} {name}: {here} in A, {there} in B")
    lines += [found.inputs, *(f"note: {note}" for note in found.notes)]
    for line in filter(None, lines):
        CONSOLE.print(line)
    if found.verdict == "diverged":
        rows = [
            (cell["stage"], cell["field"], verdict(cell["state"]))
            for cell in found.fields
        ]
        CONSOLE.print(table(("stage", "field", ""), rows, f"step {found.step}"))
    if found.advice:
        CONSOLE.print(found.advice)
