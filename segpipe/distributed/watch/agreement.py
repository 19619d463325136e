"""What all ranks must hold alike, from the first step to the last; where they do not, the run ends and names it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.errors import CheckpointError, DivergenceError
from segpipe.settings.config import Config

if TYPE_CHECKING:
    from segpipe.ledger.recorder import Recorder

FOLDER = "desync"


def common_fingerprint(config: Config, group: Group) -> tuple[dict[str, Any], list[str]]:
    """What the bits of this run depend on besides its configuration, as rank 0 sees it; and where ranks differ."""
    divided = {} if config.compute.mode in ("elastic", "audit") else {"world_size": group.world_size}
    first, *others = group.gather({**flags.fingerprint(), **divided})
    differ = [
        f"rank {rank}: {name} {other[name]}, rank 0: {first[name]}"
        for rank, other in enumerate(others, 1)
        for name in first
        if other[name] != first[name]
    ]
    return first, differ


def agree_on_step(last: Path, step: int, group: Group) -> None:
    """Raises CheckpointError unless all ranks have found the same checkpoint, or all none."""
    steps = group.gather(step)
    if set(steps) != {step}:
        raise CheckpointError(
            f"{last} is not the same file on every machine: ranks 0, 1, ... would start at steps {steps}. "
            f"Set run.root to a folder that all machines share."
        )


class Agreement:
    """Compares what the ranks have called, and all that their last update left behind, in a sum that exists anyway.

    What comes after the reduced gradient is the same arithmetic on every rank, so one that holds other bits has a
    fault: a flipped bit, a kernel that does not repeat itself, code that depends on the rank. Each rank adds its digest
    to the sum of the step; where the sum is not the own digest times the number of ranks, all see it in the same step.
    (A sum hides no difference of a single rank among a power of two: their number less one is odd, so it has an
    inverse modulo 2^64.)
    """

    def __init__(self, group: Group, recorder: Recorder | None, folder: Path) -> None:
        """Without a recorder (compute.mode=off, compute.ledger=false) only the calls are compared."""
        self._group, self._recorder, self._folder = group, recorder, folder
        self._answer: _Answer | None = None  # of the step before, on a GPU

    def sum(self, numbers: Sequence[int], *, wait: bool = True) -> Tensor:
        """Sums over the ranks of these integers, int64 (n,), on the device. A collective.

        Raises CollectiveError or DivergenceError, on every rank, when ranks differ: at once on a CPU and with `wait`;
        else one step later, from a copy that has reached the host by then.
        """
        group, recorder = self._group, self._recorder
        own = torch.tensor([*numbers, group.contract.ticket(), 0]).to(group.device, non_blocking=True)
        if recorder is not None:
            own[-1] = recorder.state_digest
        total = group.sum_tensor(own.clone())
        if group.world_size > 1:
            wait = wait or group.device.type == "cpu"
            if wait:
                group.contract.settle(int(total[-2]))
            if recorder is not None and self._differ(total[-1] != own[-1] * group.world_size, wait=wait):
                self._stop(recorder)
        return total[:-2]

    def _differ(self, unequal: Tensor, *, wait: bool) -> bool:
        before, self._answer = self._answer, None
        if not wait:
            self._answer = _Answer(unequal)
        return (wait and bool(unequal)) or (before is not None and before.read())

    def _stop(self, recorder: Recorder) -> None:
        """Name the tensor and the ranks, and leave the state of those that differ."""
        everyone = self._group.gather(recorder.state_parts())
        verdict, odd = first_disagreement(everyone, recorder.part_names())
        kept = self._folder / FOLDER / f"rank{self._group.rank:02d}.pt"
        if self._group.rank in (odd[0], min(set(range(len(everyone))) - set(odd), default=odd[-1])):
            with contextlib.suppress(OSError, RuntimeError):  # a full disk: what was found counts more than its traces
                kept.parent.mkdir(parents=True, exist_ok=True)
                torch.save(recorder.state.model.state_dict(), kept)
        self._group.barrier()
        raise DivergenceError(
            f"step {recorder.state.step}: ranks that must hold the same bits do not. {verdict} The weights of one rank "
            f"of either side are in {kept.parent}, if the disk took them; nothing was saved since. If it is always the "
            f"same rank, test its memory and its GPU; if not, look for code that depends on the rank. Continue with "
            f"run.exists=resume."
        )


class _Answer:
    """A flag on its way from the device to the host."""

    def __init__(self, flag: Tensor) -> None:
        self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._host.copy_(flag, non_blocking=True)
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record()

    def read(self) -> bool:
        self._there.synchronize()
        return bool(self._host)


def first_disagreement(everyone: Sequence[dict[str, list[int]]], names: dict[str, list[str]]) -> tuple[str, list[int]]:
    """A sentence that names the first tensor on which ranks differ, and the ranks that are in the minority there.

    everyone: of each rank, digests by kind (weights, optimizer, ...) in the order of `names`. The order of the kinds is
    the order in which a fault spreads.
    """
    for kind, tensors in names.items():
        for place, tensor in enumerate(tensors):
            digests = [rank[kind][place] for rank in everyone]
            if len(set(digests)) > 1:
                usual, votes = Counter(digests).most_common(1)[0]
                odd = [rank for rank, value in enumerate(digests) if value != usual]
                said = ", ".join(f"rank {rank} {digests[rank] % 2**64:016x}" for rank in odd[:8])
                counted = (
                    f"{votes} of {len(digests)} ranks have {usual % 2**64:016x}, but {said}"
                    if 2 * votes > len(digests)
                    else f"{said}, and {votes} others {usual % 2**64:016x}, so that no side has a majority"
                )
                return f"The first tensor that differs is {tensor} ({kind}): {counted}.", odd
    return "No tensor differs any more, so what was summed changed on its way.", [0]
