"""Exact, order-free digests of tensors: equal bits give equal numbers on any device and under any split.

    H = sum over i of mix64(bits_i xor mix64(i * phi)) mod 2^64

Integer addition wraps and commutes, so chunks, ranks and parallel reductions cannot change the sum; the index inside
makes it see position, and the raw bits make it see sign, -0.0 and one ulp. mix64 is the finaliser of SplitMix64.
Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_PHI = 0x9E3779B97F4A7C15
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20  # elements digested at a time: bounds the memory to 24 MiB


def _signed(value: int) -> int:
    """`value` mod 2^64 as torch's int64 holds it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, places: int) -> Tensor:
    """Logical right shift; torch shifts int64 arithmetically."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def digest(tensor: Tensor, *, offset: int = 0) -> Tensor:
    """H of a tensor's elements in logical (row-major) order, as a 0-d int64 tensor on its device; never synchronises.

    `offset` is the index of the first element, so digests of consecutive chunks add up to that of the whole.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        index = torch.arange(offset + start, offset + start + part.numel(), dtype=torch.int64, device=tensor.device)
        total = total + _mix64(part ^ _mix64(index * _signed(_PHI))).sum()
    return total


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Hex digest over names, dtypes, shapes and bits of a state dict, in name order."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name]
        number = int(digest(value)) & ((1 << 64) - 1)
        whole.update(f"{name}|{value.dtype}|{tuple(value.shape)}|{number:016x}\n".encode())
    return whole.hexdigest()
