"""The resize of a GPU by Triton: in Triton's interpreter against float64, compiled for an H100, and where it fails.

The interpreter must be chosen before triton is imported, so another process runs it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu import compare_resize
from ranks import launched
from segpipe import native
from segpipe.models import resize

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")
# Shape and size: up by whole and odd factors, in one axis, down, to the same, from one pixel, more than one block.
CASES = (
    ((2, 2, 3, 4), (6, 20)),
    ((1, 3, 2, 4), (5, 9)),
    ((1, 2, 7, 1), (5, 4)),
    ((1, 3, 6, 7), (3, 2)),
    ((1, 2, 1, 1), (3, 2)),
    ((1, 1, 2, 530), (3, 540)),
    ((1, 260, 1, 2), (2, 3)),
)


def differences(number: int) -> list[float]:
    """Of values and gradients in fp32, relative to the largest; of values in bf16; 1 where a memory format is lost.

    Or where the node of a compiled graph has other bits.
    """
    from segpipe.models import triton_resize

    torch.manual_seed(number)
    shape, size = CASES[number]
    x, weights = torch.randn(shape), torch.randn(*shape[:2], *size)
    corners, order = (
        bool(number % 2),
        (torch.contiguous_format, torch.channels_last)[number // 2 % 2],
    )
    exact = x.double().requires_grad_()
    rows, columns = (  # with coordinates as torch has them for fp32
        torch.from_numpy(
            resize.bilinear_weights(*lengths, np.float32, align_corners=corners)
        ).double()
        for lengths in zip(shape[2:], size, strict=True)
    )
    expected = rows @ exact @ columns.t()
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    given = x.clone(memory_format=order).requires_grad_()
    axes = resize.bilinear_axes(given, size, align_corners=corners)
    found = triton_resize.bilinear(given, axes, order)
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    half = triton_resize.bilinear(given.detach().bfloat16(), axes, order)
    compiled = x.clone(memory_format=order).requires_grad_()
    kind = "bilinear_corners" if corners else "bilinear"
    with mock.patch.object(resize, "_kernels_for", return_value=triton_resize):
        node = resize._compiled(compiled, kind, shape[2:], size, False)
        (node * weights).sum().backward()
    assert compiled.grad is not None
    assert given.grad is not None
    lost = (
        not torch.equal(node, found)
        or node.stride() != found.stride()
        or not torch.equal(compiled.grad, given.grad)
        or found.dtype != x.dtype
        or half.dtype != torch.bfloat16
        or not found.is_contiguous(memory_format=order)
    )
    return [
        far(found, expected),
        far(given.grad, exact.grad),
        far(half, expected),
        float(lost),
    ]


def far(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float(
        (found.detach().double() - expected.detach()).abs().max()
        / expected.detach().abs().max()
    )


def _interpreted(rank: int) -> list[list[float]]:
    """Differences of all cases; gpu-check accepts the kernels."""
    os.environ["TRITON_INTERPRET"] = "1"
    from segpipe.models import triton_resize

    compare_resize(triton_resize, CPU)
    return [differences(number) for number in range(len(CASES))]


def test_values_and_gradients_are_those_of_float64() -> None:
    (found,) = launched(1, _interpreted)
    assert len(found) == len(CASES)
    for case, (value, gradient, half, lost) in zip(CASES, found, strict=True):
        assert value < 2e-6, case
        assert gradient < 2e-6, case
        assert 1e-4 < half < 1e-2 or case[0][2:] == (1, 1), (
            case
        )  # its inputs are rounded, so it cannot be closer
        assert lost == 0, case


def test_they_compile_for_an_h100() -> None:
    """Without a GPU: what the compiler refuses must not wait for one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from segpipe.models import triton_resize as kernels

    names = dict.fromkeys(kernels._product.arg_names, "i32")
    names |= {"row_first": "*i32", "col_first": "*i32", "block": "constexpr"}
    names |= {"row_weights": "*fp32", "col_weights": "*fp32"}
    for dtype in ("*bf16", "*fp32"):
        given = {**names, "source": dtype, "out": dtype}
        source = ASTSource(kernels._product, given, {"block": 512})
        ptx = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert "atom" not in ptx
        assert "red.global" not in ptx


def test_what_a_cuda_graph_reads_outlives_the_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A validation on images of many sizes empties them; a replay would then read memory that is somebody else's."""
    from triton.runtime.jit import JITFunction

    from segpipe.models import triton_resize

    held: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(triton_resize, "_recorded", held)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: None)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    seen = []
    for capturing in (False, True):
        monkeypatch.setattr(
            torch.cuda,
            "is_current_stream_capturing",
            lambda capturing=capturing: capturing,
        )
        x = torch.randn(1, 2, 3, 5, requires_grad=True)
        axes = resize.bilinear_axes(x, (6, 10))
        triton_resize.bilinear(x, axes, torch.contiguous_format).sum().backward()
        read = [
            value
            for axis in axes
            for band in triton_resize._bands(axis)
            for value in band
        ]
        seen.append(
            [any(value is kept for values in held for kept in values) for value in read]
        )
    assert seen == [[False] * 8, [True] * 8]


@pytest.mark.parametrize("fault", ["value", "gradient"])
def test_gpu_check_names_kernels_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from segpipe.models import triton_resize

    def bilinear(x: Tensor, axes: Any, order: torch.memory_format) -> Tensor:
        found = F.interpolate(x, tuple(len(axis.low) for axis in axes), mode="bilinear")
        return found + 1e-3 * (found if fault == "value" else found - found.detach())

    monkeypatch.setattr(triton_resize, "bilinear", bilinear)
    with pytest.raises(AssertionError, match="not close"):
        compare_resize(triton_resize, CPU)


@pytest.mark.parametrize("works", [True, False])
def test_products_take_its_place_where_triton_does_not_work(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    from segpipe.models import triton_resize

    monkeypatch.setattr(native, "triton_builds", lambda: works)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert resize._kernels_for(torch.ones(1)) is (triton_resize if works else None)
    assert resize._kernels_for(torch.ones(1).double()) is None


def test_only_tensors_of_a_gpu_take_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        native, "triton_builds", lambda: pytest.fail("asked for the kernels")
    )
    with resize.as_on_cuda():
        resize.bilinear(torch.randn(1, 2, 3, 4), (6, 8))
