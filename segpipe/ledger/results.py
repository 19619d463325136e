"""What two runs show besides their ledgers: scores of validations, final digests, and the files that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError
from segpipe.ledger.rows import INPUTS

RESULT, METRICS = "result.json", "metrics.jsonl"
# In result.json, `weights_digest` covers every buffer of the network, also those that no ledger row holds.
FINAL = ("weights_digest", "ema_digest", "pixels", "miou", "iou")
UNEQUAL_BY_NATURE = ("step", "kind", "time_s")  # of a line of metrics.jsonl
SHOWN = 5


@dataclass(frozen=True)
class ResultDifferences:
    """What differs between two runs, as phrases; empty where nothing does or one of the two lacks the file."""

    results: tuple[str, ...]
    files: tuple[str, ...]  # images, masks and class tables that were altered, are missing or were added in B
    sources: tuple[str, ...]  # the same for the code
    missing: tuple[str, ...]  # files that only one of the two has

    @property
    def inputs(self) -> str:
        """A phrase with the changed files and sources; empty when there is none."""
        parts = [("data", self.files), ("code", self.sources)]
        return "; ".join(f"{what} of B: {_listed(changes)}" for what, changes in parts if changes)


def compare_results(a: Path, b: Path) -> ResultDifferences:
    """Differences between the files of two run folders. Raises CheckpointError for a file that cannot be read."""
    both = [name for name in (RESULT, METRICS, INPUTS) if (a / name).is_file() and (b / name).is_file()]
    only = [f"{name} is in {run} only" for name in (RESULT, INPUTS) for run in _holders(name, a, b)]
    results = [*_validations(a, b)] if METRICS in both else []
    results += [*_finals(a, b)] if RESULT in both else []
    read = [read_inputs(folder / INPUTS) for folder in (a, b)] if INPUTS in both else []
    changed = {part: changes(*(each[part]["files"] for each in read)) if read else [] for part in ("data", "code")}
    return ResultDifferences(tuple(results), tuple(changed["data"]), tuple(changed["code"]), tuple(only))


def _holders(name: str, a: Path, b: Path) -> list[str]:
    """The run that has a file which the other lacks."""
    found = [run for run, folder in (("A", a), ("B", b)) if (folder / name).is_file()]
    return found if len(found) == 1 else []


def _validations(a: Path, b: Path) -> Iterator[str]:
    here, there = ({(line["step"], line["precision"]): line for line in _lines(folder)} for folder in (a, b))
    for step, precision in sorted(here.keys() & there.keys()):
        one, two = here[step, precision], there[step, precision]
        names = [name for name in one if name not in UNEQUAL_BY_NATURE and one[name] != two.get(name)]
        if names:
            first = "miou" if "miou" in names else names[0]
            values = f"{one[first]} in A and {two.get(first)} in B"
            yield f"{first} of the validation at step {step} ({precision}) is {values}"


def _finals(a: Path, b: Path) -> Iterator[str]:
    one, two = (_read(folder / RESULT) for folder in (a, b))
    if one.get("steps") != two.get("steps"):
        return
    for name in FINAL:
        if name in one and name in two and one[name] != two[name]:
            yield f"{name} in {RESULT} is {one[name]} in A and {two[name]} in B"


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of validations; one that a crash left torn is skipped."""
    for text in (folder / METRICS).read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, Mapping) and line.get("kind") == "validation" and {"step", "precision"} <= line.keys():
            yield dict(line)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as the result of a run ({error!r}). Restore it.") from error


def _listed(changes: tuple[str, ...]) -> str:
    more = len(changes) - SHOWN
    return ", ".join(changes[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_inputs(path: Path) -> dict[str, Any]:
    """Content of inputs.json. Raises CheckpointError when it is damaged."""
    try:
        content = dict(json.loads(path.read_bytes()))
        for part in ("data", "code"):
            content[part]["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as the inputs of a run ({error!r}). Restore it.") from error
    return content


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Phrases such as "a.png was altered": altered files first, then missing and added ones."""
    altered = [f"{name} was altered" for name in before if name in now and now[name] != before[name]]
    missing = [f"{name} is missing" for name in before if name not in now]
    return altered + missing + [f"{name} was added" for name in now if name not in before]
