"""Help texts, generated from the declarations. Imports no torch."""

from collections.abc import Iterable, Iterator

from segpipe.cli.commands import COMMANDS, Command
from segpipe.settings.compose import choices
from segpipe.settings.config import GROUPS, SETTINGS
from segpipe.settings.setting import Setting, shown

USAGE = """usage: segpipe COMMAND [key=value ...]

{commands}

segpipe COMMAND --help lists the keys of a command, segpipe --version prints the version.
Exit codes: docs/exit-codes.md."""

Rows = list[tuple[str, str]]


def overview() -> str:
    """All commands, one line each."""
    lines = (f"  {name:14} {command.summary}" for name, command in COMMANDS.items())
    return USAGE.format(commands="\n".join(lines))


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
