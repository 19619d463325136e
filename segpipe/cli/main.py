"""Entry point of `segpipe COMMAND ...`: finds the command, parses its arguments, turns errors into exit codes.

Help texts are generated from the declarations. Imports no torch.
"""

import gc
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

from segpipe import __version__, plugins
from segpipe.cli.commands import COMMANDS, Command
from segpipe.determinism import flags
from segpipe.errors import ConfigError, Interrupted, SegpipeError
from segpipe.settings.compose import choices, parse
from segpipe.settings.config import GROUPS, SETTINGS
from segpipe.settings.setting import Setting, nearest, shown

HELP = {"-h", "--help"}
Rows = list[tuple[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of a command line, see docs/exit-codes.md; `arguments` default to those of the process."""
    gc.set_threshold(
        10_000
    )  # with the default, 700, garbage collection takes a seventh of the start
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if name == "--version":
            print(f"segpipe {__version__}")
        elif name in HELP:
            print(overview())
        elif name not in COMMANDS:
            raise ConfigError(
                f"{name} is not a command of segpipe.{nearest(name, COMMANDS)} See segpipe --help."
            )
        elif HELP & {*rest}:
            print(page(name))
        else:
            return _run(name, rest)
        return 0
    except SegpipeError as error:
        if not error.told:
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(name: str, rest: list[str]) -> int:
    """Import and run a command's module. Imported only here, since most of them import torch."""
    command = COMMANDS[name]
    given: Any = parse(
        rest, command.known, command.positional, overrides=bool(command.overrides)
    )
    plugins.trust(given.get("trust", []))
    # OpenMP reads this once; a training sets its own number of threads later.
    flags.set_environment(SETTINGS["compute.threads"].default, "off")
    start = resolve_name(f"segpipe.cli.{command.starts or f'{name}:main'}")
    return int(start(given))


def overview() -> str:
    """All commands, one line each."""
    lines = (f"  {name:14} {command.summary}" for name, command in COMMANDS.items())
    return "\n".join(
        [
            "usage: segpipe COMMAND [key=value ...]",
            "",
            *lines,
            "",
            "segpipe COMMAND --help lists the keys of a command, segpipe --version prints the version.",
            "Exit codes: docs/exit-codes.md.",
        ]
    )


def page(name: str) -> str:
    """Help page of a command, with a line per key: default, meaning, valid values."""
    command = COMMANDS[name]
    words = ["usage: segpipe", name, *map(str.upper, command.positional)]
    lines = [" ".join([*words, "[key=value ...]"]), "", command.details]
    for title, rows in _sections(command):
        width = max((len(left) for left, _ in rows), default=0)
        lines += ["", title, *(f"  {left:{width}}  {right}" for left, right in rows)]
    return "\n".join(lines)


def _sections(command: Command) -> Iterator[tuple[str, Rows]]:
    if command.overrides:
        yield (
            "files of conf/",
            [
                (f"{group}=FILE", f"one of {', '.join(choices(group))}")
                for group in GROUPS
                if group in (*command.overrides, "experiment")
            ],
        )
    for group in command.overrides:
        yield (
            group,
            _rows(SETTINGS[key] for key in SETTINGS if key.partition(".")[0] == group),
        )
    if command.keys:
        yield "keys", _rows(command.keys)
    if command.settings:
        rows = [(f"{key}=...", meaning(SETTINGS[key])) for key in command.settings]
        yield "settings of the run that can be replaced", rows
    if 0 < len(command.overrides) < len(COMMANDS["train"].overrides):
        yield "All other settings of segpipe train are accepted too.", []


def _rows(entries: Iterable[Setting]) -> Rows:
    return [
        (f"{entry.key}={shown(entry.default)}", meaning(entry)) for entry in entries
    ]


def meaning(entry: Setting) -> str:
    """Meaning and valid values of a setting."""
    notes = "; ".join(filter(None, ["required" * entry.required, entry.valid]))
    return f"{entry.doc} ({notes})" if notes else entry.doc
