"""The compiled digests are those of numpy, on any split, alignment and number of threads; without a compiler too."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from segpipe import native
from segpipe.ledger import digest as digests
from segpipe.ledger.digest import (
    BLOCK,
    THREAD_BLOCKS,
    digest_groups,
    digest_many,
)

SIZES = [0, 1, 2, 3, 7, 19, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5]
needs_compiler = pytest.mark.skipif(
    digests.kernels() is None, reason="no C compiler here"
)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled yet, and nothing left behind."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def tensors() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    flat = [torch.randn(size, generator=random) for size in SIZES]
    image = torch.randint(0, 256, (3, 5, 7, 3), generator=random).to(torch.uint8)
    maps = torch.randn(2, 19, 65, 33, generator=random)
    large = torch.randn(3 * THREAD_BLOCKS * BLOCK * 2 + 6, generator=random)
    strided = [
        maps.to(memory_format=torch.channels_last),
        maps[:, 1:],
        maps.half()[0, 3],
    ]
    return [
        *flat,
        image,
        image[1:],
        maps,
        *strided,
        large,
        large[1:],
        torch.tensor(-0.0),
        torch.arange(3),
    ]


def numbers() -> list[int]:
    """Of every tensor alone, of all together in both orders, and of every image."""
    given = tensors()
    found = [int(digest_many([tensor])) for tensor in given]
    found += [
        int(digest_many(given)),
        int(digest_many([])),
    ]
    found += digest_groups(
        [given[:3], [], given[3:8], *([tensor] for tensor in given[8:])]
    ).tolist()
    found += digest_groups([given, given[::-1]]).tolist()
    return found + digest_groups([[image] for image in given[len(SIZES)]]).tolist()


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "kernels", lambda: None)
        return numbers()


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_compiled_equals_numpy(plain: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert numbers() == plain
    finally:
        torch.set_num_threads(before)


class Shares:
    """The compiled kernels; notes how many words each thread takes, and the threads."""

    def __init__(self) -> None:
        self.kernels, self.taken = digests.kernels(), []  # type: ignore[var-annotated]

    def segpipe_digests(self, *arguments: Any) -> None:
        self.taken.append(arguments[4:6])
        self.kernels.segpipe_digests(*arguments)


@needs_compiler
@pytest.mark.parametrize(
    ("num_blocks", "shares"), [(0, 1), (1, 1), (3, 1), (4, 2), (7, 2), (8, 3), (40, 3)]
)
def test_threads_share_whole_blocks_evenly_where_each_gets_a_mebibyte(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, shares: int
) -> None:
    kernels = Shares()
    monkeypatch.setattr(digests, "kernels", lambda: kernels)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        digest_groups(
            [
                [torch.zeros(5)],
                [torch.zeros(num_blocks * BLOCK, dtype=torch.int64), torch.zeros(7)],
            ]
        )
    finally:
        torch.set_num_threads(before)
    num_words = num_blocks * BLOCK + 4  # of the longest group
    width = -(-num_words // (shares * BLOCK)) * BLOCK
    assert kernels.taken == [(width, shares)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
)
def test_single_numbers_are_padded_together(dtype: torch.dtype) -> None:
    """As AdamW's counters of the steps; one operator for all of them instead of several for each."""
    given = [torch.tensor(value).to(dtype) for value in (3, 0, 7)] + [
        torch.tensor([5]).to(dtype)
    ] * 2
    expected = [digests._by_numpy([tensor]) for tensor in given]
    assert digest_groups([[tensor] for tensor in given]).tolist() == expected
    assert int(digest_many(given)) == digests._by_numpy(given)


def test_a_group_has_the_number_of_its_tensors_alone() -> None:
    """So different places and contents have different numbers, of which the empty ones are 0."""
    given = tensors()
    assert digest_groups([[tensor] for tensor in given]).tolist() == [
        int(digest_many([tensor])) for tensor in given
    ]
    found = [int(digest_many([tensor])) for tensor in given]
    assert found[0] == 0
    assert (
        len(set(found)) == len(found) - 1
    )  # one tensor is there in two orders of memory


