"""Race canary: makes samples again in another process, compares their pixels, and explains a difference.

The purity check runs before the first step, on a few samples, one at a time. It cannot see threads of a worker that
share data, a module that keeps the parameters of one call for the next, or writes into a cache. So one sample in
`augment.canary` is read and augmented `REPEATS` more times by another process. Each transform leaves a digest of its
input, so that the one at fault can be named. docs/race.md has the arithmetic.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from segpipe.data import Sample, Uint8
from segpipe.data.order import REPEATS, Member
from segpipe.errors import ImpureAugmentError
from segpipe.ledger.digest import as_tensors, digest_groups, kernels

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter
    from segpipe.data.data_set import Samples

# For each transform its name, and an 8-byte digest of its input.
Trail = tuple[tuple[str, int], ...]
OTHER_SEED = 0x51F15EED  # a value that no transform uses


class Witness(NamedTuple):
    """Evidence about a sample, besides its pixels, from the process that made it."""

    process: int  # its id
    trail: Trail


def augment_watched(
    augmenter: Augmenter, frame: Sample, key: int, again: bool = False
) -> tuple[Sample, Witness]:
    """The augmented sample and its witness; no trail if digests are not compiled, because it would cost too much.

    `again` poses as a worker of another layout: a transform that reads the number of workers makes another sample then.
    """
    trail: list[tuple[str, int]] = []

    def look(name: str, *arrays: Uint8) -> None:
        trail.append((name, int(digest_groups([as_tensors(*arrays)]))))

    with another_worker() if again else nullcontext():
        crop = augmenter(*frame, key, look if kernels() else None)
    return crop, Witness(os.getpid(), tuple(trail))


@contextmanager
def another_worker() -> Iterator[None]:
    """Inside the block, this process looks to a transform like a loader worker with another id, seed and layout."""
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if not worker:  # not imported, so nothing can ask
        yield
        return
    own = worker._worker_info
    number, total = (own.id, own.num_workers) if own else (0, 0)
    worker._worker_info = worker.WorkerInfo(
        id=number + 7, num_workers=total + 11, seed=OTHER_SEED, dataset=None
    )
    try:
        yield
    finally:
        worker._worker_info = own


def first_difference(expected: Sample, found: Sample) -> str:
    """Where two frames first differ, in row-major order, image before target; empty if they are equal."""
    for name, before, now in zip(("image", "target"), expected, found, strict=True):
        if before.shape != now.shape or before.dtype != now.dtype:
            return f"the {name} is {before.dtype} {before.shape}, then {now.dtype} {now.shape}"
        differing = before != now
        if differing.any():
            place = np.unravel_index(int(differing.argmax()), before.shape)
            y, x, channel = (*map(int, place), 0)[:3]
            where = f"{name} (y, x, channel) = ({y}, {x}, {channel})"
            return f"{where} is {before[place]}, then {now[place]}"
    return ""


@dataclass
class _Held:
    frame: Sample
    witness: Witness
    left: int = REPEATS


class Canary:
    """`segpipe.data.loader.Repeats`: holds copies of delivered samples until all their repeats are compared."""

    augment = staticmethod(augment_watched)

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._held: dict[Member, _Held] = {}

    def hold(self, member: Member, pixels: Sample, made: Witness) -> None:
        """Keep a watched sample that was delivered."""
        self._held[member] = _Held(pixels, made)

    def compare(self, member: Member, pixels: Sample, made: Witness) -> None:
        """Compare a sample made again. Raises ImpureAugmentError when its pixels differ from those delivered."""
        held = self._held[member]
        if difference := first_difference(held.frame, pixels):
            first, (epoch, index) = held.witness, member
            raise ImpureAugmentError(
                f"sample {index} ({self._samples.name(index)}) of epoch {epoch}, augmented again under the same key: "
                f"{difference} (process {first.process}, then {made.process}). {_cause(first.trail, made.trail)} "
                f"Set augment.canary=0 to train without this check."
            )
        held.left -= 1
        if not held.left:
            del self._held[member]


def _cause(before: Trail, now: Trail) -> str:
    """Which transform is at fault, as far as the two trails show."""
    differing = [one != two for (_, one), (_, two) in zip(before, now, strict=False)]
    if differing and differing[0]:
        return (
            "The sample already differed when it was read: the file was changed meanwhile, or a transform wrote into a "
            "sample in the cache (data.cache_mib)."
        )
    which = "one of the transforms (or the file was changed meanwhile)"
    if differing:
        last_equal = differing.index(True) - 1 if True in differing else -1
        name = before[last_equal][0]
        which = f"the first transform whose output differs is {name}, which"
    return (
        f"So augmentation is not a pure function of sample and key: {which} depends on earlier samples, on other "
        f"threads, or on a generator that the key does not seed. Keep parameters inside the call, and check with "
        f"segpipe check-augment."
    )
