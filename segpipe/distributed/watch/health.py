"""Memory of every rank: figures, outliers, growth, and an explanation when it runs out."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from segpipe.errors import OutOfMemory

if TYPE_CHECKING:
    from segpipe.distributed.group import Group

WINDOWS = 5  # consecutive windows that must all rise
STEADY = 0.5  # smallest over largest rise, at least: a cache that fills slows down
MIB = 2**20
EXCESS = 1.2  # times the median of the ranks, above which a rank is named
EXCESS_MIB = 256.0  # and at least this much above it
LOOK_SHARE = 0.005  # of the time that looking for graphs may take
COMPARED = ("rss_mib", "workers_rss_mib", "shm_mib", "peak_mib", "reserved_mib")

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
    workers = sum(
        _status("VmRSS", child.pid) for child in multiprocessing.active_children()
    )
    figures = {
        "rss_mib": _status("VmRSS"),
        "workers_rss_mib": workers,
        "shm_mib": _status("RssShmem"),
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        figures |= {
            "allocated_mib": stats["allocated_bytes.all.current"] / MIB,
            "peak_mib": stats["allocated_bytes.all.peak"] / MIB,
            "reserved_mib": stats["reserved_bytes.all.current"] / MIB,
            "fragmented_mib": stats["inactive_split_bytes.all.current"] / MIB,
            "retries": float(stats["num_alloc_retries"]),
        }
        torch.cuda.reset_peak_memory_stats(device)
    return {name: round(value, 1) for name, value in figures.items()}


def _status(name: str, process: int | str | None = "self") -> float:
    """A line of /proc/PID/status in MiB; 0 if there is none."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")),
        0.0,
    )


def outliers(ranks: Sequence[Mapping[str, float]]) -> dict[tuple[int, str], str]:
    """A warning for each (rank, figure) that is more than 20 % and 256 MiB above the median of the ranks.

    The median of an even number of ranks is the lower of the two in the middle: for two ranks the smaller, since their
    mean would hide an excess of 40 %.
    """
    found = {}
    for name in COMPARED:
        values = [figures.get(name, 0.0) for figures in ranks]
        median = statistics.median_low(values)
        for rank, value in enumerate(values):
            if value > EXCESS * median and value - median > EXCESS_MIB:
                found[rank, name] = (
                    f"rank {rank} uses {name.removesuffix('_mib')} {value:.0f} MiB, the median of the ranks is "
                    f"{median:.0f} MiB: it will be the first to run out."
                )
    return found


def attached() -> Counter[tuple[tuple[int, ...], str]]:
    """Live tensors that hold a graph, by (shape, node that made them); between updates there should be none.

    Walks all objects of Python's garbage collector, which is too slow for every step.
    """
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    # Not isinstance, which would import lazy modules. Parameters, of another type, are leaves.
    for tensor in [thing for thing in gc.get_objects() if type(thing) is Tensor]:
        with contextlib.suppress(
            RuntimeError
        ):  # grad_fn of a view that was overwritten
            if tensor.grad_fn is not None:
                found[tuple(tensor.shape), type(tensor.grad_fn).__name__] += 1
    return found


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
        self._least, self._window = least, window
        self._samples: list[tuple[float, int]] = []
        self._minima: deque[tuple[float, int]] = deque(maxlen=WINDOWS)
        self._warm = self._reported = False

    def add(self, step: int, value: float) -> Growth | None:
        """Take a sample; the growth, if it is certain and was not reported before."""
        self._samples.append((value, step))
        if self._reported or len(self._samples) < self._window:
            return None
        lowest = min(self._samples)
        self._samples.clear()
        if self._warm:
            self._minima.append(lowest)
        self._warm = True
        return self._judge()

    def _judge(self) -> Growth | None:
        if len(self._minima) < WINDOWS:
            return None
        rises = [
            (after - before) / (end - start)
            for (before, start), (after, end) in pairwise(self._minima)
        ]
        if min(rises) <= 0 or min(rises) < STEADY * max(rises):
            return None
        (before, since), (now, step) = self._minima[0], self._minima[-1]
        if now - before < self._least:
            return None
        self._reported = True
        return Growth(since, before, now, (now - before) / (step - since))


