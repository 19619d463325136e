"""Each exit code has one meaning, and one table lists all of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from segpipe.errors import SegpipeError

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exit-codes.md"
WITHOUT_ERROR = {0, 1, 13, 14}  # success, bug, and the verdicts of an audit


def table() -> dict[int, list[str]]:
    """Names of the errors by exit code, as the page lists them."""
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", PAGE.read_text(), flags=re.M)
    return {int(code): re.findall(r"`(\w+)`", errors) for code, errors in rows}


def errors(kind: type[SegpipeError] = SegpipeError) -> Iterator[type[SegpipeError]]:
    for child in kind.__subclasses__():
        if child.__module__ == "segpipe.errors":
            yield child
            yield from errors(child)


def test_the_table_lists_all_errors_with_their_code() -> None:
    listed = {name: code for code, names in table().items() for name in names}
    assert listed == {kind.__name__: kind.exit_code for kind in errors()}


def test_every_code_of_the_table_is_used() -> None:
    assert table().keys() == {kind.exit_code for kind in errors()} | WITHOUT_ERROR


def test_codes_other_than_refused_settings_have_one_error() -> None:
    assert [code for code, names in table().items() if len(names) > 1] == [2]
    assert SegpipeError.exit_code == 1
