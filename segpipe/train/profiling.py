"""Where updates and the loader spend their time, and how much of the memory's bandwidth each part of an update uses."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segpipe.data.augment import Augmenter
from segpipe.data.plan import REPEATS
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import Recorder
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step
from segpipe.train.watch import Watch

if TYPE_CHECKING:
    from segpipe.data.data_set import DataSet
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config

WARM, TIMED, TRACED = 3, 10, 2  # updates; one more counts bytes
COPY_MIB = 256
SAMPLES = 8  # that the loader's work is measured on
HOOKS = (
    "forward",
    "shard",
    "whole_batch",
    "reduced",
    "applied",
    "after_update",
)  # of a Watch: the ledger's work


@dataclass(frozen=True)
class SpanCost:
    """A part of an update: milliseconds per update, and bytes that its tensors take and give."""

    name: str
    ms: float
    share: float  # of an update
    gib: float
    bandwidth: float  # share of what a plain copy reaches; 0 where nothing was counted


@dataclass(frozen=True)
class StepProfile:
    """What `measure` found."""

    update_ms: float
    images_per_second: float  # of this process
    parts: list[SpanCost]
    copy_gib_per_s: float
    read_ms: float  # per sample, in one process
    augment_ms: float
    repeated: float  # share of the samples that the canary has made again
    advice: list[str]


class Spans:
    """Seconds spent in each span, on the device where it is a GPU, and a range of the trace for each."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self.now = device.type == "cuda", ""
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self, name: str, *, host: bool = False) -> Iterator[None]:
        """`host`: measure the host's time even if there is a GPU."""
        events: list[torch.cuda.Event] = []
        if self._cuda and not host:
            for _ in range(2):
                events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self.now, before = name, time.perf_counter()
        with record_function(name):
            if events:
                events[0].record()
            yield
        if events:
            events[1].record()
            self._events.append((name, events[0], events[1]))
        else:
            self._seconds[name] += time.perf_counter() - before
        self.now = ""

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; waits for a GPU."""
        if self._cuda:
            torch.cuda.synchronize()
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1000
        found = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return found

    def attach(self, watch: Watch) -> None:
        """Measure this watch's spans, and its hooks as `ledger`."""
        watch.span = self  # type: ignore[method-assign, assignment]
        for name in HOOKS:
            setattr(watch, name, partial(self._hook, getattr(watch, name)))

    @staticmethod
    def detach(watch: Watch) -> None:
        """Undo `attach`."""
        for name in ("span", *HOOKS):
            delattr(watch, name)

    def _hook(self, hook: Any, *given: Any) -> None:
        with self("ledger"):
            hook(*given)


class Traffic(TorchDispatchMode):
    """Bytes of all tensors that operators take and give, by span: what a memory without caches would move."""

    def __init__(self, spans: Spans) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spans, self.bytes = spans, defaultdict[str, int](int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [
                leaf
                for leaf in tree_leaves((args, kwargs, out))
                if isinstance(leaf, Tensor)
            ]
            self.bytes[self._spans.now] += sum(
                tensor.numel() * tensor.element_size() for tensor in tensors
            )
        return out


def measure(config: Config, group: Group, folder: Path) -> StepProfile:
    """Profile of some updates of a fresh network; writes `folder`/trace.json, for chrome://tracing and Perfetto.

    A collective: every rank measures itself. Raises ConfigError and DataError as a training does.
    """
    flags.apply(config.compute.threads, config.compute.mode)
    samples, spans = (
        open_samples(config.data, "train", config.seed),
        Spans(group.device),
    )
    with _updates(config, group, samples, spans) as update:
        for _ in range(WARM):
            update()
        spans.take()
        before = time.perf_counter()
        for _ in range(TIMED):
            update()
        seconds = {name: spent / TIMED for name, spent in spans.take().items()}
        whole = (time.perf_counter() - before) / TIMED
        _trace(update, folder, group.device)
        with Traffic(spans) as traffic:
            update()
    speed, batch = (
        copy_speed(group.device),
        len(group.own_shards(config.compute.shards)),
    )
    read, augment = _loader(config, samples)
    batch *= config.compute.samples_per_shard
    found = StepProfile(
        update_ms=round(1000 * whole, 2),
        images_per_second=round(batch / whole, 2),
        parts=_parts(seconds, whole, traffic.bytes, speed),
        copy_gib_per_s=round(speed, 2),
        read_ms=round(read, 2),
        augment_ms=round(augment, 2),
        repeated=REPEATS / config.augment.canary if config.augment.canary else 0.0,
        advice=[],
    )
    return replace(found, advice=advice(found, config, group.device, batch))


@contextlib.contextmanager
def _updates(
    config: Config, group: Group, samples: DataSet, spans: Spans
) -> Iterator[Callable[[], None]]:
    """A function that does the next update; nothing of it outlives the block."""
    counts = counted(config, group, samples, kept=None, say=print)
    steps = range(WARM + TIMED + TRACED + 1)
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.closing(
            shard_stream(config, group, samples, steps, counts)
        ) as stream,
    ):
        state = build_state(config, samples.classes, group.device)
        kept = replace(config, run=replace(config.run, root=scratch))
        ledger = config.compute.ledger and config.compute.mode != "off"
        watch = (
            Recorder(kept, group, state, samples, flags.fingerprint())
            if ledger
            else Watch(group, state)
        )
        spans.attach(watch)
        step = TrainStep(config, watch, loss_weights(config, samples, counts))

        def update() -> None:
            with spans("data", host=True):
                shards = [next(stream) for _ in group.own_shards(config.compute.shards)]
            train_step(step, shards, wait=group.device.type == "cpu")

        yield update
        watch.close()


