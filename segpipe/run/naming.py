"""Names of the jobs of a sweep: run.name with the swept settings, where it does not show them itself."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

_VALUE_LENGTH, _SUFFIX_LENGTH = 24, 120  # characters; a longer text ends with a hash of the whole


def distinct(
    names: Sequence[str], templates: Sequence[str], swept: Sequence[Mapping[str, str]], *, always: bool
) -> list[str]:
    """The run names of all jobs: as they are if they differ, else each with the swept settings that it does not show.

    names: run.name of each job. templates: the same before `${...}` is resolved. swept: its swept overrides, by key.
    `always` is for sweepers that choose jobs batch by batch: a name must not depend on which jobs share a batch.
    """
    if not always and len(set(names)) == len(names):
        return list(names)
    keys = {key for overrides in swept for key in overrides}
    named = []
    for name, template, overrides in zip(names, templates, swept, strict=True):
        hidden = {key: text for key, text in overrides.items() if not _shows(template, key)}
        named.append("-".join([name, _suffix(hidden, keys)]) if hidden else name)
    return named


def _shows(template: str, key: str) -> bool:
    """Whether a run name contains a setting, or the name of the file that a group such as `model` was set to."""
    return key == "run.name" or "${hydra:job" in template or f"${{{key}}}" in template or f"${{{key}.name}}" in template


def _suffix(overrides: Mapping[str, str], keys: Collection[str]) -> str:
    """`lr0.1-schedule_cosine`: short keys, and characters that every file system and shell takes."""
    leaves = Counter(key.rpartition(".")[2] for key in keys)
    parts = []
    for key, text in overrides.items():
        leaf = key.rpartition(".")[2]
        value = _shortened(_plain(text), text, _VALUE_LENGTH)
        joint = "" if value[:1].isdigit() else "_"
        parts.append(f"{_plain(leaf if leaves[leaf] == 1 else key)}{joint}{value}")
    suffix = "-".join(parts)
    return _shortened(suffix, suffix, _SUFFIX_LENGTH)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_") or "empty"


def _shortened(shown: str, text: str, length: int) -> str:
    if len(shown) <= length:
        return shown
    return f"{shown[: length - 9]}_{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
