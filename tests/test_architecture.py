"""The house rules that a machine can check: arrows between rooms, their size, and who may talk to whom."""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "segpipe").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))

# Room: rooms that it must not import at the top of a file.
FORBIDDEN = {
    "segpipe.errors": ("segpipe",),
    "segpipe.settings.config": (
        "segpipe.models",
        "segpipe.data",
        "segpipe.losses",
        "segpipe.distributed",
        "torch",
        "omegaconf",
    ),
    "segpipe.models": (
        "segpipe.data",
        "segpipe.losses",
        "segpipe.train.engine",
        "segpipe.distributed",
        "segpipe.export",
    ),
    "segpipe.data": (
        "segpipe.models",
        "segpipe.losses",
        "segpipe.train.engine",
        "segpipe.distributed",
        "segpipe.export",
    ),
    "segpipe.losses": ("segpipe.models", "segpipe.data", "segpipe.train.engine", "segpipe.distributed"),
    "segpipe.determinism": ("segpipe.models", "segpipe.data", "segpipe.train.engine", "segpipe.distributed"),
    "segpipe.distributed": ("segpipe.models", "segpipe.data", "segpipe.train.engine", "segpipe.losses"),
    "segpipe.train.engine": ("segpipe.export", "hydra", "omegaconf", "segpipe.models"),
    "segpipe.audit": ("segpipe.export", "segpipe.run.launch", "hydra"),
    "segpipe.export": ("segpipe.train.engine", "segpipe.run.launch", "hydra"),
    "segpipe.runtime": (
        "segpipe.settings.config",
        "segpipe.models",
        "segpipe.data",
        "segpipe.export",
        "torch",
        "hydra",
    ),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in SOURCES}


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, also inside `if` and `try`; not those for type checkers."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from top_level(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(statement, name, []))


def imported(tree: ast.Module, package: str = "") -> set[str]:
    """Dotted names of what a file imports when it is imported: modules, and attributes as `module.name`.

    Imports are absolute, but for those of `package` segpipe.runtime, which is installed under another name too.
    """
    found: set[str] = set()
    for statement in top_level(tree.body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level <= (package == "segpipe.runtime"), "imports are absolute"
            module = f"{package}.{statement.module}" if statement.level else statement.module
            names = {f"{module}.{alias.name}" for alias in statement.names}
            # `from segpipe import state` needs that module; `from segpipe.models import MODELS` needs the package.
            found |= names if names <= NAMES.keys() else {str(module), *names}
    return found


def package_of(name: str) -> str:
    return name if NAMES[name].stem == "__init__" else name.rpartition(".")[0]


@cache
def graph() -> dict[str, frozenset[str]]:
    """Modules of segpipe that each module imports."""
    edges = {}
    for name, path in NAMES.items():
        wanted = imported(ast.parse(path.read_text()), package_of(name))
        edges[name] = frozenset(other for other in wanted & NAMES.keys() if other != name)
    return edges


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def code_lines(text: str) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def depth(name: str) -> int:
    return 1 + max((depth(other) for other in graph()[name]), default=0)


def test_import_graph_has_no_cycle() -> None:
    try:
        tuple(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert len(graph()) > 40
    assert "segpipe.settings.config" in graph()["segpipe.train.engine"], "the parser sees imports"


def test_import_chains_are_short() -> None:
    deepest = max(graph(), key=depth)
    assert depth(deepest) <= 10, deepest


@pytest.mark.parametrize("room", FORBIDDEN)
def test_arrows_go_one_way(room: str) -> None:
    for name in [name for name in NAMES if within(name, room)]:
        for wanted in imported(ast.parse(NAMES[name].read_text()), package_of(name)):
            bad = [other for other in FORBIDDEN[room] if within(wanted, other)]
            assert not bad, f"{name} imports {wanted}"


def test_models_never_import_data_even_inside_functions() -> None:
    for name in [name for name in NAMES if within(name, "segpipe.models")]:
        for node in ast.walk(ast.parse(NAMES[name].read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not within(str(node.module), "segpipe.data"), name
                assert "data" not in {alias.name for alias in node.names}, name


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, ROOT / "train.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_only_one_room_knows_ranks_and_collectives(path: Path) -> None:
    if path.parent.name == "distributed":
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"), path
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            collective = within(name, "torch.distributed") and not within(name, "torch.distributed.elastic")
            starter = path.name == "launch.py" and name.startswith(
                ("torch.distributed.launcher", "torch.distributed.Dist")
            )
            assert not collective or starter, f"{path} imports {name}"
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed.")), path


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("segpipe.errors", ("torch", "numpy", "hydra")),
        ("segpipe.settings.config", ("torch", "numpy", "hydra", "omegaconf", "cv2")),
        ("segpipe.keys", ("torch", "cv2")),
        ("segpipe.settings.compose", ("torch", "cv2", "albumentations")),
        ("segpipe.run.launch", ("torch", "cv2", "albumentations")),
        ("segpipe.distributed.environment", ("torch",)),
    ],
)
def test_light_rooms_load_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_train_is_short_and_without_torch() -> None:
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 60
    assert not any(within(name, "torch") for name in imported(ast.parse(text)))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_say_how_they_are_called(path: Path) -> None:
    text = path.read_text()
    assert code_lines(text) <= 60
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"scripts/{path.name}" in docstring
    assert "Exit codes" in docstring


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_name(path))
def test_files_stay_readable(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "what the file is for"
    assert len(text.splitlines()) <= 400
    assert path.stem not in ("utils", "common", "helpers", "base", "misc")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is long"
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node in tree.body and not node.name.startswith("_"):
            assert ast.get_docstring(node) or isinstance(node, ast.ClassDef), f"{node.name} says nothing"


def test_code_lines_counts_code() -> None:
    assert (
        code_lines('"""Doc\nstring."""\n\n# why\nx = """a\nb"""\ndef f():\n    """Doc."""\n    return 1  # so\n') == 4
    )
