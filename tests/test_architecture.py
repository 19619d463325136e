"""The house rules that a machine can check: arrows between rooms, their size, and who may talk to whom."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "segpipe").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))

# Floors of the house: a room imports rooms of lower floors only, wherever in a file the import stands.
FLOORS = (
    ("segpipe", "errors", "keys", "processes"),
    ("files", "native", "plugins"),
    ("settings",),
    ("models",),
    ("data", "losses", "determinism"),
    ("datasets",),
    ("ledger",),
    ("distributed",),
    ("train",),
    ("audit", "export", "predict"),
    ("checks",),
    ("run",),
    ("cli", "__main__"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ALONE = "runtime"  # imports nothing else of segpipe; every other room may import it
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
LONGEST_CHAIN = (
    10  # of modules that import one another; annotations for type checkers do not count
)
LOADS_NOTHING_HEAVY = {
    "segpipe.errors": ("torch", "numpy", "hydra"),
    "segpipe.settings.config": ("torch", "numpy", "hydra", "omegaconf", "cv2"),
    "segpipe.keys": ("torch", "cv2"),
    "segpipe.settings.compose": ("torch", "cv2", "albumentations"),
    "segpipe.run.launch": ("torch", "cv2", "albumentations"),
    "segpipe.distributed.environment": ("torch",),
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in SOURCES}
ALL = NAMES | {module_name(path): path for path in (ROOT / "benchmarks").rglob("*.py")}


def imports(tree: ast.Module, *, for_types: bool, package: str = "") -> set[str]:
    """Dotted names of what a file imports, also inside functions: modules, and attributes as `module.name`.

    `for_types` adds what stands under `if TYPE_CHECKING`. Relative imports, of one level, start at `package`.
    """
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (
                f"{package}.{node.module or ''}".rstrip(".")
                if node.level
                else str(node.module)
            )
            names = {f"{module}.{alias.name}" for alias in node.names}
            # `from segpipe.train import state` needs the module, `from segpipe.models import MODELS` the package.
            found |= names if names <= ALL.keys() else {module, *names}
        elif (
            isinstance(node, ast.If)
            and "TYPE_CHECKING" in ast.unparse(node.test)
            and not for_types
        ):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
    return found


def graph(*, for_types: bool) -> dict[str, frozenset[str]]:
    """Modules of segpipe that each module of segpipe imports."""
    edges = whole_graph(for_types=for_types)
    return {name: edges[name] & NAMES.keys() for name in NAMES}


@cache
def whole_graph(*, for_types: bool) -> dict[str, frozenset[str]]:
    """Modules of segpipe and of the benchmarks that each of them imports."""
    edges = {}
    for name, path in ALL.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        wanted = (
            imports(parsed(path), for_types=for_types, package=package) & ALL.keys()
        )
        edges[name] = frozenset(wanted - {name})
    return edges


def room_of(name: str) -> str:
    """First folder or module below segpipe, or segpipe itself."""
    return name.split(".")[1] if "." in name else name


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def code_lines(text: str) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@cache
def chain(name: str) -> tuple[str, ...]:
    """Longest chain of imports that starts at a module."""
    return name, *max(
        (chain(other) for other in graph(for_types=False)[name]), key=len, default=()
    )


def against_the_floors(edges: dict[str, frozenset[str]]) -> list[str]:
    """Imports that go up or across, as `module imports module`."""
    found = []
    for name, others in edges.items():
        for other in others:
            room, wanted = room_of(name), room_of(other)
            inside = room == wanted or name == "segpipe.__main__"
            allowed = (
                inside
                or wanted == ALONE
                or (room != ALONE and FLOOR_OF[wanted] < FLOOR_OF[room])
            )
            if not allowed:
                found.append(f"{name} imports {other}")
    return sorted(found)


def test_imports_have_no_cycle() -> None:
    try:
        tuple(TopologicalSorter(whole_graph(for_types=True)).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert "segpipe.train.step" in graph(for_types=False)["segpipe.train.engine"], (
        "the parser sees imports"
    )
    assert "benchmarks.bits" in whole_graph(for_types=False)["benchmarks.chaos"]


def test_import_chains_are_short() -> None:
    longest = max((chain(name) for name in NAMES), key=len)
    assert len(longest) <= LONGEST_CHAIN, " -> ".join(longest)


def test_arrows_go_one_way() -> None:
    assert against_the_floors(graph(for_types=True)) == []


def test_an_arrow_that_goes_up_is_found_wherever_it_stands() -> None:
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from segpipe.train.state import TrainState
def f():
    from segpipe.run import launch
"""
    found = imports(ast.parse(text), for_types=True) & NAMES.keys()
    assert found == {"segpipe.train.state", "segpipe.run.launch"}
    assert imports(ast.parse(text), for_types=False) & NAMES.keys() == {
        "segpipe.run.launch"
    }
    assert against_the_floors({"segpipe.data.order": frozenset(found)}) == [
        "segpipe.data.order imports segpipe.run.launch",
        "segpipe.data.order imports segpipe.train.state",
    ]
    assert against_the_floors(
        {"segpipe.runtime.session": frozenset({"segpipe.errors"})}
    )
    assert against_the_floors(
        {"segpipe.audit.examine": frozenset({"segpipe.export.publish"})}
    )


