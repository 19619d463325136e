"""Prints docs/settings.md, and with `commands` tests/cli/help.txt: python scripts/settings_page.py [commands].

Exit codes: docs/exit-codes.md.
"""

import sys
from itertools import groupby

from segpipe.cli.commands import COMMANDS
from segpipe.cli.main import overview, page
from segpipe.settings.config import SETTINGS
from segpipe.settings.setting import shown

TITLE = """# Settings

Set any of them with `segpipe train KEY=VALUE`. `segpipe train --help` prints this list.

`*` marks settings that cannot reach the numbers: they may change when a run is resumed.
This page is generated: `make docs`.
"""


def all_pages() -> str:
    """The help of segpipe and of every command, as text."""
    pages = [overview(), *(page(name) for name in COMMANDS)]
    return "\n\n\n".join(pages) + "\n"


def settings_page() -> str:
    """docs/settings.md: a table for each group of settings."""
    lines = [TITLE]
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
