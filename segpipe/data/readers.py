"""Picture files to arrays. A truncated or damaged file is an error that names it.

PNG and JPEG are decoded by OpenCV, every other format by Pillow.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.headers import (
    JPEG_END,
    JPEG_START,
    PNG_END,
    PNG_SIGNATURE,
    Header,
    check_jpeg_end,
    header_of,
    open_other,
    palette_of,
    parse_jpeg,
    parse_png,
    pixels_of,
    png_chunks,
    rgb_of,
)
from segpipe.disk import PASSING, patiently
from segpipe.errors import DataError

# How EXIF's orientations turn stored pixels upright, in this order: transpose, flip
# rows, flip columns.
TURNS = {
    1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
    5: (True, False, False), 6: (True, False, True), 7: (True, True, True), 8: (True, True, False),
}  # fmt: skip
# In nearly all files the header fits into the first length; previews and color profiles
# of a JPEG may need the second. None: the whole file.
HEAD_BYTES = (1 << 12, 1 << 18, None)
TAIL_BYTES = 1 << 12
# What libjpeg says of a file that it decodes all the same. Extraneous bytes cost no
# pixel, and cameras write them.
JPEG_DAMAGE = re.compile(
    "premature end of data segment|Premature end of JPEG file|bad Huffman code"
    "|found marker .* instead of RST.*|Inconsistent progression sequence.*"
    "|Invalid SOS parameters.*"
)
JPEG_WORDS = re.compile(f"{JPEG_DAMAGE.pattern}|Corrupt JPEG data")
NO_FILES = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
OPAQUE = 255
Value = int | tuple[int, int, int]  # an id or a color
Pixels = NDArray[np.uint8] | NDArray[np.uint16]
T = TypeVar("T")
R = TypeVar("R")


class RawMask(NamedTuple):
    """Pixels of a mask file as they are stored: either `ids` or `rgba` is None."""

    header: Header
    ids: Pixels | None  # grey values or palette indices (H, W)
    rgba: NDArray[np.uint8] | None = None  # colors of the pixels, uint8 (H, W, 4)
    palette: NDArray[np.uint8] | None = None  # colors of the indices, uint8 (n, 4)


def read_image(
    path: str,
    orient: Callable[[Header], int] = lambda header: 1,
    data: bytes | None = None,
) -> NDArray[np.uint8]:
    """RGB pixels, uint8 (H, W, 3): grey is repeated, alpha dropped, and of 16 bits the upper 8 are kept.

    `orient` chooses the EXIF orientation to apply; by default none. `data` is the
    content of the file, if it was read and checked before. Raises DataError for a
    missing, truncated or damaged file.
    """
    known = data is not None
    data = _content(path) if data is None else data
    with _named(path, len(data)):
        if data.startswith((PNG_SIGNATURE, JPEG_START)):
            header = _parse(data, path) if known else _parse_whole(data, path)
            flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
            pixels = np.asarray(_decode(data, flags), np.uint8)
        else:
            other = open_other(data, Path(path).suffix)
            header, pixels = header_of(other), rgb_of(other)
    return _turned(pixels, orient(header))


def read_mask(path: str) -> RawMask:
    """Pixels of a mask file as stored. Raises DataError for a damaged file, and for formats that lose ids."""
    data = _content(path)
    with _named(path, len(data)):
        if data.startswith((PNG_SIGNATURE, JPEG_START)):
            header = _parse_whole(data, path)
            check_mask(header, path)
            if header.layout == "palette":
                return _read_indices(data, header, path)
            pixels = _decode(data, cv2.IMREAD_UNCHANGED)
            if pixels.ndim == 2:
                return RawMask(header, _unscaled(pixels, header.bits))
            bgr = pixels.shape[2] == 3
            code = cv2.COLOR_BGR2RGBA if bgr else cv2.COLOR_BGRA2RGBA
            return RawMask(
                header, None, np.asarray(cv2.cvtColor(pixels, code), np.uint8)
            )
        other = open_other(data, Path(path).suffix)
        header = header_of(other)
        check_mask(header, path)
        if header.layout != "color":
            palette = palette_of(other) if header.layout == "palette" else None
            return RawMask(header, pixels_of(other), palette=palette)
        pixels = pixels_of(other)
        if pixels.shape[2] == 3:
            pixels = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_RGB2RGBA), np.uint8)
        return RawMask(header, None, np.ascontiguousarray(pixels))


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


def read_header(path: str) -> Header:
    """Header of a picture file. Raises DataError if the file does not reach its end; reads little of a PNG or JPEG."""
    _check_regular(path)
    try:
        return patiently(Path(path), lambda: _read_header(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_header(path: str) -> Header:
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with _named(path, size):
            for length in HEAD_BYTES:
                file.seek(0)
                head = file.read(length)
                png, jpeg = head.startswith(PNG_SIGNATURE), head.startswith(JPEG_START)
                if length is not None and len(head) == length and not (png or jpeg):
                    continue
                try:
                    header = _parse(head, path)
                    break
                except EOFError:
                    if length is None or size <= length:
                        raise
            if png or jpeg:
                file.seek(max(0, size - TAIL_BYTES))
                if (PNG_END if png else JPEG_END) not in file.read():
                    raise EOFError
    return header


def _parse(data: bytes, path: str) -> Header:
    if data.startswith(PNG_SIGNATURE):
        return parse_png(data)
    if data.startswith(JPEG_START):
        return parse_jpeg(data)
    if not data:
        raise ValueError("is empty. Copy it again, or convert it.")
    return header_of(open_other(data, Path(path).suffix))


def _parse_whole(data: bytes, path: str) -> Header:
    """Header of a PNG or JPEG after a check of all of its structure."""
    if data.startswith(PNG_SIGNATURE):
        png_chunks(data)
    else:
        check_jpeg_end(data)
    return _parse(data, path)


@contextmanager
def _named(path: str, length: int) -> Iterator[None]:
    """Turns the EOFError and ValueError of headers.py into a DataError that names the file."""
    try:
        yield
    except EOFError:
        raise DataError(
            f"{path} is truncated: its {length} bytes end before the image does. Copy "
            "it again."
        ) from None
    except ValueError as error:
        raise DataError(f"{path} {error}") from None


def _check_regular(path: str) -> None:
    """Raise DataError for what is no file: opening a FIFO waits for ever, and a device has no end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(mode):
        kind = NO_FILES.get(stat.S_IFMT(mode), "a device")
        raise DataError(f"{path} is {kind}, but a picture file was needed. Remove it.")


