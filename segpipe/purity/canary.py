"""Race canary: a few samples are augmented again by other processes, and 8 bytes of each result are compared.

The purity checker asks before the first step, a few samples, in peace. What it misses shows in the run alone: threads
of a worker that share data, a module that keeps the parameters of one call for the next, a cache that somebody writes
into. So one sample in `augment.canary` is read and augmented RECOMPUTATIONS more times, by a process whose last samples
were others than those of the process that delivered it. Which samples these are is a function of (seed, epoch, index),
the same under any layout. Of these samples each transform leaves a digest as well, so that the one which made the
difference has a name. docs/race.md has the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from segpipe.data.order import Order
from segpipe.errors import ImpureAugmentError
from segpipe.keys import generator, sample_key
from segpipe.ledger import native
from segpipe.ledger.digest import digest_groups
from segpipe.purity.probes import Frame, first_difference

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter
    from segpipe.data.samples import Samples

# One would find a transform that is impure in 1 % of its calls within 200,000 samples with p = 0.98; two, with 0.997.
RECOMPUTATIONS = 2
Member = tuple[int, int]  # epoch and index of a sample
Trail = tuple[tuple[str, int], ...]  # of each transform its name, and 8 bytes of what it was given


class Task(NamedTuple):
    """What a loader process reads, augments and packs at a time."""

    place: tuple[int, int] | None  # (step, shard) of a batch to deliver; None: samples that were delivered before
    members: tuple[Member, ...]
    watched: tuple[int, ...]  # rows of `members` whose digests are sent along


class Witness(NamedTuple):
    """What a process tells about a sample that it made: 8 bytes of each array, and how it came to them."""

    row: int
    process: int  # its id
    image: int
    target: int
    trail: Trail = ()


def witness(row: int, image: NDArray[np.uint8], target: NDArray[np.uint8], trail: Trail = ()) -> Witness:
    """The digests of a sample, made in this process; those that the ledger of an audit holds."""
    of_image, of_target = digest_groups([[torch.from_numpy(image)], [torch.from_numpy(target)]]).tolist()
    return Witness(row, os.getpid(), of_image % 2**64, of_target % 2**64, trail)


def augment_watched(augmenter: Augmenter, frame: Frame, key: int) -> tuple[Frame, Trail]:
    """The augmented sample and its trail, which is empty where digests are not compiled: it would cost too much."""
    if native.kernels() is None:
        return augmenter(*frame, key), ()
    trail: list[tuple[str, int]] = []

    def look(name: str, *arrays: NDArray[np.uint8]) -> None:
        trail.append((name, int(digest_groups([[_tensor(array) for array in arrays]]))))

    return augmenter.looked_at(*frame, key, look), tuple(trail)


def _tensor(array: NDArray[np.uint8]) -> torch.Tensor:
    """The array as torch sees it, to be read only."""
    array = np.ascontiguousarray(array)
    if not array.flags.writeable:  # of a cache: torch warns of such memory, and a copy costs more than the digest
        array = np.asarray(_Unlocked(array))
    return torch.from_numpy(array)


class _Unlocked:
    """The memory of an array, in order, without its lock."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array  # lives as long as the memory is looked at
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


@lru_cache(maxsize=4)
def chosen(seed: int, epoch: int, num: int, every: int) -> frozenset[int]:
    """Those of the first `num` indices that are watched in an epoch: one in `every` on average, none for 0."""
    if not every:
        return frozenset()
    draws = generator(sample_key(seed, epoch, 0, "canary")).bit_generator.random_raw(num)
    return frozenset(np.flatnonzero(draws % np.uint64(every) == 0).tolist())


@dataclass
class _Repeat:
    """A sample that has to be made again."""

    member: Member
    due: int  # the first task that may do it
    made_by: set[int]  # workers that may not
    left: int = field(default=RECOMPUTATIONS)


