"""What two runs show besides their ledgers: scores of validations, final digests, and the files that they read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError, listed
from segpipe.ledger.rows import INPUTS

RESULT, METRICS = "result.json", "metrics.jsonl"
# Of result.json: how, where and how fast it was trained. All else must be equal, above all `weights_digest`, which
# covers every buffer of the network, also those that no ledger row holds.
NO_RESULT = (
    "name", "images_per_second", "train_seconds", "world_size", "config_hash", "segpipe", "mode", "versions",
    "switches", "git", "weights",
)  # fmt: skip
NO_METRIC = ("time_s", "images_per_second")  # of a line of metrics.jsonl
COMPARED = ("train", "validation")  # kinds of its lines
LONGEST_VALUE = 200  # characters in a phrase


def mapping_differences(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Entries that differ, as name -> (value in a, value in b); None stands for a missing one."""
    return {
        name: (a.get(name), b.get(name))
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    }


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Phrases such as "a.png was altered": altered files first, then missing and added ones."""
    altered = [name for name in before if name in now and now[name] != before[name]]
    return [
        *(f"{name} was altered" for name in altered),
        *(f"{name} is missing" for name in before if name not in now),
        *(f"{name} was added" for name in now if name not in before),
    ]


def result_differences(a: Path, b: Path) -> list[str]:
    """Phrases on unequal numbers in metrics.jsonl and result.json; empty where one run lacks the file.

    Raises CheckpointError for a file that cannot be read.
    """
    return [*_metrics(a, b), *_finals(a, b)]


def input_differences(a: Path, b: Path) -> str:
    """A phrase with the data files and sources that differ; empty when none does or one run lacks inputs.json.

    Raises CheckpointError for a file that cannot be read.
    """
    if not _both_have(INPUTS, a, b):
        return ""
    one, two = (read_inputs(folder / INPUTS) for folder in (a, b))
    found = []
    for part in ("data", "code"):
        if changed := changes(one[part]["files"], two[part]["files"]):
            found.append(f"{part} of B: {listed(changed)}")
    return "; ".join(found)


def missing_files(a: Path, b: Path) -> list[str]:
    """Phrases on files with results that only one of two runs has."""
    return [
        f"{name} is in {run} only"
        for name in (RESULT, INPUTS)
        for run, folder, other in (("A", a, b), ("B", b, a))
        if (folder / name).is_file() and not (other / name).is_file()
    ]


def _both_have(name: str, a: Path, b: Path) -> bool:
    return (a / name).is_file() and (b / name).is_file()


def _metrics(a: Path, b: Path) -> Iterator[str]:
    if not _both_have(METRICS, a, b):
        return
    here, there = _lines(a), _lines(b)
    for step, kind, precision in sorted(here.keys() & there.keys()):
        one, two = here[step, kind, precision], there[step, kind, precision]
        if names := _unequal(one, two, NO_METRIC):
            first = "miou" if "miou" in names else names[0]
            where = f"of step {step} in {METRICS}"
            if precision:
                where = f"of the validation at step {step} ({precision})"
            yield f"{first} {where} is {one.get(first)} in A and {two.get(first)} in B"


def _finals(a: Path, b: Path) -> Iterator[str]:
    if not _both_have(RESULT, a, b):
        return
    one, two = (_read(folder / RESULT) for folder in (a, b))
    if one.get("steps") != two.get("steps"):
        return
    same_release = one.get("segpipe") == two.get("segpipe")  # releases add names
    for name in _unequal(one, two, NO_RESULT):
        if same_release or (name in one and name in two):
            here, there = _brief(one, name), _brief(two, name)
            yield f"{name} in {RESULT} is {here} in A and {there} in B"


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
                precision = str(line.get("precision", ""))
                found[int(line["step"]), str(line["kind"]), precision] = line
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}). Restore it."
        ) from error


def read_inputs(path: Path) -> dict[str, Any]:
    """Content of inputs.json. Raises CheckpointError when it is damaged."""
    content = _read(path)
    try:
        for part in ("data", "code"):
            content[part]["files"].items()
    except (KeyError, TypeError, AttributeError) as error:
        text = f"{path} does not describe the inputs of a run. Restore it."
        raise CheckpointError(text) from error
    return content
