"""What a picture file says of itself: format, size, pixels, orientation, and whether the file is complete.

Decoders fill the missing part of a truncated file with grey or black and carry on, so the structure of a file is
checked up to its end before OpenCV decodes it. The format is that of the content; the suffix does not matter.

Everything here raises EOFError for a file that ends too early, and ValueError with the rest of a sentence for others.
"""

from __future__ import annotations

import mmap
import re
import zlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

Bytes = bytes | mmap.mmap

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
PNG_LAYOUTS = {
    0: "grey",
    2: "color",
    3: "palette",
    4: "grey",
    6: "color",
}  # by color type; 4 and 6 have alpha
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
HEAD_BYTES = 1 << 18  # in a JPEG, previews and color profiles come before the size
TAIL_BYTES = 1 << 12
# The marker that ends a JPEG scan: 0xFF00 is a stuffed byte, 0xFFD0 to 0xFFD7 are restarts, 0xFFFF is fill.
SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
TIFF_SIGNATURES = (b"II*\0", b"MM\0*")
WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, ORIENTATION = (
    256,
    257,
    258,
    259,
    262,
    274,
)
STRIPS, CHANNELS, STRIP_BYTES, TILES, TILE_BYTES, FORMAT, SUBFILE = (
    273,
    277,
    279,
    324,
    325,
    339,
    254,
)
NUMBER_BYTES = {1: 1, 3: 2, 4: 4}  # bytes of an unsigned number by its type
JPEG_CODES = (6, 7)
MOST_VALUES = 1 << 20

LOSSY = "{} loses information, and with it ids at every edge. Export the masks as PNG from where they were drawn."


class Header(NamedTuple):
    """Properties of a picture file from its first bytes."""

    height: int
    width: int
    layout: str  # grey, palette or color
    bits: int = 8  # per channel or index
    orientation: int = 1  # of EXIF: 1 upright, 2 to 4 mirrored or upside down, 5 to 8 turned by 90 degrees
    mask_fault: str = ""  # why it cannot be a mask; empty if it can

    @property
    def upright(self) -> tuple[int, int]:
        """(height, width) after the orientation is applied."""
        return (
            (self.width, self.height)
            if self.orientation >= 5
            else (self.height, self.width)
        )


def parse(data: Bytes) -> Header:
    """Header of a file from its content; of PNG and JPEG, the first HEAD_BYTES are enough."""
    if data[:8] == PNG_SIGNATURE:
        return _parse_png(data)
    if data[:2] == JPEG_START:
        return _parse_jpeg(data)
    if data[:2] == b"BM":
        return _parse_bmp(data)
    if data[:4] == b"RIFF" and data[8:12] in (b"WEBP", b""):
        return _parse_webp(data)
    if data[:4] in TIFF_SIGNATURES:
        return _parse_tiff(data)
    found = "neither PNG nor JPEG, BMP, TIFF or WebP" if len(data) else "empty"
    raise ValueError(f"is {found}. Copy it again, or convert it.")


def check_complete(data: bytes) -> None:
    """Raise an error unless the file is complete up to its end, and the checksums of a PNG hold."""
    if data.startswith(PNG_SIGNATURE):
        _check_png(data)
    elif data.startswith(JPEG_START):
        if all(marker != JPEG_END[1] for marker, _ in _jpeg_markers(data)):
            raise EOFError
    else:
        parse(data)  # the headers of the other formats say where the file ends


def _parse_png(data: Bytes) -> Header:
    if len(data) < 33:
        raise EOFError
    width, height, bits, color = (
        int.from_bytes(data[16:20]),
        int.from_bytes(data[20:24]),
        data[24],
        data[25],
    )
    if color not in PNG_LAYOUTS:
        raise ValueError(f"is damaged: a PNG has no color type {color}. Copy it again.")
    orientation, place = 1, 8
    while place + 8 <= min(len(data), HEAD_BYTES):
        size, kind = (
            int.from_bytes(data[place : place + 4]),
            data[place + 4 : place + 8],
        )
        if kind == b"IDAT":
            break
        if kind == b"eXIf":
            orientation = _exif_orientation(data[place + 8 : place + 8 + size])
        place += 12 + size
    fault = (
        "16 bits per channel are more than a color needs. Write it with 8."
        if bits == 16 and color
        else ""
    )
    return Header(height, width, PNG_LAYOUTS[color], bits, orientation, fault)


