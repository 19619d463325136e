"""The user's own code by import path, `package.module:Name`: where it lies, whether it may be imported, and its hash.

The current folder is searched first. A name that the user gave on the command line or in a configuration is imported
from anywhere. A name that only a run's files give is imported if it lies in the project: below the current folder,
but neither an installed package nor segpipe itself.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module, invalidate_caches, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError, ConfigError, did_you_mean

FORM = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
LIKE = 0.4  # of a name in code, to name it in a message
INSTALLED = ("site-packages", "dist-packages")
FINGERPRINTED = (
    "albumentations",
    "cv2",
    "numpy",
    "segpipe",
    "torch",
)  # whose versions each run records anyway
_trusted: set[str] = set()  # import paths, and packages


def is_path(name: str) -> bool:
    """Whether a name in the configuration is meant as an import path."""
    return ":" in name


def trust(names: Iterable[str]) -> None:
    """Allow the import of these paths and packages, because the user named them."""
    _trusted.update(names)


def load(key: str, path: str) -> Any:
    """The class or function that `path`, the value of setting `key`, names.

    Raises ConfigError when it cannot be found or imported, names no callable, or may not be imported.
    """
    module, name = split(key, path)
    top = module.partition(".")[0]
    check_place(key, path)
    try:
        found = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(_no_module(key, path, str(error.name))) from None
        raise ConfigError(
            f"{key} = {path}: importing {module} failed: {located(error)}."
        ) from error
    except AttributeError as error:
        if error.name != name or error.obj is not sys.modules.get(module):
            raise ConfigError(
                f"{key} = {path}: importing {module} failed: {located(error)}."
            ) from error
        names = [
            one
            for one, value in vars(sys.modules[module]).items()
            if callable(value) and one[0] != "_"
        ]
        raise ConfigError(
            f"{key} = {path}, but {module} has no {name}.{did_you_mean(name, names, LIKE)}"
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} = {path}: importing {module} failed: {located(error)}."
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{key} = {path} is {found!r}, but a class or function was needed."
        )
    if not is_trusted(path) and not _in_project(
        home := str(getattr(found, "__module__", "")).partition(".")[0]
    ):
        raise ConfigError(
            f"{key} = {path} is named by a run, and {module} has it from {home or 'elsewhere'}, which is outside this "
            f"project. If you trust it, add trust=[{top}]."
        )
    return found


def split(key: str, path: str) -> tuple[str, str]:
    """Module and name of an import path. Raises ConfigError for another form."""
    if match := FORM.fullmatch(path):
        module, name = match.groups()
        if module.endswith(".py"):
            raise ConfigError(
                f"{key} = {path} names a file. Write the module: {module.removesuffix('.py')}:{name}."
            )
        return module, name
    guess = re.sub(r"\.py(?=:)", "", path).strip("./").replace("/", ".")
    hint = f" Did you mean {guess}?" if guess != path and FORM.fullmatch(guess) else ""
    raise ConfigError(
        f"{key} = {path}, but the form package.module:Name was needed.{hint}"
    )


def check_place(key: str, path: str) -> None:
    """Raise ConfigError unless the module exists and the user named it, or it lies in the project. Imports nothing."""
    module = split(key, path)[0]
    top = module.partition(".")[0]
    place = _place(top)
    if place is None:
        raise ConfigError(_no_module(key, path, top))
    if not is_trusted(path) and not _in_project(top):
        raise ConfigError(
            f"{key} = {path} is named by a run, but {top} lies in {place if place.is_absolute() else 'Python itself'}, "
            f"outside the project in {Path.cwd()}: code that a run names is imported from the current folder only. Run "
            f"the command in the folder that holds {top}, or, if you trust it, add trust=[{top}]."
        )


def is_trusted(path: str) -> bool:
    """Whether the user named this import path, or its package."""
    return path in _trusted or path.partition(":")[0].partition(".")[0] in _trusted


def _place(top: str) -> Path | None:
    """Where a package or module of the top level lies; None where there is none. Imports nothing."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    invalidate_caches()  # it may have been written a moment ago
    try:
        spec = find_spec(top)
    except ValueError:  # imported in a way that left no spec, as __main__
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin or "")


def _in_project(top: str) -> bool:
    place = _place(top) if top else None
    if (
        place is None or top in ("segpipe", "__main__") or not place.is_absolute()
    ):  # the last: built in
        return False
    folder, standard = Path.cwd(), Path(sysconfig.get_paths()["stdlib"])
    if not place.is_relative_to(folder) or place.is_relative_to(standard):
        return False
    return not set(INSTALLED) & set(place.relative_to(folder).parts)


def _no_module(key: str, path: str, missing: str) -> str:
    """Message about a module that does not exist, with the nearest one in its folder."""
    parent, _, name = missing.rpartition(".")
    folder = _place(parent.partition(".")[0]) if parent else Path.cwd()
    folder = folder.joinpath(*parent.split(".")[1:]) if folder and parent else folder
    beside = [
        one
        for one in (folder.iterdir() if folder and folder.is_dir() else ())
        if one.name[0] not in "._"
    ]
    names = [one.stem for one in beside if one.suffix == ".py" or one.is_dir()]
    if parent:
        return f"{key} = {path}, but there is no module {name} in {folder}.{did_you_mean(name, names, LIKE)}"
    hint = (
        did_you_mean(name, names, LIKE)
        or f" Run the command in the folder that holds {name}."
    )
    return f"{key} = {path}, but there is no module {name} in {folder} or among the installed packages.{hint}"


