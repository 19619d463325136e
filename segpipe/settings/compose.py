"""Parse `key=value` arguments and options with dashes into typed values of a command's keys, or into a Config."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

from segpipe import plugins
from segpipe.errors import ConfigError, refuse
from segpipe.processes import proc_lines
from segpipe.settings.config import (
    GROUPS,
    MAPPINGS,
    SETTINGS,
    Config,
    check,
    flat,
    from_mapping,
    no_setting,
)
from segpipe.settings.setting import (
    Setting,
    Settings,
    Values,
    converted,
    nearest,
    problems_of,
    shown,
)

PACKAGE = Path(__file__).resolve().parents[1]
# In a clone, conf/ lies next to the package; in an installed wheel, inside it.
CONF = next(
    path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir()
)
MULTIRUN = ("-m", "--multirun")
CONFIG_DIR = ("-cd", "--config-dir")
SHOW = ("-c", "--cfg")
# Options of `segpipe train`, with an example of each value's type.
OPTIONS: Values = {
    **dict.fromkeys(MULTIRUN, False),
    **dict.fromkeys((*CONFIG_DIR, *SHOW), ""),
}
# Text in Hydra's sweep grammar; other text is taken literally, and a comma separates two jobs.
SWEEP = re.compile(
    r"""['"]|^(choice|range|interval|glob|shuffle|sort|tag|str|json_str)\("""
)
MODE = re.compile(r"\+*(experiment|hydra(\.mode)?)=")  # may make it a sweep
# Lines that OmegaConf appends to its messages; they name only its classes.
OMEGACONF_LINE = re.compile(r"\s*(full_key: |reference_type=|object_type=)")

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver(
    "label", lambda name: str(name).rpartition(":")[2], replace=True
)
OmegaConf.register_new_resolver("home", os.path.expanduser, replace=True)
OmegaConf.register_new_resolver(  # without instructions for it bf16 takes 8 to 16 times as long
    "cpu_precision",
    lambda: "bf16" if "bf16" in str(proc_lines("cpuinfo")) else "fp32",
    replace=True,
)


@dataclass
class CommandLine:
    """The command line of `segpipe train`, parsed."""

    # In Hydra's form, including the added folders.
    overrides: list[str] = field(default_factory=list)
    added: list[Path] = field(default_factory=list)  # folders with further files
    sweeps: bool = False
    shows: bool = False  # prints the configuration instead of training


def command_line(arguments: Sequence[str]) -> CommandLine:
    """The arguments, checked. Folders are relative to the current folder.

    Raises ConfigError with a line for each key, file of conf/ or value that is not valid.
    """
    line = CommandLine()
    typed: list[str] = []
    for option, value in _pairs(arguments, OPTIONS, (), typed):
        if option in CONFIG_DIR:
            folder = Path(value or "?").expanduser()
            if not folder.is_dir():
                raise ConfigError(
                    f"{option} = {value} is not a folder in {Path.cwd()}."
                )
            line.added.append(folder.resolve())
        line.sweeps |= option in MULTIRUN
        line.shows |= option in SHOW
        if option in SHOW and value != "job":
            raise ConfigError(
                f"{option} = {value}, but only the configuration of the run is shown. Write {option} job."
            )
    if line.added:
        folders = ",".join(f"'file://{folder}'" for folder in line.added)
        line.overrides.append(f"hydra.searchpath=[{folders}]")
    # What is wrong with them is reported below.
    with suppress(ConfigError), explained(line.added):
        if modes := [_override(text, line) for text in filter(MODE.match, typed)]:
            merged = _merged([*line.overrides, *modes], return_hydra_config=True)
            line.sweeps |= merged.hydra.mode == RunMode.MULTIRUN
    line.sweeps &= not line.shows  # of one run
    problems = [
        f"{path} is not read, since {ours} has the same name. Rename it."
        for folder in line.added
        for ours in CONF.glob("*/*.yaml")
        if (path := folder / ours.relative_to(CONF)).is_file()
        and path.read_bytes() != ours.read_bytes()
    ]
    for text in typed:
        try:
            line.overrides.append(_override(text, line))
        except ConfigError as error:
            problems.append(str(error))
    if problems and not line.sweeps:
        # The valid overrides may contradict each other, too: report everything in one attempt.
        try:
            check(composed(line))
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)
    return line


def choices(group: str, added: Sequence[Path] = ()) -> list[str]:
    """Names of the files of a group."""
    folders = [folder / group for folder in (CONF, *added)]
    return sorted(
        {
            path.relative_to(folder).with_suffix("").as_posix()
            for folder in folders
            for path in folder.rglob("*.yaml")
        }
    )


