"""Memory of this process: its figures, and an error that explains them when it runs out."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator

import torch

from segpipe.errors import OutOfMemory, first_line
from segpipe.processes import memory_mib

MIB = 2**20
ALLOCATOR = {
    "allocated_mib": "allocated_bytes.all.current",
    "peak_mib": "allocated_bytes.all.peak",
    "reserved_mib": "reserved_bytes.all.current",
    "fragmented_mib": "inactive_split_bytes.all.current",
}

# Fragments of the messages of torch and the system when memory runs out.
SHORT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "ALLOC_FAILED",
)


def sample(device: torch.device) -> dict[str, float]:
    """This process's memory in MiB, and the allocator's retries. Takes 0.1 ms on a CPU, and as much per worker.

    rss: host memory in use; workers_rss: the sum over its loader processes, each with all shared pages; shm: the part
    of rss in /dev/shm, mostly batches from the workers. On a GPU also allocated: in tensors now; peak: the most since
    the last call; reserved: held by the allocator; fragmented: free parts of reserved blocks, too small for larger
    tensors; retries: how often the allocator had to release all free blocks first, after which cuDNN may choose other
    kernels.
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that a device or the machine ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError | OSError)
        and any(sign in str(error) for sign in SHORT_OF_MEMORY)
    )


@contextlib.contextmanager
def out_of_memory_named(
    rank: int, device: torch.device, step: Callable[[], int]
) -> Iterator[None]:
    """Replaces an error inside the block by OutOfMemory if memory ran out; `step()` is the current update."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where = "the machine"
        advice = "On a CPU, fewer data.workers and a lower data.prefetch or data.cache_mib also help."
        if device.type == "cuda":
            where = f"the GPU {device}"
            advice = (
                "compute.cuda_graph=off frees what a recording keeps between updates. If fragmented_mib or retries "
                "are high, set PYTORCH_ALLOC_CONF=expandable_segments:True."
            )
        figures = [f"{name} {value:g}" for name, value in sample(device).items()]
        raise OutOfMemory(
            f"step {step()}: the memory of {where} ran out on rank {rank}. {first_line(error)}. Now: "
            f"{'; '.join(figures)}. Use a smaller augment.crop_size, or a smaller compute.samples_per_shard with more "
            f"compute.shards: the global batch stays the same, and only one shard at a time is in memory. {advice}"
        ) from error
