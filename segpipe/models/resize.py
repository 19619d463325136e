"""Bilinear resize and adaptive average pooling whose backward is deterministic, fast on CUDA and exportable.

torch's own backward of both is either an error or a slow decomposition under deterministic algorithms. Both
maps are linear and separable, so they equal two products with small constant matrices.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

_Real = TypeVar("_Real", np.float32, np.float64)

_MATRICES: dict[tuple[str, int, int, torch.device, torch.dtype], Tensor] = {}
_as_on_cuda = False


def bilinear(x: Tensor, size: tuple[int, int], *, align_corners: bool = False) -> Tensor:
    """`x` resized to `size` = (height, width); the one bilinear resize of the project.

    Shapes: float (B, C, h, w) -> same dtype (B, C, H, W). On a CPU and in export this is `F.interpolate`; on CUDA
    under deterministic algorithms it is `bilinear_matmul`, because torch's backward is slow there. The two agree to
    5e-7 of the largest value in fp32, unless TF32 is allowed for matrix products.
    """
    on_cuda = _as_on_cuda or (x.is_cuda and torch.are_deterministic_algorithms_enabled())
    if on_cuda and not _exporting():
        return bilinear_matmul(x, size, align_corners=align_corners)
    return F.interpolate(x, size=size, mode="bilinear", align_corners=align_corners)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """A context in which `bilinear` goes the way of CUDA on a CPU too, so that a test there sees the same ops."""
    global _as_on_cuda
    before, _as_on_cuda = _as_on_cuda, True
    try:
        yield
    finally:
        _as_on_cuda = before


def bilinear_matmul(x: Tensor, size: tuple[int, int], *, align_corners: bool = False) -> Tensor:
    """`F.interpolate(x, size, mode="bilinear")` as `rows @ x @ columns.T`, on any device.

    Shapes: float (B, C, h, w) -> same dtype (B, C, H, W). Half precision is computed in fp32, autocast or not.
    """
    return _separable(x, size, "bilinear_corners" if align_corners else "bilinear")


def adaptive_avg_pool(x: Tensor, bins: int) -> Tensor:
    """`F.adaptive_avg_pool2d(x, bins)` to 1e-6, also where the bins do not divide the feature map.

    Shapes: float (B, C, h, w) -> same dtype (B, C, bins, bins). The spatial size becomes a constant of an exported
    graph, unless the graph leaves it open. Half precision is computed in fp32.
    """
    if bins == 1:
        return x.mean((-2, -1), keepdim=True)
    return _separable(x, (bins, bins), "pool")


def bilinear_weights(num_in: int, num_out: int, real: type[_Real], *, align_corners: bool) -> NDArray[_Real]:
    """Matrix (num_out, num_in) that interpolates one axis; every row sums to 1.

    Coordinates are computed in `real`, as torch computes them in the dtype of its input: exact ones would differ from
    an exported fp32 graph by 4e-6.
    """
    out = np.arange(num_out, dtype=real)
    if align_corners:
        source = out * (real(num_in - 1) / real(max(num_out - 1, 1)))
    else:
        source = np.maximum((out + real(0.5)) * (real(num_in) / real(num_out)) - real(0.5), real(0))
    low = np.minimum(source.astype(np.int64), num_in - 1)
    high = np.minimum(low + 1, num_in - 1)
    share = source - low.astype(real)
    matrix = np.zeros((num_out, num_in), real)
    np.add.at(matrix, (np.arange(num_out), low), real(1) - share)
    np.add.at(matrix, (np.arange(num_out), high), share)
    return matrix


def pool_weights(num_in: int, bins: int, real: type[_Real]) -> NDArray[_Real]:
    """Matrix (bins, num_in) that averages bin b over [floor(b n / bins), ceil((b + 1) n / bins))."""
    matrix = np.zeros((bins, num_in), real)
    for row in range(bins):
        start, stop = row * num_in // bins, -(-(row + 1) * num_in // bins)
        matrix[row, start:stop] = 1.0 / (stop - start)
    return matrix


def traced_pool_weights(num_in: int | torch.SymInt, bins: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`pool_weights` bit by bit, computed by the graph itself, for an exported one whose size is open."""
    cell = torch.arange(num_in, device=device)
    row = torch.arange(bins, device=device)[:, None]
    # start <= cell < stop, multiplied out: whole numbers need no rounding.
    inside = ((cell + 1) * bins > row * num_in) & (cell * bins < (row + 1) * num_in)
    ones = inside.to(dtype)
    weights: Tensor = ones / ones.sum(1, keepdim=True)
    return weights


_WEIGHTS: dict[str, Callable[[int, int, type[Any]], NDArray[Any]]] = {
    "bilinear": partial(bilinear_weights, align_corners=False),
    "bilinear_corners": partial(bilinear_weights, align_corners=True),
    "pool": pool_weights,
}


def _separable(x: Tensor, size: tuple[int, int], kind: str) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):  # it would turn the products into bf16 ones
        with torch.autocast(x.device.type, enabled=False):
            return _separable(x, size, kind)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    # A fake tensor of torch.export must not outlive its trace, and torch.jit.trace checks that two traces are equal.
    cached = type(x) is Tensor and not _tracing()
    with _static_shapes():
        rows = _weights(kind, x.shape[-2], size[0], wide, cached)
        columns = _weights(kind, x.shape[-1], size[1], wide, cached)
    out = torch.matmul(rows, torch.matmul(wide, columns.t()))
    return out if wide is x else out.to(x.dtype)


def _weights(kind: str, num_in: int | torch.SymInt, num_out: int, like: Tensor, cached: bool) -> Tensor:
    if kind == "pool" and isinstance(num_in, torch.SymInt):  # of torch.export, where a size is left open
        return traced_pool_weights(num_in, num_out, like.device, like.dtype)
    constant: Tensor = _matrix(kind, int(num_in), int(num_out), like.device, like.dtype, cached)
    return constant


def _matrix(kind: str, num_in: int, num_out: int, device: torch.device, dtype: torch.dtype, cached: bool) -> Tensor:
    """The weights as a tensor (num_out, num_in); made once per process if `cached`."""
    key = (kind, num_in, num_out, device, dtype)
    if cached and key in _MATRICES:
        return _MATRICES[key]
    weights = _WEIGHTS[kind](num_in, num_out, np.float64 if dtype == torch.float64 else np.float32)
    # A tensor made in inference mode could not take part in a later backward.
    with torch.inference_mode(False):
        matrix = torch.tensor(weights.tolist(), dtype=dtype, device=device)
    if cached:
        _MATRICES[key] = matrix
    return matrix


def _static_shapes() -> AbstractContextManager[object]:
    """Silences torch.jit.trace about shapes that become constants: a traced file is for one size by contract."""
    if not _tracing():
        return nullcontext()
    category: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
    return warnings.catch_warnings(action="ignore", category=category)


def _tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _exporting() -> bool:
    return _tracing() or torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()
