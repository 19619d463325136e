"""Exact, order-free digests of tensors: equal bits give equal digests on any device and under any split.

    H = sum over i of mix64(bits_i xor mix64(i * phi)) mod 2^64

Integer addition wraps and commutes, so chunks, ranks and parallel reductions cannot change the sum. The index inside
makes it depend on position; the raw bits make it depend on sign, -0.0 and one ulp. mix64 is the finalizer of
SplitMix64. Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

`digest` is H of a tensor's elements. The others run in every training step: they read words of 8 bytes, take H of each
block of BLOCK words, and H of these block sums.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe import native

SOURCE = Path(__file__).with_name("digest.c")
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, factor
_PHI = 0x9E3779B97F4A7C15
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 1 << 15  # words; part of the definition. On a CPU three buffers of 256 KiB fit its L2 cache
THREAD_BLOCKS = 4  # blocks that are worth a thread: 1 MiB
DEVICE_CHUNK = 1 << 22  # words mixed at a time on a GPU, a multiple of BLOCK: few launches, 64 MiB


def kernels() -> Any:
    """digest.c, 15 times as fast as numpy, as a ctypes library; None where it cannot be compiled."""
    library = native.load(SOURCE)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.segpipe_digests.argtypes = [*[pointer] * 3, *[number] * 3, pointer, number, pointer]
        library.segpipe_digests.restype = None
    return library


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit `value`."""
    return value - (1 << 64) if value >> 63 else value


def _mix64_(x: Tensor) -> Tensor:
    """mix64 in place."""
    if x.device.type == "cpu":  # numpy has unsigned shifts and multiplies 64-bit integers three times as fast
        _mix64_on_host(x.numpy().view(np.uint64))
    else:
        _mix64_on_device(x)
    return x


def _mix64_on_host(x: NDArray[np.uint64]) -> None:
    shifted = np.empty_like(x)
    for places, factor in _ROUNDS:
        np.right_shift(x, np.uint64(places), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        if factor != 1:
            np.multiply(x, np.uint64(factor), out=x)


def _mix64_on_device(x: Tensor) -> None:
    shifted = torch.empty_like(x)
    for places, factor in _ROUNDS:
        torch.bitwise_right_shift(x, places, out=shifted)  # int64: the mask removes the copies of the sign bit
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - places)) - 1))
        if factor != 1:
            x.mul_(_signed(factor))


