"""The process group of a run: this process's rank, and the few collectives the rest of segpipe needs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from segpipe.distributed import environment, meeting
from segpipe.distributed.watch.contract import MARGIN_S, Contract, watch
from segpipe.errors import ConfigError, SegpipeError
from segpipe.settings.groups import ComputeConfig

T = TypeVar("T")


class Level(NamedTuple):
    """Ranks among which the reduction sums on its way up the tree; neighbours in the order of the shards."""

    size: int
    ranks: dist.ProcessGroup | None  # None: all of them


@dataclass(frozen=True)
class Group:
    """This process's place in the run; a single process communicates nothing."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    # Of several machines: the ranks of one, then those of one local rank on all.
    subgroups: tuple[Level, ...] = ()
    # Every collective is announced to it.
    contract: Contract = field(default_factory=Contract, compare=False)

    def levels(self, leaves: int) -> tuple[Level, ...]:
        """From the leaves to the root: one level, or two on several machines if each rank holds one subtree."""
        power_of_two = leaves & (leaves - 1) == 0
        whole = power_of_two and leaves % self.world_size == 0
        if self.subgroups and (whole or len(self.subgroups) == 1):
            return self.subgroups
        return (Level(self.world_size, None),)

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes the run's files."""
        return self.rank == 0

    def own_shards(self, shards: int) -> range:
        """The logical shards that this rank computes."""
        return self.runs(shards)[self.rank]

    def runs(self, shards: int) -> list[range]:
        """The shards of every rank, `[rank*V/R, (rank+1)*V/R)` rounded down; their numbers differ by one at most."""
        size = self.world_size
        bounds = [rank * shards // size for rank in range(size + 1)]
        return [range(first, end) for first, end in pairwise(bounds)]

    def sum_tensor(self, counts: Tensor) -> Tensor:
        """Sum over the ranks of an integer tensor; floats are refused because their sum depends on the order."""
        assert not counts.is_floating_point()
        if self.world_size > 1:
            counts = counts.to(self.device)
            self.contract.enter("all_reduce", counts)
            dist.all_reduce(counts)
        return counts

    def gather(self, item: T) -> list[T]:
        """Every rank's `item`, in rank order, on every rank; for small picklable things."""
        if self.world_size == 1:
            return [item]
        items = [item] * self.world_size
        self.contract.enter("all_gather_object")
        dist.all_gather_object(items, item)
        return items

    def together(self, action: Callable[[], None]) -> None:
        """Do `action` on every rank. If it raises a SegpipeError on one, every rank raises the first such error.

        Rank 0 reports it: on the others the error is marked as `told`.
        """
        own: SegpipeError | None = None
        try:
            action()
        except SegpipeError as error:
            own = error
        for first in self.gather(own):
            if first is not None:
                first.told = not self.is_main
                raise first from own

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self.contract.enter("barrier")
            dist.barrier()

    def keep_stacks(self, folder: Path) -> None:
        """Write every rank's stacks to `folder`/stacks on a failure; rank 0 must have made the folder."""
        self.barrier()
        self.contract.keep_stacks(folder)


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: its own GPU, or the CPU. Raises ConfigError when a GPU is asked for and missing."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "compute.device = cuda, but torch sees no GPU. Set compute.device=cpu, or check the driver."
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def join(config: ComputeConfig, same: Mapping[str, str]) -> Group:
    """Group of this process; meets the other ranks when a launcher set RANK and WORLD_SIZE.

    `same`: further values that must be equal on all ranks, by name. Raises CollectiveError when they are not, or when
    ranks are missing. NCCL is used where each rank has a GPU of its own; gloo on CPUs and where ranks share a GPU.
    """
    rank = environment.rank()
    local_rank = environment.local_rank()
    world_size = environment.world_size() or 1
    device = choose_device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        return Group(rank, local_rank, world_size, device)
    same = {**same, "device": device.type}
    gpu = ""  # a name that is its own on all machines
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    store = meeting.meet(timeout_s=config.timeout_s, same=same, gpu=gpu)
    # Not by the number of visible GPUs: a launcher may show each rank its own alone.
    shared = meeting.sharing(store, world_size)
    if shared and rank == 0:
        warnings.warn(
            f"ranks {shared[:16]} share GPUs: all ranks exchange gradients through the host (gloo), which is slow. "
            f"Start one process for each GPU.",
            stacklevel=2,
        )
    if environment.on_loopback():
        for library in ("GLOO", "NCCL"):  # whose ranks listen for each other
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    nccl = device.type == "cuda" and not shared
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=dist.PrefixStore("torch", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeout_s + MARGIN_S),
        device_id=device if nccl else None,
    )
    contract = watch(store, rank, world_size, timeout_s=config.timeout_s)
    group = Group(rank, local_rank, world_size, device, contract=contract)
    subgroups = _subgroups(group, environment.local_world_size())
    return replace(group, subgroups=subgroups)


def _subgroups(group: Group, local: int) -> tuple[Level, ...]:
    """The two levels of several machines; none on one, or where the machines have different numbers of ranks."""
    world = group.world_size
    if set(group.gather(local)) != {local} or local in (1, world):
        return ()
    ranks = range(world)
    machines = [list(ranks[first : first + local]) for first in range(0, world, local)]
    places = [list(ranks[place::local]) for place in range(local)]
    within, _ = dist.new_subgroups_by_enumeration(machines)
    across, _ = dist.new_subgroups_by_enumeration(places)
    assert isinstance(within, dist.ProcessGroup)
    assert isinstance(across, dist.ProcessGroup)
    return (Level(local, within), Level(world // local, across))


def leave(group: Group) -> None:
    """Destroy the process group, if there is one, and watch no more."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    group.contract.close()
