"""The Triton kernels in Triton's interpreter, which runs them on a CPU, against plain torch in float64.

The interpreter must be chosen before triton is imported, so another process runs them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ranks import launched

# Images, classes, size of logits, size of target, stride: whole, odd and equal scales, down to less, blocks of columns.
CASES = (
    (2, 3, (2, 3), (16, 24), 1),
    (1, 19, (2, 14), (5, 115), 1),
    (1, 5, (5, 4), (3, 3), 1),
    (2, 4, (4, 17), (4, 17), 1),
    (1, 2, (3, 5), (25, 41), 2),
    (1, 3, (1, 1), (5, 70), 1),
    (1, 70, (1, 20), (2, 40), 1),
)


def difference(number: int) -> float:
    """Largest error of losses, gradient and sums of a case, each relative to its largest value."""
    from segpipe.losses import cross_entropy, triton_pass
    from segpipe.losses.fused import ClassHead, Wanted
    from segpipe.models.resize import bilinear_axes

    torch.manual_seed(number)
    batch, classes, small, size, stride = CASES[number]
    seen = torch.randint(0, classes, (batch, *size), dtype=torch.uint8)
    seen[torch.rand(seen.shape) < 0.3] = 255
    seen = seen[:, stride // 2 :: stride, stride // 2 :: stride].contiguous()
    weights = torch.rand(classes) + 0.1 if number % 2 else None
    factors = torch.rand(seen.shape) if number % 3 else None
    slopes = (torch.randn(classes), torch.randn(classes)) if number % 2 == 0 else None
    found = []
    for evaluate, kind in (
        (triton_pass.evaluate, torch.float32),
        (cross_entropy.evaluate, torch.float64),
    ):
        torch.manual_seed(number)
        logits = (torch.randn(batch, classes, *small) * 3).to(kind)
        rows, columns = bilinear_axes(
            logits, size, align_corners=number % 2 == 1, stride=stride
        )
        given = weights.to(kind) if weights is not None else None
        head = ClassHead(logits, seen, rows, columns, given, 0.1 * (number % 3))
        found.append(evaluate(head, Wanted(True, True, factors, slopes)))
    parts = [[each.losses, each.gradient, each.sums] for each in found]
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-9))
        for a, b in zip(*parts, strict=True)
    )


def _differences(rank: int) -> list[float]:
    os.environ["TRITON_INTERPRET"] = "1"
    return [difference(number) for number in range(len(CASES))]


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")
def test_the_kernels_are_those_of_float64() -> None:
    (errors,) = launched(1, _differences)
    assert len(errors) == len(CASES)
    assert max(errors) <= 1e-6, errors


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")
@pytest.mark.parametrize(("classes", "everything"), [(19, False), (150, True)])
def test_they_compile_for_an_h100(classes: int, everything: bool) -> None:
    """Without a GPU: what the compiler refuses must not wait for one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from segpipe.losses import triton_pass

    number = "*fp32"
    kinds: dict[str, Any] = {
        "logits": number, "target": "*u8", "weights": number, "losses": number,
        "axes": ("*i32", number, "*i32", number), "shape": ("i32",) * 6, "smoothing": ("fp32",) * 2,
        "factors": number, "slopes": (number, number), "sums": number, "parts": number,
    }  # fmt: skip
    constants = triton_pass.block(classes)
    warps = constants.pop("num_warps")
    if not everything:
        constants |= dict.fromkeys(("factors", "slopes", "sums", "parts"))
    signature = kinds | dict.fromkeys(constants, "constexpr")
    source = ASTSource(triton_pass._losses, signature, constants)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": warps}
    built = compile(source, target=target, options=options)
    assert built.asm["cubin"]
    assert "atom" not in built.asm["ptx"]
