"""What a function keeps from one call to the next: all data that its objects, classes, modules and closures hold."""

from __future__ import annotations

import functools
import hashlib
import pickle
import random
import re
import sys
from collections import Counter, deque
from collections.abc import Mapping
from mmap import mmap
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch

from segpipe.checks.tripwire import is_foreign

State = dict[str, str]  # what is held, by its path, such as `Blur.apply.cache`
# What cannot change: its text is all there is to know.
ATOMS = (
    type(None),
    int,
    float,
    complex,
    str,
    bytes,
)
# What leads to a function or an object by one of the names in WRAPPED.
WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    MethodType,
    functools.partial,
    functools._lru_cache_wrapper,
)
WRAPPED = (
    "__self__",
    "__func__",
    "__wrapped__",
    "fget",
    "func",
    "args",
    "keywords",
)
MEMO = "entries of "  # the path of a mapping's keys
# Attributes that albumentations sets in every call: the same after two calls with one key.
SET_BY_CALL = re.compile(r"\.(random_generator|py_random|params)\b")


def object_state(thing: object) -> State:
    """The data of an object, its class and its functions, and of all objects, modules and closures that these reach.

    Modules and classes of libraries are left out, and files that are mapped to be read.
    """
    return _Walk(thing).state


def changed(before: State, after: State) -> list[str]:
    """Paths whose data differ, but for mappings and caches to which entries were added.

    A memo of a pure function is no fault, and one that is not pure shows in what comes out.
    """
    return sorted(
        path
        for path, value in after.items()
        if not path.startswith(MEMO) and path in before and value != before[path]
    )


def changed_by_call(first: State, other_key: State, same_key: State) -> list[str]:
    """Paths that calls change, of the states after three calls, the last two with one sample and key.

    What albumentations sets in each call follows the key, but does not change in the last call.
    """
    paths = [path for path in changed(first, other_key) if not SET_BY_CALL.search(path)]
    again = changed(other_key, same_key)
    return [*dict.fromkeys(paths + again)]


def written(before: State, after: State) -> list[str]:
    """Paths of all that calls have written into, memos too."""
    paths = changed(before, after)
    for path, value in after.items():
        if path.startswith(MEMO) and value != before.get(path):
            paths.append(path.removeprefix(MEMO))
    return [path for path in dict.fromkeys(paths) if not SET_BY_CALL.search(path)]


