"""Mutation run of the core: which small changes of a module do the tests of that module not notice?

    python -m benchmarks.mutants --sample 40                 # 40 mutants of every module
    python -m benchmarks.mutants --module keys order --all   # all mutants of the named modules
    python -m benchmarks.mutants --module keys --again       # only those that survived, after tests were added

A mutant is one change of one expression or statement. It is killed when a test of its module fails, and when the tests
take ten times as long as without it. Every mutant runs in a fork of a process that has imported torch, on a copy of the
repository, so it costs the tests' own time and the working tree is never touched. Tests marked `slow` do not take part.
Survivors that compute the same are listed with a reason in mutants_equivalent.json and are not counted.

cosmic-ray starts a process per mutant, which imports torch for 4 s; mutmut leaves constants outside of functions alone
and chooses tests by tracing the whole suite.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
EQUIVALENT: list[dict[str, str]] = json.loads(
    (ROOT / "benchmarks" / "mutants_equivalent.json").read_text()
)
LOSSES, GATES = (
    ("tests/losses",),
    ("tests/export/test_limits.py", "tests/export/test_gates.py"),
)
JUDGE = ("tests/export/test_judge.py", *GATES)
MODULES: dict[
    str, tuple[str, ...]
] = {  # the tests that must notice a change of the module
    "segpipe/keys.py": ("tests/test_keys.py",),
    "segpipe/data/order.py": (
        "tests/data/test_order.py",
        "tests/data/test_draws.py",
        *(
            f"tests/train/test_canary.py::test_{name}"
            for name in (
                "one_sample_in_so_many_is_chosen",
                "the_choice_is_a_function_of_seed_epoch_and_index",
                "the_choice_is_the_same_for_any_workers_and_ranks",
                "every_chosen_sample_is_made_again_by_others",
                "the_sample_before_is_another_one_each_time",
            )
        ),
    ),
    "segpipe/losses/boundary.py": LOSSES,
    "segpipe/losses/cross_entropy.py": LOSSES,
    "segpipe/losses/dice.py": LOSSES,
    "segpipe/losses/ohem.py": LOSSES,
    "segpipe/losses/total.py": LOSSES,
    "segpipe/models/weights.py": (
        "tests/models/test_parity.py",
        "tests/models/test_weights.py",
        "tests/train/test_start.py::test_other_classes_are_initialized_from_the_seed_or_told",
    ),
    "segpipe/ledger/digest.py": (
        "tests/ledger/test_digest.py",
        "tests/ledger/test_native.py",
    ),
    "segpipe/ledger/divergence.py": (
        "tests/ledger/test_divergence.py",
        "tests/ledger/test_results.py",
    ),
    "segpipe/distributed/reduce.py": ("tests/distributed/test_reduce.py",),
    "segpipe/train/state.py": (
        "tests/train/test_optim.py",
        "tests/train/test_state.py",
        "tests/train/test_gradients.py::test_statistics_over_all_ranks_are_refused_where_they_break_a_promise",
        "tests/train/test_gradients.py::test_with_sync_batchnorm_norms_keep_the_names_of_the_weights",
        "tests/train/test_start.py::test_other_classes_are_initialized_from_the_seed_or_told",
    ),
    "segpipe/train/checkpoint.py": (
        "tests/train/test_checkpoint.py",
        "tests/train/test_start.py",
        "tests/losses/test_further_losses.py::test_a_teacher_that_does_not_fit_is_refused",
        "tests/train/test_optim.py",
        "tests/train/test_state.py",
    ),
    "segpipe/train/step.py": (
        "tests/train/test_step.py",
        "tests/train/test_gradients.py",
        "tests/train/test_loopback.py",
    ),
    "segpipe/export/gates/comparison.py": GATES,
    "segpipe/export/gates/judge.py": JUDGE,
    "segpipe/export/dataset.py": ("tests/export/test_judge.py",),
    "segpipe/export/gates/controls.py": GATES,
    "segpipe/export/gates/quality.py": (
        *GATES,
        "tests/export/test_temperature.py",
    ),
}
PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "torchvision", "cv2", "albumentations", "hydra", "onnx",
             "onnxruntime", "pytest", "psutil", "rich")  # fmt: skip
SLOWER, GRACE_S = (
    10,
    5.0,
)  # a mutant may take this many times as long as the unchanged module, and so much more
PYTEST_OPTIONS = ("-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=",
                  "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
COMMUTATIVE = ("min", "max", "minimum", "maximum")
# Types, messages and assertions of our own invariants are not behavior that a test could see.
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "msg")
SKIPPED_NODES = (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
REMOVED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """One change of a module; `source` is the whole module with it."""

    line: int
    column: int
    code: str  # the line as it was
    before: str
    after: str
    source: str = field(repr=False)

    @property
    def name(self) -> str:
        """Where it is, and the change, as results list it."""
        return f"{self.line}:{self.column}: {self.before} -> {self.after}"


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its text."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    found = []
    for node, after in _edits(ast.parse(source)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        text = (
            source.encode()[:first] + after.encode() + source.encode()[last:]
        ).decode()
        with suppress(SyntaxError):
            compile(text, "mutant", "exec")
            code = lines[node.lineno - 1].decode().strip()
            found.append(
                Mutant(
                    node.lineno, node.col_offset, code, ast.unparse(node), after, text
                )
            )
    return sorted(found, key=lambda mutant: mutant.line)


def _edits(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Node and new text of every change at `node` and below."""
    if isinstance(node, SKIPPED_NODES) or (
        isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ):
        return
    yield from _changes(node)
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name not in SKIPPED_FIELDS and not (name == "keywords" and _is_zip(node)):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _edits(child)


