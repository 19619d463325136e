"""Exact, order-free digests of tensors: equal bits give equal numbers on any device and under any split.

    H = sum over i of mix64(bits_i xor mix64(i * phi)) mod 2^64

Integer addition wraps and commutes, so chunks, ranks and parallel reductions cannot change the sum; the index inside
makes it see position, and the raw bits make it see sign, -0.0 and one ulp. mix64 is the finaliser of SplitMix64.
Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

`digest` is H of a tensor's elements. `digest_many` and `digest_each` are for every step of a training: they read words
of 8 bytes, take H of each block of BLOCK words, and H of these numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe.ledger import native

_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # places of the shift, factor
_PHI = 0x9E3779B97F4A7C15
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 1 << 15  # words; part of the definition. On a CPU three buffers of 256 KiB stay in its L2 cache
THREAD_BLOCKS = 4  # that are worth a thread: 1 MiB
DEVICE_CHUNK = 1 << 22  # elements mixed at a time on a GPU, a multiple of BLOCK: few launches, 64 MiB


def _signed(value: int) -> int:
    """`value` mod 2^64 as torch's int64 holds it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix64_(x: Tensor, spare: Tensor) -> Tensor:
    """mix64 in place; `spare` is overwritten."""
    if x.device.type == "cpu":  # numpy knows unsigned shifts and multiplies 64-bit integers three times as fast
        _mix64_on_host(x.numpy().view(np.uint64), spare.numpy().view(np.uint64))
    else:
        _mix64_on_device(x, spare)
    return x


