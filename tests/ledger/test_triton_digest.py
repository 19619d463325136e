"""Digests of a GPU by Triton: their bits in Triton's interpreter, their code for an H100, and torch where they fail.

The interpreter must be chosen before triton is imported, so another process runs it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from ranks import launched
from segpipe import native
from segpipe.ledger import digest as module

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")


def groups() -> list[list[Tensor]]:
    """Empty groups and tensors, parts that end between blocks, more than one piece and block, bytes and odd strides."""
    random = torch.Generator().manual_seed(0)
    sizes = ((), (0, 1), (5, 96, 97, 0, 300), (2, 2 * 2048 + 3, 64), (2_500,), (0,))
    words = [
        [torch.randint(-(2**63), 2**63 - 1, (size,), generator=random) for size in each]
        for each in sizes
    ]
    maps = torch.randn(2, 3, 5, 7, generator=random)
    return [
        *words,
        [maps, maps.to(memory_format=torch.channels_last), maps[:, 1:], maps.half()],
        [torch.tensor(-0.0)],
    ]


def found_by_triton(rank: int) -> list[list[int]]:
    """Digests of `groups` for three sizes of a block."""
    os.environ["TRITON_INTERPRET"] = "1"
    from segpipe.ledger import triton_digest

    module.gpu_kernels = lambda device: triton_digest
    given, found = groups(), []
    ends = tuple(sum(map(len, given[: n + 1])) for n in range(len(given)))
    for block in (96, 5000, module.BLOCK):
        module.BLOCK = block
        tensors = [tensor for group in given for tensor in group]
        parts = [module._in_words(tensor, CPU) for tensor in tensors]
        away = [module._words(tensor) for tensor in tensors]
        lengths = tuple(len(words) for words in away)
        found.append(triton_digest.digests(parts, lengths, ends, block).tolist())
        found.append(
            module._by_triton(away, lengths, ends, CPU).tolist()
        )  # all are moved
    return found


def test_the_kernels_give_the_digests_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = launched(1, found_by_triton)
    for block, direct, copied in zip(
        (96, 5000, module.BLOCK), found[::2], found[1::2], strict=True
    ):
        monkeypatch.setattr(module, "BLOCK", block)
        module._block_indices.cache_clear()
        expected = module.digest_groups(groups()).tolist()
        module._block_indices.cache_clear()
        assert direct == copied == expected


def test_they_compile_for_an_h100() -> None:
    """Without a GPU: what the compiler refuses must not wait for one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from segpipe.ledger import triton_digest as kernels

    for kernel, names in (
        (kernels._add_to_blocks, ("addresses", "pieces", "sums")),
        (kernels._join_blocks, ("sums", "edges", "digests")),
    ):
        signature = {**dict.fromkeys(names, "*i64"), "chunk": "constexpr"}
        built = compile(
            ASTSource(kernel, signature, {"chunk": 2048}),
            target=GPUTarget("cuda", 90, 32),
        )
        assert built.asm["cubin"]
        assert ("atom" in built.asm["ptx"]) == (kernel is kernels._add_to_blocks)


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_asks_triton_and_torch_where_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    from segpipe.ledger import triton_digest

    monkeypatch.setattr(native, "triton_builds", lambda: works)
    found = module.gpu_kernels(torch.device("cuda", 0))
    assert found is (triton_digest if works else None)
    assert module.gpu_kernels(torch.device("mps")) is None


def test_torch_and_numpy_compute_them_without_either_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "kernels", lambda: None)
    for group in groups():
        assert int(module.digest_many(group)) == module._by_numpy(group)