def _is_zip(node: ast.AST) -> bool:
    """Whether its only keyword, `strict`, is an assertion of ours."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.stmt):
        if _is_removable(node):
            yield node, "pass"
        if (
            isinstance(node, ast.Return)
            and node.value is not None
            and ast.unparse(node.value) != "None"
        ):
            yield node, "return None"
    elif isinstance(node, ast.expr):
        yield from ((node, f"({ast.unparse(new)})") for new in _expressions(node))
    for test in getattr(node, "ifs", [getattr(node, "test", None)]):
        if test is not None:
            yield test, f"(not ({ast.unparse(test)}))"


def _is_removable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(
            isinstance(target, ast.Attribute | ast.Subscript) for target in targets
        )
    return isinstance(node, REMOVED) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp(left, op, right):
            if type(op) in SWAPPED:
                yield ast.BinOp(left, SWAPPED[type(op)](), right)  # type: ignore[arg-type]
            if isinstance(op, ast.Mult | ast.Div):
                yield left
            if isinstance(op, ast.Mult):
                yield right
        case ast.Compare(left, ops, comparators):
            for place, op in enumerate(ops):
                yield ast.Compare(
                    left,
                    [*ops[:place], SWAPPED[type(op)](), *ops[place + 1 :]],
                    comparators,
                )  # type: ignore[list-item]
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPPED[type(op)](), values)  # type: ignore[arg-type]
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.Constant(value):
            yield from map(ast.Constant, _constants(value))
        case ast.Call(func, [first, second, *rest], keywords):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            same = ast.unparse(first) == ast.unparse(second)
            if (
                not starred
                and not same
                and ast.unparse(func).split(".")[-1] not in COMMUTATIVE
            ):
                yield ast.Call(func, [second, first, *rest], keywords)


def _constants(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, 2] if value == 1 else [value + 1]
    return [value * 2 or 1.0] if isinstance(value, float) else []


# --- running them


class QuickFirst:
    """A pytest plugin: the files and tests that were quick unchanged come first, since one failure is enough."""

    def __init__(self, path: Path, *, note: bool) -> None:
        """`path`: seconds by test, which an unchanged run writes with `note`."""
        self.path, self.note = path, note
        self.before = {} if note else json.loads(path.read_text())
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Tests of a file stay together, so that fixtures of a module are made once."""
        files: Counter[Path] = Counter()
        for item in items:
            files[item.path] += self.before.get(item.nodeid, 0.0)
        items.sort(
            key=lambda item: (
                files[item.path],
                item.path,
                self.before.get(item.nodeid, 0.0),
            )
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Setup, call and teardown each have a report."""
        self.seconds[report.nodeid] = (
            self.seconds.get(report.nodeid, 0.0) + report.duration
        )

    def pytest_sessionfinish(self) -> None:
        """Only an unchanged run is noted."""
        if self.note:
            self.path.write_text(json.dumps(self.seconds))


def run_tests(folder: Path, tests: Sequence[str], *, unchanged: bool = False) -> int:
    """Start the tests of a copy of the repository in a fork with a process group of its own; returns its id.

    The `unchanged` run comes first: it writes bytecode and how long each test takes.
    """
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.chdir(folder)
    sys.path[:] = [
        str(folder),
        *[entry for entry in sys.path if entry not in ("", str(ROOT))],
    ]
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] in ("segpipe", "benchmarks", "tests")
    ]:
        del sys.modules[name]
    sys.dont_write_bytecode = not unchanged
    os.environ.update({} if unchanged else {"PYTHONDONTWRITEBYTECODE": "1"})
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 4
    try:
        order = QuickFirst(folder.with_suffix(".times"), note=unchanged)
        code = int(
            sys.modules["pytest"].main(
                [*PYTEST_OPTIONS, f"--basetemp={folder}.tmp", *tests], plugins=[order]
            )
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_code(pid: int, timeout_s: float) -> int | None:
    """Exit code of a fork of `run_tests` (None: it was too slow); none of its processes is left."""
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def survives(
    folder: Path, module: str, tests: Sequence[str], mutant: Mutant, timeout_s: float
) -> bool:
    """Whether the tests pass on the mutant. One that cannot be imported leaves pytest without tests, which kills it."""
    path = folder / module
    original, stat = path.read_text(encoding="utf-8"), path.stat()
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(mutant.source, encoding="utf-8")
    try:
        return exit_code(run_tests(folder, tests), timeout_s) == 0
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def run_module(
    folder: Path,
    module: str,
    tests: Sequence[str],
    sample: int | None,
    seed: int,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Figures of one module, in `folder`, a copy of the repository.

    With `before`, its earlier figures, only the survivors in them are tried again.
    """
    start = time.monotonic()
    if exit_code(run_tests(folder, tests, unchanged=True), math.inf) != 0:
        raise SystemExit(
            f"{module}: its tests fail unchanged:\n{folder.with_suffix('.log').read_text()[-4000:]}"
        )
    timeout_s = SLOWER * (time.monotonic() - start) + GRACE_S
    same = {
        (entry["code"], entry["before"], entry["after"])
        for entry in EQUIVALENT
        if entry["module"] == module
    }
    source = (folder / module).read_text(encoding="utf-8")
    content, whole, killed = (
        hashlib.sha256(source.encode()).hexdigest()[:16],
        mutants(source),
        0,
    )
    tried = [each for each in whole if (each.code, each.before, each.after) not in same]
    equivalent = len(whole) - len(tried)
    if before is not None:
        if before.get("content") != content:
            raise SystemExit(
                f"{module} has changed since its mutants were tried: leave out --again."
            )
        killed, tried = (
            before["killed"],
            [each for each in tried if each.name in before["survivors"]],
        )
    elif sample is not None and sample < len(tried):
        tried = sorted(
            random.Random(f"{seed} {module}").sample(tried, sample),
            key=lambda each: each.line,
        )
    survivors = []
    for each in tried:
        if survives(folder, module, tests, each, timeout_s):
            survivors.append(each.name)
            print(f"survived {module}:{each.name}", file=sys.stderr, flush=True)
    return {
        "tests": list(tests),
        "content": content,
        "mutants": len(whole),
        "equivalent": equivalent,
        "tried": killed + len(tried),
        "killed": killed + len(tried) - len(survivors),
        "seconds": round(time.monotonic() - start),
        "survivors": survivors,
    }


def copy_of_the_repository(into: Path) -> Path:
    """What git tracks or would track, as it lies in the working tree."""
    for name in _git(
        "ls-files", "--cached", "--others", "--exclude-standard"
    ).splitlines():
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| module | mutants | equivalent | tried | killed | killed of tried |",
        "|---|---|---|---|---|---|",
    ]
    for module, entry in figures.items():
        numbers = " | ".join(
            str(entry[name]) for name in ("mutants", "equivalent", "tried", "killed")
        )
        lines.append(
            f"| {module} | {numbers} | {100 * entry['killed'] / max(entry['tried'], 1):.0f} % |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--module",
        nargs="+",
        default=[""],
        help="parts of the paths of modules; default all",
    )
    parser.add_argument(
        "--all", action="store_true", help="all mutants instead of a sample"
    )
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module")
    parser.add_argument(
        "--again",
        action="store_true",
        help="only the mutants that survived, as --out lists them",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON; entries of other modules stay"
    )
    given = parser.parse_args()
    for part in given.module:
        if not any(part in name for name in MODULES):
            parser.error(
                f"--module {part}: no module of MODULES has it in its path. Valid: {', '.join(MODULES)}."
            )
    os.environ.update(OMP_NUM_THREADS="1", NO_ALBUMENTATIONS_UPDATE="1")
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that no process is left
    for name in PRELOADED:
        importlib.import_module(name)
    from benchmarks.measure import machine  # imports what is preloaded

    with tempfile.TemporaryDirectory(prefix="mutants") as scratch:
        folder = copy_of_the_repository(Path(scratch) / "copy")
        for module in [
            name for name in MODULES if any(part in name for part in given.module)
        ]:
            old = (
                json.loads(given.out.read_text())["modules"]
                if given.out.exists()
                else {}
            )
            sample, before = (
                None if given.all else given.sample,
                old[module] if given.again else None,
            )
            figures = run_module(
                folder, module, MODULES[module], sample, given.seed, before
            )
            found = {**old, module: {"commit": _git("rev-parse", "HEAD"), **figures}}
            given.out.write_text(
                json.dumps({"machine": machine(), "modules": found}, indent=2) + "\n"
            )
    print(table(json.loads(given.out.read_text())["modules"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
