"""Digests of the inputs, outputs and gradients of every module in one update, and the first module at which two differ.

Gradients are hooked on tensors, because backward hooks on modules forbid the in-place operations that networks use. No
hook changes a number: the ledger of a traced run is that of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from segpipe.ledger.digest import digest_many

INPUT, OUTPUT, WEIGHT = "input", "output", "weight"  # kinds of gradients


class ModuleCall(NamedTuple):
    """Digests of inputs and outputs of a module that returned."""

    name: str
    inputs: int
    outputs: int


class Gradient(NamedTuple):
    """A complete gradient of a module's input or output, or of a parameter."""

    kind: str
    name: str
    digest: int


class ShardTrace(NamedTuple):
    """One shard: calls in the order in which they returned (children before parents), gradients in order of arrival."""

    forward: list[ModuleCall]
    backward: list[Gradient]


Traces: TypeAlias = dict[int, ShardTrace]  # by shard


class Culprit(NamedTuple):
    """The first module at which two traces differ."""

    step_of: str  # forward | backward
    shard: int
    layer: str
    words: str


class Tracer:
    """Hooks on all modules of a network, while inside `watch`."""

    def __init__(
        self, model: nn.Module, start: nn.Module, shards: Sequence[int]
    ) -> None:
        """`start` is called once for each of `shards`, in their order, before the network."""
        self._model, self._start, self._shards = model, start, list(shards)
        self._forward: dict[int, list[tuple[str, Tensor, Tensor]]] = {}
        self._backward: dict[int, list[tuple[str, str, Tensor]]] = {}
        self._inputs: list[
            Tensor
        ] = []  # digests of the inputs of the modules that have not returned yet

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Trace the updates inside."""
        handles = [self._start.register_forward_pre_hook(self._next_shard)]
        for name, module in self._model.named_modules():
            if name:
                handles.append(
                    module.register_forward_pre_hook(partial(self._enter, name))
                )
                handles.append(module.register_forward_hook(partial(self._leave, name)))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                hook = partial(self._gradient, WEIGHT, name)
                handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def traces(self) -> Traces:
        """The traces; waits for the device."""
        return {
            shard: ShardTrace(
                [
                    ModuleCall(name, int(inputs), int(outputs))
                    for name, inputs, outputs in calls
                ],
                [
                    Gradient(kind, name, int(value))
                    for kind, name, value in self._backward[shard]
                ],
            )
            for shard, calls in self._forward.items()
        }

    def _next_shard(self, module: nn.Module, inputs: Any) -> None:
        shard = self._shards[len(self._forward)]
        self._forward[shard], self._backward[shard] = [], []

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        tensors = list(_tensors(inputs))
        self._inputs.append(digest_many(tensors))  # now: the module may write into them
        self._hook(INPUT, name, tensors)

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = list(_tensors(output))
        calls = self._forward[self._shard]
        calls.append((name, self._inputs.pop(), digest_many(tensors)))
        self._hook(OUTPUT, name, tensors)

    def _hook(self, kind: str, name: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, kind, name))  # type: ignore[no-untyped-call]

    def _gradient(self, kind: str, name: str, grad: Tensor) -> None:
        self._backward[self._shard].append((kind, name, digest_many([grad])))

    @property
    def _shard(self) -> int:
        return self._shards[len(self._forward) - 1]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in the inputs or outputs of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def write_traces(path: Path, traces: Traces) -> None:
    """Traces of this process's shards, as JSON."""
    path.write_text(json.dumps({shard: list(trace) for shard, trace in traces.items()}))


def read_traces(folder: Path) -> Traces:
    """Traces of all processes of a run."""
    found: Traces = {}
    for path in sorted(folder.glob("trace*.json")):
        for shard, (forward, backward) in json.loads(path.read_text()).items():
            found[int(shard)] = ShardTrace(
                [ModuleCall(*call) for call in forward],
                [Gradient(*event) for event in backward],
            )
    return found


def first_culprit(a: Traces, b: Traces) -> Culprit | None:
    """The first module with equal input and another output, in the lowest shard that has one; forward before backward.

    None if all modules agree, or if inputs already differ: then the difference arose before the network.
    """
    shards = sorted(a.keys() & b.keys())
    forward = (
        _forward_culprit(shard, a[shard].forward, b[shard].forward) for shard in shards
    )
    found = next((culprit for culprit in forward if culprit), None)
    if found or any(a[shard].forward != b[shard].forward for shard in shards):
        return found
    backward = (
        _backward_culprit(shard, a[shard].backward, b[shard].backward)
        for shard in shards
    )
    return next((culprit for culprit in backward if culprit), None)


def _forward_culprit(
    shard: int, a: Sequence[ModuleCall], b: Sequence[ModuleCall]
) -> Culprit | None:
    for one, two in zip(a, b, strict=False):
        if one.name != two.name:
            return Culprit(
                "forward",
                shard,
                one.name,
                f"A calls {one.name} where B calls {two.name}",
            )
        if one.inputs == two.inputs and one.outputs != two.outputs:
            return Culprit(
                "forward",
                shard,
                one.name,
                f"{one.name} has equal inputs and other outputs",
            )
    return None


def _backward_culprit(
    shard: int, a: Sequence[Gradient], b: Sequence[Gradient]
) -> Culprit | None:
    """By the first gradient that differs; gradients of one tensor arrive together and are equal."""
    pairs = list(zip(a, b, strict=False))
    place = next(
        (number for number, (one, two) in enumerate(pairs) if one != two), None
    )
    if place is None:
        return None
    first = pairs[place]
    if first[0][:2] != first[1][:2]:
        words = f"A computes the gradient of the {first[0].kind} of {first[0].name} where B has {first[1].name}"
        return Culprit("backward", shard, first[0].name, words)
    together = takewhile(
        lambda pair: (
            (pair[0].digest, pair[1].digest) == (first[0].digest, first[1].digest)
        ),
        pairs[place:],
    )
    events = [one for one, _ in together]
    return _blame(shard, events)


def _blame(shard: int, events: Sequence[Gradient]) -> Culprit:
    """The innermost module whose input gradient differs; without one, what follows the module it reaches."""
    left = [event.name for event in events if event.kind == INPUT]
    if left:
        layer = max(left, key=lambda name: name.count("."))
        words = f"{layer} receives the same gradient and passes another one back"
    elif events[0].kind == WEIGHT:
        layer = events[0].name.rpartition(".")[0]
        words = f"{layer} receives the same gradient and returns another one for {events[0].name}"
    else:
        layer = events[0].name
        words = f"what follows {layer} passes another gradient back to it: the loss, or an operation between modules"
    return Culprit("backward", shard, layer, words)
