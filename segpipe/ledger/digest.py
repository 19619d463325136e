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
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# Words; part of the definition. On a CPU three buffers of 256 KiB fit its L2 cache.
BLOCK = 1 << 15
# Words mixed at a time on a GPU, a multiple of BLOCK: few launches, 64 MiB.
DEVICE_CHUNK = 1 << 22
THREAD_BLOCKS = 4  # blocks that are worth a thread: 1 MiB
_CPU = torch.device("cpu")


def kernels() -> Any:
    """digest.c, 15 times as fast as numpy, as a ctypes library; None where it cannot be compiled."""
    library = native.load(SOURCE)
    if library is not None:
        array, number = ctypes.c_void_p, ctypes.c_int64
        library.segpipe_digests.argtypes = [
            *(array, array, array),
            *(number, number, number),
            *(array, number, array),
        ]
        library.segpipe_digests.restype = None
    return library


@lru_cache(maxsize=16)
def gpu_kernels(device: torch.device) -> Any:
    """triton_digest.py, whose two launches replace some 30 and a copy of all words; None where torch has to do it.

    It is asked first for numbers that the host knows: kernels that were compiled wrongly here must not fill a ledger.
    """
    wrong = "Triton's were wrong"
    probe = torch.arange(2 * BLOCK + 77, dtype=torch.int64)
    parts = [probe[:5], probe]
    try:
        from segpipe.ledger import triton_digest

        there = [part.to(device) for part in parts]
        lengths = (len(parts[0]), len(parts[1]))
        found = triton_digest.digests(there, lengths, (1, 2), BLOCK).tolist()
        if found == [int(_digest_words(part)) for part in parts]:
            return triton_digest
    except Exception as error:
        wrong = f"Triton failed: {error}"
    text = f"digests on {device} are computed by torch, because {wrong}"
    warnings.warn(text, stacklevel=2)
    return None


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit `value`."""
    return value - (1 << 64) if value >> 63 else value


def _mix64_(x: Tensor) -> Tensor:
    """mix64 in place."""
    if x.device.type == "cpu":
        _mix64_on_host(x.numpy().view(np.uint64))
    else:
        _mix64_on_device(x)
    return x


def _mix64_on_host(x: NDArray[np.uint64]) -> None:
    """By numpy, which has unsigned shifts and multiplies 64-bit integers three times as fast as torch."""
    shifted = np.empty_like(x)
    for places, factor in _ROUNDS:
        np.right_shift(x, np.uint64(places), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.multiply(x, np.uint64(factor), out=x)


def _mix64_on_device(x: Tensor) -> None:
    shifted = torch.empty_like(x)
    for places, factor in _ROUNDS:
        # int64: the mask removes the copies of the sign bit.
        torch.bitwise_right_shift(x, places, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - places)) - 1))
        x.mul_(_signed(factor))


def digest(tensor: Tensor) -> Tensor:
    """H of a tensor's elements in row-major order, 0-d int64 on its device; never synchronizes."""
    flat, device = tensor.detach().contiguous().reshape(-1), tensor.device
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=device)
    start = 0
    for part in torch.split(bits, _chunk(device)):
        indices = _mixed_indices(start, len(part), device)
        total += _mix64_(part ^ indices).sum()
        start += len(part)
    return total


def _chunk(device: torch.device) -> int:
    """Words to mix at a time."""
    return BLOCK if device.type == "cpu" else DEVICE_CHUNK


def _mixed_indices(start: int, num: int, device: torch.device) -> Tensor:
    """mix64(i * phi) for `num` indices i from `start`, int64."""
    indices = torch.arange(start, start + num, dtype=torch.int64, device=device)
    return _mix64_(indices.mul_(_signed(_PHI)))


@lru_cache(maxsize=16)
def _block_indices(device: torch.device) -> Tensor:
    return _mixed_indices(0, BLOCK, device)


def _words(tensor: Tensor, *, channels_last: bool = False) -> Tensor:
    """Bytes of a tensor as int64 (n,), padded with zero bytes; a view where its memory allows one."""
    tensor = tensor.detach()
    if channels_last and tensor.ndim == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        padded = octets.new_zeros(octets.numel() + -octets.numel() % 8)
        padded[: octets.numel()] = octets
        octets = padded
    return octets.view(torch.int64)


def digest_many(tensors: Sequence[Tensor], *, channels_last: bool = False) -> Tensor:
    """One digest of several tensors in their order, 0-d int64 on their device; never synchronizes.

    Each tensor starts a new word, and its last word is padded with zero bytes. `channels_last` reads 4-D tensors in the
    order N, H, W, C, which avoids a copy of those in that memory format. CPU tensors beside GPU tensors (AdamW's step
    counters) are copied to the GPU.
    """
    return digest_groups([tensors], channels_last=channels_last)[0]


