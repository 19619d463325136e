"""Bilinear resize and adaptive average pooling, exportable and with a backward that is deterministic and fast on CUDA.

Under deterministic algorithms, torch's backward of both either raises or falls back to a slow decomposition. Both maps
are linear and separable, so they equal two products with small constant matrices.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from segpipe import native

Real = type[np.floating[Any]]  # np.float32 or np.float64
Taps = tuple[NDArray[np.int64], NDArray[Any]]  # returned by `bilinear_taps`
_as_on_cuda = False


def bilinear(x: Tensor, size: Sequence[int], *, align_corners: bool = False) -> Tensor:
    """`x` resized to `size` = (height, width); the only bilinear resize of the project.

    Shapes: float (B, C, h, w) -> same dtype (B, C, H, W). On a CPU and in export this is `F.interpolate`. On CUDA under
    deterministic algorithms, where torch's backward is slow, it is a Triton kernel, or `bilinear_matmul` if Triton does
    not work. All agree to 5e-7 of the largest value in fp32, unless TF32 is allowed for matrix products.
    """
    if not _needs_own_way(x):
        return F.interpolate(x, size=size, mode="bilinear", align_corners=align_corners)

    if torch.compiler.is_compiling() or (kernels := _kernels_for(x)) is None:
        return bilinear_matmul(x, size, align_corners=align_corners)

    axes = bilinear_axes(x, size, align_corners=align_corners)
    return kernels.bilinear(x, axes, order_of(x))


def bicubic(x: Tensor, size: Sequence[int]) -> Tensor:
    """`F.interpolate(x, size, mode="bicubic")`; two matrix products on CUDA under deterministic algorithms.

    Shapes: float (B, C, h, w) -> same dtype (B, C, H, W).
    """
    if _needs_own_way(x):
        return _separable(x, size, "bicubic")
    return F.interpolate(x, size=size, mode="bicubic")


def _needs_own_way(x: Tensor) -> bool:
    """Whether torch's resize would be nondeterministic or slow here, and no graph is being exported."""
    on_cuda = x.is_cuda and torch.are_deterministic_algorithms_enabled()
    return (on_cuda or _as_on_cuda) and not (_tracing() or _exporting())


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Context in which resizes take their CUDA path even on a CPU, so that tests there see the same ops."""
    global _as_on_cuda
    before, _as_on_cuda = _as_on_cuda, True
    try:
        yield
    finally:
        _as_on_cuda = before


def bilinear_matmul(
    x: Tensor, size: Sequence[int], *, align_corners: bool = False, stride: int = 1
) -> Tensor:
    """`F.interpolate(x, size, mode="bilinear")` as `rows @ x @ columns.T`, on any device.

    With `stride`, computes only rows and columns `stride // 2 :: stride` of that result.

    Shapes: float (B, C, h, w) -> same dtype (B, C, H, W). Half precision is computed in fp32, also under autocast.
    """
    return _separable(
        x, size, "bilinear_corners" if align_corners else "bilinear", stride
    )


def adaptive_avg_pool(x: Tensor, bins: int) -> Tensor:
    """`F.adaptive_avg_pool2d(x, bins)` to within 1e-6, even if `bins` does not divide the feature map's size.

    Shapes: float (B, C, h, w) -> same dtype (B, C, bins, bins). The spatial size becomes a constant of an exported
    graph. Half precision is computed in fp32.
    """
    if bins == 1:
        return x.mean((-2, -1), keepdim=True)
    return _separable(x, (bins, bins), "pool")


def bilinear_taps(
    num_in: int, num_out: int, real: Real, *, align_corners: bool
) -> Taps:
    """Index of the lower input, and weight of the next one, 0 to 1, for each output position of an axis.

    Coordinates are computed in `real`, as torch computes them in the dtype of its input: exact ones would differ from
    an exported fp32 graph by 4e-6.
    """
    out = np.arange(num_out, dtype=real)
    if align_corners:
        source = out * ((num_in - 1) / max(num_out - 1, 1))
    else:
        source = np.maximum((out + 0.5) * (num_in / num_out) - 0.5, 0)

    low = np.minimum(source.astype(np.int64), num_in - 1)

    return low, source - low.astype(real)


def bilinear_weights(
    num_in: int, num_out: int, real: Real, *, align_corners: bool
) -> NDArray[Any]:
    """Matrix (num_out, num_in) that interpolates one axis, by `bilinear_taps`; every row sums to 1."""
    taps = bilinear_taps(num_in, num_out, real, align_corners=align_corners)
    return _dense(num_in, *taps)


def _dense(num_in: int, low: NDArray[np.int64], share: NDArray[Any]) -> NDArray[Any]:
    source = np.minimum(low + share, num_in - 1)[:, None]
    nearness = 1 - np.abs(source - np.arange(num_in))
    return np.maximum(nearness, 0).astype(share.dtype)


def bicubic_weights(num_in: int, num_out: int, real: Real) -> NDArray[Any]:
    """Matrix (num_out, num_in) that interpolates one axis by cubic convolution with a = -0.75, as torch does."""
    source = (np.arange(num_out, dtype=real) + 0.5) * (num_in / num_out) - 0.5
    low = np.floor(source)
    matrix = np.zeros((num_out, num_in), real)
    for tap in (-1, 0, 1, 2):
        x = np.abs(source - low - tap)
        near = (1.25 * x - 2.25) * x * x + 1
        far = ((-0.75 * x + 3.75) * x - 6) * x + 3
        places = np.clip(low.astype(np.int64) + tap, 0, num_in - 1)
        np.add.at(matrix, (np.arange(num_out), places), np.where(x <= 1, near, far))

    return matrix


@dataclass(frozen=True, eq=False)  # compared by identity as a cache key
class Axis:
    """How one axis is resized: each output interpolates the inputs `low` and `low` + 1, the second with weight `share`.

    Shapes: low int32 and share float (num_out,), on a device.
    """

    low: Tensor
    share: Tensor
    num_in: int
    host: Taps  # the same, on the host

    @property
    def weights(self) -> NDArray[Any]:
        """The same as a matrix, (num_out, num_in)."""
        return _dense(self.num_in, *self.host)

    @cached_property
    def matrix(self) -> Tensor:
        """`weights` on the device; created at first use, because compiled passes never need it."""
        with torch.inference_mode(False):
            return torch.from_numpy(self.weights).to(self.low.device)


def bilinear_axes(
    x: Tensor, size: Sequence[int], *, align_corners: bool = False, stride: int = 1
) -> tuple[Axis, Axis]:
    """Row and column axes of `bilinear_matmul`, on the device of `x`; cached per process.

    In fp32, or float64 if `x` is.
    """
    real = np.float64 if x.dtype == torch.float64 else np.float32
    given = (stride, align_corners, x.device, real)
    rows = _axis(x.shape[-2], size[0], *given)
    return rows, _axis(x.shape[-1], size[1], *given)


@lru_cache(maxsize=256)
def _axis(
    num_in: int,
    num_out: int,
    stride: int,
    align_corners: bool,
    device: torch.device,
    real: Real,
) -> Axis:
    taps = bilinear_taps(num_in, num_out, real, align_corners=align_corners)
    low, share = (np.ascontiguousarray(each[stride // 2 :: stride]) for each in taps)
    with torch.inference_mode(False):
        at = torch.from_numpy(low.astype(np.int32)).to(device)
        return Axis(at, torch.from_numpy(share).to(device), num_in, (low, share))


def _kernels_for(x: Tensor) -> Any:
    """The module triton_resize, if it can resize `x` and Triton works; else None."""
    fits = x.is_cuda and x.numel() and x.dtype != torch.float64
    if not (fits and native.triton_builds()):
        return None
    from segpipe.models import triton_resize  # takes seconds, not available everywhere

    return triton_resize


def order_of(x: Tensor) -> torch.memory_format:
    """The memory format of `x`, or of the copy that a kernel needs."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    plain = x.is_contiguous() or not last
    return torch.contiguous_format if plain else torch.channels_last


