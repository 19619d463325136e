"""Image files to arrays. A truncated or damaged file is an error.

Decoders fill the missing part of a truncated file with grey or black and carry on, so the structure of a file is
checked up to its end marker before OpenCV decodes it. EXIF orientation is not applied, because masks have none.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_native_id
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.errors import DataError

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
HEAD_BYTES = 1 << 18  # in a JPEG, previews and colour profiles come before the size
TAIL_BYTES = 1 << 12
# The marker that ends a JPEG scan: 0xFF00 is a stuffed byte, 0xFFD0 to 0xFFD7 are restarts, 0xFFFF is fill.
SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
T = TypeVar("T")
R = TypeVar("R")


class Header(NamedTuple):
    """Properties of an image file from its first bytes."""

    height: int
    width: int
    single_channel_8bit: bool  # grey, 8 bits, no palette, as a mask must be


def read_image(path: str) -> NDArray[np.uint8]:
    """RGB pixels of a PNG or JPEG, uint8 (H, W, 3). Raises DataError for a missing, truncated or damaged file."""
    data = _read(path)
    _check_complete(data, path)
    return _decode(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION, path)


def read_mask(path: str) -> NDArray[np.uint8]:
    """Raw ids of a single-channel 8-bit PNG, uint8 (H, W). Raises DataError for any other file."""
    data = _read(path)
    _check_complete(data, path)
    check_mask(_parse_header(data, path), path)
    return _decode(data, cv2.IMREAD_UNCHANGED, path)


def read_header(path: str) -> Header:
    """Header of an image file, from its first and last bytes. Raises DataError when the end marker is missing."""
    try:
        with Path(path).open("rb") as handle:
            head = handle.read(HEAD_BYTES)
            length = handle.seek(0, 2)
            handle.seek(max(0, length - TAIL_BYTES))
            tail = handle.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    header = _parse_header(head, path)
    if (PNG_END if head.startswith(PNG_SIGNATURE) else JPEG_END) not in tail:
        raise _truncated(path, length)
    return header


def check_mask(header: Header, path: str) -> None:
    """Raise DataError unless the pixels are one 8-bit channel; a palette PNG would be decoded to colours, not ids."""
    if not header.single_channel_8bit:
        raise DataError(
            f"{path} is a mask of colours, of a palette, or not of 8 bits, but a single-channel 8-bit PNG of class ids "
            "was needed. Convert it to ids."
        )


def _parse_header(data: bytes, path: str) -> Header:
    if data.startswith(PNG_SIGNATURE) and len(data) >= 26:
        width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
        return Header(height, width, data[24] == 8 and data[25] == 0)
    if not data.startswith(JPEG_START):
        raise _unknown_format(path, data)
    for marker, place in _jpeg_markers(data):
        if marker in SIZE_MARKERS and place + 9 <= len(data):
            height, width = int.from_bytes(data[place + 5 : place + 7]), int.from_bytes(data[place + 7 : place + 9])
            return Header(height, width, False)
    raise _truncated(path, len(data))


def _check_complete(data: bytes, path: str) -> None:
    """Raise DataError unless the file is complete up to its end marker, and the checksums of a PNG hold."""
    if data.startswith(PNG_SIGNATURE):
        _check_png(data, path)
    elif not data.startswith(JPEG_START):
        raise _unknown_format(path, data)
    elif all(marker != JPEG_END[1] for marker, _ in _jpeg_markers(data)):
        raise _truncated(path, len(data))


def _check_png(data: bytes, path: str) -> None:
    place = len(PNG_SIGNATURE)
    while place + 12 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])
        if end > len(data):
            break
        if zlib.crc32(memoryview(data)[place + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise DataError(f"{path} is damaged: the checksum of a chunk at byte {place} is wrong. Copy it again.")
        if data[place + 4 : place + 8] == b"IEND":
            return
        place = end
    raise _truncated(path, len(data))


def _jpeg_markers(data: bytes) -> Iterator[tuple[int, int]]:
    """Code and position of each marker, up to the end of the data or the first byte that is not one."""
    place = 2
    while place + 2 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
            continue
        yield marker, place
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
        if marker == 0xDA:
            found = SCAN_END.search(data, place)
            place = found.start() if found else len(data)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _decode(data: bytes, flags: int, path: str) -> NDArray[np.uint8]:
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        pixels = None
    if pixels is None:
        raise DataError(f"{path} is complete, but cannot be decoded. Write or copy it again.")
    return np.asarray(pixels, np.uint8)


def _truncated(path: str, length: int) -> DataError:
    return DataError(f"{path} is truncated: its {length} bytes end before the image does. Copy it again.")


def _unknown_format(path: str, data: bytes) -> DataError:
    return DataError(f"{path} is {'neither PNG nor JPEG' if data else 'empty'}. Copy it again, or convert it.")


def threaded(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results of `work` in the order of `items`, computed by threads: OpenCV decodes outside Python's lock.

    No thread outlives the iterator. While a thread ends, it frees OpenCV's thread-local memory under a lock; a loader
    process forked at that moment would inherit the lock locked, and hang. So this waits until the system has ended all.
    """
    threads: list[int] = []
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), initializer=lambda: threads.append(get_native_id()))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)  # a caller that stops at the first problem does not wait for the rest
        tasks = [Path(f"/proc/self/task/{number}") for number in threads]
        deadline = time.monotonic() + 5.0
        while any(task.exists() for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.0005)