def _parse_jpeg(data: Bytes) -> Header:
    orientation = 1
    for marker, place in _jpeg_markers(data[:HEAD_BYTES]):
        if marker == 0xE1 and data[place + 4 : place + 10] == b"Exif\0\0":
            orientation = _exif_orientation(
                data[
                    place + 10 : place + 2 + int.from_bytes(data[place + 2 : place + 4])
                ]
            )
        if marker in SIZE_MARKERS and place + 9 <= len(data):
            height, width = (
                int.from_bytes(data[place + 5 : place + 7]),
                int.from_bytes(data[place + 7 : place + 9]),
            )
            return Header(height, width, "color", 8, orientation, LOSSY.format("JPEG"))
    raise EOFError


def _parse_bmp(data: Bytes) -> Header:
    if len(data) < 54:
        raise EOFError
    start, info, width, height = (
        int.from_bytes(data[place : place + 4], "little", signed=True)
        for place in (10, 14, 18, 22)
    )
    bits, coding = (
        int.from_bytes(data[28:30], "little"),
        int.from_bytes(data[30:34], "little"),
    )
    rows = (width * bits + 31) // 32 * 4 * abs(height)
    end = start + rows if coding in (0, 3) else int.from_bytes(data[2:6], "little")
    if len(data) < end:
        raise EOFError
    if width < 1 or height == 0 or info < 40:
        raise ValueError("is damaged: its BMP header has no size. Copy it again.")
    layout, fault = "color", ""
    if bits == 8 and coding == 0:
        count = min(int.from_bytes(data[46:50], "little") or 256, 256)
        table = data[14 + info : 14 + info + 4 * count]
        ramp = all(table[4 * i : 4 * i + 3] == bytes((i, i, i)) for i in range(count))
        layout = "grey" if ramp else "palette"
    elif bits not in (24, 32):
        fault = f"BMP with {bits} bits per pixel{' and run lengths' * (coding in (1, 2))} is not read. Write it as PNG."
    return Header(abs(height), width, layout, 8, 1, fault)


def _parse_webp(data: Bytes) -> Header:
    if len(data) < 30 or len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise EOFError
    chunk, orientation = data[12:16], 1
    if chunk == b"VP8X":
        if data[20] & 0x02:
            raise ValueError("is an animated WebP. Write its frames as pictures.")
        width, height = (
            int.from_bytes(data[place : place + 3], "little") + 1 for place in (24, 27)
        )
        place = data.find(b"EXIF", 30) if data[20] & 0x08 else -1
        if place >= 0:
            size = int.from_bytes(data[place + 4 : place + 8], "little")
            orientation = _exif_orientation(
                data[place + 8 : place + 8 + size].removeprefix(b"Exif\0\0")
            )
    elif chunk == b"VP8L":
        both = int.from_bytes(data[21:25], "little")
        width, height = (both & 0x3FFF) + 1, (both >> 14 & 0x3FFF) + 1
    else:
        width, height = (
            int.from_bytes(data[place : place + 2], "little") & 0x3FFF
            for place in (26, 28)
        )
    return Header(height, width, "color", 8, orientation, LOSSY.format("WebP"))


def _check_png(data: bytes) -> None:
    place = len(PNG_SIGNATURE)
    while place + 12 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])
        if end > len(data):
            break
        if zlib.crc32(memoryview(data)[place + 4 : end - 4]) != int.from_bytes(
            data[end - 4 : end]
        ):
            raise ValueError(
                f"is damaged: the checksum of a chunk at byte {place} is wrong. Copy it again."
            )
        if data[place + 4 : place + 8] == b"IEND":
            return
        place = end
    raise EOFError


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


