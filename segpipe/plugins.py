"""The user's code by import path, `package.module:Name`: its location, permission to import it, and its hashes.

The current folder is searched first. A name from the command line or a configuration is imported from anywhere. A name
that comes only from a run's files is imported only if it lies in the project: in a module or package below the current
folder that is neither installed, nor segpipe itself, nor in the same folder as a run.
"""

import ast
import hashlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module, invalidate_caches, metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError, ConfigError, did_you_mean, listed

FORM = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
INSTALLED = ("site-packages", "dist-packages")
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
RECORDED = ("albumentations", "cv2", "numpy", "segpipe", "torch")  # in each fingerprint
RUN_FILES = ("last.pt", "best.pt", "step_*.pt", "metrics.jsonl", "inputs.json")
_trusted: set[str] = set()  # import paths, and packages
# For each import path used by a training of this process: the imported value, and the hashes of its files.
_trained: dict[str, tuple[Any, dict[str, str]]] = {}


def is_path(name: str) -> bool:
    """Whether a name in the configuration is an import path."""
    return ":" in name


def trust(names: Iterable[str]) -> None:
    """Allow the import of these paths and packages, because the user named them."""
    _trusted.update(names)


def is_trusted(path: str) -> bool:
    """Whether the user named this import path, or its package."""
    return path in _trusted or _top(path) in _trusted


def load(key: str, path: str) -> Any:
    """The class or function at import path `path`, the value of setting `key`.

    Raises ConfigError if it cannot be found or imported, is not callable, or may not be imported.
    """
    module, name = split(key, path)
    top, place = _top(path), _place(key, path)
    if not is_trusted(path) and (fault := _fault_of_place(top, place)):
        raise ConfigError(
            f"{key} = {path} is named by a run, but {top} {fault}. Code that a run names must be a module or package "
            f"of the project, here {Path.cwd()}, outside of runs. If you trust it, add trust=[{top}]."
        )
    try:
        value = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(_not_imported(key, path, error)) from error
    if not callable(value):
        raise ConfigError(
            f"{key} = {path} is {value!r}, but a class or function was needed."
        )
    return value


def check_current(key: str, path: str) -> None:
    """Raise ConfigError if files behind an import path changed since an earlier training of this process.

    This process would still run the code that it imported then.
    """
    value, now = load(key, path), sources([(key, path)])
    earlier, then = _trained.get(path, (value, now))
    changed = sorted({file for file, _ in now.items() ^ then.items()})
    if changed and earlier is value:
        raise ConfigError(
            f"{key} = {path}: {listed(changed)} changed since this process imported it. Start a new process, such as "
            f"by restarting a notebook's kernel."
        )
    _trained[path] = value, now


def _not_imported(key: str, path: str, error: BaseException) -> str:
    """Why an import failed: no such module or name, or an error inside the user's code."""
    module, name = split(key, path)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module}.".startswith(f"{missing}."):
        return _no_module(key, path, missing)
    known = vars(sys.modules.get(module, object))
    if isinstance(error, AttributeError) and error.name == name not in known:
        return f"{key} = {path}, but {module} has no {name}.{did_you_mean(name, known)}"
    return f"{key} = {path}: importing {module} failed: {located(error)}."


def split(key: str, path: str) -> tuple[str, str]:
    """Module and name of an import path. Raises ConfigError for any other form."""
    match = FORM.fullmatch(path)
    if match is None or match[1].endswith(".py"):
        raise ConfigError(
            f"{key} = {path}, but the form package.module:Name was needed, without .py and slashes."
        )
    return match[1], match[2]


def _top(path: str) -> str:
    """The top-level package or module of an import path."""
    return path.partition(":")[0].partition(".")[0]


def _place(key: str, path: str) -> Path:
    """Folder of the package, or file of the module, at the top of an import path. Imports nothing.

    A relative path means built into Python. Raises ConfigError if the module does not exist.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    invalidate_caches()  # the module may be new
    top = _top(path)
    with suppress(ValueError):  # imported without a spec, as __main__ is
        if spec := find_spec(top):
            folders = spec.submodule_search_locations
            return Path(next(iter(folders)) if folders else spec.origin or "")
    raise ConfigError(_no_module(key, path, top))


def _fault_of_place(top: str, place: Path) -> str:
    """Why a package or module must not be imported only because a run names it; empty if it may."""
    here = Path.cwd()
    if not place.is_absolute():
        return "lies in Python itself, outside the project"
    if not place.is_relative_to(here) or top == "segpipe" or _is_installed(place):
        return f"lies in {place}, outside the project"
    if place.is_dir() and not (place / "__init__.py").is_file():
        return f"is not a package: {place}/__init__.py is missing"
    around = [folder for folder in place.parents if folder.is_relative_to(here)]
    for pattern in ("*.pt", *RUN_FILES):  # a checkpoint inside may have any name
        folders = around if pattern in RUN_FILES else []
        beside = (path for folder in folders for path in folder.glob(pattern))
        if path := next(chain(place.rglob(pattern), beside), None):
            return f"shares a folder with a run: {path}"
    return ""


def _is_installed(place: Path) -> bool:
    """Whether a file belongs to the standard library or an installed package."""
    return bool(set(INSTALLED) & set(place.parts)) or place.is_relative_to(
        STANDARD_LIBRARY
    )


def _no_module(key: str, path: str, missing: str) -> str:
    return (
        f"{key} = {path}, but there is no module {missing} in {Path.cwd()} or among the installed packages. Run the "
        f"command in the folder that contains {_top(missing)}; code of a notebook goes into a file."
    )


def located(error: BaseException) -> str:
    """File, line and message of an error in the user's code, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
        return f"{where}: {type(error).__name__}: {error.msg}"
    package = Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
        and not Path(frame.filename).is_relative_to(package)
    ]
    own = [frame for frame in frames if not _is_installed(Path(frame.filename))]
    where = ""
    if frames:
        last = (own or frames)[-1]
        where = f"{last.filename}, line {last.lineno} ({last.line}): "
    return f"{where}{type(error).__name__}: {text}".rstrip(".")


