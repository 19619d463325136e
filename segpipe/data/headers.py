"""What a picture file says of itself: size, pixels, orientation, and whether the file is complete.

Decoders fill the missing part of a truncated file with grey or black and carry on, so
the structure of a PNG or JPEG is checked up to its end before OpenCV decodes it. The
format is that of the content; the suffix does not matter. other_formats.py reads the
rest with Pillow, which takes twice as long.

Everything here raises EOFError for a file that ends too early, and ValueError with the
rest of a sentence for a file that is wrong in another way.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
# Layout by color type; 4 and 6 have alpha.
PNG_LAYOUTS = {0: "grey", 2: "color", 3: "palette", 4: "grey", 6: "color"}
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
# The marker that ends a JPEG scan: 0xFF00 is a stuffed byte, 0xFFD0 to 0xFFD7 are
# restarts, 0xFFFF is fill.
SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
ORIENTATION_TAG = 0x0112

LOSSY = (
    "{} loses information, and with it ids at every edge. Export the masks as PNG "
    "from where they were drawn."
)


class Header(NamedTuple):
    """Properties of a picture file from its first bytes."""

    height: int
    width: int
    layout: str  # grey, palette or color
    bits: int = 8  # per channel or index
    orientation: int = 1  # of EXIF: 2 to 4 mirrored or upside down, 5 to 8 on its side
    mask_fault: str = ""  # why it cannot be a mask; empty if it can

    @property
    def upright(self) -> tuple[int, int]:
        """(height, width) after the orientation is applied."""
        if self.orientation >= 5:
            return self.width, self.height
        return self.height, self.width


def parse_png(data: bytes) -> Header:
    """Header of a PNG from its bytes up to the first pixels."""
    if len(data) < 33:
        raise EOFError
    width = int.from_bytes(data[16:20])
    height = int.from_bytes(data[20:24])
    bits, color = data[24], data[25]
    if color not in PNG_LAYOUTS:
        raise ValueError(f"is damaged: a PNG has no color type {color}. Copy it again.")
    fault = ""
    if bits == 16 and color:
        fault = "16 bits per channel are more than a color needs. Write it with 8."
    orientation = 1
    for kind, start, size in _png_chunks(data):
        if kind == b"eXIf":
            orientation = exif_orientation(data[start : start + size])
        if kind == b"IDAT":
            return Header(height, width, PNG_LAYOUTS[color], bits, orientation, fault)
    raise EOFError


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, first byte and length of the content of each chunk that starts in `data`."""
    place = len(PNG_SIGNATURE)
    while place + 8 <= len(data):
        size = int.from_bytes(data[place : place + 4])
        yield data[place + 4 : place + 8], place + 8, size
        place += 12 + size


def png_chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """Kind and range of the content of each chunk of a PNG, up to its end. Checks the checksums."""
    chunks = []
    for kind, start, size in _png_chunks(data):
        end = start + size
        if end + 4 > len(data):
            break
        checksum = int.from_bytes(data[end : end + 4])
        if zlib.crc32(memoryview(data)[start - 4 : end]) != checksum:
            raise ValueError(
                f"is damaged: the checksum of a chunk at byte {start - 8} is wrong. "
                "Copy it again."
            )
        chunks.append((kind, start, end))
        if kind == b"IEND":
            return chunks
    raise EOFError


def parse_jpeg(data: bytes) -> Header:
    """Header of a JPEG from its bytes up to its size."""
    orientation = 1
    for marker, place in _jpeg_markers(data):
        if marker == 0xE1 and data[place + 4 : place + 10] == b"Exif\0\0":
            end = place + 2 + int.from_bytes(data[place + 2 : place + 4])
            if end > len(data):
                raise EOFError
            orientation = exif_orientation(data[place + 10 : end])
        if marker in SIZE_MARKERS and place + 9 <= len(data):
            height = int.from_bytes(data[place + 5 : place + 7])
            width = int.from_bytes(data[place + 7 : place + 9])
            return Header(height, width, "color", 8, orientation, LOSSY.format("JPEG"))
    raise EOFError


def check_jpeg_end(data: bytes) -> None:
    """Raise EOFError unless the markers of a JPEG reach the one that ends it."""
    if all(marker != JPEG_END[1] for marker, _ in _jpeg_markers(data)):
        raise EOFError


def _jpeg_markers(data: bytes) -> Iterator[tuple[int, int]]:
    """Code and position of each marker, up to the first byte that is not one."""
    place = 2
    while place + 2 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
            continue
        yield marker, place
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
        if marker == 0xDA:
            end = SCAN_END.search(data, place)
            place = end.start() if end else len(data)


def exif_orientation(block: bytes) -> int:
    """Orientation that EXIF data names, 1 to 8; 1 if it names none or is damaged."""
    exif = Image.Exif()
    try:
        exif.load(block)
        value = exif.get(ORIENTATION_TAG)
    except Exception:  # whatever Pillow raises for damaged data
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1
