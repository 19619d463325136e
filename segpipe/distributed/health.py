"""Memory of every rank: figures, outliers, and an explanation when it runs out."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segpipe.errors import OutOfMemory
from segpipe.processes import memory_mib

if TYPE_CHECKING:
    from segpipe.distributed.group import Group

MIB = 2**20
EXCESS = 1.2  # times the median of the ranks, above which a rank is named
EXCESS_MIB = 256.0  # and at least this much above it
COMPARED = ("rss_mib", "workers_rss_mib", "shm_mib", "peak_mib", "reserved_mib")
ALLOCATOR = {
    "allocated_mib": "allocated_bytes.all.current",
    "peak_mib": "allocated_bytes.all.peak",
    "reserved_mib": "reserved_bytes.all.current",
    "fragmented_mib": "inactive_split_bytes.all.current",
}

# In the messages of torch and the system when memory runs out; CUDA raises a class of its own.
SHORT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "ALLOC_FAILED",
)


def sample(device: torch.device) -> dict[str, float]:
    """This process's memory in MiB, and the allocator's retries; 0.1 ms on a CPU, and as much for each worker.

    rss: host memory in use; workers_rss: that of its loader processes, where shared pages count for each; shm: the
    part of rss in /dev/shm, mostly batches from the workers. On a GPU also allocated: in tensors now; peak: the most
    since the last call; reserved: held by the allocator; fragmented: free parts of reserved blocks, too small for
    larger tensors; retries: how often the allocator had to release all free blocks first, after which cuDNN may choose
    other kernels.
    """
    workers = multiprocessing.active_children()
    figures = {
        "rss_mib": memory_mib("VmRSS"),
        "workers_rss_mib": sum(memory_mib("VmRSS", child.pid) for child in workers),
        "shm_mib": memory_mib("RssShmem"),
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        figures |= {name: stats[key] / MIB for name, key in ALLOCATOR.items()}
        figures["retries"] = float(stats["num_alloc_retries"])
        torch.cuda.reset_peak_memory_stats(device)
    return {name: round(value, 1) for name, value in figures.items()}


def outliers(ranks: Sequence[Mapping[str, float]]) -> dict[tuple[int, str], str]:
    """A warning for each (rank, figure) that is more than 20 % and 256 MiB above the median of the ranks.

    The median of an even number of ranks is the lower of the two in the middle: for two ranks the smaller, since their
    mean would hide an excess of 40 %.
    """
    warnings = {}
    for name in COMPARED:
        values = [figures.get(name, 0.0) for figures in ranks]
        median = statistics.median_low(values)
        for rank, value in enumerate(values):
            if value > max(EXCESS * median, median + EXCESS_MIB):
                warnings[rank, name] = (
                    f"rank {rank} uses {name.removesuffix('_mib')} {value:.0f} MiB, the median of the ranks is "
                    f"{median:.0f} MiB: it will be the first to run out."
                )
    return warnings


class Health:
    """The memory of all ranks, and which ranks were named already."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._reported: set[tuple[int, str]] = set()

    def report(self, step: int) -> tuple[dict[str, list[float]], list[str]]:
        """Figures of all ranks, in rank order, and warnings not yet reported; equal on every rank. A collective."""
        ranks = self._group.gather(sample(self._group.device))
        found = outliers(ranks)
        new = [found[key] for key in found if key not in self._reported]
        self._reported |= found.keys()
        by_name = {name: [figures[name] for figures in ranks] for name in ranks[0]}
        return by_name, [f"step {step}: {warning}" for warning in new]


@dataclass(frozen=True)
class Scene:
    """What is in memory when it runs out."""

    rank: int
    step: int
    shapes: Sequence[tuple[int, ...]]  # of this rank's image batches
    model: nn.Module
    device: torch.device
    optimizer: torch.optim.Optimizer


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that the memory of a device or of the machine ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        sign in str(error) for sign in SHORT_OF_MEMORY
    )


def explain(error: BaseException, scene: Scene) -> str:
    """One paragraph: where memory ran out, what holds it, and what to change."""
    cuda = scene.device.type == "cuda"
    weights = _mib([*scene.model.parameters(), *scene.model.buffers()])
    states = scene.optimizer.state.values()
    moments = _mib(value for state in states for value in state.values())
    figures = [f"{name} {value:g}" for name, value in sample(scene.device).items()]
    shapes = ", ".join(str(list(shape)) for shape in scene.shapes)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    advice = (
        "When fragmented_mib or retries are high, set PYTORCH_ALLOC_CONF=expandable_segments:True."
        if cuda
        else "On a CPU, fewer data.workers, a lower data.prefetch and data.cache_mib help as well."
    )
    return (
        f"step {scene.step}: the memory of {f'the GPU {scene.device}' if cuda else 'the machine'} ran out on rank "
        f"{scene.rank}, with image batches {shapes}. {reason.rstrip('.')}. Weights take {weights:.1f} MiB, as much "
        f"again their gradients and their average, the optimizer {moments:.1f} MiB; activations come on top and grow "
        f"with crop and batch. Now: {'; '.join(figures)}. Take a smaller augment.crop_size, or a smaller "
        f"compute.samples_per_shard with more compute.shards: the global batch stays, and one shard at a time is in "
        f"memory. {advice}"
    )


def _mib(tensors: Iterable[object]) -> float:
    size = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):  # a state has numbers too
            size += tensor.nbytes
    return size / MIB


@contextlib.contextmanager
def out_of_memory_named(scene: Scene) -> Iterator[None]:
    """Raises OutOfMemory in place of the error when memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explain(error, scene)) from error
