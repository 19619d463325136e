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
import operator
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
BLOCK = (
    1 << 15
)  # words; part of the definition. On a CPU three buffers of 256 KiB fit its L2 cache
_CPU = torch.device("cpu")
THREAD_BLOCKS = 4  # blocks that are worth a thread: 1 MiB
DEVICE_CHUNK = (
    1 << 22
)  # words mixed at a time on a GPU, a multiple of BLOCK: few launches, 64 MiB


def kernels() -> Any:
    """digest.c, 15 times as fast as numpy, as a ctypes library; None where it cannot be compiled."""
    library = native.load(SOURCE)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.segpipe_digests.argtypes = [
            *[pointer] * 3,
            *[number] * 3,
            pointer,
            number,
            pointer,
        ]
        library.segpipe_digests.restype = None
    return library


@lru_cache(maxsize=16)
def gpu_kernels(device: torch.device) -> Any:
    """triton_digest.py, whose two launches replace some 30 and a copy of all words; None where torch has to do it.

    It is asked first for numbers that the host knows: kernels that were compiled wrongly here must not fill a ledger.
    """
    try:
        from segpipe.ledger import triton_digest

        probe = torch.arange(2 * BLOCK + 77, dtype=torch.int64)
        parts = [part.to(device) for part in (probe[:5], probe)]
        lengths = tuple(len(part) for part in parts)
        found = triton_digest.digests(parts, lengths, (1, 2), BLOCK).tolist()
    except Exception as error:
        warnings.warn(
            f"digests on {device} are computed by torch, because Triton failed: {error}",
            stacklevel=2,
        )
        return None
    if found != [int(_digest_words(part)) for part in (probe[:5], probe)]:
        warnings.warn(
            f"digests on {device} are computed by torch, because Triton's were wrong",
            stacklevel=2,
        )
        return None
    return triton_digest


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit `value`."""
    return value - (1 << 64) if value >> 63 else value


def _mix64_(x: Tensor) -> Tensor:
    """mix64 in place."""
    if (
        x.device.type == "cpu"
    ):  # numpy has unsigned shifts and multiplies 64-bit integers three times as fast
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
        torch.bitwise_right_shift(
            x, places, out=shifted
        )  # int64: the mask removes the copies of the sign bit
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
        total += _mix64_(
            part ^ _mixed_indices(offset + start, part.numel(), device)
        ).sum()
    return total


def _chunk(device: torch.device) -> int:
    """Words to mix at a time."""
    return BLOCK if device.type == "cpu" else DEVICE_CHUNK


def _mixed_indices(start: int, num: int, device: torch.device) -> Tensor:
    """mix64(i * phi) for `num` indices i from `start`, int64."""
    return _mix64_(
        torch.arange(start, start + num, dtype=torch.int64, device=device).mul_(
            _signed(_PHI)
        )
    )


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


def digest_groups(
    groups: Sequence[Sequence[Tensor]], *, channels_last: bool = False
) -> Tensor:
    """`digest_many` of every group of tensors, int64 (n,), on their device."""
    return GroupDigests(channels_last=channels_last)(groups)


class GroupDigests:
    """`digest_groups` for tensors that come again and again: where their words lie is looked up once.

    It keeps the tensors of the last call, and looks again when one is another, or lies elsewhere or otherwise.
    """

    def __init__(self, *, channels_last: bool = False) -> None:
        self.channels_last = channels_last
        self._tensors: list[Tensor] = []
        self._sizes: list[int] = []
        self._places: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        self._look()

    def __call__(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        """Digest of every group, int64 (n,), on the device of the tensors; never synchronizes."""
        tensors, sizes = (
            [tensor for group in groups for tensor in group],
            [len(group) for group in groups],
        )
        places = [
            (tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors
        ]
        same = places == self._places and all(map(operator.is_, tensors, self._tensors))
        if not same or sizes != self._sizes:
            self._tensors, self._sizes, self._places = tensors, sizes, places
            self._look()
        if (kernels() if self._device == _CPU else gpu_kernels(self._device)) is None:
            found = [
                _digest_words(_joined(group, self._device, self.channels_last))
                for group in groups
            ]
            return (
                torch.stack(found)
                if found
                else torch.zeros(0, dtype=torch.int64, device=self._device)
            )
        self._copy()
        if self._device != _CPU:
            return _by_triton(self._parts, self._lengths, self._ends, self._device)
        addresses = [place[0] for place in places]
        for place in self._copied:
            addresses[place] = self._parts[place].data_ptr()
        return _by_c(addresses, self._lengths, self._ends)

    def _look(self) -> None:
        """Note how the words of each tensor are read: there, or from a copy that every call makes anew."""
        devices = {tensor.device for tensor in self._tensors} - {_CPU}
        assert len(devices) <= 1, "tensors of one device"
        self._device = devices.pop() if devices else _CPU
        self._parts, self._ends = (
            list(self._tensors),
            tuple(itertools.accumulate(self._sizes)),
        )
        self._lengths = tuple(-(-tensor.nbytes // 8) for tensor in self._tensors)
        self._copied = [
            n for n, tensor in enumerate(self._tensors) if not self._in_place(tensor)
        ]
        self._larger: list[int] = []
        self._scalars: dict[
            Any, list[int]
        ] = {}  # of a kind; AdamW counts the steps of each parameter
        for place in self._copied:
            tensor = self._tensors[place]
            scalar = tensor.numel() == 1 and tensor.nbytes <= 8
            kind = (tensor.dtype, tensor.device, tensor.shape)
            (self._scalars.setdefault(kind, []) if scalar else self._larger).append(
                place
            )

    def _in_place(self, tensor: Tensor) -> bool:
        """Whether its memory holds whole words in the order of the digest, on the device of the digest."""
        order = (
            torch.channels_last
            if self.channels_last and tensor.ndim == 4
            else torch.contiguous_format
        )
        if tensor.nbytes % 8 or not tensor.is_contiguous(memory_format=order):
            return False
        return self._device == _CPU or not (tensor.is_cpu or tensor.data_ptr() % 8)

    @torch.no_grad()
    def _copy(self) -> None:
        """Make the words of tensors that cannot be read where they are; those for a GPU are still to be moved."""
        for place in self._larger:
            self._parts[place] = _words(
                self._tensors[place], channels_last=self.channels_last
            )
        for (dtype, device, _), places in self._scalars.items():
            words = torch.zeros(
                len(places), 8 // dtype.itemsize, dtype=dtype, device=device
            )
            words[:, 0] = torch.stack([self._tensors[place] for place in places]).view(
                -1
            )
            for place, word in zip(
                places, torch.split(words.view(torch.int64).view(-1), 1), strict=True
            ):
                self._parts[place] = word


def digest_each(batch: Tensor) -> Tensor:
    """`digest_many` of every tensor along the first axis, int64 (b,)."""
    return digest_groups([[row] for row in batch])


def _joined(
    tensors: Iterable[Tensor], device: torch.device, channels_last: bool
) -> Tensor:
    """The words of all tensors, int64 (n,)."""
    parts = [
        _words(tensor, channels_last=channels_last).to(device, non_blocking=True)
        for tensor in tensors
    ]
    return (
        torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)
    )


def _by_c(
    addresses: Sequence[int], lengths: tuple[int, ...], ends: tuple[int, ...]
) -> Tensor:
    """Digests of groups of CPU tensors by digest.c, on as many threads as torch has."""
    words, until, longest = _tables(lengths, ends)
    threads = min(native.threads(), longest // (THREAD_BLOCKS * BLOCK) + 1)
    width = -(-longest // (threads * BLOCK)) * BLOCK
    places, indices = np.array(addresses, np.uint64), _block_indices(_CPU)
    shares = torch.empty(threads, len(ends), dtype=torch.int64)
    kernels().segpipe_digests(
        *(array.ctypes.data for array in (places, words, until)),
        *(len(ends), width, threads, indices.data_ptr(), BLOCK, shares.data_ptr()),
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
    if away := [place for place, part in enumerate(parts) if part.is_cpu]:
        words = [parts[place] for place in away]
        moved = torch.split(
            torch.cat(words).to(device, non_blocking=True),
            [len(each) for each in words],
        )
        parts = list(parts)
        for place, part in zip(away, moved, strict=True):
            parts[place] = part
    found: Tensor = gpu_kernels(device).digests(parts, lengths, ends, BLOCK)
    return found


def _digest_words(words: Tensor) -> Tensor:
    """The digest of words (n,), 0-d int64, by numpy or by torch on a GPU."""
    whole = len(words) // BLOCK * BLOCK
    width = max(_chunk(words.device) // BLOCK, 1) * BLOCK
    indices, sums = _block_indices(words.device), []
    for start in range(0, whole, width):
        blocks = words[start : min(start + width, whole)].view(-1, BLOCK)
        sums.append(_mix64_(blocks ^ indices).sum(dim=1))
    if whole < len(words):
        sums.append(
            _mix64_(words[None, whole:] ^ indices[: len(words) - whole]).sum(dim=1)
        )
    if not sums:
        return words.new_zeros(())
    blocks = torch.cat(sums)
    return _mix64_(blocks ^ _mixed_indices(0, len(blocks), words.device)).sum()


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
