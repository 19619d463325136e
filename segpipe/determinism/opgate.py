"""Finds, on a CPU, the ops that would not give the same bits on CUDA, and the lines that call them.

A dispatch mode sees every aten op, those of the backward too, and looks it up in `RULES`. The states there are those
of torch 2.11 to 2.14 under `torch.use_deterministic_algorithms(True)`, the worse one where they differ, from torch's
documentation and sources; `benchmarks/ops.py` measures them on a GPU. Not seen: what a kernel calls inside itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from segpipe.errors import UnsafeOpError
from segpipe.models.resize import as_on_cuda

RAISES = "raises under deterministic algorithms"
SLOW = "takes a slow form under deterministic algorithms"
SILENT = "changes from run to run without a word"

_TORCH = str(Path(torch.__file__).parent) + os.sep
_FRAME = re.compile(r'  File "(.+?)", line (\d+), in ')


def _always(arguments: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """Ops, by aten name without overload and final underscore, that a network or a loss must not call on CUDA.

    `when` tells from the arguments, by their names in the op's schema, whether this call is meant.
    """

    ops: tuple[str, ...]
    state: str
    why: str
    instead: str
    when: Callable[[Mapping[str, Any]], bool] = _always


def _accumulates(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["accumulate"])


def _is_float(arguments: Mapping[str, Any]) -> bool:
    dtype: torch.dtype = arguments["dtype"] or arguments["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


RULES = (
    Rule(
        ("nll_loss2d_forward",),
        RAISES,
        "adds pixels in any order for reduction mean and sum",
        'cross_entropy(reduction="none") with a sum and a count of your own',
        lambda arguments: arguments["reduction"] != 0,
    ),
    Rule(
        ("upsample_bilinear2d_backward",),
        SLOW,
        "adds gradients in any order; F.interpolate then computes other forward bits too, and the bare op raises",
        "segpipe.models.resize.bilinear",
    ),
    Rule(
        (
            *("_upsample_bilinear2d_aa_backward", "upsample_bicubic2d_backward", "_upsample_bicubic2d_aa_backward"),
            *("upsample_linear1d_backward", "upsample_trilinear3d_backward"),
        ),
        RAISES,
        "adds gradients in any order",
        "segpipe.models.resize.bilinear",
    ),
    Rule(
        ("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
        RAISES,
        "adds gradients in any order; size 1 is a mean and fine",
        "segpipe.models.resize.adaptive_avg_pool, or avg_pool2d with a fixed kernel",
    ),
    Rule(
        ("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"),
        RAISES,
        "adds gradients in any order",
        "max_pool2d with a fixed kernel",
    ),
    Rule(
        (
            *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
            *("avg_pool3d_backward", "max_pool3d_with_indices_backward"),
        ),
        RAISES,
        "adds gradients in any order",
        "the 2-D pool with a fixed kernel",
    ),
    Rule(
        ("max_unpool2d", "max_unpool3d"),
        RAISES,
        "writes to one place more than once where indices repeat",
        "segpipe.models.resize.bilinear",
    ),
    Rule(
        ("reflection_pad1d_backward", "reflection_pad3d_backward"),
        RAISES,
        "adds gradients in any order",
        "zero padding, or torch.cat of flipped slices",
    ),
    Rule(
        (
            "reflection_pad2d_backward",  # documented to raise, but no release from 2.11 on has the message for it
            *("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward"),
        ),
        SLOW,
        "adds gradients in any order",
        "zero padding, or torch.cat of slices",
    ),
    Rule(
        ("grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_grid_sampler_backward"),
        RAISES,
        "adds gradients in any order; the cuDNN path did so silently",
        "segpipe.models.resize.bilinear for a regular grid; warp images before the network",
    ),
    Rule(
        ("index_put", "_index_put_impl", "_unsafe_index_put"),
        SLOW,
        "sorts the indices, in the backward of tensor[indices] too, and waits for the device where they are a mask",
        "torch.where at a fixed shape",
        _accumulates,
    ),
    Rule(
        ("scatter_add", "index_add", "embedding_dense_backward"),
        SLOW,
        "sorts the indices, in the backward of gather, index_select and embedding too",
        "torch.where, or a product with a one-hot matrix, at a fixed shape",
    ),
    Rule(
        ("scatter",),
        SLOW,
        "sorts the indices, in the backward of max(dim), sort and topk too",
        "scatter with a number, torch.where, or amax for max(dim)",
        lambda arguments: "src" in arguments or "reduce" in arguments,
    ),
    Rule(
        ("scatter_reduce",),
        SLOW,
        "sorts the indices for sum and mean, and raises for prod",
        "torch.where, or a product with a one-hot matrix, at a fixed shape",
        lambda arguments: arguments["reduce"] not in ("amax", "amin"),
    ),
    Rule(
        ("index_reduce", "put"),
        RAISES,
        "writes to one place more than once, in any order, where indices repeat",
        "torch.where at a fixed shape",
    ),
    Rule(("histc",), RAISES, "counts in floats, in any order", "torch.bincount of integers without weights"),
    Rule(
        ("bincount",),
        RAISES,
        "adds weights in any order",
        "torch.bincount without weights, or a product with a one-hot matrix",
        lambda arguments: arguments["weights"] is not None,
    ),
    Rule(
        ("median", "nanmedian"),
        RAISES,
        "chooses any of equal values for the index",
        "median without dim, or segpipe.losses.pixelwise.kth_largest",
        lambda arguments: "dim" in arguments,
    ),
    Rule(
        ("kthvalue",),
        SILENT,
        "chooses any of equal values for the index",
        "segpipe.losses.pixelwise.kth_largest, by value",
    ),
    Rule(
        ("sort",),
        SILENT,
        "leaves the order of equal keys open",
        "stable=True, or segpipe.losses.pixelwise.kth_largest, by value",
        lambda arguments: not arguments.get("stable"),
    ),
    Rule(("topk",), SILENT, "leaves the order of equal keys open", "segpipe.losses.pixelwise.kth_largest, by value"),
    Rule(
        ("cumsum",),
        SLOW,
        "adds floats in an order that depends on the load; torch documents that as raising before 2.14",
        "cumsum of integers",
        _is_float,
    ),
    Rule(("_ctc_loss_backward",), RAISES, "adds gradients in any order", "a loss per pixel"),
    Rule(
        ("_embedding_bag_backward", "_embedding_bag_dense_backward"),
        RAISES,
        "adds gradients in any order for mode max",
        "mode sum or mean",
        lambda arguments: arguments["mode"] == 2,
    ),
)
"""What CUDA does not compute the same way twice, or only slowly, and what to use instead."""


@dataclass(frozen=True)
class Violation:
    """A call that a rule forbids. `file` and `line` are where it, or for a backward its forward, was written."""

    op: str
    file: str
    line: int
    rule: Rule

    def __str__(self) -> str:
        rule = self.rule
        return f"{self.file}:{self.line} calls {self.op}: it {rule.why}, and {rule.state}. Use {rule.instead}."


class OpGate:
    """A context for forward, loss and backward on a CPU; raises UnsafeOpError at its end, naming op, file and line.

    Every forbidden call is kept in `violations`, once per op and line. An error of the code inside comes through as it
    is. While the gate is open, `segpipe.models.resize.bilinear` goes the way it goes on CUDA. An op of the backward is
    named by the line of its forward, or by that of `backward()` where the forward ran before the gate was opened. Costs
    about half a millisecond per node of the autograd graph.
    """

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._rules = {op: rule for rule in rules for op in rule.ops}
        self._found: dict[tuple[str, str, int], Violation] = {}
        self._open = ExitStack()

    @property
    def violations(self) -> list[Violation]:
        """What was found so far, in the order of the calls."""
        return list(self._found.values())

    def __enter__(self) -> OpGate:
        self._open.enter_context(as_on_cuda())
        # Anomaly mode writes into each node of the graph where its forward was called.
        self._open.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        self._open.enter_context(_Watch(self._see))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()
        if kind is None and self._found:
            raise UnsafeOpError("\n".join(map(str, self._found.values())))

    def _see(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the call if a rule forbids it; `op` is a torch._ops.OpOverload."""
        if op.namespace != "aten":
            return
        rule = self._rules.get(op._schema.name.removeprefix("aten::").rstrip("_"))
        if rule is None or not rule.when(_arguments(op, args, kwargs)):
            return
        name, (file, line) = str(op.overloadpacket), _caller()
        self._found.setdefault((name, file, line), Violation(name, file, line, rule))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every op to `see` before it runs."""

    def __init__(self, see: Callable[[Any, Sequence[Any], Mapping[str, Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._see(func, args, kwargs)
        if torch.is_inference_mode_enabled():  # ops made of others arrive whole there
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


def _arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the defaults that the dispatcher leaves out."""
    schema = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema}
    return {**defaults, **{argument.name: value for argument, value in zip(schema, args, strict=False)}, **kwargs}


def _caller() -> tuple[str, int]:
    """File and line of the innermost code outside torch that called the op, or, in a backward, the op's forward."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name == "_engine_run_backward" and (forward := _forward_of_current_node()):
            return forward
        if _is_users(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _forward_of_current_node() -> tuple[str, int] | None:
    """Where the forward of the autograd node that runs now was called; None when no gate was open then."""
    node = torch._C._current_autograd_node()
    metadata: dict[str, Any] = node.metadata if node is not None else {}  # type: ignore[assignment]
    for text in reversed(metadata.get("traceback_", [])):
        if (match := _FRAME.match(text)) and _is_users(match[1]):
            return match[1], int(match[2])
    return None


def _is_users(file: str) -> bool:
    return not file.startswith((_TORCH, "<frozen")) and file != __file__
