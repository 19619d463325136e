"""The process group of a run: who this process is, and the few collectives the rest of segpipe needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from segpipe.config import ComputeConfig
from segpipe.distributed import environment
from segpipe.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """This process among all of a run; with a single process nothing is communicated."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes the run's files."""
        return self.rank == 0

    def own_shards(self, shards: int) -> range:
        """The logical shards that this rank computes: `[rank*V/R, (rank+1)*V/R)`."""
        share = shards // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Element-wise sums over the ranks, exact (int64)."""
        if self.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        return [int(number) for number in total.tolist()]

    def sum_tensor(self, counts: Tensor) -> Tensor:
        """Sum over the ranks of an integer tensor; floats are refused because their sum depends on the order."""
        assert not counts.is_floating_point()
        if self.world_size > 1:
            counts = counts.to(self.device)
            dist.all_reduce(counts)
        return counts

    def gather(self, item: T) -> list[T]:
        """Every rank's `item`, in rank order, on every rank; for small picklable things."""
        if self.world_size == 1:
            return [item]
        items = [item] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: its own GPU, or the CPU. Raises ConfigError when a GPU is asked for and missing."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("compute.device = cuda, but torch sees no GPU. Set compute.device=cpu, or check the driver.")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def join(config: ComputeConfig) -> Group:
    """Group of this process; meets the other ranks when a launcher set RANK and WORLD_SIZE.

    NCCL carries one GPU per rank; gloo carries CPU ranks and several ranks that share a GPU.
    """
    rank, local_rank, world_size = environment.rank(), environment.local_rank(), environment.world_size() or 1
    device = choose_device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        alone = device.type == "cuda" and environment.local_world_size() <= torch.cuda.device_count()
        dist.init_process_group(
            "nccl" if alone else "gloo",
            timeout=timedelta(seconds=config.timeout_s),
            device_id=device if alone else None,
        )
    return Group(rank, local_rank, world_size, device)


def leave() -> None:
    """Take the process group down, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