def test_one_name_is_one_module() -> None:
    """But for the commands: each bears the name of what it starts."""
    stems = Counter(
        path.stem
        for path in SOURCES
        if path.parent.name != "cli" and not path.stem.startswith("__")
    )
    assert [name for name, count in stems.items() if count > 1] == []


def test_one_name_is_one_public_class() -> None:
    places: dict[str, list[str]] = {}
    for name, path in NAMES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def collectives(tree: ast.Module, *, starts_processes: bool) -> list[str]:
    """What a file says of ranks and collectives: launcher variables by name, and torch.distributed.

    The launcher itself, and its error for a lost rank, are allowed where processes are started.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in RANK_VARIABLES:
            found.append(str(node.value))
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        names += (
            [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in names:
            launcher = name.startswith(
                ("torch.distributed.launcher", "torch.distributed.Dist")
            )
            elastic = within(name, "torch.distributed.elastic")
            if (
                within(name, "torch.distributed")
                and not elastic
                and not (launcher and starts_processes)
            ):
                found.append(name)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
            "torch.distributed."
        ):
            found.append(ast.unparse(node))
    return found


def test_only_one_room_knows_ranks_and_collectives() -> None:
    for path in [*SOURCES, *SCRIPTS, ROOT / "train.py"]:
        if (
            "distributed" not in path.parts and path.name != "elsewhere.py"
        ):  # to the user's code, it looks like rank 1
            found = collectives(parsed(path), starts_processes=path.name == "launch.py")
            assert not found, f"{path} uses {found}"
    assert collectives(
        ast.parse("import torch.distributed as dist"), starts_processes=True
    )
    assert collectives(ast.parse("os.environ['RANK']"), starts_processes=True)


@pytest.mark.parametrize(("module", "absent"), LOADS_NOTHING_HEAVY.items())
def test_light_rooms_load_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_train_is_short_and_without_torch() -> None:
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 60
    assert not any(
        within(name, "torch") for name in imports(ast.parse(text), for_types=True)
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_say_how_they_are_called(path: Path) -> None:
    text = path.read_text()
    assert code_lines(text) <= 60
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"scripts/{path.name}" in docstring
    assert "Exit codes" in docstring


def test_files_stay_readable() -> None:
    for path in SOURCES:
        tree = parsed(path)
        assert ast.get_docstring(tree), f"{path} does not say what it is for"
        assert path.stem not in ("utils", "common", "helpers", "base", "misc"), path
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef)
                and node in tree.body
                and not node.name.startswith("_")
            ):
                assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def density(text: str) -> tuple[int, int]:
    """Tokens without comments and layout, and all lines."""
    layout = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in layout for token in tokens), len(text.splitlines())


def test_code_is_not_packed() -> None:
    """Ratchets: lower a limit when it is passed with room; the goal is 6 tokens per line in every module."""
    assert density("x = [\n    1,  # why\n]\n") == (6, 3)
    found = [density(path.read_text()) for path in SOURCES]
    tokens, lines = (sum(column) for column in zip(*found, strict=True))
    assert tokens / lines <= 6.1
    assert tokens <= 202_859
    assert sum(count > 6 * length for count, length in found) <= 69


def test_code_lines_counts_code() -> None:
    assert (
        code_lines(
            '"""Doc\nstring."""\n\n# why\nx = """a\nb"""\ndef f():\n    """Doc."""\n    return 1  # so\n'
        )
        == 4
    )


def test_every_page_is_in_the_index_and_in_the_site() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    site = yaml.safe_load((ROOT / "packaging/site/mkdocs.yml").read_text())
    named = re.findall(r"[\w-]+\.md", str(site["nav"]))
    assert sorted(named) == sorted(pages)
    index = (ROOT / "docs/index.md").read_text()
    assert pages - {"index.md"} == set(re.findall(r"\]\(([\w-]+\.md)\)", index))


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ],
)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), (
            f"{page.name} links to {target}"
        )
