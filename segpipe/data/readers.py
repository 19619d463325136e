"""Picture files to arrays: PNG, JPEG, BMP, TIFF and WebP. A truncated or damaged file is an error."""

from __future__ import annotations

import mmap
import os
import re
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id
from typing import IO, Any, NamedTuple, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.headers import (
    HEAD_BYTES,
    JPEG_END,
    JPEG_START,
    PNG_END,
    PNG_SIGNATURE,
    TAIL_BYTES,
    Bytes,
    Header,
    check_complete,
    parse,
)
from segpipe.disk import PASSING, patiently
from segpipe.errors import DataError

# How EXIF's orientations turn stored pixels upright: (transpose, flip rows, flip columns), in this order.
TURNS = {
    1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
    5: (True, False, False), 6: (True, False, True), 7: (True, True, True), 8: (True, True, False),
}  # fmt: skip
# What libjpeg says of a file that it decodes all the same. Extraneous bytes cost no pixel, and cameras write them.
JPEG_DAMAGE = re.compile(
    "premature end of data segment|Premature end of JPEG file|bad Huffman code|found marker .* instead of RST.*"
    "|Inconsistent progression sequence.*|Invalid SOS parameters.*"
)
JPEG_WORDS = re.compile(f"{JPEG_DAMAGE.pattern}|Corrupt JPEG data")
Pixels = NDArray[np.uint8] | NDArray[np.uint16]
T = TypeVar("T")
R = TypeVar("R")


class RawMask(NamedTuple):
    """Pixels of a mask file as they are stored, before a class table says what they mean."""

    header: Header
    ids: (
        Pixels | None
    )  # grey values or palette indices (H, W); None if the pixels are colors
    rgba: NDArray[np.uint8] | None = None  # colors of the pixels, uint8 (H, W, 4)
    palette: NDArray[np.uint8] | None = None  # colors of the indices, RGBA uint8 (n, 4)


def read_image(
    path: str,
    orient: Callable[[Header], int] = lambda header: 1,
    data: bytes | None = None,
) -> NDArray[np.uint8]:
    """RGB pixels, uint8 (H, W, 3): grey is repeated, alpha dropped, and of 16 bits the upper 8 are kept.

    `orient` chooses the EXIF orientation to apply; by default none. `data`: content of the file, if it was read before.
    Raises DataError for a missing, truncated or damaged file.
    """
    data, header = _read(path) if data is None else (data, _parsed(data, path))
    turn = orient(header)
    pixels = np.asarray(
        _decode(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION, path),
        np.uint8,
    )
    return _turned(pixels, turn)


def read_mask(path: str) -> RawMask:
    """Pixels of a mask file as stored. Raises DataError for a damaged file, and for formats that lose ids."""
    data, header = _read(path)
    check_mask(header, path)
    if header.layout == "palette":
        try:
            return _read_indices(data, header, path)
        except ValueError:  # tables that are shorter than their header says
            raise DataError(
                f"{path} is damaged: its palette is incomplete. Write it again."
            ) from None
    pixels = _decode(data, cv2.IMREAD_UNCHANGED, path)
    if pixels.ndim == 3:
        code = cv2.COLOR_BGR2RGBA if pixels.shape[2] == 3 else cv2.COLOR_BGRA2RGBA
        return RawMask(header, None, np.asarray(cv2.cvtColor(pixels, code), np.uint8))
    return RawMask(header, _unscaled(pixels, header.bits))


def check_mask(header: Header, path: str) -> None:
    """Raise DataError for a format that cannot hold a mask."""
    if header.mask_fault:
        raise DataError(
            f"{path} cannot be a mask: {header.mask_fault}",
            cause=header.mask_fault,
            where=path,
        )
    if header.orientation != 1:
        raise DataError(
            f"{path} is a mask with an EXIF orientation. Write it upright, without EXIF."
        )


