"""Image files to arrays, with no pixel guessed: a torn or damaged file is an error.

Decoders fill what is missing from a truncated file with grey or black and carry on, so the structure of a file is
walked to its end marker before OpenCV sees it. Pixels are taken as stored: EXIF orientation is not applied, because
masks have none.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.errors import DataError

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
JPEG_START = b"\xff\xd8"
HEAD_BYTES = 1 << 18  # JPEG writes previews and colour profiles before its size
TAIL_BYTES = 1 << 12
# The marker that ends a JPEG scan: 0xFF00 is a stuffed byte, 0xFFD0 to 0xFFD7 are restarts, 0xFFFF is fill.
SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class Header(NamedTuple):
    """What the first bytes of an image file say."""

    height: int
    width: int
    single_channel_8bit: bool  # grey, 8 bits, no palette: what a mask has to be


def read_image(path: str) -> NDArray[np.uint8]:
    """RGB pixels of a PNG or JPEG, uint8 (H, W, 3). Raises DataError naming a missing, torn or damaged file."""
    data = _read(path)
    check_complete(data, path)
    return _decode(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION, path)


def read_mask(path: str) -> NDArray[np.uint8]:
    """Raw ids of a single-channel 8-bit PNG, uint8 (H, W). Raises DataError naming any other file."""
    data = _read(path)
    check_complete(data, path)
    check_mask(parse_header(data, path), path)
    return _decode(data, cv2.IMREAD_UNCHANGED, path)


def read_header(path: str) -> Header:
    """Size of an image file, whose end marker is seen too; reads its first and last bytes only."""
    try:
        with Path(path).open("rb") as handle:
            head = handle.read(HEAD_BYTES)
            length = handle.seek(0, 2)
            handle.seek(max(0, length - TAIL_BYTES))
            tail = handle.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    header = parse_header(head, path)
    if (PNG_END if head.startswith(PNG_SIGNATURE) else b"\xff\xd9") not in tail:
        raise _torn(path, length)
    return header


def check_mask(header: Header, path: str) -> None:
    """Raise DataError unless the pixels are one 8-bit channel; a palette PNG would be decoded to colours, not ids."""
    if not header.single_channel_8bit:
        raise DataError(
            f"{path} is a mask of colours, of a palette, or not of 8 bits, but a single-channel 8-bit PNG of class ids "
            "was needed. Convert it to ids."
        )


def check_complete(data: bytes, path: str) -> None:
    """Raise DataError unless every part of the file is there, up to its end marker, and PNG checksums hold."""
    if data.startswith(PNG_SIGNATURE):
        _walk_png(data, path)
    elif data.startswith(JPEG_START):
        _walk_jpeg(data, path)
    else:
        raise _foreign(path, data)


def parse_header(data: bytes, path: str) -> Header:
    """Header of a file from its first bytes."""
    if data.startswith(PNG_SIGNATURE) and len(data) >= 26:
        width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
        return Header(height, width, data[24] == 8 and data[25] == 0)
    if not data.startswith(JPEG_START):
        raise _foreign(path, data)
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        if data[place + 1] in SIZE_MARKERS:
            height, width = int.from_bytes(data[place + 5 : place + 7]), int.from_bytes(data[place + 7 : place + 9])
            return Header(height, width, False)
        place += 1 if data[place + 1] == 0xFF else 2 + int.from_bytes(data[place + 2 : place + 4])
    raise _torn(path, len(data))


def _walk_png(data: bytes, path: str) -> None:
    place = len(PNG_SIGNATURE)
    while place + 12 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])
        if end > len(data):
            break
        kind = data[place + 4 : place + 8]
        if zlib.crc32(memoryview(data)[place + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise DataError(f"{path} is damaged: the checksum of a part at byte {place} is wrong. Copy it again.")
        if kind == b"IEND":
            return
        place = end
    raise _torn(path, len(data))


def _walk_jpeg(data: bytes, path: str) -> None:
    place = 2
    while place + 4 <= len(data) + 2 and data[place : place + 1] == b"\xff":
        marker = data[place + 1] if place + 1 < len(data) else 0
        if marker == 0xD9:
            return
        if marker == 0xFF:
            place += 1
            continue
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
        if marker == 0xDA:
            found = SCAN_END.search(data, place)
            place = found.start() if found else len(data)
    raise _torn(path, len(data))


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
        raise DataError(f"{path} cannot be decoded, though all of its parts are there. Write or copy it again.")
    return np.asarray(pixels, np.uint8)


def _torn(path: str, length: int) -> DataError:
    return DataError(f"{path} is truncated: its {length} bytes end before the image does. Copy it again.")


def _foreign(path: str, data: bytes) -> DataError:
    what = "empty" if not data else "neither PNG nor JPEG"
    return DataError(f"{path} is {what}. Copy it again, or convert it.")
