"""What two runs show besides their ledgers: final scores and digests, and the files that they read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError, listed
from segpipe.files import read_json
from segpipe.ledger.rows import INPUTS

RESULT = "result.json"
# Of result.json: how, where and how fast it was trained. All else must be equal, above all `weights_digest`, which
# covers every buffer of the network, also those that no ledger row holds.
NO_RESULT = (
    "name", "images_per_second", "wall_images_per_second", "train_seconds", "world_size", "config_hash", "segpipe",
    "mode", "versions", "switches", "git", "weights",
)  # fmt: skip
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
    """Phrases on unequal entries of result.json; empty where one run lacks it, or did other updates.

    Raises CheckpointError for a file that cannot be read.
    """
    if not _both_have(RESULT, a, b):
        return []
    one, two = (_read(folder / RESULT) for folder in (a, b))
    if one.get("steps") != two.get("steps"):
        return []
    same_release = one.get("segpipe") == two.get("segpipe")
    found = []
    for name in {**one, **two}:
        if name in NO_RESULT or not (same_release or (name in one and name in two)):
            continue  # releases add names
        # As JSON has them, NaN equals NaN.
        if json.dumps(one.get(name)) != json.dumps(two.get(name)):
            here, there = _brief(one, name), _brief(two, name)
            found.append(f"{name} in {RESULT} is {here} in A and {there} in B")
    return found


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


def _brief(content: Mapping[str, Any], name: str) -> str:
    text = str(content.get(name, "missing"))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
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
