"""Finds, on a CPU, ops of a network or loss that are nondeterministic or slow on CUDA, and the lines that call them.

A dispatch mode sees every aten op, including the backward, and looks it up in `RULES`: the behavior of torch 2.11 to
2.14 under `torch.use_deterministic_algorithms(True)`, or the worst one if releases differ, from torch's documentation
and sources. `benchmarks/ops.py` checks the table on a GPU. Ops that a kernel calls internally are not seen. `segpipe
check-plugin` runs the user's networks and losses through it.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from segpipe.models.resize import as_on_cuda

RAISES = "raises under deterministic algorithms"
SLOW = "takes a slow path under deterministic algorithms"
SILENT = "silently changes from run to run"

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(
    r'  File "(.+?)", line (\d+), in '
)  # a line of a traceback that torch keeps as text


Arguments = Mapping[str, Any]  # of a call, by name in the op's schema


class Rule(NamedTuple):
    """Ops that a network or loss must not call on CUDA, by aten name without overload and trailing underscore."""

    names: str  # separated by spaces
    state: str
    why: str
    instead: str
    # Whether the rule applies to a call.
    when: Callable[[Arguments], bool] = lambda call: True

    @property
    def ops(self) -> tuple[str, ...]:
        """The names as a tuple."""
        return tuple(self.names.split())


def _is_float(call: Arguments) -> bool:
    dtype: torch.dtype = call["dtype"] or call["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


_ATOMICS = "adds gradients in any order"
_REPEATED = "writes one element several times in any order where indices repeat"
_TIES = "may choose any of several equal values"
_SORTS = "sorts the indices, also in the backward of"
_WHERE = "torch.where at a fixed shape"
_ONE_HOT = "torch.where, or a product with a one-hot matrix, at a fixed shape"
_BY_VALUE = "segpipe.losses.ohem.kth_largest, by value"
_BILINEAR = "segpipe.models.resize.bilinear"
_AVERAGE = "segpipe.models.resize.adaptive_avg_pool, or avg_pool2d with a fixed kernel"
_POOL = "avg_pool2d or max_pool2d with a fixed kernel"
_PADDING = "zero padding, or torch.cat of slices"

# Ops that CUDA computes nondeterministically, or deterministically but slowly, and what to use instead.
RULES = (
    Rule(
        "nll_loss2d_forward",
        RAISES,
        "adds pixels in any order for reduction mean and sum",
        'cross_entropy(reduction="none") with your own sum and count',
        lambda call: call["reduction"] != 0,
    ),
    Rule(
        "upsample_bilinear2d_backward",
        SLOW,
        f"{_ATOMICS}; F.interpolate changes forward bits too",
        _BILINEAR,
    ),
    Rule(
        "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward upsample_bicubic2d_backward "
        "upsample_linear1d_backward upsample_trilinear3d_backward",
        RAISES,
        _ATOMICS,
        _BILINEAR,
    ),
    Rule(
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
        RAISES,
        _ATOMICS,
        _AVERAGE,
    ),
    Rule(
        "adaptive_max_pool2d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward "
        "avg_pool3d_backward max_pool3d_with_indices_backward",
        RAISES,
        _ATOMICS,
        _POOL,
    ),
    Rule("adaptive_max_pool3d_backward", SILENT, _ATOMICS, _POOL),
    Rule("max_unpool2d max_unpool3d", RAISES, _REPEATED, _BILINEAR),
    Rule(
        "reflection_pad1d_backward reflection_pad3d_backward",
        RAISES,
        _ATOMICS,
        _PADDING,
    ),
    Rule(
        # reflection_pad2d_backward is documented to raise; no release since 2.11 does.
        "reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
        SLOW,
        _ATOMICS,
        _PADDING,
    ),
    Rule(
        "grid_sampler_2d_backward grid_sampler_3d_backward cudnn_grid_sampler_backward",
        RAISES,
        f"{_ATOMICS}; the cuDNN path did so silently",
        f"{_BILINEAR} for a regular grid; warp images before the network",
    ),
    Rule(
        "index_put _index_put_impl _unsafe_index_put",
        SLOW,
        f"{_SORTS} tensor[indices], and synchronizes when they are a mask",
        _WHERE,
        lambda call: bool(call["accumulate"]),
    ),
    Rule("scatter_add index_add", SLOW, f"{_SORTS} gather and index_select", _ONE_HOT),
    Rule("embedding_dense_backward", SLOW, "sorts the indices", _ONE_HOT),
    Rule(
        "scatter",
        SLOW,
        f"{_SORTS} max(dim), sort and topk",
        "scatter of a number, torch.where, or amax for max(dim)",
        lambda call: "src" in call or "reduce" in call,
    ),
    Rule(
        "scatter_reduce",
        SLOW,
        "sorts the indices for sum and mean, and raises for prod",
        _ONE_HOT,
        lambda call: call["reduce"] not in ("amax", "amin"),
    ),
    Rule("index_reduce put", RAISES, _REPEATED, _WHERE),
    Rule(
        "histc",
        RAISES,
        "counts in floats, in any order",
        "torch.bincount of integers without weights",
    ),
    Rule(
        "bincount",
        RAISES,
        "adds weights in any order",
        f"torch.bincount without weights, or {_ONE_HOT}",
        lambda call: call["weights"] is not None,
    ),
    Rule(
        "median nanmedian",
        RAISES,
        _TIES,
        f"median without dim, or {_BY_VALUE}",
        lambda call: "dim" in call,
    ),
    Rule("kthvalue topk", SILENT, _TIES, _BY_VALUE),
    Rule(
        "sort",
        SILENT,
        _TIES,
        f"stable=True, or {_BY_VALUE}",
        lambda call: not call.get("stable"),
    ),
    Rule(
        "cumsum",
        SLOW,
        "adds floats in an order that depends on the load",
        "cumsum of integers",
        _is_float,
    ),
    Rule("_ctc_loss_backward", RAISES, _ATOMICS, "a loss per pixel"),
    Rule(
        "_embedding_bag_backward _embedding_bag_dense_backward",
        RAISES,
        f"{_ATOMICS} for mode max",
        "mode sum or mean",
        lambda call: call["mode"] == 2,
    ),
)


class Violation(NamedTuple):
    """A call that a rule forbids, with the line of the call; for an op of the backward, that of its forward."""

    op: str
    file: str
    line: int
    rule: Rule

    def __str__(self) -> str:
        rule = self.rule
        return f"{self.file}:{self.line} calls {self.op}: it {rule.why}, and {rule.state}. Use {rule.instead}."


def check_ops(call: Callable[[], object]) -> list[Violation]:
    """Forbidden ops in `call()`, which runs forward, loss and backward on a CPU; once per op and line.

    `segpipe.models.resize.bilinear` takes its CUDA path inside. An op of the backward is reported at the line of its
    forward, or at that of `backward()` if the forward ran before `call`. Errors of `call` are not caught. Takes about
    half a millisecond per node of the autograd graph.
    """
    watch = _Watch()
    # Anomaly mode stores in each graph node where its forward was called.
    with as_on_cuda(), torch.autograd.set_detect_anomaly(True, check_nan=False), watch:
        call()
    return list(watch.found)


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes ops that draw from torch's global generators raise RuntimeError, in the thread that enters it.

    All threads of a process share these generators, and dropout in training draws from them.
    """

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As in TorchDispatchMode."""
        kwargs = kwargs or {}
        own = any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))
        # Attention has the tag because of its dropout, which is off in eval mode.
        draws = "scaled_dot_product" not in op.name() and not own
        if draws and torch.Tag.nondeterministic_seeded in op.tags:
            raise RuntimeError(
                f"{op} would draw from the generator used by training; pass a torch.Generator"
            )
        return op(*args, **kwargs)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks up every op before it runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = {op: rule for rule in RULES for op in rule.ops}
        self.found: dict[Violation, None] = {}  # in call order

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = self._rules.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        if rule is not None:
            # By name, with the defaults that the dispatcher omits.
            defaults = {one.name: one.default_value for one in func._schema.arguments}
            defaults.update(zip(defaults, args, strict=False))
            if rule.when({**defaults, **kwargs}):
                self.found[Violation(str(func.overloadpacket), *_caller(), rule)] = None
        if torch.is_inference_mode_enabled():  # composite ops arrive undecomposed there
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


def _caller() -> tuple[str, int]:
    """File and line of the innermost code outside torch that called the op or, in a backward, the op's forward."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_name == "_engine_run_backward" and (
            forward := _forward_of_current_node()
        ):
            return forward
        if _is_users(code.co_filename):
            break
    return code.co_filename, frame.f_lineno


def _forward_of_current_node() -> tuple[str, int] | None:
    """Where the forward of the running autograd node was called; None if it ran before the gate was entered."""
    node = torch._C._current_autograd_node()
    metadata: dict[str, Any] = node.metadata if node is not None else {}  # type: ignore[assignment]
    for text in reversed(metadata.get("traceback_", [])):
        if (match := _FRAME.match(text)) and _is_users(match[1]):
            return match[1], int(match[2])
    return None


def _is_users(file: str) -> bool:
    return not file.startswith((_TORCH, "<frozen")) and file != __file__
