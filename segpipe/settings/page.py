"""docs/settings.md from the declarations: `python -m segpipe.settings.page > docs/settings.md`."""

from __future__ import annotations

from itertools import groupby

from segpipe.settings.config import SETTINGS
from segpipe.settings.setting import shown

HEAD = """# Settings

Set any of them with `segpipe train KEY=VALUE`. `segpipe train --help` prints this list.

`*` marks settings that cannot reach the numbers: they may change when a run is resumed.
This page is generated: `python -m segpipe.settings.page > docs/settings.md`.
"""


def page() -> str:
    """The page as Markdown: a table for each group of settings."""
    lines = [HEAD]
    for group, settings in groupby(SETTINGS.values(), key=lambda entry: entry.key.rpartition(".")[0]):
        lines += [f"## {group or 'General'}\n", "| setting | default | meaning | valid |", "|---|---|---|---|"]
        for entry in settings:
            mark = " *" if entry.free else ""
            cells = (f"`{entry.key}`{mark}", f"`{shown(entry.default)}`", entry.doc, entry.valid)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace("``", ""))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
