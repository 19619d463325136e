"""Arguments of commands: `key=value`, `--key value`, `--switch`, and leading values without a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        if nameless and not is_flag and (name not in known or not equals):
            yield nameless.pop(0), argument
            continue
        if name not in known or not (equals or is_flag):
            path = not equals and ("/" in argument or Path(argument).exists())
            key = next(
                (key for key in ("run", "data.root") if path and key in known), ""
            )
            hint = (
                f" Did you mean {key}={argument}?"
                if key
                else nearest(name, list(known))
            )
            raise ConfigError(
                f"{argument!r} is not an argument of this command, which takes KEY=VALUE with the keys "
                f"{', '.join(known)}.{hint}"
            )
        if not equals and isinstance(known[name].default, bool):
            text = "true"
        elif not equals:  # --key value, or --key value value for a list
            values = [] if rest else [""]
            while (
                rest
                and not rest[0].startswith("--")
                and (not values or isinstance(known[name].default, list))
            ):
                values.append(rest.pop(0))
            text = (
                f"[{','.join(values)}]"
                if isinstance(known[name].default, list)
                else "".join(values)
            )
        if name in nameless:
            nameless.remove(name)
        yield name, text


def with_settings(config: Config, given: Mapping[str, Any]) -> Config:
    """`config` with the settings in `given`, as text or value, replaced; keys without a dot are no settings.

    A `loss.backend` that needs a certain machine becomes auto: the network may have been trained on another one.
    """
    values = to_mapping(config)
    if values["loss"]["backend"] in ("native", "triton"):
        values["loss"]["backend"] = "auto"
    for key, value in given.items():
        group, dot, name = key.partition(".")
        if dot:
            values[group][name] = (
                read(SETTINGS[key], value) if isinstance(value, str) else value
            )
    changed = from_mapping(values)
    check(changed, world_size=1)
    return changed


def read(setting: Setting, text: str) -> Any:
    """Value of `text` with the type of the setting's default. Raises ConfigError if it does not fit."""
    value = convert(setting.key, _typed(text, setting.default), setting.default)
    if problem := setting.problem(value):
        raise ConfigError(problem)
    return value


def _typed(text: str, default: Any) -> Any:
    """Number, switch or list that `text` stands for; the text itself if it is none of them."""
    if isinstance(default, str):
        return text
    if isinstance(
        default, bool
    ):  # YAML would take yes, on and more, which Hydra does not
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        parsed = OmegaConf.from_dotlist([f"value={text}"])
        return OmegaConf.to_container(parsed)["value"]  # type: ignore[index, call-overload]
    except (YAMLError, OmegaConfBaseException):
        return text
