"""Measures the table of `segpipe.determinism.opgate`: which ops differ from run to run, which raise, and what it costs.

It runs on any device, so that its logic is tested where there is no GPU; every row says where it was measured, and
only rows of a GPU say anything about the table.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from segpipe.determinism.opgate import RAISES, RULES, SILENT, Rule
from segpipe.losses.ohem import kth_largest
from segpipe.models.resize import adaptive_avg_pool, bilinear_matmul

CLASSES = 19


@dataclass(frozen=True)
class Inputs:
    """Fixed tensors: the same values on every device."""

    full: Tensor  # float32 (B, 19, S, S), wants a gradient
    small: Tensor  # float32 (B, 19, S/8, S/8), wants a gradient
    volume: Tensor  # float32 (B, 4, S/4, S/4, S/4), wants a gradient
    table: Tensor  # float32 (19, 32), wants a gradient
    labels: Tensor  # int64 (B, S, S), 0 to 18
    values: Tensor  # float32 (B * S * S)
    ties: Tensor  # float32 (B * S * S), multiples of 1/8 only
    grid: Tensor  # float32 (B, S, S, 2), within -1 to 1


def make_inputs(device: torch.device, size: int, batch: int) -> Inputs:
    """Inputs from one seed; `size` is a multiple of 32."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    values = noise(batch * size * size)
    return Inputs(
        noise(batch, CLASSES, size, size).requires_grad_(),
        noise(batch, CLASSES, size // 8, size // 8).requires_grad_(),
        noise(batch, 4, size // 4, size // 4, size // 4).requires_grad_(),
        noise(CLASSES, 32).requires_grad_(),
        torch.randint(0, CLASSES, (batch, size, size), generator=generator).to(device),
        values,
        (values * 8).round() / 8,
        noise(batch, size, size, 2).tanh(),
    )


@dataclass(frozen=True)
class Case:
    """A call of an op and of what replaces it; `by` names the input whose gradient is the result, "" for the value."""

    op: str  # as in the table; after a comma, which variant of it
    by: str
    plain: Callable[[Inputs], Tensor]
    replacement: Callable[[Inputs], Tensor] | None = None

    @property
    def rule(self) -> Rule:
        return next(rule for rule in RULES if self.op.split(",")[0] in rule.ops)

    def compute(self, call: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
        """The value of `call`, or its gradient for a gradient of the output that equals the output."""
        out = call(inputs)
        return (
            torch.autograd.grad(out, getattr(inputs, self.by), out.detach())[0]
            if self.by
            else out
        )


def measure(
    device: torch.device,
    *,
    size: int = 256,
    batch: int = 8,
    runs: int = 10,
    cases: Sequence[Case] | None = None,
) -> list[dict[str, Any]]:
    """One row per case; `size` is a multiple of 32, and small ones give atomics little to collide in.

    bitwise_equal: the same bits `runs` times with deterministic algorithms off. raises: it does with them on.
    deterministic_equal, replacement_equal: the call, and its replacement, gave the same bits `runs` times with them on.
    ms_*: median over the runs, of the call and its backward. None where there is nothing to measure. table: what the
    table says.
    """
    inputs = make_inputs(device, size, batch)
    return [
        _row(case, inputs, device, runs) for case in (CASES if cases is None else cases)
    ]


def _row(case: Case, inputs: Inputs, device: torch.device, runs: int) -> dict[str, Any]:
    with _deterministic(False):
        equal, ms_plain = _repeat(case, case.plain, inputs, device, runs)
    ms_deterministic = ms_replacement = deterministic_equal = replacement_equal = None
    with _deterministic(True):
        try:
            deterministic_equal, ms_deterministic = _repeat(
                case, case.plain, inputs, device, runs
            )
        except RuntimeError as error:
            if "does not have a deterministic implementation" not in str(error):
                raise
        if case.replacement is not None:
            replacement_equal, ms_replacement = _repeat(
                case, case.replacement, inputs, device, runs
            )
    return {
        "op": case.op,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else device.type,
        "raises": ms_deterministic is None,
        "bitwise_equal": equal,
        "deterministic_equal": deterministic_equal,
        "replacement_equal": replacement_equal,
        "ms_plain": ms_plain,
        "ms_deterministic": ms_deterministic,
        "ms_replacement": ms_replacement,
        "table": case.rule.state,
    }


def misjudged(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of a GPU that contradict the table, in words. That an op happened to repeat its bits contradicts nothing,
    and what a variant does (`op, direct`) the table tells in `why`."""
    found = []
    for row in rows:
        if row["device"] == "cpu" or "," in row["op"]:
            continue
        if row["raises"] != (row["table"] == RAISES):
            found.append(
                f"{row['op']} {'raises' if row['raises'] else 'does not raise'}, the table: {row['table']}"
            )
        elif row["deterministic_equal"] is False and row["table"] != SILENT:
            found.append(f"{row['op']} changes all the same, the table: {row['table']}")
    return found


def _repeat(
    case: Case,
    call: Callable[[Inputs], Tensor],
    inputs: Inputs,
    device: torch.device,
    runs: int,
) -> tuple[bool, float]:
    """Whether all runs give the bits of one before them, and their median time in ms."""
    first, equal, seconds = case.compute(call, inputs), True, []
    for _ in range(runs):
        _wait(device)
        started = time.perf_counter()
        result = case.compute(call, inputs)
        _wait(device)
        seconds.append(time.perf_counter() - started)
        equal = equal and torch.equal(result, first)
    return equal, round(1000 * statistics.median(seconds), 4)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    """Deterministic algorithms on or off, without filling new memory, which would be timed too."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _one_hot(labels: Tensor) -> Tensor:
    return (
        labels.flatten() == torch.arange(CLASSES, device=labels.device)[:, None]
    ).float()


def _class_sums(i: Inputs) -> Tensor:
    return _one_hot(i.labels) @ i.values


def _zeros(i: Inputs) -> Tensor:
    return i.values.new_zeros(CLASSES)


def _class_means(i: Inputs) -> Tensor:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # "in beta"
        return _zeros(i).index_reduce(0, _flat(i), i.values, "mean", include_self=False)


def _flat(i: Inputs) -> Tensor:
    return i.labels.flatten()


def _histogram(i: Inputs) -> Tensor:
    bins = ((i.values.clamp(-4, 4) + 4) * 8).long().clamp_max(63)
    return torch.bincount(bins, minlength=64).float()


def _replicated(x: Tensor) -> Tensor:
    wide = torch.cat([x[..., :1], x, x[..., -1:]], -1)
    return torch.cat([wide[..., :1, :], wide, wide[..., -1:, :]], -2)


def _reflected(x: Tensor) -> Tensor:
    wide = torch.cat([x[..., 1:2], x, x[..., -2:-1]], -1)
    return torch.cat([wide[..., 1:2, :], wide, wide[..., -2:-1, :]], -2)


def _upsampled(x: Tensor, mode: str, **options: bool) -> Tensor:
    return F.interpolate(x, scale_factor=8, mode=mode, **options)


def _by_matrix(i: Inputs) -> Tensor:
    return bilinear_matmul(i.small, (i.full.shape[-2], i.full.shape[-1]))


def _direct_bilinear(i: Inputs) -> Tensor:
    out: Tensor = torch.ops.aten.upsample_bilinear2d(
        i.small, list(i.full.shape[-2:]), False
    )
    return out


def _ctc(i: Inputs) -> Tensor:
    steps = i.small.flatten(2).permute(2, 0, 1).log_softmax(2)
    targets = i.labels[:, 0, :4].clamp_min(1)
    lengths = torch.full((steps.shape[1],), 4)
    return F.ctc_loss(
        steps,
        targets,
        torch.full_like(lengths, steps.shape[0]),
        lengths,
        zero_infinity=True,
    )


def _unpooled(i: Inputs) -> Tensor:
    pooled, indices = F.max_pool2d(i.full.detach(), 3, 2, 1, return_indices=True)
    return F.max_unpool2d(
        pooled, indices, (3, 3), (2, 2), (1, 1), output_size=i.full.shape[-2:]
    )


def _fractional(x: Tensor) -> Tensor:
    return F.fractional_max_pool2d(
        x, 3, x.shape[-1] // 2, _random_samples=x.new_full((*x.shape[:2], 2), 0.5)
    )


def _first(values: Tensor, count: int) -> Tensor:
    return values.sort(descending=True, stable=True).indices[:count]


def _kth(i: Inputs) -> Tensor:
    found: Tensor = kth_largest(i.ties.abs(), i.ties.numel() // 2)
    return found


CASES = (
    Case(
        "nll_loss2d_forward",
        "",
        lambda i: F.cross_entropy(i.full.detach(), i.labels),
        lambda i: (
            F.cross_entropy(i.full.detach(), i.labels, reduction="none").sum()
            / i.labels.numel()
        ),
    ),
    Case(
        "upsample_bilinear2d_backward",
        "small",
        lambda i: _upsampled(i.small, "bilinear"),
        _by_matrix,
    ),
    Case("upsample_bilinear2d_backward, direct", "small", _direct_bilinear, _by_matrix),
    Case(
        "_upsample_bilinear2d_aa_backward",
        "full",
        lambda i: F.interpolate(
            i.full, scale_factor=0.5, mode="bilinear", antialias=True
        ),
    ),
    Case(
        "upsample_bicubic2d_backward", "small", lambda i: _upsampled(i.small, "bicubic")
    ),
    Case(
        "_adaptive_avg_pool2d_backward",
        "small",
        lambda i: F.adaptive_avg_pool2d(i.small, 3),
        lambda i: adaptive_avg_pool(i.small, 3),
    ),
    Case(
        "adaptive_max_pool2d_backward",
        "full",
        lambda i: F.adaptive_max_pool2d(i.full, i.full.shape[-1] // 8),
        lambda i: F.max_pool2d(i.full, 8),
    ),
    Case(
        "adaptive_max_pool3d_backward",
        "volume",
        lambda i: F.adaptive_max_pool3d(i.volume, 3),
    ),
    Case("fractional_max_pool2d_backward", "full", lambda i: _fractional(i.full)),
    Case("avg_pool3d_backward", "volume", lambda i: F.avg_pool3d(i.volume, 3, 1, 1)),
    Case(
        "max_pool3d_with_indices_backward",
        "volume",
        lambda i: F.max_pool3d(i.volume, 3, 1, 1),
    ),
    Case("max_unpool2d", "", _unpooled),
    Case(
        "reflection_pad2d_backward",
        "full",
        lambda i: F.pad(i.full, (1, 1, 1, 1), mode="reflect"),
        lambda i: _reflected(i.full),
    ),
    Case(
        "reflection_pad1d_backward",
        "full",
        lambda i: F.pad(i.full[0], (1, 1), mode="reflect"),
    ),
    Case(
        "replication_pad2d_backward",
        "full",
        lambda i: F.pad(i.full, (1, 1, 1, 1), mode="replicate"),
        lambda i: _replicated(i.full),
    ),
    Case(
        "grid_sampler_2d_backward",
        "small",
        lambda i: F.grid_sample(i.small, i.grid, align_corners=False),
    ),
    Case(
        "index_put",
        "table",
        lambda i: i.table[_flat(i)],
        lambda i: _one_hot(i.labels).T @ i.table,
    ),
    Case(
        "scatter_add",
        "",
        lambda i: _zeros(i).scatter_add(0, _flat(i), i.values),
        _class_sums,
    ),
    Case(
        "index_add",
        "",
        lambda i: _zeros(i).index_add(0, _flat(i), i.values),
        _class_sums,
    ),
    Case(
        "embedding_dense_backward",
        "table",
        lambda i: F.embedding(_flat(i), i.table),
        lambda i: _one_hot(i.labels).T @ i.table,
    ),
    Case("scatter", "full", lambda i: i.full.max(1).values, lambda i: i.full.amax(1)),
    Case(
        "scatter_reduce",
        "",
        lambda i: _zeros(i).scatter_reduce(0, _flat(i), i.values, "sum"),
        _class_sums,
    ),
    Case("index_reduce", "", _class_means),
    Case(
        "put",
        "",
        lambda i: _zeros(i).put(_flat(i), i.values, accumulate=True),
        _class_sums,
    ),
    Case(
        "histc", "", lambda i: torch.histc(i.values.clamp(-4, 4), 64, -4, 4), _histogram
    ),
    Case(
        "bincount",
        "",
        lambda i: torch.bincount(_flat(i), weights=i.values).float(),
        _class_sums,
    ),
    Case("median", "", lambda i: i.ties.median(0).indices, lambda i: i.ties.median()),
    Case(
        "kthvalue",
        "",
        lambda i: i.ties.abs().kthvalue(i.ties.numel() // 2).indices,
        _kth,
    ),
    Case(
        "sort",
        "",
        lambda i: i.ties.sort(descending=True).indices,
        lambda i: _first(i.ties, i.ties.numel()),
    ),
    Case(
        "topk",
        "",
        lambda i: i.ties.topk(i.ties.numel() // 16).indices,
        lambda i: _first(i.ties, i.ties.numel() // 16),
    ),
    Case("cumsum", "", lambda i: i.values.cumsum(0)),
    Case("_ctc_loss_backward", "small", _ctc),
    Case(
        "_embedding_bag_dense_backward",
        "table",
        lambda i: F.embedding_bag(i.labels.flatten(1), i.table, mode="max"),
    ),
)
"""At least one case for every rule of the table."""