class Health:
    """Watches this rank's memory from step to step; `report` is a collective, `after_step` is not."""

    def __init__(
        self,
        group: Group,
        *,
        every: int = 5,
        look_every: int = 50,
        allowance_mib: float = 0.0,
    ) -> None:
        """`every`: steps between samples; `look_every`: between searches for graphs, which are rarer if they would take
        more than 0.5 % of the time; `allowance_mib`: what caches of this process may take."""
        self._group, self._every, self._look_every = group, every, look_every
        self._growth = {"host memory": GrowthWatch(least=64.0 + allowance_mib)}
        if group.device.type == "cuda":
            self._growth["memory in tensors"] = GrowthWatch(least=1.0)
        self._graphs = GrowthWatch(least=8.0, window=2)
        self._next_look = 0.0
        self._reported: set[object] = set()
        self._found: list[str] = []

    def after_step(self, step: int) -> None:
        """Sample, on the steps on which it is due; to be called when gradients are gone."""
        if step % self._look_every == 0 and time.monotonic() >= self._next_look:
            before = time.monotonic()
            self._look_for_graphs(step)
            self._next_look = before + (time.monotonic() - before) / LOOK_SHARE
        if step % self._every == 0:
            self._sample(step)

    def _sample(self, step: int) -> None:
        values = {"host memory": _status("VmRSS")}
        if self._group.device.type == "cuda":
            values["memory in tensors"] = (
                torch.cuda.memory_allocated(self._group.device) / MIB
            )
        for name, value in values.items():
            if growth := self._growth[name].add(step, value):
                self._found.append(
                    f"rank {self._group.rank}: {name} grows by {growth.per_step:.3g} MiB with every step, from "
                    f"{growth.before:.0f} MiB at step {growth.since} to {growth.now:.0f} MiB at step {step}."
                )

    def _look_for_graphs(self, step: int) -> None:
        tensors = attached()
        if growth := self._graphs.add(step, tensors.total()):
            (shape, maker), number = tensors.most_common(1)[0]
            self._found.append(
                f"rank {self._group.rank}: {growth.per_step:.3g} more tensors hold a graph after every step, "
                f"{growth.now:.0f} at step {step}; {number} of them have the shape {list(shape)} and come from "
                f"{maker}. Something keeps a loss or an output without .detach()."
            )

    def report(self, step: int) -> tuple[dict[str, list[float]], list[str]]:
        """Figures of all ranks, in rank order, and warnings not yet reported; equal on every rank."""
        own, self._found = self._found, []
        gathered = self._group.gather((sample(self._group.device), own))
        ranks = [figures for figures, _ in gathered]
        warnings = [warning for _, found in gathered for warning in found]
        for key, warning in outliers(ranks).items():
            if key not in self._reported:
                self._reported.add(key)
                warnings.append(f"step {step}: {warning}")
        return {
            name: [figures[name] for figures in ranks] for name in ranks[0]
        }, warnings


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
    states = scene.optimizer.state.values() if scene.optimizer is not None else []
    held = {
        "parameters": _mib(scene.model.parameters()),
        "buffers": _mib(scene.model.buffers()),
        "gradients": _mib(
            p.grad for p in scene.model.parameters() if p.grad is not None
        ),
        "optimizer state": _mib(
            value
            for state in states
            for value in state.values()
            if isinstance(value, Tensor)
        ),
    }
    if scene.average is not None:
        held["averaged weights"] = _mib(
            [*scene.average.parameters(), *scene.average.buffers()]
        )
    if scene.device.type == "cuda":
        peak = torch.cuda.memory_stats(scene.device)["allocated_bytes.all.peak"] / MIB
        held["activations, sums and workspaces at the peak"] = max(
            0.0, peak - sum(held.values())
        )
    return dict(sorted(held.items(), key=lambda entry: -entry[1]))


def _mib(tensors: Iterator[Tensor] | Sequence[Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB


def explain(error: BaseException, scene: Scene) -> str:
    """One paragraph: where memory ran out, what holds it, and what to change."""
    held = "; ".join(
        f"{name} {size:.1f} MiB" for name, size in consumers(scene).items()
    )
    figures = "; ".join(
        f"{name} {value:g}" for name, value in sample(scene.device).items()
    )
    shapes = ", ".join(str(list(shape)) for shape in scene.shapes)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][
        :300
    ].rstrip(".")
    where = f"the GPU {scene.device}" if scene.device.type == "cuda" else "the machine"
    fragments = (
        " When fragmented_mib or retries are high, set PYTORCH_ALLOC_CONF=expandable_segments:True."
        if scene.device.type == "cuda"
        else " On a CPU, fewer data.workers, a lower data.prefetch and data.cache_mib help as well."
    )
    return (
        f"step {scene.step}: the memory of {where} ran out on rank {scene.rank}, with image batches {shapes}. "
        f"{reason}. Held: {held}; activations come on top and grow with crop and batch. Now: {figures}. Take a smaller "
        f"augment.crop_size, or a smaller compute.samples_per_shard with more compute.shards: the global batch stays, "
        f"and one shard at a time is in memory.{fragments}"
    )


@contextlib.contextmanager
def out_of_memory_named(scene: Scene, folder: Path) -> Iterator[None]:
    """Raises OutOfMemory in place of the error when memory runs out inside, and writes `folder`/oom_rankNN.txt."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        text = explain(error, scene)
        path = folder / f"oom_rank{scene.rank:02d}.txt"
        with contextlib.suppress(OSError):  # the disk may be full as well
            path.write_text(f"{text}\n\n{_summary(scene)}\n", encoding="utf-8")
            text += f" The allocator's summary is in {path}."
        raise OutOfMemory(text) from error


def _summary(scene: Scene) -> str:
    """The allocator's table on a GPU, else /proc/self/status; then the largest parameters of the network."""
    if scene.device.type == "cuda":
        table: Any = torch.cuda.memory_summary(scene.device)
    else:
        table = Path("/proc/self/status").read_text()
    largest = sorted(
        scene.model.named_parameters(), key=lambda entry: -entry[1].numel()
    )[:10]
    lines = [
        f"{_mib([value]):10.2f} MiB  {name} {list(value.shape)}"
        for name, value in largest
    ]
    return "\n".join([str(table), "Largest parameters:", *lines])
