"""From command-line overrides to a Config. With the train command, the only module that knows Hydra."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
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
from segpipe.settings.config import MAPPINGS, SETTINGS, Config, convert, from_mapping
from segpipe.settings.setting import nearest, shown

PACKAGE = Path(__file__).resolve().parents[1]
# In a clone the folder lies beside the package, in an installed wheel inside it.
CONF = next(
    path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir()
)
GROUPS = ("model", "data", "augment", "track", "export", "experiment")
FILE_FLAGS = {  # of Hydra
    "--config-dir": "added", "-cd": "added", "--config-path": "main", "-cp": "main", "--config-name": "name",
    "-cn": "name",
}  # fmt: skip
COMPLETION = ("--shell-completion", "-sc")
MULTIRUN = ("-m", "--multirun")
HYDRA_FLAGS = (
    *COMPLETION, *MULTIRUN, *FILE_FLAGS, "--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve",
    "--package", "-p", "--run", "-r", "--info", "-i", "--experimental-rerun",
)  # fmt: skip
# Below OmegaConf's messages; names only its classes.
OMEGACONF_LINE = re.compile(r"\s*(full_key: |reference_type=|object_type=)")

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver(
    "label", lambda name: str(name).rpartition(":")[2], replace=True
)


@dataclass(frozen=True)
class ConfigFiles:
    """Where config files are looked for: in `main`, which holds the first file `name`.yaml, then in `added`."""

    main: Path = CONF
    name: str = "config"
    added: tuple[Path, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """The search path as Hydra's override."""
        listed = ",".join(f"'file://{folder}'" for folder in self.added)
        return [f"hydra.searchpath=[{listed}]"] if listed else []

    @property
    def flags(self) -> list[str]:
        """The same for Hydra's command line; empty for the files of segpipe alone."""
        flags = []
        if self.main != CONF:
            flags.append(f"--config-path={self.main}")
        if self.name != "config":
            flags.append(f"--config-name={self.name}")
        return flags + self.overrides

    def paths(self, group: str = "") -> Iterator[tuple[str, Path]]:
        """Names and paths of all files, or of those of a group."""
        for folder in (self.main, *self.added):
            for path in sorted((folder / group).rglob("*.yaml")):
                name = path.relative_to(folder / group).with_suffix("").as_posix()
                yield name, path

    def choices(self, group: str) -> list[str]:
        """Names of the files of a group."""
        return sorted({name for name, _ in self.paths(group)})


OWN_FILES = ConfigFiles()


