"""The mutation run: which mutants there are, and that a weak test lets one survive where a strong test kills it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants import EQUIVALENT, MODULES, ROOT, _edits, mutants

SOURCE = """
LIMIT = 3

def mean(total, count):
    if count <= 0:
        raise ValueError("no values")
    return total / count

def halved(number):
    while number > 1:
        number = number // 3
"""
WEAK = "import mod\ndef test(): assert mod.mean(6, 1) == 6\n"
STRONG = """
import mod, pytest
assert mod.LIMIT == 3  # while tests are collected
def test_mean():
    assert mod.mean(6, 3) == 2 and mod.mean(1, 1) == 1
    with pytest.raises(ValueError):
        mod.mean(1, 0)
def test_halved():
    mod.halved(5)
"""


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants(source)}


def test_mutants_are_single_changes_that_compile() -> None:
    assert changes(SOURCE) == {
        ("3", "(4)"),
        ("count <= 0", "(not (count <= 0))"),
        ("count <= 0", "(count < 0)"),
        ("0", "(1)"),
        ("raise ValueError('no values')", "pass"),
        ("return total / count", "return None"),
        ("total / count", "(total * count)"),
        ("total / count", "(total)"),
        ("number > 1", "(not (number > 1))"),
        ("number > 1", "(number >= 1)"),
        ("number // 3", "(number * 3)"),
        ("1", "(0)"),
        ("1", "(2)"),
    }
    for mutant in mutants(SOURCE):
        compile(mutant.source, "mutant", "exec")
        assert mutant.source != SOURCE
    assert next((mutant.line, mutant.code) for mutant in mutants(SOURCE)) == (
        2,
        "LIMIT = 3",
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 2.5 * f(a, b)", {("2.5", "(5.0)"), ("2.5 * f(a, b)", "(2.5 / f(a, b))"), ("2.5 * f(a, b)", "(2.5)"),
                               ("2.5 * f(a, b)", "(f(a, b))"), ("f(a, b)", "(f(b, a))")}),
        ("self.é = not a and b", {("self.é = not a and b", "pass"), ("not a", "(a)"), ("not a and b", "(not a or b)")}),
        ("x = [y for y in z if y in w]", {("y in w", "(not (y in w))"), ("y in w", "(y not in w)")}),
        ("x = max(a, b)", set()),  # the order of its arguments means nothing
        ("x = f(a, a)", set()),
        ("def f(x: Literal[3] = True) -> g(1, 2):\n    assert x > 1, f'{1 + 1}'", {("True", "(False)")}),
        ("y = zip(a, b, strict=True)", {("zip(a, b, strict=True)", "(zip(b, a, strict=True))")}),
        ("if TYPE_CHECKING:\n    x = 1", set()),
    ],
)  # fmt: skip
def test_every_operator_and_what_is_left_alone(
    source: str, expected: set[tuple[str, str]]
) -> None:
    assert changes(source) == expected


def mutation_run(folder: Path, test: str, **options: Any) -> dict[str, Any]:
    """Figures of `mod.py` under one test file, from a process that has no torch."""
    folder.mkdir(exist_ok=True)
    (folder / "mod.py").write_text(SOURCE)
    (folder / "test_mod.py").write_text(test)
    (folder / "conftest.py").write_text(
        "def pytest_configure(config): config.addinivalue_line('markers', 'slow: not here')"
    )
    names = [line[4:-3] for line in test.splitlines() if line.startswith("def test")]
    given = {
        "folder": str(folder),
        "tests": [f"test_mod.py::{name.partition('(')[0]}" for name in names],
        "options": {"sample": None, "seed": 0, **options},
    }
    code = (
        "import json, sys, pytest; from pathlib import Path; from benchmarks import mutants;"
        "mutants.SLOWER, mutants.GRACE_S = 2, 1.0;"
        "given = json.loads(sys.argv[1]); folder = Path(given['folder']);"
        "print(json.dumps(mutants.run_module(folder, 'mod.py', given['tests'], **given['options'])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_weak_test_lets_mutants_survive_and_a_strong_one_kills_them(
    tmp_path: Path,
) -> None:
    weak, strong = (
        mutation_run(tmp_path / "weak", WEAK, sample=4),
        mutation_run(tmp_path / "strong", STRONG),
    )
    assert (weak["mutants"], weak["tried"], strong["tried"]) == (14, 4, 14)
    assert len(weak["survivors"]) == weak["tried"] - weak["killed"] > 0
    assert not any(
        "total / count" in line or "raise" in line for line in strong["survivors"]
    )
    assert not any(
        "number * 3" in line for line in strong["survivors"]
    )  # never ends: stopped, which kills it
    assert (tmp_path / "strong" / "mod.py").read_text() == SOURCE
    again = mutation_run(tmp_path / "weak", STRONG, before=weak)
    assert (again["tried"], set(again["survivors"]) <= set(strong["survivors"])) == (
        4,
        True,
    )
    assert again["killed"] == 4 - len(again["survivors"]) > weak["killed"]


def test_every_module_and_its_tests_exist_and_every_equivalent_mutant_has_a_reason() -> (
    None
):
    for module, tests in MODULES.items():
        assert (ROOT / module).is_file()
        assert all((ROOT / test.partition("::")[0]).exists() for test in tests)
    found: dict[str, set[tuple[str, str, str]]] = {}
    for module in {entry["module"] for entry in EQUIVALENT}:
        source = (ROOT / module).read_text()
        lines = source.splitlines()
        found[module] = {
            (lines[node.lineno - 1].strip(), ast.unparse(node), after)
            for node, after in _edits(ast.parse(source))
        }
    for entry in EQUIVALENT:
        assert (entry["code"], entry["before"], entry["after"]) in found[
            entry["module"]
        ], entry
        assert len(entry["reason"]) > 20