@torch.no_grad()
def digest_groups(
    groups: Sequence[Sequence[Tensor]], *, channels_last: bool = False
) -> Tensor:
    """`digest_many` of every group of tensors, int64 (n,), on their device."""
    tensors = [tensor for group in groups for tensor in group]
    devices = {tensor.device for tensor in tensors} - {_CPU}
    assert len(devices) <= 1, "tensors of one device"
    device = devices.pop() if devices else _CPU
    if (kernels() if device == _CPU else gpu_kernels(device)) is None:
        found = [
            _digest_words(_joined(group, device, channels_last)) for group in groups
        ]
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return torch.stack(found) if found else none
    parts = _in_words(tensors, device, channels_last)
    lengths = tuple(-(-tensor.nbytes // 8) for tensor in tensors)
    ends = tuple(itertools.accumulate(len(group) for group in groups))
    if device == _CPU:
        return _by_c(parts, lengths, ends)
    return _by_triton(parts, lengths, ends, device)


def _in_words(
    tensors: Sequence[Tensor], device: torch.device, channels_last: bool
) -> list[Tensor]:
    """Each tensor if its memory holds whole words in the order of the digest, or a copy that does.

    Numbers are copied together: AdamW counts the steps of each parameter.
    """
    parts = list(tensors)
    numbers: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        whole = not tensor.nbytes % 8
        if whole and device != _CPU:
            whole = not (tensor.is_cpu or tensor.data_ptr() % 8)
        if whole and channels_last and tensor.ndim == 4:
            whole = tensor.is_contiguous(memory_format=torch.channels_last)
        elif whole:
            whole = tensor.is_contiguous()
        if whole:
            continue
        if tensor.numel() == 1 and tensor.nbytes <= 8:
            kind = tensor.dtype, tensor.device, tensor.shape
            numbers.setdefault(kind, []).append(index)
        else:
            parts[index] = _words(tensor, channels_last=channels_last)
    for (dtype, place, _), indices in numbers.items():
        values = torch.stack([tensors[index] for index in indices]).view(-1)
        words = torch.zeros(
            len(indices), 8 // dtype.itemsize, dtype=dtype, device=place
        )
        words[:, 0] = values
        for index, word in zip(indices, words.view(torch.int64), strict=True):
            parts[index] = word
    return parts


def _joined(
    tensors: Iterable[Tensor], device: torch.device, channels_last: bool
) -> Tensor:
    """The words of all tensors, int64 (n,)."""
    parts = [
        _words(tensor, channels_last=channels_last).to(device, non_blocking=True)
        for tensor in tensors
    ]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat(parts) if parts else none


def _by_c(
    parts: Sequence[Tensor], lengths: tuple[int, ...], ends: tuple[int, ...]
) -> Tensor:
    """Digests of groups of CPU tensors by digest.c, on as many threads as torch has."""
    words, until, longest = _tables(lengths, ends)
    addresses = np.array([part.data_ptr() for part in parts], np.uint64)
    threads = min(native.threads(), longest // (THREAD_BLOCKS * BLOCK) + 1)
    width = -(-longest // (threads * BLOCK)) * BLOCK
    shares = torch.empty(threads, len(ends), dtype=torch.int64)
    kernels().segpipe_digests(
        addresses.ctypes.data,
        words.ctypes.data,
        until.ctypes.data,
        len(ends),
        width,
        threads,
        _block_indices(_CPU).data_ptr(),
        BLOCK,
        shares.data_ptr(),
    )
    return shares.sum(0) if threads > 1 else shares[0]


@lru_cache(maxsize=64)
def _tables(
    lengths: tuple[int, ...], ends: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Both as arrays, and the words of the longest group."""
    words = np.diff(np.concatenate([[0], np.cumsum(lengths)])[np.array([0, *ends])])
    return (
        np.array(lengths, np.int64),
        np.array(ends, np.int64),
        int(words.max(initial=0)),
    )


def _by_triton(
    parts: list[Tensor],
    lengths: tuple[int, ...],
    ends: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Digests of groups of tensors, of which those of the CPU are copied to the GPU at once."""
    away = [index for index, part in enumerate(parts) if part.is_cpu]
    if away:
        words = [parts[index].view(-1).view(torch.int64) for index in away]
        moved = torch.cat(words).to(device, non_blocking=True)
        pieces = torch.split(moved, [len(each) for each in words])
        for index, part in zip(away, pieces, strict=True):
            parts[index] = part
    found: Tensor = gpu_kernels(device).digests(parts, lengths, ends, BLOCK)
    return found


def _digest_words(words: Tensor) -> Tensor:
    """The digest of words (n,), 0-d int64, by numpy or by torch on a GPU."""
    indices = _block_indices(words.device)
    whole = len(words) // BLOCK * BLOCK
    blocks, rest = words[:whole].view(-1, BLOCK), words[whole:]
    sums = [
        _mix64_(several ^ indices).sum(dim=1)
        for several in torch.split(blocks, _chunk(words.device) // BLOCK)
    ]
    if len(rest):
        sums.append(_mix64_(rest[None] ^ indices[: len(rest)]).sum(dim=1))
    if not len(words):
        return words.new_zeros(())
    totals = torch.cat(sums)
    return _mix64_(totals ^ _mixed_indices(0, len(totals), words.device)).sum()


def float_bits(value: float | Tensor) -> Tensor:
    """Bits of a number or 0-d tensor as float64 (exact for every narrower type), int64 on its device."""
    return torch.as_tensor(value, dtype=torch.float64).detach().view(torch.int64)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Hex digest of the names, dtypes, shapes and bits of a state dict, in name order."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name]
        number = int(digest(value)) & ((1 << 64) - 1)
        whole.update(
            f"{name}|{value.dtype}|{tuple(value.shape)}|{number:016x}\n".encode()
        )
    return whole.hexdigest()


def tensor_digests(content: Mapping[str, Any]) -> dict[str, str]:
    """`state_digest` of every tensor in nested dictionaries and lists by itself, by path such as ema/net.bias."""
    tensors = {
        name.replace("'", "").lstrip("/"): value
        for name, value in leaves(content)
        if isinstance(value, Tensor)
    }
    return {name: state_digest({"": value}) for name, value in tensors.items()}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries, lists and tuples, by path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}/{key!r}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from leaves(item, f"{name}/{place}")
    else:
        yield name, value