def digest(tensor: Tensor, *, offset: int = 0) -> Tensor:
    """H of a tensor's elements in row-major order, 0-d int64 on its device; never synchronizes.

    `offset` is the index of the first element, so digests of consecutive chunks add up to that of the whole.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    bits, device = flat.view(_BITS[flat.element_size()]), tensor.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    chunk = _chunk(device)
    for start in range(0, bits.numel(), chunk):
        part = bits[start : start + chunk]
        total += _mix64_(part ^ _mixed_indices(offset + start, part.numel(), device)).sum()
    return total


def _chunk(device: torch.device) -> int:
    """Words to mix at a time."""
    return BLOCK if device.type == "cpu" else DEVICE_CHUNK


def _mixed_indices(start: int, num: int, device: torch.device) -> Tensor:
    """mix64(i * phi) for `num` indices i from `start`, int64."""
    return _mix64_(torch.arange(start, start + num, dtype=torch.int64, device=device).mul_(_signed(_PHI)))


@lru_cache(maxsize=16)
def _block_indices(device: torch.device) -> Tensor:
    return _mixed_indices(0, BLOCK, device)


def _words(tensor: Tensor, rows: int, *, channels_last: bool = False) -> Tensor:
    """Bytes of a tensor as int64 (rows, n), each row padded with zero bytes; a view where its memory allows one."""
    tensor = tensor.detach()
    if channels_last and tensor.ndim == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    num = octets.numel() // rows
    if num % 8 or octets.storage_offset() % 8:
        padded = octets.new_zeros((rows, num + -num % 8))
        padded[:, :num] = octets.view(rows, num)
        octets = padded.view(-1)
    return octets.view(torch.int64).view(rows, -(-num // 8))


def digest_many(tensors: Sequence[Tensor], *, channels_last: bool = False) -> Tensor:
    """One digest of several tensors in their order, 0-d int64 on their device; never synchronizes.

    Each tensor starts a new word, and its last word is padded with zero bytes. `channels_last` reads 4-D tensors in the
    order N, H, W, C, which avoids a copy of those in that memory format. On a GPU the tensors are joined first, some 40
    launches; CPU tensors beside GPU tensors (AdamW's step counters) are copied to the GPU.
    """
    return digest_groups([tensors], channels_last=channels_last)[0]


def digest_groups(groups: Sequence[Sequence[Tensor]], *, channels_last: bool = False) -> Tensor:
    """`digest_many` of every group of tensors, int64 (n,), on their device."""
    devices = {tensor.device for group in groups for tensor in group} - {torch.device("cpu")}
    if not devices and kernels() is not None:
        return _compiled(groups, channels_last=channels_last)
    device = devices.pop() if devices else torch.device("cpu")
    assert not devices, "tensors of one device"
    found = []
    for group in groups:
        parts = [_words(tensor, 1, channels_last=channels_last).to(device, non_blocking=True) for tensor in group]
        parts = parts or [torch.zeros((1, 0), dtype=torch.int64, device=device)]
        found.append(_digest_rows(torch.cat(parts, dim=1), _chunk(device)))
    return torch.cat(found)


def digest_each(batch: Tensor) -> Tensor:
    """`digest_many` of every tensor along the first axis, int64 (b,)."""
    if batch.device.type == "cpu" and kernels() is not None:
        return _compiled([[row] for row in batch], channels_last=False)
    return _digest_rows(_words(batch, len(batch)), _chunk(batch.device))


def _compiled(groups: Sequence[Sequence[Tensor]], *, channels_last: bool) -> Tensor:
    """Digests of groups of CPU tensors by digest.c, on as many threads as torch has."""
    parts = [_in_order(tensor.detach(), channels_last) for group in groups for tensor in group]
    ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
    addresses = np.array([part.data_ptr() for part in parts], np.uint64)
    lengths = np.array([part.numel() * part.element_size() // 8 for part in parts], np.int64)
    indices, library = _block_indices(torch.device("cpu")), kernels()

    def share(first: int, last: int) -> NDArray[np.uint64]:
        """The part of each digest that words `first` to `last - 1` of its group make."""
        digests = np.empty(len(groups), np.uint64)
        library.segpipe_digests(
            *(array.ctypes.data for array in (addresses, lengths, ends)),
            *(len(groups), first, last, indices.data_ptr(), BLOCK, digests.ctypes.data),
        )
        return digests

    words = np.diff(np.concatenate([[0], np.cumsum(lengths)])[np.concatenate([[0], ends])])
    longest = int(words.max(initial=0))
    threads = min(torch.get_num_threads(), longest // (THREAD_BLOCKS * BLOCK) + 1)
    width = -(-longest // (threads * BLOCK)) * BLOCK
    pool = native.pool(os.getpid())
    waiting = [pool.submit(share, n * width, (n + 1) * width) for n in range(1, threads)]
    total = share(0, width)
    for other in waiting:
        total += other.result()
    return torch.from_numpy(total.view(np.int64))


def _in_order(tensor: Tensor, channels_last: bool) -> Tensor:
    """The tensor, or a copy where its memory is not whole words in the order of the digest."""
    order = torch.channels_last if channels_last and tensor.ndim == 4 else torch.contiguous_format
    if tensor.numel() * tensor.element_size() % 8 or not tensor.is_contiguous(memory_format=order):
        return _words(tensor, 1, channels_last=channels_last)
    return tensor


def _digest_rows(words: Tensor, chunk: int) -> Tensor:
    """Digests of rows of words (r, n) by numpy or on a GPU, int64 (r,); mixes about `chunk` words at a time."""
    rows, num = words.shape
    if num == 0:
        return words.new_zeros(rows)
    indices = _block_indices(words.device)
    width = max(chunk // rows // BLOCK, 1) * BLOCK
    edges = [*range(0, num - num % BLOCK, width), num - num % BLOCK, num]
    sums = []
    for start, end in itertools.pairwise(edges):
        if start < end:
            blocks = words[:, start:end].reshape(rows, -1, min(BLOCK, end - start))
            sums.append(_mix64_(blocks ^ indices[: blocks.shape[2]]).sum(dim=2))
    blocks = torch.cat(sums, dim=1)
    return _mix64_(blocks ^ _mixed_indices(0, blocks.shape[1], words.device)).sum(dim=1)


def float_bits(value: float | Tensor) -> Tensor:
    """Bits of a number or 0-d tensor as float64 (exact for every narrower type), int64 on its device."""
    return torch.as_tensor(value, dtype=torch.float64).detach().view(torch.int64)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Hex digest of the names, dtypes, shapes and bits of a state dict, in name order."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name]
        number = int(digest(value)) & ((1 << 64) - 1)
        whole.update(f"{name}|{value.dtype}|{tuple(value.shape)}|{number:016x}\n".encode())
    return whole.hexdigest()
