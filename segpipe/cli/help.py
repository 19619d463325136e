"""Help and docs/settings.md, generated from the declarations. Imports no torch.

`python -m segpipe.cli.help` prints docs/settings.md, `python -m segpipe.cli.help commands` tests/cli/help.txt.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

from segpipe.cli.commands import COMMANDS, Command
from segpipe.settings.compose import choices
from segpipe.settings.config import GROUPS, SETTINGS
from segpipe.settings.setting import Setting, shown

USAGE = """usage: segpipe COMMAND [key=value ...]

{commands}

segpipe COMMAND --help lists the keys of a command, segpipe --version prints the version.
Exit codes: docs/exit-codes.md."""

SETTINGS_PAGE = """# Settings

Set any of them with `segpipe train KEY=VALUE`. `segpipe train --help` prints this list.

`*` marks settings that cannot reach the numbers: they may change when a run is resumed.
This page is generated: `make docs`.
"""

Rows = list[tuple[str, str]]


def overview() -> str:
    """All commands, a line each."""
    lines = (f"  {name:14} {command.summary}" for name, command in COMMANDS.items())
    return USAGE.format(commands="\n".join(lines))


def page(name: str) -> str:
    """What a command does, and a line for each key: default, meaning, valid values."""
    command = COMMANDS[name]
    words = ["usage: segpipe", name, *map(str.upper, command.positional)]
    lines = [" ".join([*words, "[key=value ...]"]), "", command.details]
    for title, rows in _sections(command):
        width = max((len(left) for left, _ in rows), default=0)
        lines += ["", title, *(f"  {left:{width}}  {right}" for left, right in rows)]
    return "\n".join(lines)


def all_pages() -> str:
    """The help of segpipe and of every command: the whole command line as text."""
    pages = [overview(), *(page(name) for name in COMMANDS)]
    return "\n\n\n".join(pages) + "\n"


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
    """The meaning of a setting with its valid values."""
    notes = "; ".join(filter(None, ["required" * entry.required, entry.valid]))
    return f"{entry.doc} ({notes})" if notes else entry.doc


def settings_page() -> str:
    """docs/settings.md: a table for each group of settings."""
    lines = [SETTINGS_PAGE]
    by_group = groupby(SETTINGS.values(), lambda entry: entry.key.rpartition(".")[0])
    for group, settings in by_group:
        heading = "| setting | default | meaning | valid |"
        lines += [f"## {group or 'General'}\n", heading, "|---|---|---|---|"]
        for entry in settings:
            default = f"`{shown(entry.default)}`".replace("``", "")
            name = f"`{entry.key}`" + " *" * entry.free
            cells = (name, default, entry.doc, entry.valid)
            row = " | ".join(cell.replace("|", "/") for cell in cells)
            lines.append(f"| {row} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(all_pages() if "commands" in sys.argv[1:] else settings_page(), end="")