def _exif_orientation(block: Bytes) -> int:
    """Orientation that EXIF data names, 1 to 8; 1 if it names none or is damaged."""
    if block[:4] not in TIFF_SIGNATURES:
        return 1
    try:
        value = _directory(block, _first(block))[0].get(ORIENTATION, [1])[0]
    except (EOFError, IndexError):
        return 1
    return value if 1 <= value <= 8 else 1


def _parse_tiff(data: Bytes) -> Header:
    tags, following = _directory(data, _first(data))
    if (
        following and not _directory(data, following)[0].get(SUBFILE, [0])[0] & 0b101
    ):  # a smaller copy or a mask
        raise ValueError("holds several pages. Write each as a file.")
    try:
        height, width = tags[HEIGHT][0], tags[WIDTH][0]
        places, sizes = (
            tags.get(strip, tags.get(tile))
            for strip, tile in ((STRIPS, TILES), (STRIP_BYTES, TILE_BYTES))
        )
        if any(
            place + size > len(data)
            for place, size in zip(places or (), sizes or (), strict=True)
        ):
            raise EOFError
    except (KeyError, ValueError):
        raise ValueError(
            "is damaged: its TIFF directory is incomplete. Write it again."
        ) from None
    channels, bits = tags.get(CHANNELS, [1])[0], tags.get(BITS, [1])[0]
    photometric, compression = (
        tags.get(PHOTOMETRIC, [1])[0],
        tags.get(COMPRESSION, [1])[0],
    )
    if channels not in (1, 2, 3, 4) or tags.get(FORMAT, [1])[0] != 1 or bits > 16:
        raise ValueError(
            f"has {channels} channels of {bits} bits, but grey or RGB of 8 or 16 bits were needed."
        )
    if tags.get(ORIENTATION, [1])[0] != 1:
        raise ValueError(
            "names an orientation, which decoders treat differently in TIFF. Write it upright."
        )
    layout = "color" if channels > 2 else "palette" if photometric == 3 else "grey"
    fault = LOSSY.format("JPEG inside TIFF") if compression in JPEG_CODES else ""
    return Header(
        height,
        width,
        layout,
        bits,
        1,
        fault or _tiff_mask_fault(layout, bits, photometric, channels),
    )


def _tiff_mask_fault(layout: str, bits: int, photometric: int, channels: int) -> str:
    if layout == "grey" and (photometric != 1 or channels != 1):
        return "its grey values are inverted or have alpha. Write it as PNG."
    if layout == "palette":
        return "a TIFF with a palette is decoded to colors and loses its ids. Write it as PNG."
    if bits not in ((8, 16) if layout == "grey" else (8,)):
        return f"{layout} with {bits} bits is not read. Write it as PNG."
    return ""


def _first(data: Bytes) -> int:
    return int.from_bytes(data[4:8], _order(data))


def _order(data: Bytes) -> Literal["little", "big"]:
    return "little" if data[:2] == b"II" else "big"


def _directory(data: Bytes, place: int) -> tuple[dict[int, list[int]], int]:
    """Whole numbers of a directory by tag, and where the next directory is. Raises EOFError."""
    order = _order(data)

    def number(start: int, size: int) -> int:
        if start + size > len(data):
            raise EOFError
        return int.from_bytes(data[start : start + size], order)

    tags: dict[int, list[int]] = {}
    count = number(place, 2)
    for start in range(place + 2, place + 2 + 12 * count, 12):
        tag, size, times = (
            number(start, 2),
            NUMBER_BYTES.get(number(start + 2, 2), 0),
            number(start + 4, 4),
        )
        if size and 0 < times <= MOST_VALUES:
            values = start + 8 if size * times <= 4 else number(start + 8, 4)
            tags[tag] = [number(values + size * i, size) for i in range(times)]
    return tags, number(place + 2 + 12 * count, 4)