def pool_weights(num_in: int, bins: int, real: Real) -> NDArray[Any]:
    """Matrix (bins, num_in) that averages bin b over [floor(b n / bins), ceil((b + 1) n / bins))."""
    matrix = np.zeros((bins, num_in), real)
    for row in range(bins):
        matrix[row, row * num_in // bins : -(-(row + 1) * num_in // bins)] = 1
    return matrix / matrix.sum(1, keepdims=True)


def _separable(x: Tensor, size: Sequence[int], kind: str, stride: int = 1) -> Tensor:
    if torch.compiler.is_compiling() and not _exporting():
        assert stride == 1, "only losses use a stride, and they are not compiled"
        return _compiled(x, kind, x.shape[-2:], size, False)  # type: ignore[no-any-return]
    rows = _matrix(kind, x.shape[-2], size[0], stride, x)
    columns = _matrix(kind, x.shape[-1], size[1], stride, x)
    return _products(x, rows, columns)


def _products(
    x: Tensor, rows: Tensor, columns: Tensor, *, back: bool = False
) -> Tensor:
    """rows @ (x @ columns.T), computed in the dtype of the matrices; the result has the dtype of `x`.

    With `back`, its gradient, (rows.T @ x) @ columns, multiplied in the order that autograd uses.
    """
    on_meta = x.device.type == "meta"  # has no autocast
    if not on_meta and torch.is_autocast_enabled(x.device.type):
        # Autocast would run the products in bf16.
        with torch.autocast(x.device.type, enabled=False):
            return _products(x, rows, columns, back=back)

    wide = x if x.dtype == rows.dtype else x.to(rows.dtype)
    if back:
        out = torch.matmul(torch.matmul(rows.t(), wide), columns)
    else:
        out = torch.matmul(rows, torch.matmul(wide, columns.t()))
    return out if wide is x else out.to(x.dtype)


def _matrix(kind: str, num_in: int, num_out: int, stride: int, like: Tensor) -> Tensor:
    """Weights of one axis, (num_out / stride, num_in), on the device of `like`, at least fp32; cached per process."""
    wide = torch.promote_types(like.dtype, torch.float32)
    given = (kind, int(num_in), num_out, stride, like.device, wide)
    # torch.export's fake tensors must not outlive their trace; torch.jit.trace compares two traces, which must both
    # build the matrix.
    if type(like) is not Tensor or _tracing():
        return _built(*given)

    return _kept(*given)


def _built(
    kind: str,
    num_in: int,
    num_out: int,
    stride: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    real = np.float64 if dtype == torch.float64 else np.float32
    weights = WEIGHTS[kind](num_in, num_out, real)[stride // 2 :: stride]
    # A tensor created in inference mode cannot take part in a later backward.
    with torch.inference_mode(False):
        return torch.tensor(weights, device=device)


_kept = cache(_built)


# torch.compile caches graphs on disk by the name of an operator, not by its code. If the strides of its output change,
# the operator needs a new name, or graphs that an earlier version cached fail.
@torch.library.custom_op("segpipe::resize", mutates_args=())
def _compiled(
    x: Tensor, kind: str, inner: Sequence[int], outer: Sequence[int], back: bool
) -> Tensor:
    """A resize from size `inner` to `outer` as one node of a compiled graph; with `back`, its gradient.

    torch.compile cannot trace the code that builds a matrix. Eager mode avoids this op: its first call imports the
    compiler.
    """
    kernels = _kernels_for(x) if "bilinear" in kind else None
    ends = list(zip(inner, outer, strict=True))
    if kernels:
        given = 1, kind == "bilinear_corners", x.device, np.float32
        axes = [_axis(*each, *given) for each in ends]
        return kernels.resized(x, axes, order_of(x), back)
    matrices = (_matrix(kind, *each, 1, x) for each in ends)
    out = _products(x, *matrices, back=back)
    return out.contiguous(memory_format=_order(x, kind))


def _order(x: Tensor, kind: str) -> torch.memory_format:
    """Memory format of the result: that of a kernel where there may be one; products are contiguous."""
    by_kernel = x.is_cuda and "bilinear" in kind
    return order_of(x) if by_kernel else torch.contiguous_format


@_compiled.register_fake
def _(
    x: Tensor, kind: str, inner: Sequence[int], outer: Sequence[int], back: bool
) -> Tensor:
    shape = *x.shape[:-2], *(inner if back else outer)
    order = _order(x, kind)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.given, _ = inputs


def _gradient(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
    return _compiled(given, *ctx.given, True), None, None, None, None


_compiled.register_autograd(_gradient, setup_context=_keep)


# Functions that return the weights of one axis, by kind of resize.
WEIGHTS: dict[str, Callable[..., NDArray[Any]]] = {
    "pool": pool_weights,
    "bilinear": partial(bilinear_weights, align_corners=False),
    "bilinear_corners": partial(bilinear_weights, align_corners=True),
    "bicubic": bicubic_weights,
}


def _exporting() -> bool:
    """As torch.compiler.is_exporting(), which is always true inside the torch.compile of torch 2.11."""
    return torch.compiler._is_exporting_flag


def _tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
