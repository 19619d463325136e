"""Entry point of `segpipe COMMAND ...`: finds the command, parses its arguments, turns errors into exit codes."""

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from segpipe import __version__, plugins
from segpipe.cli.commands import COMMANDS
from segpipe.cli.help import overview, page
from segpipe.determinism import flags
from segpipe.errors import ConfigError, Interrupted, SegpipeError
from segpipe.settings.compose import parse
from segpipe.settings.config import SETTINGS
from segpipe.settings.setting import nearest

HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of a command line, see docs/exit-codes.md; `arguments` default to those of the process."""
    gc.set_threshold(
        10_000
    )  # with the default, 700, garbage collection takes a seventh of the start
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if name in HELP or name == "--version":
            print(f"segpipe {__version__}" if name == "--version" else overview())
            return 0
        if name not in COMMANDS:
            raise ConfigError(
                f"{name} is not a command of segpipe.{nearest(name, list(COMMANDS))} See segpipe --help."
            )
        if any(argument in HELP for argument in rest):
            print(page(name))
            return 0
        return _run(name, rest)
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
        rest,
        command.known,
        command.positional,
        overrides=bool(command.overrides),
    )
    plugins.trust(given.get("trust", []))
    # OpenMP reads this once; a training sets its own number of threads later.
    flags.set_environment(SETTINGS["compute.threads"].default, "off")
    module, _, function = (
        command.starts or f"{name.replace('-', '_')}.main"
    ).partition(".")
    return int(getattr(import_module(f"segpipe.cli.{module}"), function)(given))
