"""One declaration per setting: default, meaning and valid values, for --help, docs/settings.md and the checks."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, cached_property, partial
from os.path import expanduser
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError, did_you_mean, refuse

# For each type of value: the types accepted as input, and its name in messages.
KINDS: dict[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str | int | float | Path, "text"),
}

MOST = 1e9  # upper limit of a number that declares none


@dataclass(frozen=True)
class Setting:
    """A setting, or a key of a command. Values have the type of `default`."""

    key: str
    default: Any
    doc: str
    choices: tuple[str, ...] = ()  # valid values, or valid items of a list
    low: float = 0  # smallest valid number
    high: float = MOST
    length: int = 0  # items that a list must have; 0 means any number
    free: bool = False  # cannot affect the numbers: may change when a run is resumed
    required: bool = False  # has no default; `default` is then an example
    # Further valid names: an example, and the regular expression.
    family: tuple[str, str] = ("", "")
    # An example of the items of a list or mapping. If `default` is neither, a list of such items is valid too.
    item: Any = None
    auto: bool = False  # "auto" is valid too: an empty list until the data set is known
    # An import path package.module:Name is valid too; its form is checked on import.
    plugin: bool = False

    @cached_property
    def is_text(self) -> bool:
        """Whether every value is text, taken literally."""
        return isinstance(self.default, str) and self.item is None

    @property
    def valid(self) -> str:
        """Description of the valid values; empty if every value of the type is valid."""
        if self.choices:
            quantity = "any" if isinstance(self.default, list) else "one"
            text = f"{quantity} of {self._names}"
            if isinstance(self.item, float):
                text += f", or a list of numbers of at least {self.low}"
            return text
        if type(self._example) not in (int, float):
            return ""
        if self.high == MOST:
            return f"at least {self.low}"
        return f"{self.low} to {self.high}{', or auto' if self.auto else ''}"

    @property
    def _names(self) -> str:
        family = f"names like {self.family[0]}" if self.family[0] else ""
        own = "or package.module:Name of your own" if self.plugin else ""
        return ", ".join(filter(None, [*self.choices, family, own]))

    def convert(self, value: Any) -> Any:
        """`value` converted to the type of the default; a number given for text (`compute.nproc=4`) becomes text.

        Raises ConfigError for a value of another type.
        """
        default, value = self.default, simple(value)
        # YAML reads these words as booleans.
        word = {"true": "on", "false": "off"}.get(str(value).lower())
        if word in (default, *self.choices):
            value = word
        if isinstance(default, dict):
            if not isinstance(value, Mapping) or any(
                not isinstance(name, str) for name in value
            ):
                raise self._unfit(value, "a mapping such as {name: value}")
            if self.item is None:
                return value
            return {name: self._item(f".{name}", value[name]) for name in value}

        if self.auto and value in ("auto", []):
            return []
        is_list = isinstance(default, list)
        takes_list = is_list or self.item is not None
        if takes_list and isinstance(value, list) and (value or default == []):
            numbered = enumerate(value)
            return [self._item(f"[{place}]", each) for place, each in numbered]
        if is_list:
            example = default or [self._example or "name"]
            raise self._unfit(
                value, f"a list such as {example}{', or auto' if self.auto else ''}"
            )

        accepted, name = KINDS[type(default)]
        fits = isinstance(value, accepted) and (
            isinstance(value, bool) == isinstance(default, bool)
        )
        if fits and isinstance(default, float):
            fits = abs(value) <= sys.float_info.max
        if not fits:
            of = f" of {self.valid}" if self.valid and not self.choices else ""
            example = f", such as {shown(default)}" if default != "" else ""
            raise self._unfit(value, name + of, example)
        return type(default)(value)

    @property
    def _example(self) -> Any:
        """An example of an item of a list or mapping; for other types, the default itself."""
        if self.item is None and isinstance(self.default, list):
            return next(iter(self.default), "")
        return self.default if self.item is None else self.item

    def _item(self, place: str, value: Any) -> Any:
        """An item of a list or mapping, converted."""
        kind = Setting(f"{self.key}{place}", self._example, "", (), self.low, self.high)
        return kind.convert(value)

    def _unfit(self, value: Any, needed: str, example: str = "") -> ConfigError:
        return ConfigError(
            f"{self.key} = {brief(value)}, but {needed} was needed{example}."
        )

    def problem(self, value: Any) -> str:
        """What is wrong with `value`, already of the right type; empty if it is valid."""
        items = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            items = [] if self.item is None else list(value.values())
        if self.length and len(items) != self.length and (items or not self.auto):
            return f"{self.key} = {value}, but {self.length} values were needed, such as {self.default}."
        for item in items:
            if isinstance(item, str):
                known = not self.choices or item in self.choices
                known |= self.plugin and ":" in item
                # The family of a setting without one matches the empty text.
                if not known and not (item and re.fullmatch(self.family[1], item)):
                    return f"{self.key} = {item!r} is not one of {self._names}.{nearest(item, self.choices)}"
            elif self.item != {} and not self.low <= item <= self.high:
                return f"{self.key} = {brief(value)}, but a value of {self.valid} was needed."
        names = [item for item in items if isinstance(item, str) and not item.isdigit()]
        if len(set(names)) < len(names):
            return f"{self.key} = {value} contains a name twice. Give each name once."
        return ""

    def checked(self, value: Any) -> Any:
        """`value`, converted. Raises ConfigError for one that is not valid."""
        found = self.convert(value)
        if problem := self.problem(found):
            raise ConfigError(problem)
        return found


Settings = Mapping[str, Setting]
Values = dict[str, Any]  # by key


def problems_of(settings: Settings, values: Values) -> dict[str, str]:
    """What is wrong with each invalid value, by key; all values have the right type."""
    found = {key: settings[key].problem(value) for key, value in values.items()}
    return {key: problem for key, problem in found.items() if problem}


def converted(
    settings: Settings, values: Values, unknown: Callable[[str], str]
) -> Values:
    """The values by key, converted to their types.

    Raises ConfigError with a line for each value of the wrong type, and for each key that is `unknown`, which says why.
    """
    found, problems = {}, []
    for key, value in values.items():
        try:
            if key not in settings:
                raise ConfigError(unknown(key))
            found[key] = settings[key].convert(value)
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)
    return found


def setting(default: Any, doc: str, **properties: Any) -> Any:
    """Dataclass field of a setting; `properties` are fields of Setting."""
    metadata = {"doc": doc, **properties}
    return field(default_factory=partial(copy, default), metadata=metadata)


def group(kind: type, **properties: Any) -> Any:
    """Dataclass field of a group of settings; `properties` apply to all of them."""
    return field(default_factory=kind, metadata=properties)


def declared(kind: type, prefix: str = "", **inherited: Any) -> Iterator[Setting]:
    """All settings of a dataclass and its groups, in their order."""
    defaults = kind()
    for entry in fields(kind):
        default = getattr(defaults, entry.name)
        properties = {**inherited, **entry.metadata}
        if is_dataclass(default):
            yield from declared(type(default), f"{prefix}{entry.name}.", **properties)
        else:
            yield Setting(prefix + entry.name, default, **properties)


def simple(value: Any) -> Any:
    """The value as Python's own: of numpy or torch, a set as a list, a path as text with the home folder for ~."""
    if isinstance(value, str | Path):  # no shell expands the ~ of run.root=~/x
        return expanduser(value)
    if isinstance(value, Mapping):
        return {name: simple(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [simple(each) for each in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Set):  # whose order differs between processes
        try:
            return sorted(value)
        except TypeError:  # of several types
            return sorted(value, key=repr)
    return value


def shown(value: Any) -> str:
    """A value in command-line syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def brief(value: Any) -> str:
    """A value for a message; the middle of a long one is left out."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:100]}...{text[-100:]}"


def nearest(word: str, choices: Iterable[str]) -> str:
    """A sentence that names the choice nearest to `word`, with a leading space; empty if none is similar.

    Finds a setting in another group or spelling, or by its name in other trainers: `train.batchSize`.
    """
    choices = list(choices)
    leaf = word.rpartition(".")[2].replace("-", "_")
    snake = re.sub("([A-Z])", r"_\1", leaf).lower().lstrip("_")
    for key, terms in terms_elsewhere().items():
        if snake in terms and key in choices:
            return f" Did you mean {key}?"
    leaves = [key.rpartition(".")[2] for key in choices]
    if leaves.count(leaf) == 1 and word.count(".") < 2:
        return f" Did you mean {choices[leaves.index(leaf)]}?"
    if hint := did_you_mean(word, choices):
        return hint
    close = get_close_matches(leaf, leaves, 1)
    return f" Did you mean {choices[leaves.index(close[0])]}?" if close else ""


@cache
def terms_elsewhere() -> dict[str, list[str]]:
    """Names of our settings in other trainers, best match first."""
    path = Path(__file__).with_name("terms_elsewhere.txt")
    lines = path.read_text(encoding="utf8").splitlines()[1:]
    entries = (line.split(": ") for line in lines)
    return {key: terms.split() for key, terms in entries}