def tasks(places: Iterable[tuple[int, int]], order: Order, *, seed: int, every: int, workers: int) -> Iterator[Task]:
    """Tasks that deliver `places` in their order, with those between them that make watched samples again.

    torch gives task n to worker n % workers. A repeat waits for the turn of a worker that has not made the sample; with
    two workers the other one makes it twice, with one or none the caller says who. After the last place, tasks without
    members pass the turn on until every watched sample was made often enough.
    """
    number = 0
    repeats: list[_Repeat] = []
    for place in places:
        while (again := _due(repeats, number, workers)).members:
            yield again
            number += 1
        task = _delivery(place, order, seed, every)
        yield task
        # Not at once: where nobody else can make it, there shall be other samples in between.
        repeats += [_Repeat(task.members[row], number + 2, {number % max(workers, 1)}) for row in task.watched]
        number += 1
    while repeats:
        yield _due(repeats, number, workers)
        number += 1


def _delivery(place: tuple[int, int], order: Order, seed: int, every: int) -> Task:
    members = tuple(order.shard(*place))
    watched = (
        row for row, (epoch, index) in enumerate(members) if index in chosen(seed, epoch, order.num_samples, every)
    )
    return Task(place, members, tuple(watched))


def _due(repeats: list[_Repeat], number: int, workers: int) -> Task:
    """What task `number` makes again; takes from `repeats` what is then done."""
    turn = number % max(workers, 1)
    ready = [repeat for repeat in repeats if repeat.due <= number and (workers < 2 or turn not in repeat.made_by)]
    for repeat in ready:
        repeat.left -= 1
        repeat.due = number + 2 * max(workers, 1)
        if workers > RECOMPUTATIONS:
            repeat.made_by.add(turn)
    repeats[:] = [repeat for repeat in repeats if repeat.left]
    # Backwards: what carries over from one sample to the next shall come from another one than the first time.
    members = tuple(repeat.member for repeat in reversed(ready))
    return Task(None, members, tuple(range(len(members))))


@dataclass
class _Held:
    frame: Frame
    witness: Witness
    left: int = field(default=RECOMPUTATIONS)


class Canary:
    """Keeps what was delivered until it was made again as often as it has to be; the pixels are not copied."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._held: dict[Member, _Held] = {}

    def hold(self, member: Member, frame: Frame, made: Witness) -> None:
        """A watched sample is delivered."""
        self._held[member] = _Held(frame, made)

    def compare(self, member: Member, frame: Frame, made: Witness) -> None:
        """A sample was made again. Raises ImpureAugmentError when it has other bytes than the delivered one."""
        held = self._held[member]
        if (made.image, made.target) != (held.witness.image, held.witness.target):
            raise ImpureAugmentError(self._complaint(member, held, frame, made))
        held.left -= 1
        if not held.left:
            del self._held[member]

    def _complaint(self, member: Member, held: _Held, frame: Frame, made: Witness) -> str:
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
            f"{'; '.join(found)}{_pixel(held, frame)}. {_cause(held.witness.trail, made.trail)}; augment.canary=0 "
            f"trains all the same."
        )


def _cause(before: Trail, now: Trail) -> str:
    """Which transform it was, as far as two trails tell; without an end."""
    unlike = [one[1] != two[1] for one, two in zip(before, now, strict=False)]
    if any(unlike[:1]):
        return (
            "What was read differs already: the file was changed meanwhile, or a transform wrote into a sample that "
            "data.cache_mib keeps"
        )
    impure = "So augmentation is not a pure function of sample and key"
    depends = "depends on the samples before, on other threads, or on a generator that the key does not set"
    if not unlike:
        return (
            f"{impure}: it {depends} (or the file was changed meanwhile). Name the transform with python "
            f"scripts/check_augment.py, and keep its parameters inside the call"
        )
    first = before[unlike.index(True) - 1 if any(unlike) else -1][0]
    return (
        f"{impure}: the first transform whose output differs is {first}. It {depends}. Keep its parameters inside the "
        f"call, and look at it with python scripts/check_augment.py"
    )


def _pixel(held: _Held, frame: Frame) -> str:
    """The first pixel that differs; nothing when the receiver of the batch has written into it."""
    now = witness(0, *held.frame)
    if (now.image, now.target) != (held.witness.image, held.witness.target):
        return ""
    found = first_difference(held.frame, frame)
    return f"; {found}" if found else ""