def _override(text: str, line: CommandLine) -> str:
    """`text` in Hydra's form: strings quoted, and entries of a mapping added with ++.

    Raises ConfigError for an invalid key, file of conf/ or value. The values of a sweep are checked with its jobs.
    """
    key, equals, value = text.partition("=")
    key = key.lstrip("+")
    if key.startswith("hydra"):
        return text
    if key.startswith("-") or not equals or not key:
        fault = f"{text!r} is not of the form key=value."
        if key.startswith("-"):
            fault = f"{key} is not an option of segpipe. Settings are written without dashes, as KEY=VALUE."
        hint = nearest(key.strip("-"), [*SETTINGS, *GROUPS])
        raise ConfigError(f"{fault}{hint}")

    is_entry = ".".join(key.split(".")[:2]) in MAPPINGS
    if is_entry:
        if not line.sweeps:
            _check_value(key, value)
        return f"++{key}={value}"
    if key not in SETTINGS and key not in GROUPS:
        raise ConfigError(no_setting(key))
    is_text = key in GROUPS or SETTINGS[key].is_text
    if line.sweeps:
        value = value.strip()
        if not is_text or SWEEP.search(value):
            return text
        parts = re.split(r",(?![^{]*\})", value)  # but not within ${}
        return f"{key}={','.join(quoted(part.strip()) for part in parts)}"
    if key not in GROUPS:
        _check_value(key, value)
    elif value not in (valid := choices(key, line.added)):
        raise ConfigError(
            f"{key} = {value} is not one of {', '.join(valid)}.{nearest(value, valid)}"
        )
    return f"{key}={quoted(value) if is_text else value}"


def _check_value(key: str, text: str) -> None:
    """Raise ConfigError unless `text` is a value of the setting `key`, or of an entry of a mapping."""
    if key not in SETTINGS:
        _parsed(key, text, {})
    elif "${" not in text and text != "???":
        entry = SETTINGS[key]
        entry.checked(_value(entry, text))


def _parsed(key: str, text: str, example: Any) -> Override:
    """An override, parsed by Hydra's grammar. Raises ConfigError for a syntax error."""
    try:
        return OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException:
        example = shown(example) if example != {} else "{name: value}"
        raise ConfigError(
            f"'{key}={text}' cannot be parsed. Write it like {key}={example}."
        ) from None


def unquoted(text: str) -> str:
    """Text without the quotes around it."""
    is_quoted = len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]
    return text[1:-1] if is_quoted else text


def quoted(text: str) -> str:
    """Text quoted for Hydra's grammar: backslashes before a quote are doubled, and an inner quote is escaped."""
    inner = re.sub(r'(\\+)("|$)', r"\1\1\2", unquoted(text)).replace('"', '\\"')
    return f'"{inner}"'


def _value(entry: Setting, text: str) -> Any:
    """Value of `text` for a setting: strings are taken literally, all else is parsed by Hydra's grammar."""
    if entry.is_text:
        return unquoted(text)
    parsed = _parsed(entry.key, text, entry.default)
    if parsed.is_sweep_override():
        raise ConfigError(
            f"'{entry.key}={text}' has several values. For a list, write {entry.key}=[{text}]; "
            f"for one run per value, add --multirun. --cfg shows one run."
        )
    return parsed.value()


def parse(
    arguments: Sequence[str],
    keys: Sequence[Setting],
    positional: Sequence[str] = (),
    *,
    overrides: bool = False,
) -> Values:
    """Values of a command's keys, and of the settings of a run (keys with a dot) that are given.

    Keys in `positional` may be given without their name, in this order. With `overrides`, all other arguments are
    settings of a training, returned under this name. Raises ConfigError for unknown and missing keys and for invalid
    values.
    """
    known = {key.key: key for key in keys}
    defaults = {name: entry.default for name, entry in known.items()}
    rest: list[str] = []
    typed = dict(_pairs(arguments, defaults, positional, rest))
    if not overrides:
        refuse(_unknown(text, known) for text in rest)
    values = {name: _value(known[name], text) for name, text in typed.items()}
    given = complete(values, keys)
    return given | {"overrides": rest} if overrides else given


def complete(values: Values, keys: Sequence[Setting]) -> Values:
    """The values, converted to their types, with defaults for missing keys. Raises as `parse` does."""
    known = {key.key: key for key in keys}
    found = converted(known, values, lambda name: _unknown(name, known))
    missing = [
        f"{key.key} is missing ({key.doc}). Set {key.key}={key.default}."
        for key in keys
        if key.required and not values.get(key.key)
    ]
    refuse([*problems_of(known, found).values(), *missing])
    defaults = {key.key: key.default for key in keys if "." not in key.key}
    return defaults | found


def _unknown(argument: str, known: Settings) -> str:
    hint = nearest(argument.lstrip("-").partition("=")[0], known)
    if "run" in known and ("/" in argument or Path(argument).exists()):
        hint = f" Did you mean run={argument}?"
    return (
        f"{argument!r} is not an argument of this command, which takes KEY=VALUE with "
        f"the keys {', '.join(known)}.{hint}"
    )