def _trace(update: Callable[[], None], folder: Path, device: torch.device) -> None:
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *cuda]) as found:
        for _ in range(TRACED):
            update()
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / "trace.json"))  # type: ignore[no-untyped-call]


def _parts(
    seconds: dict[str, float], whole: float, moved: dict[str, int], speed: float
) -> list[SpanCost]:
    """Parts by time, and `other` for what no span holds."""
    left = {**seconds, "other": max(whole - sum(seconds.values()), 0.0)}
    parts = []
    for name, spent in sorted(left.items(), key=lambda item: -item[1]):
        gib = (
            0.0
            if name == "data"
            else moved.get("" if name == "other" else name, 0) / 2**30
        )
        used = gib / spent / speed if spent else 0.0
        parts.append(
            SpanCost(
                name,
                round(1000 * spent, 2),
                round(spent / whole, 4),
                round(gib, 3),
                round(used, 3),
            )
        )
    return parts


def copy_speed(device: torch.device) -> float:
    """GiB per second that a plain copy reads and writes, the best of some."""
    source = torch.zeros(COPY_MIB << 18, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(6):
        _wait(device)
        before = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - before)
    return 2 * COPY_MIB / 1024 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _loader(config: Config, samples: DataSet) -> tuple[float, float]:
    """Milliseconds to read a sample and to augment it, in this process on one thread: medians."""
    augmenter, spent = Augmenter(config.augment), []
    for index in range(SAMPLES + 1):
        start = time.perf_counter()
        pixels = samples.read(index % len(samples))
        read = time.perf_counter()
        augmenter.crop(pixels[0], pixels[1], index)
        spent.append((read - start, time.perf_counter() - read))
    middle = [sorted(values)[SAMPLES // 2] for values in zip(*spent[1:], strict=True)]
    return 1000 * middle[0], 1000 * middle[1]


def advice(
    found: StepProfile, config: Config, device: torch.device, batch: int
) -> list[str]:
    """What to change first, in words: one sentence for each part that takes more than it should."""
    share = {part.name: part.share for part in found.parts}
    per_sample = (found.read_ms + found.augment_ms) * (1 + found.repeated)
    told = []
    if share.get("data", 0) > 0.1:
        needed = -(
            -batch * per_sample // max(found.update_ms * (1 - share["data"]), 1e-9)
        )
        more = (
            f"Set data.workers={needed:.0f} (now {config.data.workers}), which should keep up"
            if needed > config.data.workers
            else "The workers lack cores or memory bandwidth: leave them cores, with compute.threads"
        )
        told.append(
            f"Loader-bound: {share['data']:.0%} of an update waits for data, and a sample takes {per_sample:.1f} ms. "
            f"{more}, or let data.cache_mib keep decoded images."
        )
    if share.get("loss", 0) > 0.25:
        told.append(
            f"Loss-bound: the loss takes {share['loss']:.0%} of an update, without its backward. loss.stride=2 (now "
            f"{config.loss.stride}) takes a quarter of the pixels, and changes the training a little."
        )
    if share.get("reduction", 0) > 0.1:
        told.append(
            f"Reduction-bound: {share['reduction']:.0%} of an update moves gradients and waits for other processes. "
            f"Raise compute.samples_per_shard (now {config.compute.samples_per_shard}), or use fewer processes."
        )
    if share.get("ledger", 0) > 0.03:
        told.append(
            f"The ledger takes {share['ledger']:.0%} of an update; compute.ledger=false leaves it out."
        )
    if config.train.precision == "fp32" and not (
        device.type == "cpu" and flags.emulated("bf16")
    ):
        told.append(
            "train.precision=bf16 runs the network in bf16, which this device has instructions for."
        )
    if not told:
        told.append(
            "Nothing stands out: the network's forward and backward take most of the time."
        )
    return told
