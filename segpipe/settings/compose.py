"""From command-line overrides to a checked Config: the only room that knows Hydra."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from segpipe.errors import ConfigError
from segpipe.settings.config import Config, from_mapping, known_keys, nearest

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("model", "data", "augment", "track", "experiment")

ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: list[str]) -> Config:
    """The configuration of a single run. Raises ConfigError naming the key, the value and the nearest valid ones."""
    check_overrides(overrides)
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            return resolve(hydra_compose("config", overrides))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_explain(error)) from error


def resolve(composed: DictConfig) -> Config:
    """Config of what Hydra composed. Raises ConfigError on keys and types that the dataclasses do not know."""
    values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True, throw_on_missing=True)
    assert isinstance(values, dict)
    values.pop("hydra", None)
    return from_mapping({str(key): value for key, value in values.items()})


def _explain(error: Exception) -> str:
    """Hydra's message and its cause on one line, with the nearest setting when it names one that does not exist."""
    messages = [error, error.__cause__] if error.__cause__ else [error]
    text = ": ".join(" ".join(str(message).split()) for message in messages)
    named = re.search(r"full_key: ([\w.]+)(?!\S)", text)
    keys = list(known_keys())
    valid = [*dict.fromkeys(key.partition(".")[0] for key in keys), *keys]
    return f"{text}.{nearest(named[1], valid)}" if named and named[1] not in valid else text


def check_overrides(overrides: list[str]) -> None:
    """Raise ConfigError for the first override whose key or chosen file does not exist, before Hydra sees it."""
    keys = list(known_keys())
    flags = any(text.startswith("-") for text in overrides)
    for text in overrides:
        if text.startswith("-") or (flags and "=" not in text):  # a flag of Hydra, or its value: --cfg job
            continue
        override = _parse(text)
        key = override.key_or_group
        if key.startswith("hydra"):
            continue
        if key in GROUPS:
            _check_choice(override)
        elif key not in keys and not any(known.startswith(f"{key}.") for known in keys):
            choices = [*keys, *GROUPS]
            raise ConfigError(f"{key} is not a setting of segpipe (in {text!r}).{nearest(key, choices)}")


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{text!r} is not of the form key=value: {' '.join(str(error).split())}") from error


def _check_choice(override: Override) -> None:
    group = override.key_or_group
    valid = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    value = override.value()
    chosen = [str(item) for item in value.list] if isinstance(value, ChoiceSweep) else [str(value)]
    for name in chosen:
        if name not in valid and not (group == "experiment" and name in ("null", "None")):
            raise ConfigError(f"{group} = {name} is not one of {', '.join(valid)}.{nearest(name, valid)}")
