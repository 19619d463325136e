"""What may be typed: `key=value` for settings, files of conf/ and the keys of a command, and options with dashes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from segpipe.errors import ConfigError, all_of
from segpipe.settings.check import check
from segpipe.settings.config import (
    GROUPS,
    MAPPINGS,
    SETTINGS,
    Config,
    from_mapping,
    no_setting,
    to_mapping,
)
from segpipe.settings.setting import Setting, nearest, shown

PACKAGE = Path(__file__).resolve().parents[1]
# In a clone the folder lies beside the package, in an installed wheel inside it.
CONF = next(
    path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir()
)
MULTIRUN = ("-m", "--multirun")
CONFIG_DIR = ("-cd", "--config-dir")
SHOW = ("-c", "--cfg")


@dataclass
class CommandLine:
    """What was typed for a training."""

    overrides: list[str] = field(default_factory=list)  # as Hydra needs them
    added: list[Path] = field(default_factory=list)  # folders with further files
    sweeps: bool = False
    shows: bool = False  # prints the configuration instead of training

    @property
    def search_path(self) -> list[str]:
        """The added folders, as an override of Hydra."""
        listed = ",".join(f"'file://{folder}'" for folder in self.added)
        return [f"hydra.searchpath=[{listed}]"] if listed else []


def command_line(arguments: Sequence[str]) -> CommandLine:
    """The arguments, checked. Folders are relative to the current one.

    Raises ConfigError with a line for each key, file of conf/ or value that is not valid.
    """
    line = CommandLine()
    typed, waiting = list[str](), list(arguments)
    while waiting:
        argument = waiting.pop(0)
        option, equals, value = argument.partition("=")
        if not option.startswith("-"):
            typed.append(argument)
        elif option in MULTIRUN:
            line.sweeps = True
        elif option in (*CONFIG_DIR, *SHOW):
            if not equals:
                value = waiting.pop(0) if waiting else ""
            if option in SHOW:
                line.shows = True
            elif not value or not Path(value).is_dir():
                raise ConfigError(
                    f"{option} = {value} is not a folder in {Path.cwd()}."
                )
            else:
                line.added.append(Path(value).resolve())
        else:
            raise ConfigError(
                f"{option} is no option of segpipe. Settings are written without dashes, "
                f"as KEY=VALUE.{nearest(option.strip('-'), [*SETTINGS, *GROUPS])}"
            )
    line.sweeps = line.sweeps or any(_is_sweep(text, line.added) for text in typed)
    checks = (partial(override, text, line.added, line.sweeps) for text in typed)
    line.overrides = all_of(checks)
    return line


def choices(group: str, added: Sequence[Path] = ()) -> list[str]:
    """Names of the files of a group."""
    names = set()
    for folder in (CONF, *added):
        for path in (folder / group).rglob("*.yaml"):
            names.add(path.relative_to(folder / group).with_suffix("").as_posix())
    return sorted(names)


def _is_sweep(text: str, added: Sequence[Path]) -> bool:
    """Whether an override chooses an experiment that is a sweep."""
    group, _, name = text.partition("=")
    paths = (folder / "experiment" / f"{name}.yaml" for folder in (CONF, *added))
    return group == "experiment" and any(
        b"mode: MULTIRUN" in path.read_bytes() for path in paths if path.is_file()
    )


def override(text: str, added: Sequence[Path] = (), sweeps: bool = False) -> str:
    """`text` as Hydra needs it: text in quotes, and entries of a mapping added.

    Raises ConfigError for a key, a file of conf/ or a value that is not valid. The values of a sweep are checked with
    its jobs.
    """
    key, equals, value = text.partition("=")
    key = key.lstrip("+")
    if key.startswith("hydra"):
        return text
    if not equals or not key:
        raise ConfigError(
            f"{text!r} is not of the form key=value.{nearest(key, [*SETTINGS, *GROUPS])}"
        )
    is_entry = any(f"{key}.".startswith(f"{mapping}.") for mapping in MAPPINGS)
    if key not in SETTINGS and key not in GROUPS and not is_entry:
        raise ConfigError(no_setting(key))
    if sweeps:
        return f"++{key}={value}" if is_entry else text
    if key in GROUPS:
        valid = choices(key, added)
        if value not in valid:
            raise ConfigError(
                f"{key} = {value} is not one of {', '.join(valid)}.{nearest(value, valid)}"
            )
        return text
    if is_entry:
        _parsed(key, value, "{name: value}")
        return f"++{key}={value}"
    entry = SETTINGS[key]
    if "${" not in value and value != "???":
        read(entry, value)
    return f"{key}={quoted(value) if entry.is_text else value}"


def _parsed(key: str, text: str, example: str) -> Override:
    """An override in Hydra's grammar. Raises ConfigError for one that cannot be read."""
    try:
        return OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException:
        raise ConfigError(
            f"'{key}={text}' cannot be read. Write it like {key}={example}."
        ) from None


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]
    return text[1:-1] if is_quoted else text


