"""From command-line overrides to a Config. With the train command, the only module that knows Hydra."""

from __future__ import annotations

import logging
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

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
    ValidationError,
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
OMEGACONF_LINE = re.compile(
    r"\s*(full_key: |reference_type=|object_type=)"
)  # below its messages; names only its classes

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
        main = [f"--config-path={self.main}"] if self.main != CONF else []
        return [
            *main,
            *([f"--config-name={self.name}"] if self.name != "config" else []),
            *self.overrides,
        ]

    def choices(self, group: str) -> list[str]:
        """Names of the files of a group."""
        folders = [folder / group for folder in (self.main, *self.added)]
        paths = (
            (path, folder) for folder in folders for path in folder.rglob("*.yaml")
        )
        return sorted(
            {
                path.relative_to(folder).with_suffix("").as_posix()
                for path, folder in paths
            }
        )


OWN_FILES = ConfigFiles()


def config_files(arguments: list[str]) -> tuple[ConfigFiles, list[str]]:
    """The files that `--config-dir`, `--config-path` and `--config-name` choose, and the other arguments.

    Folders are relative to the current one. Raises ConfigError for one that does not exist.
    """
    found: dict[str, str] = {}
    rest, waiting = [], list(arguments)
    while waiting:
        flag, equals, value = waiting.pop(0).partition("=")
        if flag not in FILE_FLAGS:
            rest.append(f"{flag}{equals}{value}")
            continue
        if not equals and not waiting:
            raise ConfigError(f"{flag} needs a value, such as {flag} FOLDER.")
        found[FILE_FLAGS[flag]] = value if equals else waiting.pop(0)
    for name in ("added", "main"):
        if name in found and not Path(found[name]).is_dir():
            flag = next(flag for flag, what in FILE_FLAGS.items() if what == name)
            raise ConfigError(
                f"{flag} = {found[name]} is not a folder in {Path.cwd()}."
            )
    added = [Path(found["added"]).resolve()] if "added" in found else []
    main = Path(found["main"]).resolve() if "main" in found else CONF
    added += [CONF] if main != CONF else []  # its groups stay available
    return ConfigFiles(
        main, found.get("name", "config").removesuffix(".yaml"), tuple(added)
    ), rest


def compose(arguments: list[str]) -> Config:
    """The configuration of a single run. Raises ConfigError naming the key, the value and the nearest valid ones."""
    files, overrides = config_files(arguments)
    overrides = checked_overrides(overrides, files)
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(files.main)):
            return resolve(hydra_compose(files.name, [*overrides, *files.overrides]))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error)) from error


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
            f"data.root = {config.data.root}, but data=synthetic, the default, draws its scenes and reads no files. "
            "Add data=folder, or leave data.root out."
        )
    plugins.trust(path for _, path in config.import_paths)
    return config


def explain(error: Exception) -> str:
    """What is wrong with a setting that Hydra or OmegaConf refused, on one line: in our words, or else in theirs."""
    errors = [error, error.__cause__] if error.__cause__ else [error]
    text = ": ".join(
        " ".join(
            line.strip()
            for line in str(each).splitlines()
            if not OMEGACONF_LINE.match(line)
        )
        for each in errors
    )
    omegaconf = next(
        (
            each
            for each in (*errors, error.__context__)
            if isinstance(each, OmegaConfBaseException)
        ),
        None,
    )
    named = str(omegaconf.full_key or "") if omegaconf else ""
    key, of_a_list, _ = named.partition("[")
    if isinstance(omegaconf, ValidationError) and key in SETTINGS:
        default = SETTINGS[key].default
        try:
            convert(
                named, omegaconf.value, default[0] if of_a_list and default else default
            )
        except ConfigError as own:
            return str(own)
    if isinstance(omegaconf, InterpolationResolutionError | MissingMandatoryValue):
        return f"{named}: {text}. Give it a value, or name what exists, a setting or a variable; \\${{ stands for ${{."
    text = text if named in text else f"{named}: {text}"
    valid = [*dict.fromkeys(key.partition(".")[0] for key in SETTINGS), *SETTINGS]
    return (
        f"{text}.{nearest(named, valid)}"
        if named and named not in valid and not named.startswith("hydra")
        else text
    )


