"""Arguments of the scripts that take a finished run: `run=runs/NAME` and the few settings that may still change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from segpipe.errors import ConfigError
from segpipe.settings.config import Config, check, from_mapping, nearest, to_mapping


def parse(arguments: Sequence[str], settings: Sequence[str]) -> dict[str, str]:
    """The arguments by key, `which` defaulting to "last". Raises ConfigError for any key not in `settings`.

    Everything else, the network, its classes and its normalisation, comes from the checkpoint.
    """
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    for key, value in given.items():
        if key not in settings:
            raise ConfigError(
                f"{key} = {value!r}, but only {', '.join(settings)} can be given here: the rest comes from the "
                f"checkpoint.{nearest(key, list(settings))}"
            )
    if not given.get("run"):
        raise ConfigError(f"{' '.join(arguments)!r} names no run. Set run=runs/NAME.")
    if given.setdefault("which", "last") not in ("last", "best"):
        raise ConfigError(f"which = {given['which']}, but last or best was needed.")
    return given


def with_settings(config: Config, given: dict[str, str]) -> Config:
    """`config` of the run with the settings of the command line in place of its own."""
    values = to_mapping(config)
    for key, text in given.items():
        group, _, name = key.partition(".")
        if name:
            before = values[group][name]
            values[group][name] = text if isinstance(before, str) else _read(text)
    changed = from_mapping(values)
    check(changed, world_size=1)
    return changed


def _read(text: str) -> Any:
    """The number, switch or list that `text` stands for; the text itself when it is none."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (YAMLError, OmegaConfBaseException):
        return text
