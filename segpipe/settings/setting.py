"""One declaration per setting: default, meaning and valid values, for --help, docs/settings.md and the checks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from segpipe.errors import did_you_mean


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
    numbers: bool = False  # a list of numbers in the range is valid, too
    # A family of names that are valid, too: an example, and the regular expression.
    family: tuple[str, str] = ("", "")
    several: bool = False  # a list of the choices is valid, too
    mappings: bool = False  # a list of mappings, empty by default
    ending: str = ""  # of the name of a file
    # An import path package.module:Name is valid, too; its form is checked where it is
    # imported.
    plugin: bool = False

    @property
    def valid(self) -> str:
        """Description of the valid values; empty if every value of the type is valid."""
        if self.choices:
            quantity = "any" if isinstance(self.default, list) else "one"
            text = f"{quantity} of {self._names}"
            if self.numbers:
                text += f", or a list of numbers of at least {self.low}"
            return text
        if math.isinf(self.low):
            return ""
        if math.isinf(self.high):
            return f"at least {self.low}"
        return f"{self.low} to {self.high}"

    @property
    def _names(self) -> str:
        example, _ = self.family
        family = [f"names like {example}"] if example else []
        own = ["or package.module:Name of your own"] if self.plugin else []
        return ", ".join([*self.choices, *family, *own])

    def problem(self, value: Any) -> str:
        """What is wrong with `value`, which has the right type; empty when it is valid."""
        if self.ending and value and not value.endswith(self.ending):
            return f"{self.key} = {value}, but a file that ends in {self.ending} was needed."
        items = self._items(value)
        if self.length and len(items) != self.length:
            return (
                f"{self.key} = {value}, but {self.length} values were needed, such as "
                f"{self.default}."
            )
        for item in items:
            if problem := self._problem_of_item(item, value):
                return problem
        if items and isinstance(items[0], str) and len(set(items)) < len(items):
            return f"{self.key} = {value} names one twice. Give each name once."
        return ""

    def _items(self, value: Any) -> list[Any]:
        """What `choices` and the range hold for."""
        if self.mappings:
            return []
        if isinstance(value, dict):
            return list(value.values()) if math.isfinite(self.low) else []
        return value if isinstance(value, list) else [value]

    def _problem_of_item(self, item: Any, value: Any) -> str:
        is_name = isinstance(item, str)
        if self.choices and item not in self.choices:
            is_number = self.numbers and isinstance(value, list)
            in_family = not is_number and re.fullmatch(self.family[1], item)
            if not is_number and not in_family and not (self.plugin and ":" in item):
                return (
                    f"{self.key} = {item!r} is not one of {self._names}."
                    f"{nearest(item, self.choices)}"
                )
        if is_name or self.low <= item <= self.high:
            return ""
        needed = (
            f"values of {self.valid} were"
            if self.length
            else f"a value of {self.valid} was"
        )
        return f"{self.key} = {brief(value)}, but {needed} needed."


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
        default = getattr(defaults, entry.name)
        properties = {**inherited, **entry.metadata}
        if is_dataclass(default):
            yield from declared(type(default), f"{prefix}{entry.name}.", **properties)
        else:
            yield Setting(prefix + entry.name, default, **properties)


def shown(value: Any) -> str:
    """A value in command-line syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def brief(value: Any) -> str:
    """A value for a message, its middle left out if it is longer than a few lines."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:100]}...{text[-100:]}"


def nearest(word: str, choices: Iterable[str]) -> str:
    """A sentence that names the choice nearest to `word`, with a leading space; empty if none is alike.

    Knows what other trainers call a setting, in any group and spelling: `train.batchSize`.
    """
    leaf = word.rpartition(".")[2].replace("-", "_")
    snake = re.sub("([A-Z])", r"_\1", leaf).lower().lstrip("_")
    choices = list(choices)
    for key, terms in terms_elsewhere().items():
        if snake in terms and key in choices:
            return f" Did you mean {key}?"
    return did_you_mean(word, choices)


@cache
def terms_elsewhere() -> dict[str, list[str]]:
    """Our settings with their names in other trainers, the best first."""
    path = Path(__file__).with_name("terms_elsewhere.txt")
    lines = path.read_text(encoding="utf8").splitlines()[1:]
    entries = (line.split(": ") for line in lines)
    return {key: terms.split() for key, terms in entries}
