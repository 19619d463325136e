"""Arguments of commands: `key=value`, `--key value`, `--switch`, and leading values without a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from segpipe.errors import ConfigError
from segpipe.settings.check import check
from segpipe.settings.config import SETTINGS, Config, convert, from_mapping, to_mapping
from segpipe.settings.setting import Setting, nearest


def parse(
    arguments: Sequence[str],
    keys: Sequence[Setting],
    settings: Sequence[str] = (),
    positional: Sequence[str] = (),
) -> dict[str, Any]:
    """Values of all `keys`, and of those of a run's `settings` that are given.

    Keys in `positional` may be given without their name, in this order. Raises ConfigError for unknown and missing
    keys and for values that do not fit.
    """
    known = {key.key: key for key in keys} | {name: SETTINGS[name] for name in settings}
    given = {
        name: read(known[name], text)
        for name, text in _pairs(arguments, known, positional)
    }
    for key in keys:
        if key.required and not given.get(key.key):
            raise ConfigError(
                f"{key.key} is missing ({key.doc}). Set {key.key}={key.default}."
            )
        given.setdefault(key.key, key.default)
    return given


def _pairs(
    arguments: Sequence[str], known: Mapping[str, Setting], positional: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Key and text of each argument."""
    rest, nameless = list(arguments), list(positional)
    while rest:
        argument = rest.pop(0)
        is_flag = argument.startswith("--")
        name, equals, text = argument.removeprefix("--").partition("=")
        if name in known and (equals or is_flag):
            if name in nameless:
                nameless.remove(name)
            yield name, text if equals else _text_of_flag(known[name].default, rest)
        elif nameless and not is_flag:
            yield nameless.pop(0), argument
        else:
            hint = nearest(name, known)
            if not equals and ("/" in argument or Path(argument).exists()):
                for key in ("data.root", "run"):
                    if key in known:
                        hint = f" Did you mean {key}={argument}?"
            raise ConfigError(
                f"{argument!r} is not an argument of this command, which takes "
                f"KEY=VALUE with the keys {', '.join(known)}.{hint}"
            )


def _text_of_flag(default: Any, rest: list[str]) -> str:
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
            is_text = isinstance(value, str)
            values[group][name] = read(SETTINGS[key], value) if is_text else value
    changed = from_mapping(values)
    check(changed, world_size=1)
    return changed


def read(setting: Setting, text: str) -> Any:
    """Value of `text` with the type of the setting's default. Raises ConfigError if it does not fit."""
    value: Any = text
    if isinstance(setting.default, bool):  # YAML would take yes, on and more
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif not isinstance(setting.default, str):
        with suppress(YAMLError, OmegaConfBaseException):
            value = OmegaConf.to_object(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore[index, call-overload]
    value = convert(setting.key, value, setting.default)
    if problem := setting.problem(value):
        raise ConfigError(problem)
    return value