def _read_indices(data: bytes, header: Header, path: str) -> RawMask:
    """Indices and palette. OpenCV would decode to colors, so it gets a PNG whose header says grey instead."""
    if data.startswith(PNG_SIGNATURE):
        chunks = list(_png_chunks(data))
        body = dict(chunks)
        colors = np.frombuffer(body.get(b"PLTE", b""), np.uint8).reshape(-1, 3)
        alpha = np.full(len(colors), 255, np.uint8)
        given = np.frombuffer(body.get(b"tRNS", b""), np.uint8)[: len(colors)]
        alpha[: len(given)] = given
        pixels = _unscaled(
            _decode(_as_grey(chunks), cv2.IMREAD_UNCHANGED, path), header.bits
        )
    else:  # BMP with 8 bits: rows of 4-byte multiples, the lowest first unless the height is negative
        start, info, count = (
            int.from_bytes(data[place : place + 4], "little") for place in (10, 14, 46)
        )
        colors = np.frombuffer(
            data, np.uint8, 4 * min(count or 256, 256), 14 + info
        ).reshape(-1, 4)[:, 2::-1]
        alpha = np.full(len(colors), 255, np.uint8)
        stride = (header.width + 3) // 4 * 4
        rows = np.frombuffer(data, np.uint8, stride * header.height, start).reshape(
            header.height, stride
        )
        upright = (
            rows
            if int.from_bytes(data[22:26], "little", signed=True) < 0
            else rows[::-1]
        )
        pixels = np.ascontiguousarray(upright[:, : header.width])
    if len(colors) == 0 or pixels.max(initial=0) >= len(colors):
        raise DataError(
            f"{path} is damaged: its palette has {len(colors)} colors, its pixels use more. Write it again."
        )
    return RawMask(header, pixels, palette=np.column_stack([colors, alpha]))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and body of each chunk of a complete PNG."""
    place = len(PNG_SIGNATURE)
    while place < len(data):
        size = int.from_bytes(data[place : place + 4])
        yield data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        place += 12 + size
        if data[place - 8 - size : place - 4 - size] == b"IEND":
            return


def _as_grey(chunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    """PNG of the pixels alone, with color type grey."""
    parts = [PNG_SIGNATURE]
    for kind, body in chunks:
        if kind in (b"IHDR", b"IDAT", b"IEND"):
            body = body[:9] + b"\0" + body[10:] if kind == b"IHDR" else body
            parts += [
                len(body).to_bytes(4),
                kind,
                body,
                zlib.crc32(kind + body).to_bytes(4),
            ]
    return b"".join(parts)


def _unscaled(pixels: Pixels, bits: int) -> Pixels:
    """Sample values: OpenCV stretches those of fewer than 8 bits to 0 to 255."""
    return (
        pixels if bits >= 8 else np.asarray(pixels // (255 // (2**bits - 1)), np.uint8)
    )


def _turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    if orientation == 1:
        return pixels
    transpose, rows, columns = TURNS[orientation]
    pixels = pixels.transpose(1, 0, 2) if transpose else pixels
    return np.ascontiguousarray(pixels[:: -1 if rows else 1, :: -1 if columns else 1])


def read_header(path: str) -> Header:
    """Header of a picture file. Raises DataError when the file does not reach its end; reads little of a large one."""
    try:
        return patiently(Path(path), lambda: _header(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def _header(path: str) -> Header:
    _check_regular(path)
    with Path(path).open("rb") as handle:
        head = handle.read(HEAD_BYTES)
        if not head.startswith((PNG_SIGNATURE, JPEG_START)) and len(head) == HEAD_BYTES:
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _parsed(content, path)
        length = handle.seek(0, 2)
        handle.seek(max(0, length - TAIL_BYTES))
        tail = handle.read()
    header = _parsed(head, path)
    end = (
        PNG_END
        if head.startswith(PNG_SIGNATURE)
        else JPEG_END
        if head.startswith(JPEG_START)
        else b""
    )
    if end not in tail:
        raise _truncated(path, length)
    return header


def _check_regular(path: str) -> None:
    """Raise DataError for what is no file: opening a FIFO waits for ever, and a device has no end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {
            stat.S_IFIFO: "a FIFO",
            stat.S_IFDIR: "a folder",
            stat.S_IFSOCK: "a socket",
        }
        raise DataError(
            f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, but a picture file was needed. Remove it."
        )


def _unreadable(path: str, error: OSError) -> DataError:
    tried = (
        ", at six tries. Check the disk or the file server that holds it"
        if error.errno in PASSING
        else ""
    )
    return DataError(f"{path} cannot be read: {error.strerror}{tried}.")


def _parsed(data: Bytes, path: str, *, complete: bool = False) -> Header:
    """Header in the content of a file; checks all of its structure if `complete`."""
    try:
        if complete:
            check_complete(bytes(data))
        return parse(data)
    except EOFError:
        raise _truncated(path, len(data)) from None
    except ValueError as error:
        raise DataError(f"{path} {error}") from None


def _truncated(path: str, length: int) -> DataError:
    return DataError(
        f"{path} is truncated: its {length} bytes end before the image does. Copy it again."
    )


def _read(path: str) -> tuple[bytes, Header]:
    """Content and header of a file that is complete."""
    try:
        _check_regular(path)
        data = patiently(Path(path), Path(path).read_bytes)
    except OSError as error:
        raise _unreadable(path, error) from None
    return data, _parsed(data, path, complete=True)


def _decode(data: bytes, flags: int, path: str) -> NDArray[Any]:
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        pixels = None
    if pixels is None:
        raise DataError(
            f"{path} is complete, but cannot be decoded. Write or copy it again."
        )
    return np.asarray(pixels)


@contextmanager
def decoders_heard() -> Iterator[Callable[[], str]]:
    """A function that returns what decoders have written to the standard error in the block; the rest is passed on.

    OpenCV decodes a damaged JPEG to grey areas and tells nobody else. Holds the standard error of the whole process.
    """
    if sys.stderr is None:  # closed, as of a daemon
        yield lambda: ""
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as heard:
        kept = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield lambda: _content(heard)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            others = [
                line
                for line in _content(heard).splitlines(keepends=True)
                if not JPEG_WORDS.search(line)
            ]
            sys.stderr.write("".join(others))


def _content(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(
        errors="replace"
    )


def damaged_jpegs(paths: Iterable[str]) -> Iterator[str]:
    """A message for each JPEG that is decoded only in part."""
    for path in paths:
        with decoders_heard() as words:
            with suppress(DataError, OSError):
                if Path(path).read_bytes()[:2] == JPEG_START:
                    read_image(path)
            found = JPEG_DAMAGE.search(words())
        if found:
            yield f"{path} is damaged: the decoder says {found[0]!r} and fills the rest with grey. Copy it again."


def threaded(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results of `work` in the order of `items`, computed by threads: OpenCV decodes outside Python's lock.

    No thread outlives the iterator. While a thread ends, it frees OpenCV's thread-local memory under a lock; a loader
    process forked at that moment would inherit the lock locked, and hang. So this waits until the system has ended all.
    """
    threads: list[int] = []
    pool = ThreadPoolExecutor(
        min(16, os.cpu_count() or 1),
        initializer=lambda: threads.append(get_native_id()),
    )
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(
            cancel_futures=True
        )  # a caller that stops at the first problem does not wait for the rest
        tasks = [Path(f"/proc/self/task/{number}") for number in threads]
        deadline = time.monotonic() + 5.0
        while any(task.exists() for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.0005)