def _unreadable(path: str, error: OSError) -> DataError:
    advice = ""
    if error.errno in PASSING:
        advice = ", at six tries. Check the disk or the file server that holds it"
    return DataError(f"{path} cannot be read: {error.strerror}{advice}.")


def _content(path: str) -> bytes:
    _check_regular(path)
    try:
        data = patiently(Path(path), Path(path).read_bytes)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not data:
        raise DataError(f"{path} is empty. Copy it again, or convert it.")
    return data


def _decode(data: bytes, flags: int) -> NDArray[Any]:
    pixels = None
    with suppress(cv2.error):
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if pixels is None:
        raise ValueError("is complete, but cannot be decoded. Write or copy it again.")
    return np.asarray(pixels)


def _read_indices(data: bytes, header: Header, path: str) -> RawMask:
    """Indices and palette of a PNG. OpenCV would decode to colors, so it gets a PNG whose header says grey."""
    chunks = [(kind, data[start:end]) for kind, start, end in png_chunks(data)]
    contents = dict(chunks)
    table = contents.get(b"PLTE", b"")
    colors = np.frombuffer(table[: len(table) // 3 * 3], np.uint8).reshape(-1, 3)
    alpha = np.full(len(colors), 255, np.uint8)
    given = np.frombuffer(contents.get(b"tRNS", b""), np.uint8)[: len(colors)]
    alpha[: len(given)] = given
    pixels = _unscaled(_decode(_as_grey(chunks), cv2.IMREAD_UNCHANGED), header.bits)
    if pixels.max(initial=0) >= len(colors):
        raise DataError(
            f"{path} is damaged: its palette has {len(colors)} colors, its pixels use "
            "more. Write it again."
        )
    return RawMask(header, pixels, palette=np.column_stack([colors, alpha]))


def _as_grey(chunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    """PNG of the pixels alone, with color type grey."""
    parts = [PNG_SIGNATURE]
    for kind, content in chunks:
        if kind == b"IHDR":
            content = content[:9] + b"\0" + content[10:]
        if kind in (b"IHDR", b"IDAT", b"IEND"):
            checksum = zlib.crc32(kind + content).to_bytes(4)
            parts += [len(content).to_bytes(4), kind, content, checksum]
    return b"".join(parts)


def _unscaled(pixels: Pixels, bits: int) -> Pixels:
    """Sample values: OpenCV stretches those of fewer than 8 bits to 0 to 255."""
    if bits >= 8:
        return pixels
    return np.asarray(pixels // (255 // (2**bits - 1)), np.uint8)


def _turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    if orientation == 1:
        return pixels
    transpose, rows, columns = TURNS[orientation]
    if transpose:
        pixels = pixels.transpose(1, 0, 2)
    return np.ascontiguousarray(pixels[:: -1 if rows else 1, :: -1 if columns else 1])


class MaskValues(NamedTuple):
    """What the pixels of a mask file hold, before a class table says what it means.

    A color is the number R + 256 G + 65536 B, so that all of it can be written as JSON.
    """

    kind: str  # ids or colors, as they are stored
    pixels: dict[int, int]  # of each id or color
    palette: dict[int, list[int]]  # RGBA of each index that occurs
    opaque: bool  # no pixel of a file of colors is transparent
    between: dict[int, int] | None = None  # pixels of each value along edges

    @classmethod
    def of_json(cls, row: list[Any]) -> MaskValues:
        """From the lists and texts that JSON makes of it."""
        kind, pixels, palette, opaque, between = row
        return cls(
            kind,
            _with_numbers(pixels),
            _with_numbers(palette),
            opaque,
            None if between is None else _with_numbers(between),
        )

    def value(self, number: int) -> Value:
        """The id or color that a number stands for."""
        if self.kind == "ids":
            return number
        return number & 255, number >> 8 & 255, number >> 16


def _with_numbers(entries: dict[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in entries.items()}


def values_of(mask: RawMask, *, edges: bool = False) -> MaskValues:
    """What a mask holds; with `edges`, also the pixels of each value between two others."""
    between = _between(mask) if edges else None
    if mask.ids is None:
        assert mask.rgba is not None
        opaque = bool((mask.rgba[..., 3] == OPAQUE).all())
        return MaskValues("colors", _colors(mask.rgba), {}, opaque, between)
    pixels = _ids(mask.ids)
    palette = {}
    if mask.palette is not None:
        palette = {index: mask.palette[index].tolist() for index in pixels}
    return MaskValues("ids", pixels, palette, True, between)


def _ids(ids: Pixels) -> dict[int, int]:
    counts = np.bincount(ids.ravel())
    return {int(value): int(counts[value]) for value in np.flatnonzero(counts)}


def _colors(rgba: NDArray[np.uint8]) -> dict[int, int]:
    """Pixels of each color. Sorts the starts of runs of equal pixels only, which are few in a mask."""
    packed = np.ascontiguousarray(rgba).view("<u4").ravel() & 0xFFFFFF
    starts = np.flatnonzero(np.concatenate(([True], packed[1:] != packed[:-1])))
    lengths = np.diff(np.append(starts, packed.size))
    colors, places = np.unique(packed[starts], return_inverse=True)
    counts = np.zeros(len(colors), np.int64)
    np.add.at(counts, places, lengths)
    return dict(zip(colors.tolist(), counts.tolist(), strict=True))


def _between(mask: RawMask) -> dict[int, int]:
    """Pixels of each value with a smaller and a larger one among their 8 neighbors, in every channel that differs.

    Interpolation puts a line of them between any two classes. The pixels of a real
    class, if ever so small, have few.
    """
    pixels = mask.rgba if mask.ids is None else mask.ids
    assert pixels is not None
    low = np.asarray(cv2.erode(pixels, np.ones((3, 3), np.uint8)))
    high = np.asarray(cv2.dilate(pixels, np.ones((3, 3), np.uint8)))
    inside = (low < pixels) & (pixels < high)
    if mask.ids is not None:
        return _ids(mask.ids[inside])
    flat = low == high
    chosen = pixels[(flat | inside).all(axis=2) & ~flat.all(axis=2)]
    return _colors(np.asarray(chosen, np.uint8)) if len(chosen) else {}


@contextmanager
def decoders_heard() -> Iterator[Callable[[], str]]:
    """A function that returns what decoders have written to the standard error in the block.

    OpenCV decodes a damaged JPEG to grey areas and says so nowhere else. So the file
    descriptor 2 of the whole process points to a file meanwhile. Whatever else was
    written there is passed on at the end.
    """
    if sys.stderr is None:  # closed, as of a daemon
        yield lambda: ""
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as record:

        def written() -> str:
            size = os.fstat(record.fileno()).st_size
            return os.pread(record.fileno(), size, 0).decode(errors="replace")

        terminal = os.dup(2)
        os.dup2(record.fileno(), 2)
        try:
            yield written
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            lines = written().splitlines(keepends=True)
            others = [line for line in lines if not JPEG_WORDS.search(line)]
            sys.stderr.write("".join(others))


def jpeg_damage(path: str) -> str:
    """A message for a JPEG that is decoded only in part; empty for any other file."""
    with decoders_heard() as written:
        with suppress(DataError, OSError):
            if Path(path).read_bytes()[:2] == JPEG_START:
                read_image(path)
        damage = JPEG_DAMAGE.search(written())
    if damage is None:
        return ""
    return (
        f"{path} is damaged: the decoder says {damage[0]!r} and fills the rest with "
        "grey. Copy it again."
    )


def threaded(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results of `work` in the order of `items`, computed by threads: decoders work outside Python's lock.

    No thread outlives the iterator. While a thread ends, it frees OpenCV's thread-local
    memory under a lock; a loader process forked at that moment would inherit the lock
    locked, and hang. So this waits until the system has ended all.
    """
    threads: list[int] = []
    pool = ThreadPoolExecutor(
        min(16, os.cpu_count() or 1),
        initializer=lambda: threads.append(get_native_id()),
    )
    try:
        yield from pool.map(work, items)
    finally:
        # A caller that stops at the first problem does not wait for the rest.
        pool.shutdown(cancel_futures=True)
        tasks = [Path(f"/proc/self/task/{number}") for number in threads]
        deadline = time.monotonic() + 5.0
        while any(task.exists() for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.0005)
