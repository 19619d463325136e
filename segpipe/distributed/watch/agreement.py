"""Checks that ranks hold the same state: environment and checkpoint at the start, then a digest at every update."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from segpipe import plugins
from segpipe.determinism import flags
from segpipe.errors import CheckpointError, ConfigError, DivergenceError

if TYPE_CHECKING:
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config

FOLDER = "desync"


class Replica(Protocol):
    """State that every rank holds; `segpipe.train.watch.Watch` is one."""

    state: Any  # with `step` and `model`

    @property
    def state_digest(self) -> Tensor | None: ...

    def state_parts(self) -> dict[str, list[int]]: ...

    def part_names(self) -> dict[str, list[str]]: ...


def common_fingerprint(
    config: Config, group: Group, loss: str
) -> tuple[dict[str, Any], list[str]]:
    """Fingerprint of the environment on rank 0, and a phrase for each value that another rank has otherwise.

    `loss`: what computes it here. Raises ConfigError on every rank when that differs, or the code of a plug-in.
    """
    divided = (
        {}
        if config.compute.mode in ("elastic", "audit")
        else {"world_size": group.world_size}
    )
    own = {**flags.fingerprint(), **plugin_sources(config), **divided, flags.LOSS: loss}
    first, *others = group.gather(own)
    for rank, other in enumerate(others, 1):
        here, there = first.get(flags.PLUGINS, {}), other.get(flags.PLUGINS, {})
        if changed := [
            name for name in {**here, **there} if here.get(name) != there.get(name)
        ]:
            raise ConfigError(
                f"{', '.join(changed[:4])} on rank {rank} is not that of rank 0. Copy the code of the plug-ins to all "
                f"machines, or start on a shared folder."
            )
        if config.compute.mode != "off" and first[flags.LOSS] != other[flags.LOSS]:
            raise ConfigError(
                f"loss.backend = {config.loss.backend} is {other[flags.LOSS]} on rank {rank} and {first[flags.LOSS]} "
                f"on rank 0, which gives other bits. Install a C compiler (CPU) or triton (CUDA) on all machines, or "
                f"set loss.backend=torch."
            )
    differ = [
        f"rank {rank}: {name} {there}, rank 0: {here}"
        for rank, other in enumerate(others, 1)
        for name, (here, there) in flags.differences(first, other).items()
    ]
    return first, differ


def plugin_sources(config: Config) -> dict[str, dict[str, str]]:
    """The entry of a fingerprint for the plug-ins of a configuration; empty without any."""
    found = plugins.sources(config.import_paths)
    return {flags.PLUGINS: found} if found else {}


def agree_on_step(last: Path, step: int, group: Group) -> None:
    """Raises CheckpointError unless all ranks found the same checkpoint, or none did."""
    steps = group.gather(step)
    if set(steps) != {step}:
        raise CheckpointError(
            f"{last} is not the same file on every machine: ranks 0, 1, ... would start at steps {steps}. "
            f"Set run.root to a folder that all machines share."
        )


class Agreement:
    """Compares the calls and the states of the ranks inside a sum that an update needs anyway.

    After the reduced gradient every rank does the same arithmetic. A rank with other bits therefore has a fault: a
    flipped bit, a kernel that does not repeat itself, code that depends on the rank. Each rank adds the digest of its
    state to the sum. If the sum is not the own digest times the number of ranks, all ranks see it in the same step.
    (If one rank of R differs, the others always see it. That rank sees it unless the difference times R - 1 is a
    multiple of 2^64: never for an even R, and for an odd one up to 17 with a probability of at most 2^-60.)
    """

    def __init__(self, group: Group, replica: Replica, folder: Path) -> None:
        self._group, self._replica, self._folder = group, replica, folder
        self._pending: _Flag | None = None  # of the step before, on a GPU

    def sum(self, numbers: Sequence[int], *, wait: bool = True) -> Tensor:
        """Sums over the ranks of these integers, int64 (n,), on the device. A collective.

        Raises CollectiveError or DivergenceError on every rank when ranks differ: at once on a CPU and with `wait`,
        else one step later, from a copy that has reached the host by then.
        """
        group = self._group
        own = torch.tensor([*numbers, group.contract.ticket(), 0]).to(
            group.device, non_blocking=True
        )
        if isinstance(
            digest := self._replica.state_digest, Tensor
        ):  # a number would be a copy that a GPU waits for
            own[-1] = digest
        total = group.sum_tensor(own.clone())
        if group.world_size > 1:
            wait = wait or group.device.type == "cpu"
            if wait:
                group.contract.settle(int(total[-2]))
            if self._differ(total[-1] != own[-1] * group.world_size, wait=wait):
                self._stop()
        return total[:-2]

    def _differ(self, unequal: Tensor, *, wait: bool) -> bool:
        before, self._pending = self._pending, None
        if not wait:
            self._pending = _Flag(unequal)
        return (wait and bool(unequal)) or (before is not None and before.read())

    def _stop(self) -> None:
        """Name the tensor and the ranks, and save the weights of one rank of either side."""
        state = self._replica.state
        by_rank = self._group.gather(self._replica.state_parts())
        verdict, odd = first_disagreement(by_rank, self._replica.part_names())
        path = self._folder / FOLDER / f"rank{self._group.rank:02d}.pt"
        if self._group.rank in (
            odd[0],
            min(set(range(len(by_rank))) - set(odd), default=odd[-1]),
        ):
            with contextlib.suppress(
                OSError, RuntimeError
            ):  # a full disk must not hide the verdict
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state.model.state_dict(), path)
        self._group.barrier()
        raise DivergenceError(
            f"step {state.step}: ranks that must hold the same bits do not. {verdict} The weights of one rank of "
            f"either side are in {path.parent}, unless the disk was full; no checkpoint was written since. If it is "
            f"always the same rank, test its memory and its GPU; if not, look for code that depends on the rank. "
            f"Continue with run.exists=resume."
        )


class _Flag:
    """A boolean on its way from the device to the host."""

    def __init__(self, flag: Tensor) -> None:
        self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._host.copy_(flag, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def read(self) -> bool:
        self._copied.synchronize()
        return bool(self._host)


def first_disagreement(
    by_rank: Sequence[dict[str, list[int]]], names: dict[str, list[str]]
) -> tuple[str, list[int]]:
    """A sentence that names the first tensor on which ranks differ, and the ranks in the minority there.

    by_rank: digests of each rank by kind (weights, optimizer, ...), in the order of `names`. Kinds are in the order in
    which a fault spreads.
    """
    for kind, tensors in names.items():
        for place, tensor in enumerate(tensors):
            digests = [rank[kind][place] for rank in by_rank]
            if len(set(digests)) > 1:
                usual, votes = Counter(digests).most_common(1)[0]
                odd = [rank for rank, value in enumerate(digests) if value != usual]
                listed = ", ".join(
                    f"rank {rank} {digests[rank] % 2**64:016x}" for rank in odd[:8]
                )
                counted = (
                    f"{votes} of {len(digests)} ranks have {usual % 2**64:016x}, but {listed}"
                    if 2 * votes > len(digests)
                    else f"{listed}, and {votes} others {usual % 2**64:016x}, so no side has a majority"
                )
                return (
                    f"The first tensor that differs is {tensor} ({kind}): {counted}.",
                    odd,
                )
    return "No tensor differs now, so the sum itself was corrupted on its way.", [0]
