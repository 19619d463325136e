"""docs/settings.md and tests/cli/help.txt are what the declarations say."""

from pathlib import Path

import pytest

from scripts.settings_page import all_pages, settings_page
from segpipe.settings.config import SETTINGS

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == settings_page(), "run: make docs"


def test_the_command_line_is_frozen() -> None:
    """A key, a default or a range of a command that changes is seen in help.txt, which users read as --help."""
    frozen = Path(__file__).with_name("help.txt").read_text()
    assert frozen == all_pages(), "run: make docs"


def test_the_page_has_a_row_for_each_setting_with_its_meaning() -> None:
    rows = [line for line in settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(SETTINGS)
    for row, entry in zip(rows, SETTINGS.values(), strict=True):
        assert f"`{entry.key}`{' *' * entry.free}" in row
        assert entry.doc in row
        assert entry.doc.strip()