class _Walk:
    """Visits everything that can be reached from an object once, the nearest first."""

    def __init__(self, thing: object) -> None:
        self.state: State = {}
        self._seen: dict[int, Any] = {}  # keeps a reference, so that no id comes twice
        self._instances: Counter[type] = Counter()
        self._waiting: deque[tuple[str, Any]] = deque([("", thing)])
        while self._waiting:
            path, found = self._waiting.popleft()
            if isinstance(found, ATOMS):
                self._record(path, repr(found))
            elif id(found) not in self._seen:
                self._seen[id(found)] = found
                self._visit(path, found)

    def _record(self, path: str, content: str) -> None:
        """Keep what is held; a class and its object may have attributes of one name."""
        self.state[path] = self.state.get(path, "") + content

    def _add(self, path: str, thing: Any) -> None:
        """Visit this later."""
        self._waiting.append((path, thing))

    def _add_members(self, path: str, values: Mapping[str, Any]) -> None:
        """Visit attributes later, but for those of Python itself."""
        for name, value in values.items():
            if not name.startswith("__"):
                self._add(f"{path}.{name}", value)

    def _visit(self, path: str, thing: Any) -> None:
        """Record what a thing holds itself, and add what it refers to."""
        content = _memory(thing)
        if content is not None:
            self._record(path, content)
        elif isinstance(thing, Mapping):
            self._visit_mapping(path, thing)
        elif isinstance(thing, set | frozenset):
            self._record(path, repr(sorted(map(repr, thing))))
        elif isinstance(thing, list | tuple | deque | np.ndarray):
            self._record(path, str(len(thing)))
            for number, item in enumerate(thing):
                self._add(f"{path}[{number}]", item)
        elif isinstance(thing, type):
            self._visit_scope(thing, thing.__module__)
        elif isinstance(thing, ModuleType):
            self._visit_scope(thing, thing.__name__)
        elif isinstance(thing, FunctionType):
            self._visit_function(path, thing)
        elif isinstance(thing, WRAPPERS):
            self._visit_wrapper(path, thing)
        elif not isinstance(thing, BuiltinFunctionType | MemberDescriptorType):
            self._visit_object(path, thing)

    def _visit_mapping(self, path: str, mapping: Mapping[Any, Any]) -> None:
        """The keys are a memo; a value that changes is none."""
        items = [*mapping.items()]
        self._record(MEMO + path, repr([repr(key) for key, _ in items]))
        for key, value in items:
            self._add(f"{path}[{key!r}]", value)

    def _visit_scope(self, scope: type | ModuleType, module: str) -> None:
        """A class with its module, or a module, of the user."""
        if not is_foreign(module):
            self._add_members(scope.__name__, vars(scope))
            self._add(module, sys.modules.get(module))

    def _visit_function(self, path: str, function: FunctionType) -> None:
        """A function of the user: its attributes, default arguments, closure and module."""
        module = function.__module__
        if is_foreign(module):
            return
        self._add(f"the attributes of {path}", vars(function))

        keyword_defaults = function.__kwdefaults__ or {}
        defaults = (*(function.__defaults__ or ()), *keyword_defaults.values())
        # A list as a default argument is shared by all calls.
        for number, value in enumerate(defaults):
            self._add(f"default argument {number} of {path}", value)

        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            self._add(f"{name} in the closure of {path}", _content(cell))
        self._add(module, sys.modules.get(module))

    def _visit_wrapper(self, path: str, wrapper: Any) -> None:
        """A method, a partial call, a cache or a property: what it wraps."""
        if isinstance(wrapper, functools._lru_cache_wrapper):
            self._record(f"{MEMO}the cache of {path}", repr(wrapper.cache_info()))
        for name in WRAPPED:
            self._add(path, getattr(wrapper, name, ()))

    def _visit_object(self, path: str, thing: Any) -> None:
        """Any other object: its class, and its attributes or what else can be seen of it."""
        kind = type(thing)
        if kind.__module__ == "logging":
            return  # a logger keeps what it has looked up

        # First the classes: a method is named by its class, not by the object.
        for owner in kind.__mro__:
            self._add(owner.__name__, owner)

        attributes = _attributes(thing)
        if not attributes or isinstance(thing, random.Random):
            self._record(path, _snapshot(thing))
            return

        # The user's objects are named by their class, and numbered from the second on.
        name = path
        if not is_foreign(kind.__module__):
            self._instances[kind] += 1
            number = self._instances[kind]
            name = kind.__name__ if number == 1 else f"{kind.__name__} {number}"
        self._record(f"attributes of {name}", repr(sorted(attributes)))
        self._add_members(name, attributes)


def _memory(thing: Any) -> str | None:
    """A digest of an array, a tensor, or any other object that is a piece of memory; None for the rest."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu().double().numpy()
    if isinstance(thing, np.ndarray) and thing.dtype.hasobject:
        return None
    try:
        view = memoryview(thing)
    except (TypeError, ValueError):  # the latter for an array of dates
        return None

    kind = f"{view.format}{view.shape}"
    # A file that is mapped to be read cannot change, and may be larger than memory.
    if view.readonly and isinstance(thing, np.memmap | mmap):
        return kind
    return kind + hashlib.blake2b(view.tobytes(), digest_size=16).hexdigest()


def _attributes(thing: Any) -> dict[str, Any]:
    """Attributes of an object, of its `__slots__` and its `__dict__`."""
    found = {}
    # Each class names its own slots only.
    for owner in type(thing).__mro__:
        slots = vars(owner).get("__slots__", ())
        if isinstance(slots, str):  # of one slot
            slots = (slots,)
        for name in slots:
            if hasattr(thing, name):
                found[name] = getattr(thing, name)
    return found | getattr(thing, "__dict__", {})


def _content(cell: CellType) -> Any:
    """What a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _snapshot(thing: Any) -> str:
    """What an object without attributes holds, such as a generator of numbers or the position of an iterator."""
    if isinstance(thing, GeneratorType):
        frame = thing.gi_frame
        return repr((frame.f_lasti, frame.f_locals)) if frame else ""
    if isinstance(thing, torch.Generator):
        thing = thing.get_state().numpy()
    try:
        return pickle.dumps(thing).hex()
    except Exception:
        # No address: another object in its place is seen by its path.
        text = repr(thing)
        return "" if " at 0x" in text else text
