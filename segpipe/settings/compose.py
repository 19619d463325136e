"""From command-line overrides to a Config. With the train command, the only module that knows Hydra."""

from __future__ import annotations

import logging
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import YAMLError

from segpipe.errors import ConfigError
from segpipe.settings.config import MAPPINGS, SETTINGS, Config, convert, from_mapping
from segpipe.settings.setting import nearest

PACKAGE = Path(__file__).resolve().parents[1]
# In a clone the folder lies beside the package, in an installed wheel inside it.
CONF = next(path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir())
GROUPS = ("model", "data", "augment", "track", "export", "experiment")
OTHER_CONF = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")  # flags that add or replace files
COMPLETION = ("--shell-completion", "-sc")

ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: list[str]) -> Config:
    """The configuration of a single run. Raises ConfigError naming the key, the value and the nearest valid ones."""
    overrides = checked_overrides(overrides)
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            return resolve(hydra_compose("config", overrides))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error)) from error


def resolve(composed: DictConfig) -> Config:
    """Config from what Hydra composed. Raises ConfigError for unknown keys and wrong types."""
    values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True, throw_on_missing=True)
    assert isinstance(values, dict)
    values.pop("hydra", None)
    return from_mapping({str(key): value for key, value in values.items()})


def explain(error: Exception) -> str:
    """What is wrong with a setting that Hydra or OmegaConf refused, on one line: in our words, or else in theirs."""
    errors = [error, error.__cause__] if error.__cause__ else [error]
    text = ": ".join(" ".join(str(each).split()) for each in errors)
    omegaconf = next((each for each in (*errors, error.__context__) if isinstance(each, OmegaConfBaseException)), None)
    named = str(omegaconf.full_key or "") if omegaconf else ""
    key, of_a_list, _ = named.partition("[")
    if isinstance(omegaconf, ValidationError) and key in SETTINGS:
        default = SETTINGS[key].default
        try:
            convert(named, omegaconf.value, default[0] if of_a_list and default else default)
        except ConfigError as own:
            return str(own)
    valid = [*dict.fromkeys(key.partition(".")[0] for key in SETTINGS), *SETTINGS]
    return f"{text}.{nearest(named, valid)}" if named and named not in valid and not named.startswith("hydra") else text


def checked_overrides(overrides: list[str]) -> list[str]:
    """The overrides as Hydra needs them: entries of a mapping are added, which Hydra writes as `++key=value`.

    Raises ConfigError for the first override whose key or config file does not exist.
    """
    flags = [text.partition("=")[0] for text in overrides if text.startswith("-")]
    if any(flag in COMPLETION for flag in flags):  # what follows is install=bash, not a setting
        return overrides
    own_files = not any(flag in OTHER_CONF for flag in flags)
    found = []
    for text in overrides:
        found.append(text)
        if text.startswith("-") or (flags and "=" not in text):  # a flag of Hydra or its value, such as --cfg job
            continue
        override = _parse(text)
        key = override.key_or_group
        if key.startswith("hydra"):
            continue
        if key in GROUPS:
            if own_files:
                _check_choice(override)
        elif any(f"{key}.".startswith(f"{mapping}.") for mapping in MAPPINGS):
            found[-1] = f"++{text.lstrip('+')}"
        elif key not in SETTINGS and not any(known.startswith(f"{key}.") for known in SETTINGS):
            raise ConfigError(f"{key} is not a setting of segpipe (in {text!r}).{nearest(key, [*SETTINGS, *GROUPS])}")
    return found


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{text!r} is not of the form key=value: {' '.join(str(error).split())}") from error


def _check_choice(override: Override) -> None:
    group = override.key_or_group
    valid = choices(group)
    value = override.value()
    chosen = [str(item) for item in value.list] if isinstance(value, ChoiceSweep) else [str(value)]
    for name in chosen:
        if name not in valid and not (group == "experiment" and name in ("null", "None")):
            raise ConfigError(f"{group} = {name} is not one of {', '.join(valid)}.{nearest(name, valid)}")


def choices(group: str) -> list[str]:
    """Names of the files in a folder of conf/."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