def quoted(text: str) -> str:
    """Text as Hydra's grammar takes it: backslashes before a quote are doubled, and an inner quote gets one more."""
    inner = re.sub(r'(\\+)("|$)', r"\1\1\2", _unquoted(text)).replace('"', '\\"')
    return f'"{inner}"'


def read(entry: Setting, text: str) -> Any:
    """Value of `text` with the type of the setting: text as it was typed, all else in Hydra's grammar.

    Raises ConfigError if it does not fit.
    """
    return _checked(entry, _value(entry, text))


def _value(entry: Setting, text: str) -> Any:
    if entry.is_text:
        return _unquoted(text)
    parsed = _parsed(entry.key, text, shown(entry.default))
    if parsed.is_sweep_override():
        raise ConfigError(
            f"'{entry.key}={text}' has several values. A list: {entry.key}=[{text}]. "
            f"One training for each: add --multirun."
        )
    return parsed.value()


def _checked(entry: Setting, value: Any) -> Any:
    value = entry.convert(value)
    if problem := entry.problem(value):
        raise ConfigError(problem)
    return value


def parse(
    arguments: Sequence[str],
    keys: Sequence[Setting],
    settings: Sequence[str] = (),
    positional: Sequence[str] = (),
    *,
    overrides: bool = False,
) -> dict[str, Any]:
    """Values of all `keys`, and of those of a run's `settings` that are given.

    Keys in `positional` may be given without their name, in this order. With `overrides`, all other arguments are those
    of a training, and come under this name. Raises ConfigError for unknown and missing keys and for values that do not
    fit, with a line for each.
    """
    known = {key.key: key for key in keys} | {name: SETTINGS[name] for name in settings}
    rest: list[str] = []
    typed = dict(_pairs(arguments, known, positional, rest))
    if rest and not overrides:
        raise ConfigError("\n".join(_unknown(text, known) for text in rest))
    names = (partial(_value, known[name], text) for name, text in typed.items())
    given = complete(dict(zip(typed, all_of(names), strict=True)), keys, settings)
    return given | {"overrides": rest} if overrides else given


def complete(
    values: Mapping[str, Any], keys: Sequence[Setting], settings: Sequence[str] = ()
) -> dict[str, Any]:
    """The values with their types, and the defaults of the keys that are not given. Raises as `parse` does."""
    known = {key.key: key for key in keys} | {name: SETTINGS[name] for name in settings}
    if unknown := [name for name in values if name not in known]:
        raise ConfigError("\n".join(_unknown(name, known) for name in unknown))
    checks = (partial(_checked, known[name], value) for name, value in values.items())
    given = dict(zip(values, all_of(checks), strict=True))
    for key in keys:
        if key.required and not given.get(key.key):
            raise ConfigError(
                f"{key.key} is missing ({key.doc}). Set {key.key}={key.default}."
            )
        given.setdefault(key.key, key.default)
    return given


def _unknown(argument: str, known: Mapping[str, Setting]) -> str:
    hint = nearest(argument.lstrip("-").partition("=")[0], known)
    if "run" in known and ("/" in argument or Path(argument).exists()):
        hint = f" Did you mean run={argument}?"
    return (
        f"{argument!r} is not an argument of this command, which takes KEY=VALUE with "
        f"the keys {', '.join(known)}.{hint}"
    )


def _pairs(
    arguments: Sequence[str],
    known: Mapping[str, Setting],
    positional: Sequence[str],
    others: list[str],
) -> Iterator[tuple[str, str]]:
    """Key and text of each argument; unknown ones go to `others`."""
    rest, nameless = list(arguments), list(positional)
    while rest:
        argument = rest.pop(0)
        is_option = argument.startswith("--")
        name, equals, text = argument.removeprefix("--").partition("=")
        if name in known and (equals or is_option):
            if name in nameless:
                nameless.remove(name)
            yield name, text if equals else _text_of_option(known[name].default, rest)
        elif nameless and not is_option:
            yield nameless.pop(0), argument
        else:
            others.append(argument)


def _text_of_option(default: Any, rest: list[str]) -> str:
    """What follows `--key`, taken from the other arguments: one value, all for a list, none for a switch."""
    if isinstance(default, bool):
        return "true"
    is_list, values = isinstance(default, list), list[str]()
    while rest and not rest[0].startswith("--") and (is_list or not values):
        values.append(rest.pop(0))
    return f"[{','.join(values)}]" if is_list else "".join(values)


def with_settings(config: Config, given: Mapping[str, Any]) -> Config:
    """`config` with the settings in `given`, as text or value, replaced; keys without a dot are no settings.

    A `loss.backend` that needs a certain machine becomes auto: the network may have been trained on another one.
    """
    values = to_mapping(config)
    if values["loss"]["backend"] != "plain":
        values["loss"]["backend"] = "auto"
    for key, value in given.items():
        group, _, name = key.rpartition(".")
        if group:
            values[group][name] = (
                read(SETTINGS[key], value) if isinstance(value, str) else value
            )
    changed = from_mapping(values)
    check(changed, world_size=1)
    return changed
