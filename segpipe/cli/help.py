"""Help, shell completion and docs/settings.md, generated from the declarations. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import groupby

from segpipe.cli.commands import COMMANDS, Command
from segpipe.settings.compose import GROUPS, OWN_FILES
from segpipe.settings.config import SETTINGS
from segpipe.settings.setting import Setting, shown

USAGE = """usage: segpipe COMMAND [key=value ...]

{commands}

segpipe COMMAND --help lists the keys of a command, segpipe --version prints the version.
Exit codes: docs/exit-codes.md. Completion for bash: eval "$(segpipe train -sc install=bash)\""""

SETTINGS_PAGE = """# Settings

Set any of them with `segpipe train KEY=VALUE`. `segpipe train --help` prints this list.

`*` marks settings that cannot reach the numbers: they may change when a run is resumed.
This page is generated: `make docs`.
"""


def overview() -> str:
    """All commands, a line each."""
    return USAGE.format(
        commands="\n".join(
            f"  {name:14} {entry.summary}" for name, entry in COMMANDS.items()
        )
    )


def page(name: str) -> str:
    """What a command does, and a line for each key: default, meaning, valid values."""
    command = COMMANDS[name]
    arguments = " ".join(
        key.key.upper() for key in command.keys if key.key in command.positional
    )
    lines = [
        f"usage: segpipe {name} {arguments} [key=value ...]".replace("  ", " "),
        "",
        f"{command.details}",
    ]
    for title, rows in _sections(command):
        table = list(rows)
        width = max((len(left) for left, _ in table), default=0)
        lines += ["", title, *(f"  {left:{width}}  {right}" for left, right in table)]
    return "\n".join(lines)


def _sections(command: Command) -> Iterator[tuple[str, Iterable[tuple[str, str]]]]:
    if command.overrides:
        files = {
            group: OWN_FILES.choices(group)
            for group in GROUPS
            if group in command.overrides or group == "experiment"
        }
        yield (
            "files of conf/",
            [
                (f"{group}=FILE", f"one of {', '.join(found)}")
                for group, found in files.items()
            ],
        )
        for group in command.overrides:
            settings = [
                entry
                for key, entry in SETTINGS.items()
                if key.partition(".")[0] == group
            ]
            yield (
                group,
                [
                    (f"{entry.key}={shown(entry.default)}", meaning(entry))
                    for entry in settings
                ],
            )
        if command.keys:
            yield (
                "keys",
                [
                    (f"{key.key}={shown(key.default)}", meaning(key))
                    for key in command.keys
                ],
            )
        if len(command.overrides) < len(COMMANDS["train"].overrides):
            yield "All other settings of segpipe train are accepted too.", ()
        return
    yield (
        "keys",
        [(f"{key.key}={shown(key.default)}", meaning(key)) for key in command.keys],
    )
    if command.settings:
        rows = [(f"{key}=...", meaning(SETTINGS[key])) for key in command.settings]
        yield "settings of the run that can be replaced", rows


def meaning(entry: Setting) -> str:
    """The meaning of a setting with its valid values."""
    notes = ["required"] * entry.required + [entry.valid] * bool(entry.valid)
    return f"{entry.doc} ({'; '.join(notes)})" if notes else entry.doc


def complete(line: str) -> list[str] | None:
    """Completions of a command line; None if Hydra completes it, with COMP_LINE set to what Hydra understands."""
    words = line.split(" ")
    command = COMMANDS.get(words[1]) if len(words) > 2 else None
    if command is None:
        return list(COMMANDS) if len(words) <= 2 else []
    if command.overrides:
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
        return None
    entries = [*command.keys, *(SETTINGS[key] for key in command.settings)]
    values = {
        entry.key: ("false", "true")
        if isinstance(entry.default, bool)
        else entry.choices
        for entry in entries
    }
    return [
        f"{key}={value}" for key, valid in values.items() for value in (valid or ("",))
    ]


def settings_page() -> str:
    """docs/settings.md: a table for each group of settings."""
    lines = [SETTINGS_PAGE]
    for group, settings in groupby(
        SETTINGS.values(), key=lambda entry: entry.key.rpartition(".")[0]
    ):
        lines += [
            f"## {group or 'General'}\n",
            "| setting | default | meaning | valid |",
            "|---|---|---|---|",
        ]
        for entry in settings:
            mark = " *" if entry.free else ""
            cells = (
                f"`{entry.key}`{mark}",
                f"`{shown(entry.default)}`",
                entry.doc,
                entry.valid,
            )
            lines.append(
                f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace(
                    "``", ""
                )
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(settings_page(), end="")
