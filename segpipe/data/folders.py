"""Folders of a data set: which of them hold images and masks, and what to say when they are not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def missing(folder: Path) -> str:
    """Message about a folder that does not exist, with the nearest one that does."""
    parent, absent = folder, folder
    while not parent.is_dir():
        parent, absent = parent.parent, parent
    siblings = sorted(path.name for path in parent.iterdir() if path.is_dir())
    other = near(absent.name, siblings)
    hint = f"Nearest: {parent / other}" if other else f"{parent} holds {', '.join(siblings[:8]) or 'no folders'}"
    return f"{absent} does not exist. {hint}. Set data.root and the split to existing folders."


def near(name: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `name`, if one is similar."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)), None)