def config_files(arguments: list[str]) -> tuple[ConfigFiles, list[str]]:
    """The files that `--config-dir`, `--config-path` and `--config-name` choose, and the other arguments.

    Folders are relative to the current one. Raises ConfigError for one that does not exist.
    """
    found: dict[str, str] = {}
    rest, waiting = [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        if flag not in FILE_FLAGS:
            rest.append(argument)
            continue
        if not equals:
            if not waiting:
                raise ConfigError(f"{flag} needs a value, such as {flag} FOLDER.")
            value = waiting.pop(0)
        if FILE_FLAGS[flag] != "name" and not Path(value).is_dir():
            raise ConfigError(f"{flag} = {value} is not a folder in {Path.cwd()}.")
        found[FILE_FLAGS[flag]] = value
    main = Path(found["main"]).resolve() if "main" in found else CONF
    added = [Path(found["added"]).resolve()] if "added" in found else []
    if main != CONF:
        added.append(CONF)  # its groups stay available
    name = found.get("name", "config").removesuffix(".yaml")
    return ConfigFiles(main, name, tuple(added)), rest


def compose(arguments: list[str]) -> Config:
    """The configuration of a single run. Raises ConfigError naming the key, the value and the nearest valid ones."""
    files, overrides = config_files(arguments)
    overrides = checked_overrides(overrides, files) + files.overrides
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    with (
        explained(files),
        initialize_config_dir(version_base="1.3", config_dir=str(files.main)),
    ):
        return resolve(hydra_compose(files.name, overrides))


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
def explained(files: ConfigFiles) -> Iterator[None]:
    """Errors of Hydra, OmegaConf and YAML become a ConfigError that names the setting or the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        wrong = ", ".join(str(path) for _, path in files.paths() if not _is_utf8(path))
        raise ConfigError(f"{wrong} is not UTF-8 text. Save it as UTF-8.") from error
    except RecursionError as error:
        folders = " and ".join(map(str, (files.main, *files.added)))
        raise ConfigError(
            f"The defaults of a file in {folders} lead back to the file itself. Remove "
            f"one of them."
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
    errors = [error, error.__cause__] if error.__cause__ else [error]
    lines = [line for each in errors for line in str(each).splitlines()]
    text = " ".join(line.strip() for line in lines if not OMEGACONF_LINE.match(line))
    omegaconf = [
        each
        for each in (*errors, error.__context__)
        if isinstance(each, OmegaConfBaseException) and each.full_key
    ]
    if not omegaconf:
        return text
    key = str(omegaconf[0].full_key)
    text = text if key in text else f"{key}: {text}"
    if isinstance(omegaconf[0], InterpolationResolutionError | MissingMandatoryValue):
        return (
            f"{text}. Give it a value, or name what exists, a setting or a variable; "
            f"\\${{ stands for ${{."
        )
    groups = {known.partition(".")[0] for known in SETTINGS}
    if key == "experiment" or key.startswith("_"):
        return f"{text}. The first line of an experiment is `# @package _global_`."
    if key in SETTINGS or key in groups or key.startswith("hydra"):
        return text
    return f"{text}.{nearest(key, [*groups, *SETTINGS])}"


def checked_overrides(
    overrides: list[str], files: ConfigFiles = OWN_FILES
) -> list[str]:
    """The overrides as Hydra needs them: entries of a mapping are added, which Hydra writes as `++key=value`.

    Raises ConfigError for the first override whose key or config file does not exist.
    """
    flags = [text.partition("=")[0] for text in overrides if text.startswith("-")]
    if set(COMPLETION) & set(flags):  # install=bash follows, which is not a setting
        return overrides
    for flag in flags:
        if flag not in HYDRA_FLAGS:
            raise ConfigError(
                f"{flag} is no option of segpipe. Settings are written without dashes, "
                f"as KEY=VALUE.{_nearest_key(flag.strip('-'))}"
            )
    sweeps = bool(set(MULTIRUN) & set(flags)) or is_sweep(overrides)
    sweeps = sweeps or any(text.startswith("hydra.mode=") for text in overrides)
    checked = []
    for text in overrides:
        # A flag of Hydra, or its value, such as --cfg job.
        is_flag = text.startswith("-") or (flags and "=" not in text)
        checked.append(text if is_flag else _checked(text, files, sweeps=sweeps))
    lengths = {
        text.partition("=")[0]: text
        for text in checked
        if text.startswith(("train.steps=", "train.epochs="))
        and not text.endswith("=0")
    }
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(lengths.values())} both say how long to train. Set one of "
            f"them."
        )
    return checked


def _checked(text: str, files: ConfigFiles, *, sweeps: bool) -> str:
    """One override as Hydra needs it."""
    override = _parse(text)
    key = override.key_or_group
    if key.startswith("hydra"):
        return text
    if override.is_sweep_override() and not sweeps:
        _, _, value = text.partition("=")
        raise ConfigError(
            f"{text!r} has a comma, which stands for several values. One text with a "
            f"comma: {_quoted(key, value)}. A list: {key}=[{value}]. One run for each: "
            f"add --multirun."
        )
    if key in GROUPS:
        _check_choice(override, files.choices(key))
    elif any(f"{key}.".startswith(f"{mapping}.") for mapping in MAPPINGS):
        return f"++{text.lstrip('+')}"
    elif key in SETTINGS or any(known.startswith(f"{key}.") for known in SETTINGS):
        _check_value(override, text)
    else:
        raise ConfigError(
            f"{key} is not a setting of segpipe (in {text!r}).{_nearest_key(key)}"
        )
    return text


def _nearest_key(word: str) -> str:
    return nearest(word, [*SETTINGS, *GROUPS])


def _parse(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals and not key.startswith("~"):
        fix = f" Write {key}=VALUE." if key in SETTINGS else _nearest_key(key)
        if Path(key).is_dir():
            fix = f" For the data set in this folder write data=folder data.root={key}."
        raise ConfigError(f"{text!r} is not of the form key=value.{fix}")
    if not key.strip("+~ "):
        raise ConfigError(
            f"{text!r} names no setting: key=value was needed, such as optim.lr=0.05."
        )
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(f"{text!r} cannot be read. {_fix(key, value)}") from None


def _fix(key: str, value: str) -> str:
    """How a value is written that Hydra cannot read."""
    entry = SETTINGS.get(key.lstrip("+"))
    if entry is not None and not isinstance(entry.default, str):
        return f"Write it like {key}={shown(entry.default)}."
    home = "~ is not expanded here: write $HOME. " if value.startswith("~") else ""
    return (
        f"{home}Text with any of ( ) [ ] {{ }} = , : ' \" ~ $ or a letter such as "
        f"\u00fc needs quotes within quotes: {_quoted(key, value)}"
    )


def _quoted(key: str, value: str) -> str:
    """The override as a shell and Hydra take it."""
    inner = value.strip("'\"").replace("\\", "\\\\").replace('"', '\\"')
    return shlex.quote(f'{key}="{inner}"')


def _check_value(override: Override, text: str) -> None:
    """Raise ConfigError for what Hydra refuses in words of its own: `~key`, a group, a value of another type."""
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(
            f"{text!r} removes {key}, but every setting has a value. Leave it out for "
            f"the default."
        )
    values = _values(override)
    if key in SETTINGS:
        for value in values:
            if "${" not in str(value) and value != "???":
                convert(key, value, SETTINGS[key].default)
    elif not all(isinstance(value, dict) for value in values):
        own = next(known for known in SETTINGS if known.startswith(f"{key}."))
        raise ConfigError(
            f"{text!r}: {key} is a group of settings. Set one of them, such as {own}."
        )


def _values(override: Override) -> list[Any]:
    """The value, or those of a sweep; not of a range, which only Hydra knows."""
    value: Any = override.value()
    if isinstance(value, ChoiceSweep):
        return [getattr(item, "text", item) for item in value.list]
    return [] if override.is_sweep_override() else [value]


def _check_choice(override: Override, valid: list[str]) -> None:
    for name in map(str, _values(override)):
        if name not in valid:
            raise ConfigError(
                f"{override.key_or_group} = {name} is not one of {', '.join(valid)}."
                f"{nearest(name, valid)}"
            )


def is_sweep(overrides: list[str]) -> bool:
    """Whether the chosen experiment of conf/ is a sweep, which needs Hydra's own command line."""
    for text in overrides:
        path = CONF / "experiment" / f"{text.removeprefix('experiment=')}.yaml"
        if not text.startswith("experiment=") or not path.is_file():
            continue
        with suppress(YAMLError):  # composing it names file and line
            if OmegaConf.select(OmegaConf.load(path), "hydra.mode") == "MULTIRUN":
                return True
    return False
