"""What two runs show besides their ledgers: scores of validations, final digests, and the files that they read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError, listed
from segpipe.ledger.rows import INPUTS

RESULT, METRICS = "result.json", "metrics.jsonl"
# Of result.json: how, where and how fast it was trained. All else must be equal, above all `weights_digest`, which
# covers every buffer of the network, also those that no ledger row holds.
NO_RESULT = (
    "name", "images_per_second", "train_seconds", "world_size", "config_hash", "segpipe", "mode", "versions",
    "switches", "ledger", "git", "weights",
)  # fmt: skip
NO_METRIC = ("time_s", "images_per_second")  # of a line of metrics.jsonl
COMPARED = ("train", "validation")  # kinds of its lines
LONGEST_VALUE = 200  # characters in a phrase


@dataclass(frozen=True)
class ResultDifferences:
    """What differs between two runs, as phrases; empty where nothing does or one of the two lacks the file."""

    results: tuple[str, ...]
    files: tuple[
        str, ...
    ]  # images, masks and class tables that were altered, are missing or were added in B
    sources: tuple[str, ...]  # the same for the code
    missing: tuple[str, ...]  # files that only one of the two has

    @property
    def inputs(self) -> str:
        """A phrase with the changed files and sources; empty when there is none."""
        parts = [("data", self.files), ("code", self.sources)]
        return "; ".join(
            f"{what} of B: {listed(changes)}" for what, changes in parts if changes
        )


def compare_results(a: Path, b: Path) -> ResultDifferences:
    """Differences between the files of two run folders. Raises CheckpointError for a file that cannot be read."""
    both = [
        name
        for name in (RESULT, METRICS, INPUTS)
        if (a / name).is_file() and (b / name).is_file()
    ]
    only = [
        f"{name} is in {run} only"
        for name in (RESULT, INPUTS)
        for run in _holders(name, a, b)
    ]
    results = [*_metrics(a, b)] if METRICS in both else []
    results += [*_finals(a, b)] if RESULT in both else []
    read = [read_inputs(folder / INPUTS) for folder in (a, b)] if INPUTS in both else []
    changed = {
        part: changes(*(each[part]["files"] for each in read)) if read else []
        for part in ("data", "code")
    }
    return ResultDifferences(
        tuple(results), tuple(changed["data"]), tuple(changed["code"]), tuple(only)
    )


def _holders(name: str, a: Path, b: Path) -> list[str]:
    """The run that has a file which the other lacks."""
    found = [run for run, folder in (("A", a), ("B", b)) if (folder / name).is_file()]
    return found if len(found) == 1 else []


def _metrics(a: Path, b: Path) -> Iterator[str]:
    here, there = _lines(a), _lines(b)
    for step, kind, precision in sorted(here.keys() & there.keys()):
        one, two = here[step, kind, precision], there[step, kind, precision]
        if names := _unequal(one, two, NO_METRIC):
            first = "miou" if "miou" in names else names[0]
            where = (
                f"of the validation at step {step} ({precision})"
                if precision
                else f"of step {step} in {METRICS}"
            )
            yield f"{first} {where} is {one.get(first)} in A and {two.get(first)} in B"


def _finals(a: Path, b: Path) -> Iterator[str]:
    one, two = (_read(folder / RESULT) for folder in (a, b))
    if one.get("steps") != two.get("steps"):
        return
    for name in _unequal(one, two, NO_RESULT):
        if one.get("segpipe") == two.get("segpipe") or (
            name in one and name in two
        ):  # releases add names
            yield f"{name} in {RESULT} is {_brief(one, name)} in A and {_brief(two, name)} in B"


def _unequal(
    one: Mapping[str, Any], two: Mapping[str, Any], left_out: Collection[str]
) -> list[str]:
    """Names of unequal values, as JSON has them: NaN equals NaN."""
    return [
        name
        for name in {**one, **two}
        if name not in left_out
        and json.dumps(one.get(name)) != json.dumps(two.get(name))
    ]


def _brief(content: Mapping[str, Any], name: str) -> str:
    text = str(content.get(name, "missing"))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _lines(folder: Path) -> dict[tuple[int, str, str], dict[str, Any]]:
    """The last line of each step, kind and precision; one that a crash left torn is skipped."""
    found = {}
    for text in (folder / METRICS).read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            line = dict(json.loads(text))
            if line.get("kind") in COMPARED and "step" in line:
                found[
                    int(line["step"]), str(line["kind"]), str(line.get("precision", ""))
                ] = line
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the result of a run ({error!r}). Restore it."
        ) from error


def read_inputs(path: Path) -> dict[str, Any]:
    """Content of inputs.json. Raises CheckpointError when it is damaged."""
    try:
        content = dict(json.loads(path.read_bytes()))
        for part in ("data", "code"):
            content[part]["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the inputs of a run ({error!r}). Restore it."
        ) from error
    return content


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Phrases such as "a.png was altered": altered files first, then missing and added ones."""
    altered = [
        f"{name} was altered"
        for name in before
        if name in now and now[name] != before[name]
    ]
    missing = [f"{name} is missing" for name in before if name not in now]
    return (
        altered + missing + [f"{name} was added" for name in now if name not in before]
    )
