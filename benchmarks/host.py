"""What the host does in an update of a GPU: operators, launches and processor time by part. Needs no GPU.

Small tensors of a CPU in bf16 are taken for those of a GPU. An operator that moves data counts as one launch, whatever
the number of tensors (foreach), as does a kernel of Triton, which is not run. Processor time is that of one thread,
whose kernels of 2 x 64x64 take some of it; valid pixels are counted at the full size.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import measure as measuring
from benchmarks.train_step import Scene
from segpipe import native
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.losses.total import valid_pixels
from segpipe.models import MODELS, build_model
from segpipe.models.resize import as_on_cuda
from segpipe.settings.config import from_mapping
from segpipe.train.forward import AllHeads
from segpipe.train.recorder import Watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step

CPU = torch.device("cpu")
NETWORKS = ("pidnet_s", "ddrnet23_slim", "fast_scnn")
FULL, UPDATES = (1024, 12), 20
SIZE, BATCH = 64, 2
MUST = {"pidnet_s": 900}  # launches of an update at most
COMPILED = tuple(name for name in MODELS if name != "smp")  # which needs a package
SMOKE = {
    "FULL": (64, 2),
    "UPDATES": 1,
    "NETWORKS": ("fast_scnn",),
    "COMPILED": ("fast_scnn",),
}
# Operators without a kernel: views are known to torch, these are not.
NO_KERNEL = (
    "empty", "detach", "alias", "_unsafe_view", "new_empty", "lift_fresh", "profiler::",
)  # fmt: skip


class Dispatched(TorchDispatchMode):
    """Counts operators, and those of them that start a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.operators += 1
        self.launches += not (func.is_view or name.startswith(NO_KERNEL))
        return func(*args, **(kwargs or {}))


class Parts(Watch):
    """Adds up what every part of an update takes: operators, launches, processor time of this thread."""

    def __init__(self, group: Group, state: Any, seen: Dispatched) -> None:
        super().__init__(group, state)
        self.seen = seen
        self.found: dict[str, Counter[str]] = {}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:  # type: ignore[override]
        before = self.now()
        yield
        self.found.setdefault(name, Counter()).update(self.now() - before)

    def now(self) -> Counter[str]:
        """What was taken until now."""
        seen = self.seen
        now = Counter(operators=seen.operators, launches=seen.launches)
        now["microseconds"] = int(1e6 * time.thread_time())
        return now


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Of an update of each network: operators and launches by part, and milliseconds of processor time by part."""
    rounds = given.repeats or UPDATES
    networks: dict[str, Any] = {}
    _, target = Scene(CPU, *FULL).tensors()
    with as_on_a_gpu() as seen:
        for name in NETWORKS:
            with seen:
                counted = update(name, seen, 1)
            timed = update(name, seen, rounds)
            before = time.thread_time()
            valid_pixels(target)
            counting = time.thread_time() - before
            networks[name] = {
                kind: {part: each[kind] for part, each in counted.items()}
                for kind in ("operators", "launches")
            }
            networks[name]["host_ms"] = {
                part: round(each["microseconds"] / 1000 / rounds, 2)
                for part, each in timed.items()
            }
            networks[name]["host_ms"]["counts"] = round(1000 * counting, 2)
    found = {name: networks[name]["launches"]["all"] for name in networks}
    graphs = {name: graphs_of(name) for name in COMPILED}
    return {
        "what": f"an update of one shard of {BATCH} x {SIZE}x{SIZE}, bf16, OHEM, clipping, on a CPU",
        "machine": measuring.machine(),
        "networks": networks,
        "graphs_of_a_compiled_network": graphs,
        "must": MUST,
        "passed": all(
            found[name] <= most for name, most in MUST.items() if name in found
        )
        and set(graphs.values()) == {1},
    }


def graphs_of(name: str) -> int:
    """Pieces into which torch.compile divides a network: 1 without a graph break."""
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    heads = AllHeads(build_model(name, 5)).train()
    with as_on_cuda():
        torch.compile(heads, dynamic=False, backend=keep)(torch.zeros(2, 3, 128, 128))
    return len(graphs)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[Dispatched]:
    """Tensors of a CPU take the ways of a GPU; kernels of Triton are counted, and not run."""
    from triton.runtime.jit import JITFunction

    flags.apply(1)
    seen = Dispatched()

    def launched(kernel: Any, *given: Any, **named: Any) -> None:
        seen.launches += 1

    with contextlib.ExitStack() as held:
        for where, name, value in (
            (Tensor, "is_cuda", True),
            (JITFunction, "run", launched),
            (native, "triton_builds", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            held.enter_context(mock.patch.object(where, name, value))
        held.enter_context(
            mock.patch("segpipe.losses.total.backend", return_value="triton")
        )
        yield seen


def update(network: str, seen: Dispatched, rounds: int) -> dict[str, Counter[str]]:
    """What `rounds` updates take by part, and `all`, after one that warms up."""
    config = from_mapping(
        {
            "model": {"name": network},
            "loss": {"name": "ohem"},
            "optim": {"clip_norm": 5.0},
            "train": {"precision": "bf16"},
            "compute": {"shards": 1, "samples_per_shard": BATCH},
        }
    )
    state = build_state(config, STREET, CPU)
    watch = Parts(Group(0, 1, CPU), state, seen)
    step = TrainStep(config, watch)
    image, target = Scene(CPU, SIZE, BATCH).tensors()
    ids = torch.zeros(BATCH, dtype=torch.int64)
    before = watch.now()
    for number in range(rounds + 1):
        if number == 1:
            watch.found.clear()
            before = watch.now()
        shard = ShardBatch(state.step, 0, image, target, ids, ids)
        train_step(step, [shard], wait=False)
    whole = watch.now() - before
    rest = whole.copy()
    for each in watch.found.values():
        rest.subtract(each)
    return {**watch.found, "other": rest, "all": whole}
