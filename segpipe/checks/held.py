"""The data that a function keeps from one call to the next: of its object, class, module, functions and closures."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np

from segpipe.checks.tripwire import LIBRARIES, STANDARD, foreign, shadows

# Attributes that carry nothing from call to call: the caller sets the random state before every call, and
# albumentations clears the last parameters at the start of one.
TRANSIENT = ("random_generator", "py_random", "params")
NOT_WALKED = LIBRARIES - {"segpipe"} | STANDARD
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
DATA = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    deque,
    itertools.count,
    np.ndarray,
)
WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.partial,
    functools._lru_cache_wrapper,
)
MEMO = "entries of "  # the path of a mapping's keys
State = dict[str, bytes]  # what is held by its path, such as `Blur.apply.cache`


def object_state(thing: object) -> State:
    """The data of an object, of its class, of the module that defines it, and of the functions of these.

    Follows containers, attributes, closures, default arguments and caches; skips TRANSIENT attributes and libraries.
    """
    return dict(_walk("", thing, {}))


def changed(before: State, after: State) -> list[str]:
    """Paths whose data differ, without mappings and caches to which entries were added: a memo of a pure function is no
    fault, and one that is not pure shows in what comes out."""
    return sorted(
        path
        for path, value in after.items()
        if not path.startswith(MEMO) and path in before and value != before[path]
    )


def written(before: State, after: State) -> list[str]:
    """Paths of all that calls have written into, memos too, the most telling first."""
    memos = (
        path.removeprefix(MEMO)
        for path, value in after.items()
        if path.startswith(MEMO) and value != before.get(path)
    )
    return [*dict.fromkeys((*changed(before, after), *memos))]


def _walk(path: str, thing: Any, seen: dict[int, Any]) -> Iterator[tuple[str, bytes]]:
    if isinstance(thing, np.ndarray):
        yield (
            path,
            hashlib.blake2b(
                f"{thing.dtype}{thing.shape}".encode() + thing.tobytes(), digest_size=16
            ).digest(),
        )
        return
    if thing is None or isinstance(
        thing, int | float | complex | str | bytes | bytearray
    ):
        yield path, repr(thing).encode()
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # a reference, so that no other object gets its id
    if isinstance(thing, np.random.Generator):
        yield path, repr(thing.bit_generator.state).encode()
    elif isinstance(thing, np.random.RandomState):
        yield path, repr(thing.get_state(legacy=False)).encode()
    elif isinstance(thing, random.Random):
        yield path, repr(thing.getstate()).encode()
    elif isinstance(thing, Mapping):
        yield f"{MEMO}{path}", repr(list(map(repr, thing))).encode()
        for key, value in list(thing.items()):
            yield from _walk(f"{path}[{key!r:.40}]", value, seen)
    elif isinstance(thing, set | frozenset):
        yield path, repr(sorted(map(repr, thing))).encode()
    elif isinstance(thing, list | tuple | deque):
        yield path, f"{type(thing).__name__}{len(thing)}".encode()
        for number, item in enumerate(list(thing)):
            yield from _walk(f"{path}[{number}]", item, seen)
    elif isinstance(thing, (FunctionType, MethodType, *WRAPPERS)):
        yield from _function(path, thing, seen)
    elif not isinstance(thing, type | ModuleType | BuiltinFunctionType):
        yield from _object(path, thing, seen)


def _function(
    path: str, thing: Any, seen: dict[int, Any]
) -> Iterator[tuple[str, bytes]]:
    """What a function keeps: attributes, default arguments, variables of its closure, and the results of a cache."""
    if isinstance(thing, functools.partial):
        yield from _walk(path, (thing.func, thing.args, thing.keywords), seen)
        return
    if isinstance(thing, MethodType):
        yield from _walk(path, thing.__self__, seen)
    if isinstance(thing, functools._lru_cache_wrapper):
        yield f"{MEMO}the cache of {path}", repr(thing.cache_info()).encode()
    inner = (
        thing.fget if isinstance(thing, property) else getattr(thing, "__func__", None)
    )
    inner = inner or getattr(thing, "__wrapped__", None) or thing
    if inner is not thing:
        yield from _walk(path, inner, seen)
    elif isinstance(thing, FunctionType) and not foreign(thing.__module__):
        attributes = {
            name: value for name, value in vars(thing).items() if name != "__wrapped__"
        }
        yield f"{MEMO}the attributes of {path}", repr(sorted(attributes)).encode()
        yield from _members(path, attributes, seen)
        defaults = (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        for number, value in enumerate(defaults):
            yield from _walk(f"default argument {number} of {path}", value, seen)
        for name, cell in zip(
            thing.__code__.co_freevars, thing.__closure__ or (), strict=True
        ):
            if name != "__class__" and (value := _content(cell)) is not None:
                yield from _walk(f"{name} in the closure of {path}", value, seen)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _object(path: str, thing: Any, seen: dict[int, Any]) -> Iterator[tuple[str, bytes]]:
    kind = type(thing)
    yield f"type of {path}", f"{kind.__module__}.{kind.__qualname__}".encode()
    if hasattr(thing, "detach"):  # a tensor
        yield from _walk(path, thing.detach().cpu().numpy(), seen)
    elif not hasattr(thing, "__dict__"):
        yield path, _position(thing)
    else:
        number = next(seen.setdefault(-id(kind), itertools.count(1)))
        name = (
            path
            if path and foreign(kind.__module__)
            else f"{kind.__name__}{f' {number}' if number > 1 else ''}"
        )
        for owner in kind.__mro__:  # first: a bound method is named by its class
            if owner.__module__.partition(".")[0] not in NOT_WALKED or shadows(
                owner.__module__
            ):
                yield from _members(
                    owner.__name__, _data(vars(owner), owner.__module__), seen
                )
                yield from _module(owner.__module__, seen)
        yield (
            f"attributes of {name}",
            repr(sorted(set(vars(thing)) - set(TRANSIENT))).encode(),
        )
        yield from _members(name, vars(thing), seen)


def _position(thing: Any) -> bytes:
    """What an object without attributes holds, such as the place of an iterator or a generator."""
    if isinstance(thing, GeneratorType):
        frame = thing.gi_frame
        return repr((frame.f_lasti, frame.f_locals) if frame else None).encode()
    if " at 0x" not in repr(thing):
        return repr(thing).encode()  # itertools.count shows its position
    try:
        return (
            repr(thing.__reduce_ex__(2)).encode()
            if isinstance(thing, Iterator)
            else b""
        )
    except TypeError:
        return b""


def _module(name: str, seen: dict[int, Any]) -> Iterator[tuple[str, bytes]]:
    """Data and functions of a module, and of the user's modules that it imports."""
    module = sys.modules.get(name)
    if module is None or id(module) in seen:
        return
    seen[id(module)] = module
    yield from _members(name, _data(vars(module), name), seen)
    for value in list(vars(module).values()):
        other = (
            value.__name__
            if isinstance(value, ModuleType)
            else getattr(value, "__module__", None)
        )
        if (
            isinstance(value, ModuleType | FunctionType | type)
            and other != name
            and not foreign(other)
        ):
            yield from _module(str(other), seen)


def _members(
    path: str, values: Mapping[str, Any], seen: dict[int, Any]
) -> Iterator[tuple[str, bytes]]:
    for name in sorted(name for name in values if name not in TRANSIENT):
        yield from _walk(f"{path}.{name}", values[name], seen)


def _data(values: Mapping[str, Any], module: str) -> dict[str, Any]:
    """Data attributes of a class or module, and its own functions: no classes or modules."""
    return {
        name: value
        for name, value in dict(values).items()
        if not name.startswith("__")
        and (
            value is None
            or isinstance(value, (*DATA, *GENERATORS, Iterator))
            or hasattr(type(value), "detach")  # a tensor
            or (
                isinstance(value, (FunctionType, *WRAPPERS))
                and getattr(value, "__module__", module) == module
            )
        )
    }