def located(error: BaseException) -> str:
    """File, line and message of an error in the user's code, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_code(frame.filename)
    ]
    own = [
        frame for frame in frames if not _is_installed(Path(frame.filename))
    ] or frames
    where = (
        f"{own[-1].filename}, line {own[-1].lineno} ({own[-1].line}): " if own else ""
    )
    return f"{where}{type(error).__name__}: {text}".rstrip(".")


def _is_code(file: str) -> bool:
    return not file.startswith("<frozen") and not Path(file).is_relative_to(
        Path(__file__).parent
    )


def _is_installed(place: Path) -> bool:
    """Whether a file belongs to the standard library or an installed package."""
    return bool(set(INSTALLED) & set(place.parts)) or place.is_relative_to(
        sysconfig.get_paths()["stdlib"]
    )


def call(
    key: str,
    name: str,
    function: Callable[..., Any],
    args: Mapping[str, Any],
    *given: Any,
    **named: Any,
) -> Any:
    """`function(*given, **named, **args)` for the value `name` of the setting `key`; `args` are the user's own.

    Raises ConfigError for an argument that it does not have, one that is missing, and an error inside it.
    """
    check_arguments(key, name, function, args, *given, **named)
    try:
        return function(*given, **named, **args)
    except ConfigError:  # of a network of segpipe, which says all there is to say
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
    """Raise ConfigError unless `function(*given, **named, **args)` is a possible call. Calls nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    parameters = list(signature.parameters.values())[len(given) :]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    valid = [
        one.name
        for one in parameters
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    group = key.rpartition(".")[0]
    own = [one for one in valid if one not in named]
    for one in args:
        if (one in named or one not in valid) and not (takes_any and one not in named):
            raise ConfigError(
                f"{group}.args.{one} is not an argument of {name}, which takes {', '.join(own) or 'none'}."
                f"{did_you_mean(one, own, LIKE)}"
            )
    for one in named:
        if one not in valid and not takes_any:
            raise ConfigError(
                f"{key} = {name} must take the keyword {one}: {_shown(function, given, named)}."
            )
    try:
        signature.bind(*given, **named, **args)
    except TypeError as error:
        raise ConfigError(
            f"{key} = {name} cannot be called as {_shown(function, given, named)}: {error}. Set what is missing "
            f"with {group}.args.NAME=VALUE."
        ) from None


def _shown(
    function: Callable[..., Any], given: Iterable[Any], named: Iterable[str]
) -> str:
    parts = [*("..." for _ in given), *(f"{one}=..." for one in named)]
    return f"{getattr(function, '__name__', function)}({', '.join(parts)})"


def sources(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """SHA-256 of the files behind import paths, each given with its setting, and versions of packages that they import.

    The files are the module itself, the packages it lies in, and the modules beside them that these import, and so on,
    as the import statements say, wherever they stand; keys are relative to the folder on the search path. Imports
    nothing. Raises ConfigError for a module that does not exist.
    """
    found: dict[str, str] = {}
    for key, path in named:
        module = split(key, path)[0]
        place = _place(module.partition(".")[0])
        if place is None:
            raise ConfigError(_no_module(key, path, module.partition(".")[0]))
        found |= _closure(module, place.parent)
    return dict(sorted(found.items()))


def _closure(module: str, root: Path) -> dict[str, str]:
    """Files and versions behind a module that lies below `root`, a folder of the search path."""
    local = not set(INSTALLED) & set(root.parts)
    top, waiting, seen, found = (
        module.partition(".")[0],
        [module],
        set[str](),
        dict[str, str](),
    )
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        first = name.partition(".")[0]
        files = list(_files(root, name)) if local or first == top else []
        for file, package in files:
            text = file.read_bytes()
            found[file.relative_to(root).as_posix()] = hashlib.sha256(text).hexdigest()
            waiting += _imports(text, package)
        if (
            not files
            and first not in FINGERPRINTED
            and not _files_exist(root, first)
            and (number := _version(first))
        ):
            found[first] = number
    return found


def _files(root: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Files that importing a module runs, its packages first, each with the package that relative imports start at."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        folder, package = root.joinpath(*parts[:count]), ".".join(parts[:count])
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py", package
        elif folder.with_suffix(".py").is_file():
            yield folder.with_suffix(".py"), package.rpartition(".")[0]


def _files_exist(root: Path, first: str) -> bool:
    return (root / f"{first}.py").is_file() or (root / first).is_dir()


def _imports(text: bytes, package: str) -> list[str]:
    """Modules, or attributes of modules, that a file imports; empty for one that is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) - node.level + 1]
                if node.level
                else []
            )
            module = ".".join(filter(None, [*parents, node.module]))
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [
        name
        for name in names
        if name and name.partition(".")[0] not in sys.stdlib_module_names
    ]


@cache
def _version(package: str) -> str | None:
    """Version of an installed package; the SHA-256 of its first file where its distribution has another name.

    metadata.packages_distributions knows that name, but takes seconds. None for a package that is not installed.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        place = _place(package)
        file = place / "__init__.py" if place and place.is_dir() else place
        return (
            hashlib.sha256(file.read_bytes()).hexdigest()
            if file and file.is_file()
            else None
        )


def check_unchanged(
    key: str, path: str, recorded: Mapping[str, str], where: object
) -> None:
    """Raise CheckpointError when a plug-in's files are not those that `where` was trained with.

    Not for a path or package that the user named: then it is taken as it is now.
    """
    if is_trusted(path):
        return
    now = sources([(key, path)])
    changed = [name for name, value in now.items() if recorded.get(name) != value]
    if changed:
        raise CheckpointError(
            f"{where}: {key} = {path}, but {', '.join(changed[:4])} changed since the training, so it may compute "
            f"something else. Restore the file, or add trust=[{path.partition(':')[0].partition('.')[0]}] to take it "
            f"as it is now."
        )