@needs_compiler
def test_whole_words_are_read_where_they_are() -> None:
    """A copy of each tensor would take longer than its digest; the control is one with an odd number of bytes."""
    whole = [
        torch.zeros(8, 3, 3, 3).to(memory_format=torch.channels_last),
        torch.zeros(300, 2)[1:],
    ] * 100
    for given, copied in ((whole, False), ([*whole, torch.zeros(3)], True)):
        with torch.profiler.profile() as seen:
            digest_many(given)
        assert (
            any(
                event.key in ("aten::copy_", "aten::contiguous", "aten::fill_")
                for event in seen.key_averages()
            )
            == copied
        )


@needs_compiler
def test_tensors_that_a_gpu_lacks_are_moved_at_once_and_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here every tensor is one, and a stand-in for the kernels is the compiled loop."""
    blocks: list[int] = []

    class Kernels:
        @staticmethod
        def digests(
            parts: list[Tensor],
            lengths: tuple[int, ...],
            ends: tuple[int, ...],
            block: int,
        ) -> Tensor:
            assert lengths == tuple(part.numel() for part in parts)
            assert {part.dtype for part in parts} == {torch.int64}
            blocks.append(block)
            return digests._by_c(parts, lengths, ends)

    monkeypatch.setattr(digests, "gpu_kernels", lambda device: Kernels)
    groups = [tensors()[:3], [], tensors()[3:]]
    parts = [digests._words(tensor) for group in groups for tensor in group]
    lengths = tuple(part.numel() for part in parts)
    found = digests._by_triton(parts, lengths, (3, 3, len(parts)), torch.device("cpu"))
    assert found.tolist() == digest_groups(groups).tolist()
    assert blocks == [BLOCK]


@needs_compiler
def test_a_forked_process_computes_it_too() -> None:
    """Its parent's threads are not there."""
    large = torch.arange(
        4 * THREAD_BLOCKS * BLOCK
    )  # made here: torch's own threads do not survive a fork either
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = int(digest_many([large]))  # on a thread of the parent as well
        queue = mp.get_context("fork").SimpleQueue()
        child = mp.get_context("fork").Process(
            target=lambda: queue.put(int(digest_many([large])))
        )
        child.start()
        child.join(120)
        ended = child.exitcode
        child.kill()
    finally:
        torch.set_num_threads(before)
    assert ended == 0
    assert queue.get() == expected


@needs_compiler
def test_it_is_compiled_once_into_a_private_folder(
    tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digests.kernels() is not None
    [made] = (tmp_path / "segpipe").iterdir()
    assert (tmp_path / "segpipe").stat().st_mode & 0o777 == 0o700
    written = made.stat().st_mtime_ns
    native.load.cache_clear()
    assert digests.kernels() is not None
    assert [path.stat().st_mtime_ns for path in (tmp_path / "segpipe").iterdir()] == [
        written
    ]
    monkeypatch.setattr(
        native, "_processor", lambda: "flags: of another machine with this home folder"
    )
    native.load.cache_clear()
    assert digests.kernels() is not None
    assert len([*(tmp_path / "segpipe").iterdir()]) == 2


@needs_compiler
def test_a_compiler_without_openmp_is_used_too(
    tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, given = shutil.which("cc") or shutil.which("gcc"), tensors()
    expected = int(digest_many(given))
    (tmp_path / "cc").write_text(
        f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {real} "$@"\n'
    )
    (tmp_path / "cc").chmod(0o755)
    native.load.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digests.kernels() is not None
    assert int(digest_many(given)) == expected


@pytest.mark.parametrize(
    "broken", ["no compiler", "compiler fails", "no folder", "folder of another user"]
)
def test_without_it_numpy_does_it(
    plain: list[int],
    tmp_path: Path,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if broken == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif broken == "compiler fails":
        monkeypatch.setattr(native, "FLAGS", ("-no-such-flag",))
    elif broken == "no folder":
        (tmp_path / "file").touch()
        monkeypatch.setattr(native, "_folders", lambda: iter([tmp_path / "file" / "x"]))
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(native, "_folders", lambda: iter([tmp_path]))
    assert digests.kernels() is None
    assert numbers() == plain
