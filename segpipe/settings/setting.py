"""One declaration per setting: default, meaning and valid values, for --help, docs/settings.md and the checks."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A setting or a command's key. The type of `default` is the type of its values."""

    key: str
    default: Any
    doc: str
    choices: tuple[str, ...] = ()  # valid values, or valid items of a list
    low: float = -math.inf  # smallest valid number
    high: float = math.inf
    length: int = 0  # items that a list must have; 0 means any number
    free: bool = False  # cannot reach the numbers: may change when a run is resumed
    required: bool = False  # has no default; `default` is then an example
    numbers: bool = (
        False  # instead of a name, a list of numbers in the range may be given
    )
    mappings: bool = False  # a list of mappings, empty by default
    ending: str = ""  # of the name of a file
    plugin: bool = False  # an import path package.module:Name is valid too; its form is checked where it is imported

    @property
    def valid(self) -> str:
        """Description of the valid values; empty if every value of the type is valid."""
        if self.choices:
            names = (
                f"{'any' if isinstance(self.default, list) else 'one'} of {self._names}"
            )
            return (
                f"{names}, or a list of numbers of at least {self.low}"
                if self.numbers
                else names
            )
        if math.isinf(self.low):
            return ""
        return (
            f"at least {self.low}"
            if math.isinf(self.high)
            else f"{self.low} to {self.high}"
        )

    @property
    def _names(self) -> str:
        return f"{', '.join(self.choices)}{', or package.module:Name of your own' if self.plugin else ''}"

    def problem(self, value: Any) -> str:
        """What is wrong with `value`, which has the right type; empty when it is valid."""
        if self.mappings:
            items = []
        elif isinstance(value, dict):
            items = list(value.values()) if math.isfinite(self.low) else []
        else:
            items = value if isinstance(value, list) else [value]
        if self.ending and value and not value.endswith(self.ending):
            return f"{self.key} = {value}, but a file that ends in {self.ending} was needed."
        if self.length and len(items) != self.length:
            return f"{self.key} = {value}, but {self.length} values were needed, such as {self.default}."
        for item in items:
            given = (self.numbers and isinstance(value, list)) or (
                self.plugin and ":" in item
            )
            if self.choices and item not in self.choices and not given:
                return f"{self.key} = {item!r} is not one of {self._names}.{nearest(item, self.choices)}"
            if not isinstance(item, str) and not self.low <= item <= self.high:
                needed = (
                    f"values of {self.valid} were"
                    if self.length
                    else f"a value of {self.valid} was"
                )
                return f"{self.key} = {value}, but {needed} needed."
        if len(set(items)) < len(items) and isinstance(items[0], str):
            return f"{self.key} = {value} names one twice. Give each name once."
        return ""


def setting(default: Any, doc: str, **properties: Any) -> Any:
    """Dataclass field of a setting; `properties` are those of Setting."""
    metadata = {"doc": doc, **properties}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: type, **properties: Any) -> Any:
    """Dataclass field of a group of settings; `properties` hold for all of them."""
    return field(default_factory=kind, metadata=properties)


def declared(kind: type, prefix: str = "", **inherited: Any) -> Iterator[Setting]:
    """All settings below a dataclass, in its order."""
    defaults = kind()
    for entry in fields(kind):
        default, properties = (
            getattr(defaults, entry.name),
            {**inherited, **entry.metadata},
        )
        if is_dataclass(default):
            yield from declared(type(default), f"{prefix}{entry.name}.", **properties)
        else:
            yield Setting(prefix + entry.name, default, **properties)


def shown(value: Any) -> str:
    """A value in command-line syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def nearest(word: str, choices: Sequence[str]) -> str:
    """A sentence that names the choice nearest to `word`, with a leading space; empty without choices.

    Knows what other trainers call a setting, and that a setting may be typed without its group or with a wrong one.
    """
    known = next((key for key in _from_elsewhere(word) if key in choices), "")
    if known:
        return f" Did you mean {known}?"
    found = max(choices, key=lambda choice: _likeness(word, choice), default="")
    if not found:
        return ""
    return (
        f" Did you mean {found}?"
        if _likeness(word, found) >= 0.5
        else f" The nearest is {found}."
    )


@cache
def terms_elsewhere() -> dict[str, str]:
    """Names that other trainers have for our settings, by setting and separated by spaces; read for a hint only."""
    file = Path(__file__).with_name("terms_elsewhere.toml")
    return tomllib.loads(file.read_text(encoding="utf8"))


def _from_elsewhere(word: str) -> list[str]:
    """Our settings for a word of another trainer, the best first; in any group and spelling: `train.batchSize`."""
    leaf = word.rpartition(".")[2]
    snake = (
        "".join(f"_{c.lower()}" if c.isupper() else c for c in leaf)
        .replace("-", "_")
        .lstrip("_")
    )
    return [key for key, terms in terms_elsewhere().items() if snake in terms.split()]


def _likeness(word: str, choice: str) -> float:
    """0 to 1; the group counts little beside the name of the setting itself."""
    whole = difflib.SequenceMatcher(None, word, choice).ratio()
    if "." not in choice or word.count(".") > 1:
        return whole
    leaf, own = word.rpartition(".")[2], choice.rpartition(".")[2]
    named = (
        0.95 if leaf == own else 0.85 * difflib.SequenceMatcher(None, leaf, own).ratio()
    )
    return (
        max(whole, named) + 0.01 * whole
    )  # of equal names, the one whose group is nearer
