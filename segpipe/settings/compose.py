"""From what was typed to a Config, by Hydra."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

from segpipe import plugins
from segpipe.errors import ConfigError
from segpipe.settings.arguments import CONF, CommandLine, command_line
from segpipe.settings.config import SETTINGS, Config, from_mapping, no_setting

# Below OmegaConf's messages; names only its classes.
OMEGACONF_LINE = re.compile(r"\s*(full_key: |reference_type=|object_type=)")

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver(
    "label", lambda name: str(name).rpartition(":")[2], replace=True
)


def compose(arguments: Sequence[str]) -> Config:
    """The configuration of a single run. Raises ConfigError naming the key, the value and the nearest valid ones."""
    return composed(command_line(arguments))


def composed(line: CommandLine) -> Config:
    """The configuration that the overrides of a single run stand for."""
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    with (
        explained(line.added),
        initialize_config_dir(version_base="1.3", config_dir=str(CONF)),
    ):
        return resolve(hydra_compose("config", line.overrides + line.search_path))


def resolve(composed: DictConfig) -> Config:
    """Config from what Hydra composed, whose plug-ins are trusted: the user named them.

    Raises ConfigError for unknown keys, wrong types, and a folder that nothing would read. Runs that were started with
    one can still be loaded, so `check` does not ask for it.
    """
    values = OmegaConf.to_container(
        composed, resolve=True, enum_to_str=True, throw_on_missing=True
    )
    assert isinstance(values, dict)
    values.pop("hydra", None)
    config = from_mapping({str(key): value for key, value in values.items()})
    if config.data.name == "synthetic" and config.data.root and not config.data.mix:
        raise ConfigError(
            f"data.root = {config.data.root}, but data=synthetic, the default, draws "
            f"its scenes and reads no files. Add data=folder, or leave data.root out."
        )
    plugins.trust(path for _, path in config.import_paths)
    return config


@contextmanager
def explained(added: Sequence[Path]) -> Iterator[None]:
    """Errors of Hydra, OmegaConf and YAML become a ConfigError that names the setting or the file."""
    folders = (CONF, *added)
    try:
        yield
    except UnicodeDecodeError as error:
        paths = [path for folder in folders for path in folder.rglob("*.yaml")]
        wrong = ", ".join(str(path) for path in paths if not _is_utf8(path))
        raise ConfigError(f"{wrong} is not UTF-8 text. Save it as UTF-8.") from error
    except RecursionError as error:
        raise ConfigError(
            f"The defaults of a file in {' and '.join(map(str, folders))} lead back to "
            f"the file itself. Remove one of them."
        ) from error
    except (
        HydraException,
        OmegaConfBaseException,
        YAMLError,
        OverflowError,
    ) as error:
        raise ConfigError(_explanation(error)) from error


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf8")
    except UnicodeDecodeError:
        return False
    return True


def _explanation(error: Exception) -> str:
    """What is wrong with a setting that Hydra or OmegaConf refused, on one line."""
    errors = [each for each in (error, error.__cause__) if each]
    lines = [line for each in errors for line in str(each).splitlines()]
    text = " ".join(line.strip() for line in lines if not OMEGACONF_LINE.match(line))
    keys = [getattr(each, "full_key", None) for each in (*errors, error.__context__)]
    key = str(next(filter(None, keys), ""))
    if any(
        isinstance(each, InterpolationResolutionError | MissingMandatoryValue)
        for each in errors
    ):
        return (
            f"{key}: {text}. Give it a value, or name what exists, a setting or a "
            f"variable; \\${{ stands for ${{."
        )
    if key == "experiment" or key.startswith("_"):
        return f"{text}. The first line of an experiment is `# @package _global_`."
    if not key or key.partition("[")[0] in SETTINGS or key.startswith("hydra"):
        return text if key in text else f"{key}: {text}"
    return no_setting(key)