def call(
    key: str,
    name: str,
    function: Callable[..., Any],
    args: Mapping[str, Any],
    *given: Any,
    **named: Any,
) -> Any:
    """The result of `function(*given, **named, **args)`, which setting `key` names; `args` come from the user.

    Raises ConfigError for an unknown or missing argument, and for an error inside the function.
    """
    check_arguments(key, name, function, args, *given, **named)
    try:
        return function(*given, **named, **args)
    except ConfigError:  # from a network of segpipe, already complete
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} = {name}: {located(error)}.") from error


def check_arguments(
    key: str,
    name: str,
    function: Callable[..., Any],
    args: Mapping[str, Any],
    *given: Any,
    **named: Any,
) -> None:
    """Raise ConfigError unless `function(*given, **named, **args)` fits the signature. Calls nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    parameters = list(signature.parameters.values())
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken = [
            x.name
            for place, x in enumerate(parameters)
            if place >= len(given) or x.kind is x.KEYWORD_ONLY
        ]
        own = [keyword for keyword in taken if keyword not in named]
        for argument in args:
            if argument not in own:
                raise ConfigError(
                    f"{key.rpartition('.')[0]}.args.{argument} is not an argument of {name}, which takes "
                    f"{', '.join(own) or 'none'}.{did_you_mean(argument, own)}"
                )
        for keyword in named:
            if keyword not in taken:
                raise ConfigError(f"{key} = {name} must accept the keyword {keyword}.")
    try:
        signature.bind(*given, **{**args, **named})
    except TypeError as error:
        advice = f"Set missing arguments with {key.rpartition('.')[0]}.args.NAME=VALUE."
        if key == "augment.extra":  # has no arguments
            advice = "Name a function of your own that sets missing arguments."
        raise ConfigError(
            f"{key} = {name} cannot be called as {getattr(function, '__name__', name)}"
            f"({', '.join([*('...' for _ in given), *named])}): {error}. {advice}"
        ) from None


def sources(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """SHA-256 of the files behind (setting, import path) pairs, and versions of the packages that they import.

    The files are the module itself, its packages, and the modules next to them that these import, recursively, by all
    import statements anywhere in a file; keys are relative to the folder on the search path. Imports nothing. Raises
    ConfigError for a module that does not exist.
    """
    found: dict[str, str] = {}
    for key, path in named:
        module, _ = split(key, path)
        found |= _closure(module, _place(key, path).parent)
    return dict(sorted(found.items()))


def _closure(module: str, root: Path) -> dict[str, str]:
    """Files and versions behind a module that lies below `root`, a folder of the search path."""
    is_local = not set(INSTALLED) & set(root.parts)
    waiting, seen = [module], set[str]()
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        top = _top(name)
        # torch has 1,800 files, and its version is in every fingerprint.
        hashed = is_local or top == _top(module) != "torch"
        files = list(_files(root, name)) if hashed else []
        for file, package in files:
            key = file.relative_to(root).as_posix()
            if key not in found:
                text = file.read_bytes()
                found[key] = hashlib.sha256(text).hexdigest()
                waiting += _imports(text, package)
        is_here = (root / f"{top}.py").is_file() or (root / top).is_dir()
        if files or is_here or top in RECORDED or top in found:
            continue
        # Only of packages whose distribution has the same name.
        with suppress(metadata.PackageNotFoundError):
            found[top] = metadata.version(top)
    return found


def _files(root: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Files that an import of a module runs, packages first, each with the base package of its relative imports."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        folder, package = root.joinpath(*parts[:count]), ".".join(parts[:count])
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py", package
        elif folder.with_suffix(".py").is_file():
            yield folder.with_suffix(".py"), package.rpartition(".")[0]


def _imports(text: bytes, package: str) -> list[str]:
    """Modules, or attributes of modules, that a file imports; empty if it is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level]
            module = ".".join(
                [*(above if node.level else ()), *filter(None, [node.module])]
            )
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [name for name in names if _top(name) not in sys.stdlib_module_names]


def check_unchanged(
    key: str, path: str, recorded: Mapping[str, str], where: object
) -> None:
    """Raise CheckpointError if a plug-in's files differ from those that `where` was trained with.

    A path or package that the user named is used as it is now, without this check.
    """
    if is_trusted(path):
        return
    now = sources([(key, path)])
    changed = [name for name, value in now.items() if recorded.get(name) != value]
    if changed:
        raise CheckpointError(
            f"{where}: {key} = {path}, but {', '.join(changed[:4])} changed since the training, so it may compute "
            f"something else. Restore the file, or add trust=[{_top(path)}] to use it as it is now."
        )
