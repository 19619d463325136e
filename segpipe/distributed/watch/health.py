"""Memory of every rank: figures, outliers, growth, and an explanation when it runs out."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from segpipe.errors import OutOfMemory
from segpipe.processes import memory_mib

if TYPE_CHECKING:
    from segpipe.distributed.group import Group

WINDOWS = 5  # consecutive windows that must all rise
STEADY = 0.5  # smallest over largest rise, at least: a cache that fills slows down
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


class Growth(NamedTuple):
    """A figure that grew in every one of the last windows."""

    since: int  # step
    before: float
    now: float
    per_step: float


class GrowthWatch:
    """Finds unbounded growth in the minima of consecutive windows of samples.

    The minimum of a window is what is never released; a peak does not raise it. Growth is reported once, when the
    minima rose four times in a row, by about as much per step, and by `least` in all. The first window is left out:
    workers start, kernels are chosen and buffers are allocated in it.
    """

    def __init__(self, *, least: float, window: int = 5) -> None:
        """`least`: smallest growth that is reported, in the figure's unit; `window`: samples in each."""
        self._least = least
        self._window = window
        self._samples: list[tuple[float, int]] = []
        self._minima: deque[tuple[float, int]] = deque(maxlen=WINDOWS)
        self._warm = self._reported = False

    def add(self, step: int, value: float) -> Growth | None:
        """Take a sample; the growth, if it is certain and was not reported before."""
        self._samples.append((value, step))
        if self._reported or len(self._samples) < self._window:
            return None
        if self._warm:
            self._minima.append(min(self._samples))
        self._warm = True
        self._samples.clear()
        growth = self._growth() if len(self._minima) == WINDOWS else None
        self._reported = growth is not None
        return growth

    def _growth(self) -> Growth | None:
        rises = [
            (after - before) / (end - start)
            for (before, start), (after, end) in pairwise(self._minima)
        ]
        (before, since), (now, step) = self._minima[0], self._minima[-1]
        steady = min(rises) > 0 and min(rises) >= STEADY * max(rises)
        if not steady or now - before < self._least:
            return None
        return Growth(since, before, now, (now - before) / (step - since))


class Health:
    """Watches this rank's memory from step to step; `report` is a collective, `after_step` is not."""

    def __init__(
        self, group: Group, *, every: int = 5, allowance_mib: float = 0.0
    ) -> None:
        """`every`: steps between samples; `allowance_mib`: what caches of this process may take."""
        self._group = group
        self._every = every
        self._host = GrowthWatch(least=64.0 + allowance_mib)
        self._tensors = GrowthWatch(least=1.0)
        self._reported: set[tuple[int, str]] = set()
        self._warnings: list[str] = []

    def after_step(self, step: int) -> None:
        """Sample, on the steps on which it is due; to be called when gradients are gone."""
        if step % self._every:
            return
        resident = memory_mib("VmRSS")
        self._judge("host memory", self._host.add(step, resident), step)
        device = self._group.device
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device) / MIB
            self._judge("memory in tensors", self._tensors.add(step, held), step)

    def _judge(self, name: str, growth: Growth | None, step: int) -> None:
        if growth is not None:
            self._warnings.append(
                f"rank {self._group.rank}: {name} grows by {growth.per_step:.3g} MiB with every step, from "
                f"{growth.before:.0f} MiB at step {growth.since} to {growth.now:.0f} MiB at step {step}. Look for a "
                f"loss, an output or a sample that is kept; .detach() frees the graph behind it."
            )

    def report(self, step: int) -> tuple[dict[str, list[float]], list[str]]:
        """Figures of all ranks, in rank order, and warnings not yet reported; equal on every rank."""
        own, self._warnings = self._warnings, []
        gathered = self._group.gather((sample(self._group.device), own))
        ranks = [figures for figures, _ in gathered]
        warnings = [warning for _, of_rank in gathered for warning in of_rank]
        for key, warning in outliers(ranks).items():
            if key not in self._reported:
                self._reported.add(key)
                warnings.append(f"step {step}: {warning}")
        by_name = {
            name: [figures[name] for figures in ranks]
            for name in ranks[0]  # in this order
        }
        return by_name, warnings


@dataclass(frozen=True)
class Scene:
    """What is in memory when it runs out."""

    rank: int
    step: int
    shapes: Sequence[tuple[int, ...]]  # of this rank's image batches
    model: nn.Module
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    average: nn.Module | None = None  # of the weights


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that the memory of a device or of the machine ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        sign in str(error) for sign in SHORT_OF_MEMORY
    )


def consumers(scene: Scene) -> dict[str, float]:
    """MiB by consumer, the largest first; on a GPU also what everything else held at the peak."""
    model = scene.model
    average = scene.average
    states = scene.optimizer.state.values() if scene.optimizer is not None else ()
    held = {
        "parameters": _mib(model.parameters()),
        "buffers": _mib(model.buffers()),
        "gradients": _mib(parameter.grad for parameter in model.parameters()),
        "optimizer state": _mib(value for state in states for value in state.values()),
    }
    if average is not None:
        held["averaged weights"] = _mib([*average.parameters(), *average.buffers()])
    if scene.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(scene.device) / MIB
        rest = max(0.0, peak - sum(held.values()))
        held["activations, sums and workspaces at the peak"] = rest
    return dict(sorted(held.items(), key=lambda entry: -entry[1]))


def _mib(tensors: Iterable[object]) -> float:
    size = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):  # a state has numbers too
            size += tensor.nbytes
    return size / MIB


def explain(error: BaseException, scene: Scene) -> str:
    """One paragraph: where memory ran out, what holds it, and what to change."""
    cuda = scene.device.type == "cuda"
    held = [f"{name} {size:.1f} MiB" for name, size in consumers(scene).items()]
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
        f"{scene.rank}, with image batches {shapes}. {reason.rstrip('.')}. Held: {'; '.join(held)}; activations come "
        f"on top and grow with crop and batch. Now: {'; '.join(figures)}. Take a smaller augment.crop_size, or a "
        f"smaller compute.samples_per_shard with more compute.shards: the global batch stays, and one shard at a time "
        f"is in memory. {advice}"
    )


@contextlib.contextmanager
def out_of_memory_named(scene: Scene) -> Iterator[None]:
    """Raises OutOfMemory in place of the error when memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explain(error, scene)) from error