def checked_overrides(
    overrides: list[str], files: ConfigFiles = OWN_FILES
) -> list[str]:
    """The overrides as Hydra needs them: entries of a mapping are added, which Hydra writes as `++key=value`.

    Raises ConfigError for the first override whose key or config file does not exist.
    """
    flags = [text.partition("=")[0] for text in overrides if text.startswith("-")]
    if any(
        flag in COMPLETION for flag in flags
    ):  # what follows is install=bash, not a setting
        return overrides
    for flag in flags:
        if flag not in HYDRA_FLAGS:
            raise ConfigError(
                f"{flag} is no option of segpipe. Settings are written without dashes, as KEY=VALUE."
                f"{nearest(flag.strip('-'), [*SETTINGS, *GROUPS])}"
            )
    sweeps = any(flag in MULTIRUN for flag in flags) or is_sweep(overrides)
    sweeps = sweeps or any(text.startswith("hydra.mode=") for text in overrides)
    found = []
    for text in overrides:
        found.append(text)
        if text.startswith("-") or (
            flags and "=" not in text
        ):  # a flag of Hydra or its value, such as --cfg job
            continue
        override = _parse(text)
        key = override.key_or_group
        if key.startswith("hydra"):
            continue
        if not sweeps and override.is_sweep_override():
            raise ConfigError(_several(text))
        if key in GROUPS:
            _check_choice(override, files.choices(key))
        elif any(f"{key}.".startswith(f"{mapping}.") for mapping in MAPPINGS):
            found[-1] = f"++{text.lstrip('+')}"
        elif key not in SETTINGS and not any(
            known.startswith(f"{key}.") for known in SETTINGS
        ):
            raise ConfigError(
                f"{key} is not a setting of segpipe (in {text!r}).{nearest(key, [*SETTINGS, *GROUPS])}"
            )
        else:
            _check_kind(override, text)
    lengths = [
        text
        for text in found
        if text.startswith(("train.steps=", "train.epochs="))
        and not text.endswith("=0")
    ]
    if len({text.partition("=")[0] for text in lengths}) > 1:
        raise ConfigError(
            f"{' and '.join(lengths)} both say how long to train. Set one of them."
        )
    return found


def _parse(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals and not key.startswith("~"):
        fix = (
            f" Write {key}=VALUE."
            if key in SETTINGS
            else nearest(key, [*SETTINGS, *GROUPS])
        )
        fix = (
            f" For the data set in this folder write data=folder data.root={key}."
            if Path(key).is_dir()
            else fix
        )
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
        f"{home}Text with any of ( ) [ ] {{ }} = , : ' \" ~ $ or a letter such as \u00fc needs quotes within quotes: "
        f"{_quoted(key, value)}"
    )


def _several(text: str) -> str:
    key, _, value = text.partition("=")
    return (
        f"{text!r} has a comma, which stands for several values. One text with a comma: {_quoted(key, value)}. A list: "
        f"{key}=[{value}]. One run for each: add --multirun."
    )


def _quoted(key: str, value: str) -> str:
    """The override as a shell and Hydra take it."""
    inner = value.strip("'\"").replace("\\", "\\\\").replace('"', '\\"')
    return shlex.quote(f'{key}="{inner}"')


def _check_kind(override: Override, text: str) -> None:
    """Raise ConfigError for what Hydra refuses in words of its own: a group, a mapping, a setting that is removed."""
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(
            f"{text!r} removes {key}, but every setting has a value. Leave it out for the default."
        )
    value = override.value()
    if key in SETTINGS and isinstance(value, dict):
        convert(
            key,
            {str(name): item for name, item in value.items()},
            SETTINGS[key].default,
        )
    elif key not in SETTINGS and not isinstance(value, dict):
        own = next(known for known in SETTINGS if known.startswith(f"{key}."))
        raise ConfigError(
            f"{text!r}: {key} is a group of settings. Set one of them, such as {own}."
        )


def _check_choice(override: Override, valid: list[str]) -> None:
    group = override.key_or_group
    value = override.value()
    chosen = (
        [str(item) for item in value.list]
        if isinstance(value, ChoiceSweep)
        else [str(value)]
    )
    for name in chosen:
        if name not in valid and not (
            group == "experiment" and name in ("null", "None")
        ):
            raise ConfigError(
                f"{group} = {name} is not one of {', '.join(valid)}.{nearest(name, valid)}"
            )


def is_sweep(overrides: list[str]) -> bool:
    """Whether the chosen experiment of conf/ is a sweep, which needs Hydra's own command line."""
    names = [
        text.removeprefix("experiment=")
        for text in overrides
        if text.startswith("experiment=")
    ]
    files = [
        path
        for name in names
        if (path := CONF / "experiment" / f"{name}.yaml").is_file()
    ]
    try:
        return any(
            OmegaConf.select(OmegaConf.load(path), "hydra.mode") == "MULTIRUN"
            for path in files
        )
    except YAMLError:  # composing it names file and line
        return False
