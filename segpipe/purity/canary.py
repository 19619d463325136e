"""Race canary: compares 8 bytes of samples that two processes made under the same key, and explains a difference.

The purity checker runs before the first step, on a few samples, one at a time. It cannot see threads of a worker that
share data, a module that keeps the parameters of one call for the next, or a cache that somebody writes into. So one
sample in `augment.canary` is read and augmented `plan.REPEATS` more times by another process, and each transform leaves
a digest of what it was given, so that the one at fault can be named. docs/race.md has the arithmetic.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from segpipe.data.plan import REPEATS, Member
from segpipe.errors import ImpureAugmentError
from segpipe.ledger.digest import digest_groups, kernels
from segpipe.purity.probes import Frame, first_difference
from segpipe.purity.tripwire import another_worker

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter, Crop
    from segpipe.data.data_set import Samples

Trail = tuple[
    tuple[str, int], ...
]  # of each transform its name, and 8 bytes of what it was given


class Witness(NamedTuple):
    """Evidence about a sample from the process that made it. Digests are those that the ledger of an audit holds."""

    process: int  # its id
    image: int
    target: int
    trail: Trail = ()


def witness(crop: Crop, trail: Trail = ()) -> Witness:
    """The digests of a sample, made in this process; that of the image covers a color that is not applied yet."""
    image = [_tensor(part) for part in (crop.image, crop.color) if part is not None]
    of_image, of_target = digest_groups([image, [_tensor(crop.target)]]).tolist()
    return Witness(os.getpid(), of_image % 2**64, of_target % 2**64, trail)


def augment_watched(
    augmenter: Augmenter, frame: Frame, key: int, again: bool = False
) -> tuple[Crop, Witness]:
    """The augmented sample and its witness, without a trail where digests are not compiled: it would cost too much.

    With `again`, as a worker of another layout, so that a transform which reads the number of workers is seen too.
    """
    with another_worker() if again else nullcontext():
        return _augment_watched(augmenter, frame, key)


def _augment_watched(
    augmenter: Augmenter, frame: Frame, key: int
) -> tuple[Crop, Witness]:
    if kernels() is None:
        made = augmenter.crop(*frame, key)
        return made, witness(made)
    trail: list[tuple[str, int]] = []

    def look(name: str, *arrays: NDArray[np.uint8]) -> None:
        trail.append((name, int(digest_groups([[_tensor(array) for array in arrays]]))))

    made = augmenter.looked_at(*frame, key, look)
    return made, witness(made, tuple(trail))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor that is only read."""
    array = np.ascontiguousarray(array)
    if (
        not array.flags.writeable
    ):  # of a cache: torch warns of such memory, and a copy costs more than the digest
        array = np.asarray(_Unlocked(array))
    return torch.from_numpy(array)


class _Unlocked:
    """The memory of a contiguous array without its read-only flag."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.ctypes.data, False),
        }


@dataclass
class _Held:
    frame: Frame
    witness: Witness
    left: int = field(default=REPEATS)


class Canary:
    """`segpipe.data.loader.Repeats`: holds copies of delivered samples until all their repeats were compared."""

    augment = staticmethod(augment_watched)

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._held: dict[Member, _Held] = {}

    def hold(self, member: Member, pixels: Frame, made: Witness) -> None:
        """A watched sample is delivered."""
        self._held[member] = _Held(pixels, made)

    def compare(self, member: Member, pixels: Frame, made: Witness) -> None:
        """A sample was made again. Raises ImpureAugmentError when its bytes are not those that were delivered."""
        held = self._held[member]
        if (made.image, made.target) != (held.witness.image, held.witness.target):
            raise ImpureAugmentError(self._message(member, held, pixels, made))
        held.left -= 1
        if not held.left:
            del self._held[member]

    def _message(self, member: Member, held: _Held, frame: Frame, made: Witness) -> str:
        epoch, index = member
        found = []
        for name in ("image", "target"):
            before, now = getattr(held.witness, name), getattr(made, name)
            if before == now:
                found.append(f"the {name} is equal")
            else:
                found.append(
                    f"the {name} differs, digest {before:016x} in process {held.witness.process}, then {now:016x} in "
                    f"process {made.process}"
                )
        return (
            f"sample {index} ({self._samples.name(index)}) of epoch {epoch}, augmented again under the same key: "
            f"{'; '.join(found)}{_pixel(held, frame)}. {_cause(held.witness.trail, made.trail)}. Set augment.canary=0 "
            f"to train without this check."
        )


def _cause(before: Trail, now: Trail) -> str:
    """Which transform is at fault, as far as two trails tell; without a full stop."""
    unlike = [one[1] != two[1] for one, two in zip(before, now, strict=False)]
    if any(unlike[:1]):
        return (
            "What was read differs already: the file was changed meanwhile, or a transform wrote into a sample that "
            "data.cache_mib keeps"
        )
    impure = "So augmentation is not a pure function of sample and key"
    depends = "depends on earlier samples, on other threads, or on a generator that the key does not set"
    if not unlike:
        return (
            f"{impure}: it {depends} (or the file was changed meanwhile). Find the transform with "
            f"segpipe check-augment, and keep its parameters inside the call"
        )
    first = before[unlike.index(True) - 1 if any(unlike) else -1][0]
    return (
        f"{impure}: the first transform whose output differs is {first}. It {depends}. Keep its parameters inside the "
        f"call, and check it with segpipe check-augment"
    )


def _pixel(held: _Held, frame: Frame) -> str:
    """The first pixel that differs."""
    found = first_difference(held.frame, frame)
    return f"; {found}" if found else ""
