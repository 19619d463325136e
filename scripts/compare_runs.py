"""Compares the ledgers of two runs: are they the same bits, and if not, where do they part?

    python scripts/compare_runs.py runs/A runs/B [--json] [--replay [--nproc N]]

Names the first step that differs, and there the first stage in causal order, shard, sample, file and layer. The runs
may have had different numbers of processes. --replay trains both again from their last common checkpoint up to that
step, with hooks on every module, and names the layer; or says which run does not come out again. Exit codes: 0
identical, 5 diverged, 2 not comparable.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from segpipe.errors import SegpipeError
from segpipe.ledger.divergence import Comparison, compare, incomparable
from segpipe.ledger.reader import read_run

COLOURS = {"differs": "red", "equal": "green", "not recorded": "dim"}


def show(found: Comparison, console: Console) -> None:
    """The comparison in words, and a table of the first step that differs."""
    lines = [found.sentence]
    if found.processes:
        lines.append(f"processes: {found.processes[0]} in A, {found.processes[1]} in B")
    for title, values in (("environment", found.fingerprint), ("setting", found.recipe)):
        lines += [f"{title} {name}: {here} in A, {there} in B" for name, (here, there) in values.items()]
    lines += [f"note: {note}" for note in found.notes]
    lines += [found.replay] if found.replay else []
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.verdict == "diverged":
        table = Table("stage", "field", "", title=f"step {found.step}", title_justify="left")
        for cell in found.fields:
            table.add_row(cell["stage"], cell["field"], f"[{COLOURS[cell['state']]}]{cell['state']}")
        console.print(table)
    if found.advice:
        console.print(found.advice, markup=False, highlight=False, soft_wrap=True)


def replayed(a: Path, b: Path, nproc: int) -> Comparison:
    """The comparison of two run folders, after training both again up to where they part."""
    from segpipe.audit.locate import compare_again  # here: a comparison alone needs no torch

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training again", total=None)
        return compare_again(
            a, b, nproc=nproc, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def main(arguments: list[str]) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A", help="folder of a run")
    parser.add_argument("b", type=Path, metavar="B", help="folder of the run to compare with it")
    parser.add_argument("--json", action="store_true", help="one line of JSON in the place of words")
    parser.add_argument("--replay", action="store_true", help="train both again up to where they part")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes that do it; 1 unless given")
    given = parser.parse_args(arguments)
    try:
        if given.replay:
            found = replayed(given.a, given.b, given.nproc)
        else:
            found = compare(read_run(given.a), read_run(given.b))
    except SegpipeError as error:
        found = incomparable(str(error))
    if given.json:
        print(json.dumps(found.to_json()))
    else:
        show(found, Console())
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