def _pairs(
    arguments: Sequence[str],
    defaults: Values,
    positional: Sequence[str],
    others: list[str],
) -> Iterator[tuple[str, str]]:
    """Key and text of each key=text argument or option with dashes; keys not in `defaults` go to `others`."""
    rest = list(arguments)
    nameless = list(positional)
    while rest:
        argument = rest.pop(0)
        is_option = argument.startswith("-")
        name, equals, text = argument.partition("=")
        name = name if name in defaults else name.removeprefix("--")
        if name in defaults and (equals or is_option):
            if name in nameless:
                nameless.remove(name)
            if not equals:
                text = _following(defaults[name], rest)
            yield name, text
        elif nameless and not is_option:
            yield nameless.pop(0), argument
        else:
            others.append(argument)


def _following(default: Any, rest: list[str]) -> str:
    """Text of an option from the arguments after it: one value, all values for a list, none for a switch."""
    if isinstance(default, bool):
        return "true"
    is_list = isinstance(default, list)
    values: list[str] = []
    while rest and rest[0][:2] != "--" and (is_list or not values):
        values.append(rest.pop(0))
    return f"[{','.join(values)}]" if is_list else "".join(values)


def with_settings(config: Config, given: Values) -> Config:
    """`config` with the settings in `given` replaced; keys without a dot are skipped.

    A `loss.backend` that needs certain hardware becomes auto: the network may have been trained on another machine.
    """
    values = flat(config)
    if config.loss.backend != "plain":
        values["loss.backend"] = "auto"
    replaced = {key: value for key, value in given.items() if "." in key}
    changed = from_mapping(values | replaced)
    check(changed)
    return changed


def compose(arguments: Sequence[str]) -> Config:
    """The configuration of a single run. Raises ConfigError with the key, the value and the nearest valid ones."""
    return composed(command_line(arguments))


def composed(line: CommandLine) -> Config:
    """The configuration of a single run from its parsed command line."""
    with explained(line.added):
        return resolve(_merged(line.overrides))


def _merged(overrides: list[str], **options: bool) -> DictConfig:
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return hydra_compose("config", overrides, **options)


def resolve(composed: DictConfig) -> Config:
    """Config from Hydra's composed configuration. Trusts its plug-ins, since the user named them.

    Raises ConfigError for unknown keys, wrong types, and a data.root that nothing would read. `check` allows the last,
    so that old runs with one can still be loaded.
    """
    values: Any = OmegaConf.to_container(
        composed, resolve=True, enum_to_str=True, throw_on_missing=True
    )
    config = from_mapping(values)
    if config.data.name == "synthetic" and config.data.root and not config.data.mix:
        raise ConfigError(
            f"data.root = {config.data.root}, but data=synthetic, the default, generates "
            f"its scenes and reads no files. Add data=folder, or remove data.root."
        )
    plugins.trust(path for _, path in config.import_paths)
    return config


@contextmanager
def explained(added: Sequence[Path]) -> Iterator[None]:
    """Converts errors of Hydra, OmegaConf and YAML to a ConfigError that names the setting or the file."""
    folders = (CONF, *added)
    try:
        yield
    except UnicodeDecodeError as error:
        paths = [path for folder in folders for path in folder.rglob("*.yaml")]
        wrong = [str(path) for path in paths if error.object in path.read_bytes()]
        raise ConfigError(
            f"{', '.join(wrong)} is not UTF-8 text. Save it as UTF-8."
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"The defaults of a file in {' and '.join(map(str, folders))} include "
            f"the file itself, perhaps indirectly. Remove one of them."
        ) from error
    except (HydraException, OmegaConfBaseException, YAMLError, OverflowError) as error:
        raise ConfigError(_explanation(error)) from error


def _explanation(error: Exception) -> str:
    """Why Hydra or OmegaConf refused a setting, on one line."""
    errors = [each for each in (error, error.__cause__) if each]
    lines = [line for each in errors for line in str(each).splitlines()]
    text = " ".join(line.strip() for line in lines if not OMEGACONF_LINE.match(line))
    keys = [getattr(each, "full_key", None) for each in (*errors, error.__context__)]
    key = str(next(filter(None, keys), ""))
    unresolved = (InterpolationResolutionError, MissingMandatoryValue)
    if any(isinstance(each, unresolved) for each in errors):
        return f"{key}: {text}. Give it a value, or refer to an existing setting or variable; \\${{ escapes ${{."
    if override := getattr(error, "override", ""):
        return f"{override} cannot be parsed: {text}"
    if "find 'hydra/" in text:
        return f"{text}. For others, pip install 'segpipe[joblib]', 'segpipe[submitit]' or 'segpipe[optuna]'."
    if key == "experiment" or key.startswith("_"):
        return f"{text}. The first line of an experiment is `# @package _global_`, without a byte order mark before it."
    if not key or key.partition("[")[0] in SETTINGS or key.startswith("hydra"):
        return text if key in text else f"{key}: {text}"
    return no_setting(key)