def _mix64_on_host(x: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    for places, factor in _ROUNDS:
        np.right_shift(x, np.uint64(places), out=spare)
        np.bitwise_xor(x, spare, out=x)
        if factor != 1:
            np.multiply(x, np.uint64(factor), out=x)


def _mix64_on_device(x: Tensor, spare: Tensor) -> None:
    for places, factor in _ROUNDS:
        torch.bitwise_right_shift(x, places, out=spare)  # of signed integers: the mask takes the copies of the sign
        x.bitwise_xor_(spare.bitwise_and_((1 << (64 - places)) - 1))
        if factor != 1:
            x.mul_(_signed(factor))


def digest(tensor: Tensor, *, offset: int = 0) -> Tensor:
    """H of a tensor's elements in logical (row-major) order, as a 0-d int64 tensor on its device; never synchronises.

    `offset` is the index of the first element, so digests of consecutive chunks add up to that of the whole.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    bits, device = flat.view(_BITS[flat.element_size()]), tensor.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    width = BLOCK if device.type == "cpu" else DEVICE_CHUNK
    for start in range(0, bits.numel(), width):
        part = bits[start : start + width]
        indices = _mixed_indices(offset + start, part.numel(), device)
        total += _mix64_(part ^ indices, torch.empty_like(indices)).sum()
    return total


def _mixed_indices(start: int, num: int, device: torch.device) -> Tensor:
    """mix64(i * phi) for `num` numbers i from `start` on, int64."""
    x = torch.arange(start, start + num, dtype=torch.int64, device=device).mul_(_signed(_PHI))
    return _mix64_(x, torch.empty_like(x))


@lru_cache(maxsize=16)
def _block_indices(device: torch.device) -> Tensor:
    return _mixed_indices(0, BLOCK, device)


def _words(tensor: Tensor, rows: int, *, channels_last: bool = False) -> Tensor:
    """The bytes of a tensor as int64 (rows, n), zeros behind; a view where its memory allows it."""
    tensor = tensor.detach()
    if channels_last and tensor.ndim == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    num = octets.numel() // rows
    if num % 8 or octets.storage_offset() % 8 or num == 0:
        padded = octets.new_zeros((rows, num + -num % 8))
        padded[:, :num] = octets.view(rows, num)
        octets = padded.view(-1)
    return octets.view(torch.int64).view(rows, -(-num // 8))


def digest_many(tensors: Sequence[Tensor], *, channels_last: bool = False) -> Tensor:
    """One number for tensors in their order, as a 0-d int64 tensor on their device; never synchronises.

    Each tensor starts a new word, and its last one is filled up with zeros. `channels_last` reads 4-D tensors in the
    order N, H, W, C, which spares those a copy that lie in memory so. On a GPU all are joined first, some 40 launches;
    tensors that lie on the host beside others on a device (AdamW's counters of steps) are copied there.
    """
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu")}
    if not devices:
        return _on_host([tensor.detach() for tensor in tensors], channels_last=channels_last)
    (device,) = devices
    words = [_words(tensor, 1, channels_last=channels_last) for tensor in tensors]
    return _on_device(torch.cat([part.to(device, non_blocking=True) for part in words], dim=1))[0]


def digest_groups(groups: Sequence[Sequence[Tensor]], *, channels_last: bool = False) -> Tensor:
    """`digest_many` of every group of tensors, int64 (n,), on their device."""
    tensors = [tensor.detach() for group in groups for tensor in group]
    kernels = native.kernels()
    if kernels is None or any(tensor.device.type != "cpu" for tensor in tensors):
        return torch.stack([digest_many(group, channels_last=channels_last) for group in groups])
    places, indices = _Places(tensors, channels_last=channels_last), _block_indices(torch.device("cpu"))
    assert places.num_words < BLOCK * BLOCK, "room for the sums of a group among the indices"
    ends, digests = np.cumsum([len(group) for group in groups]), np.empty(len(groups), np.int64)
    kernels.segpipe_group_digests(
        *places.pointers(), ends.ctypes.data, len(groups), indices.data_ptr(), BLOCK, digests.ctypes.data
    )
    return torch.from_numpy(digests)


def digest_each(batch: Tensor) -> Tensor:
    """`digest_many` of every tensor along the first axis, int64 (b,)."""
    if batch.device.type == "cpu":
        return torch.stack([_on_host([row]) for row in batch.detach()])
    return _on_device(_words(batch, len(batch)))


def _on_host(tensors: Sequence[Tensor], *, channels_last: bool = False) -> Tensor:
    """The digest of tensors on the CPU, whose words continue each other."""
    kernels = native.kernels()
    if kernels is None:
        words = [_words(tensor, 1, channels_last=channels_last)[0].numpy().view(np.uint64) for tensor in tensors]
        sums = np.array(_streamed(words), np.uint64)
    else:
        sums = _compiled(kernels, tensors, channels_last=channels_last)
    return digest(torch.from_numpy(sums.view(np.int64)))


class _Places:
    """Where the words of tensors are, for the kernels; holds copies of those whose memory is not in order."""

    def __init__(self, tensors: Sequence[Tensor], *, channels_last: bool) -> None:
        self._kept, places, lengths = [], [], []
        for tensor in tensors:
            order = torch.channels_last if channels_last and tensor.ndim == 4 else torch.contiguous_format
            octets = tensor.numel() * tensor.element_size()
            if octets % 8 or not tensor.is_contiguous(memory_format=order):
                tensor = _words(tensor, 1, channels_last=channels_last)
                octets = 8 * tensor.numel()
                self._kept.append(tensor)
            places.append(tensor.data_ptr())
            lengths.append(octets // 8)
        self.num_words = sum(lengths)
        self._arrays = np.array(places, np.uint64), np.array(lengths, np.int64)

    def pointers(self) -> tuple[int, int]:
        """Of the parts, and of their lengths."""
        return self._arrays[0].ctypes.data, self._arrays[1].ctypes.data


def _compiled(kernels: Any, tensors: Sequence[Tensor], *, channels_last: bool) -> NDArray[np.uint64]:
    """Sums of the blocks by the compiled kernel, on as many threads as torch has."""
    places, indices = _Places(tensors, channels_last=channels_last), _block_indices(torch.device("cpu"))
    total = places.num_words
    sums = np.empty(-(-total // BLOCK), np.uint64)

    def take(first: int, last: int) -> None:
        kernels.segpipe_block_sums(
            *places.pointers(), len(tensors), first, last, indices.data_ptr(), BLOCK, sums[first // BLOCK :].ctypes.data
        )

    threads = min(torch.get_num_threads(), total // (THREAD_BLOCKS * BLOCK) + 1)
    share = -(-len(sums) // threads) * BLOCK
    ranges = [(first, min(first + share, total)) for first in range(0, total, max(share, 1))]
    waiting = [_pool(os.getpid()).submit(take, *part) for part in ranges[1:]]
    if ranges:
        take(*ranges[0])
    for part in waiting:
        part.result()
    return sums


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: those of its parent did not survive a fork."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="digest")


def _streamed(parts: Sequence[NDArray[np.uint64]]) -> list[np.uint64]:
    """Sums of the blocks by numpy; streams the words, because joining them costs as much as digesting."""
    indices = _block_indices(torch.device("cpu")).numpy().view(np.uint64)
    x, spare = np.empty((2, BLOCK), np.uint64)
    sums: list[np.uint64] = []
    filled = 0
    for part in parts:
        start = 0
        while start < len(part):
            num = min(BLOCK - filled, len(part) - start)
            end = filled + num
            np.bitwise_xor(part[start : start + num], indices[filled:end], out=x[filled:end])
            start, filled = start + num, end % BLOCK
            if filled == 0:
                sums.append(_mixed_sum(x, spare))
    if filled:
        sums.append(_mixed_sum(x[:filled], spare[:filled]))
    return sums


def _mixed_sum(x: NDArray[np.uint64], spare: NDArray[np.uint64]) -> np.uint64:
    _mix64_on_host(x, spare)
    return np.uint64(x.sum())


def _on_device(words: Tensor) -> Tensor:
    """The digests of rows of words (r, n), int64 (r,)."""
    rows, num = words.shape
    if num == 0:
        return words.new_zeros(rows)
    indices = _block_indices(words.device)
    width = max(DEVICE_CHUNK // rows // BLOCK, 1) * BLOCK
    edges = [*range(0, num - num % BLOCK, width), num - num % BLOCK, num]
    sums = []
    for start, end in itertools.pairwise(edges):
        if start < end:
            blocks = words[:, start:end].reshape(rows, -1, min(BLOCK, end - start))
            x = blocks ^ indices[: blocks.shape[2]]
            _mix64_on_device(x, torch.empty_like(x))
            sums.append(x.sum(dim=2))
    blocks = torch.cat(sums, dim=1)
    x = blocks ^ _mixed_indices(0, blocks.shape[1], words.device)
    _mix64_on_device(x, torch.empty_like(x))
    return x.sum(dim=1)


def float_bits(value: float | Tensor) -> Tensor:
    """The bits of a number, or of a 0-d tensor, as float64 (exact for every narrower type), int64; on its device."""
    return torch.as_tensor(value, dtype=torch.float64).detach().view(torch.int64)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Hex digest over names, dtypes, shapes and bits of a state dict, in name order."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name]
        number = int(digest(value)) & ((1 << 64) - 1)
        whole.update(f"{name}|{value.dtype}|{tuple(value.shape)}|{number:016x}\n".encode())
    return whole.hexdigest()
