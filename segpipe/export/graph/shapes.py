"""Which lengths a file leaves open, and the shapes at which it is therefore tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np

from segpipe.errors import ConfigError
from segpipe.export.gates.checks import Check
from segpipe.export.graph.profiles import BATCH, HEIGHT, WIDTH

Free = Mapping[str, Mapping[str, Any]]  # `io.free` of the manifest
Size = tuple[int, int]

_SMALLEST = 32  # rows or columns that the networks need
_BATCHES = (1, 2, 3)
# Rows grow where columns shrink, so that a graph which computes one of them from the other is found out.
_SHARES = {HEIGHT: (1.0, 0.5, 1.5), WIDTH: (1.0, 1.5, 0.5)}


@dataclass(frozen=True)
class Trial:
    """Check images of one shape, run so many at a time; `name` tells the shape, and is empty for the exported one."""

    name: str
    checks: Sequence[Check]
    batch: int = 1


def free_lengths(dynamic: str, size: Size, multiple: int) -> dict[str, dict[str, Any]]:
    """By axis its `exported` length, all that are `tried`, and which fit: multiples of `multiple` from `min` to `max`.

    What fits lies between the lengths that are tried; a batch has no end. `dynamic` is export.dynamic. Raises
    ConfigError for a size from which nothing can be tried.
    """
    if dynamic == "none":
        return {}
    if dynamic == "batch":
        return {BATCH: {"exported": 1, "tried": list(_BATCHES), "multiple": 1, "min": 1}}
    if any(length % multiple or length < 2 * _SMALLEST for length in size):
        raise ConfigError(
            f"export.dynamic = hw, but the images are {size[0]}x{size[1]}; multiples of {multiple} from "
            f"{2 * _SMALLEST} on were needed, since half of them is tried as well. Choose another data.split, or set "
            "export.dynamic=none."
        )
    found = {}
    for axis, length in zip((HEIGHT, WIDTH), size, strict=True):
        tried = [multiple * round(length * share / multiple) for share in _SHARES[axis]]
        found[axis] = {"exported": length, "tried": tried, "multiple": multiple, "min": min(tried), "max": max(tried)}
    return found


def dynamic_of(free: Free) -> str:
    """The setting `export.dynamic` with which a file came to its free axes."""
    return "batch" if BATCH in free else "hw" if free else "none"


def further_sizes(free: Free) -> list[Size]:
    """(height, width) of the images that are tried besides those of the exported size."""
    if HEIGHT not in free:
        return []
    return list(zip(free[HEIGHT]["tried"][1:], free[WIDTH]["tried"][1:], strict=True))


def trials(free: Free, checks: Sequence[Check]) -> Iterator[Trial]:
    """The check set as it is, then in every other shape that is tried; the names of its images tell which."""
    yield Trial("", checks)
    for height, width in further_sizes(free):
        name = f"{height}x{width}"
        resized = [
            replace(
                check,
                name=f"{check.name} ({name})",
                image=np.asarray(cv2.resize(check.image, (width, height), interpolation=cv2.INTER_LINEAR), np.uint8),
            )
            for check in checks
        ]
        yield Trial(name, resized)
    for batch in free[BATCH]["tried"][1:] if BATCH in free else ():
        name = f"batches of {batch}"
        yield Trial(name, [replace(check, name=f"{check.name} ({name})") for check in checks], batch)
