"""What a picture file says of itself: size, pixels, orientation, and whether the file is complete.

Decoders fill the missing part of a truncated file with grey or black and carry on, so
the structure of a PNG or JPEG is checked up to its end before OpenCV decodes it. Pillow
reads BMP, TIFF, WebP, PNM and TGA, which takes twice as long. The format is that of the
content; the suffix does not matter.

Everything here raises EOFError for a file that ends too early, and ValueError with the
rest of a sentence for a file that is wrong in another way.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, TiffImagePlugin

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

FORMATS = ("BMP", "TIFF", "WEBP", "PPM")
# TGA has no signature: only its suffix tells, and Pillow takes other bytes for one.
TGA = "TGA"
LAYOUTS = {
    **dict.fromkeys(("1", "L", "LA", "I", "I;16", "I;16B"), "grey"),
    **dict.fromkeys(("P", "PA"), "palette"),
    **dict.fromkeys(("RGB", "RGBA", "RGBX"), "color"),
}
WIDE = ("I", "I;16", "I;16B")  # modes of 16 bits
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_SUBFILE = 258, 262, 254
TIFF_PLACES = ((273, 279), (324, 325))  # offsets and lengths of strips, or of tiles
WRITE_PNG = "Write it as PNG."

LOSSY = (
    "{} loses information, and with it ids at every edge. Export the masks as PNG "
    "from where they were drawn."
)


# Pillow warns of a truncated TIFF, once per process: the error here names the file.
warnings.filterwarnings("ignore", module="PIL")


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


def open_other(data: bytes, suffix: str) -> ImageFile.ImageFile:
    """The picture in `data`, not decoded yet. `suffix` is that of its file."""
    formats = (TGA,) if suffix.lower() == ".tga" else FORMATS
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except Image.DecompressionBombError as error:
        raise ValueError(f"is too large for Pillow: {error}") from None
    except Exception:  # whatever Pillow raises for damaged data
        if data.startswith((b"BM", b"II*\0", b"MM\0*", b"RIFF")):
            raise EOFError from None
        raise ValueError(
            "is neither PNG nor JPEG, BMP, TIFF, WebP, PNM or TGA. Copy it again, or "
            "convert it."
        ) from None
    _check_whole(image, data)
    return image


def header_of(image: ImageFile.ImageFile) -> Header:
    """Header of a picture that `open_other` returned."""
    layout = LAYOUTS.get(image.mode)
    if layout is None or (image.mode == "I" and image.format != "PPM"):
        raise ValueError(
            f"has pixels of the mode {image.mode}, but grey or RGB of 8 or 16 bits "
            "were needed."
        )
    if _pages(image) > 1:
        raise ValueError("holds several pages. Write each as a file.")
    bits = 16 if image.mode in WIDE else 1 if image.mode == "1" else 8
    orientation = exif_orientation(image.info.get("exif", b""))
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = image.tag_v2.get(TIFF_BITS, (1,))[0]
        if image.tag_v2.get(ORIENTATION_TAG, 1) != 1:
            raise ValueError(
                "names an orientation, which decoders treat differently in TIFF. "
                "Write it upright."
            )
    fault = _mask_fault(image, layout, bits)
    return Header(image.height, image.width, layout, bits, orientation, fault)


def pixels_of(image: ImageFile.ImageFile) -> NDArray[Any]:
    """Pixels as they are stored: (H, W) of grey values or indices, or (H, W, channels)."""
    try:
        pixels = np.asarray(image)
    except OSError as error:
        if "truncated" in str(error):
            raise EOFError from None
        raise ValueError(f"cannot be decoded ({error}). Write it again.") from None
    except Exception as error:  # whatever Pillow raises for damaged data
        raise ValueError(f"cannot be decoded ({error}). Write it again.") from None
    if image.mode in WIDE:
        return pixels.astype(np.uint16)
    return pixels.astype(np.uint8) * (255 if image.mode == "1" else 1)


def rgb_of(image: ImageFile.ImageFile) -> NDArray[np.uint8]:
    """Colors uint8 (H, W, 3): grey is repeated, alpha dropped, of 16 bits the upper 8."""
    pixels = pixels_of(image)
    if image.mode in WIDE:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 2 and image.mode != "P":
        return np.repeat(pixels[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"), np.uint8)


def palette_of(image: ImageFile.ImageFile) -> NDArray[np.uint8]:
    """Colors of the indices, RGBA uint8 (n, 4)."""
    assert image.palette is not None
    colors = np.frombuffer(bytes(image.getpalette("RGBA") or ()), np.uint8)
    return colors.reshape(-1, 4)


def _check_whole(image: ImageFile.ImageFile, data: bytes) -> None:
    """Raise EOFError if the header places pixels behind the end of the file."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        for places, sizes in TIFF_PLACES:
            strips = zip(
                image.tag_v2.get(places, ()), image.tag_v2.get(sizes, ()), strict=False
            )
            if any(place + size > len(data) for place, size in strips):
                raise EOFError
    elif image.format == "WEBP" and len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise EOFError
    elif image.format == "BMP":
        bits = int.from_bytes(data[28:30], "little")
        if image.mode == "1" and bits == 8:
            raise ValueError(
                "is a BMP of 8 bits with a palette of black and white, which Pillow "
                f"reads as 0 everywhere. {WRITE_PNG}"
            )
        codec, _, start, _ = image.tile[0]
        row = (image.width * bits + 31) // 32 * 4
        if codec == "raw" and start + row * image.height > len(data):
            raise EOFError


def _pages(image: ImageFile.ImageFile) -> int:
    """Number of pictures in a file, without smaller copies and masks of the first."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(getattr(image, "n_frames", 1))
    try:
        image.seek(1)
        second = image.tag_v2.get(TIFF_SUBFILE, 0)
    except Exception:  # there is none, or it is damaged
        return 1
    finally:
        image.seek(0)
    return 1 if second & 0b101 else 2


def _mask_fault(image: ImageFile.ImageFile, layout: str, bits: int) -> str:
    if image.format == "WEBP":
        return LOSSY.format("WebP")
    if "jpeg" in str(image.info.get("compression")):
        return LOSSY.format("JPEG inside TIFF")
    if image.mode in ("LA", "PA"):
        return f"its grey values have alpha. {WRITE_PNG}"
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        if image.tag_v2.get(TIFF_PHOTOMETRIC) == 0:
            return f"its grey values are inverted. {WRITE_PNG}"
        if layout == "color" and bits != 8:
            return f"{layout} with {bits} bits is not read. {WRITE_PNG}"
    if image.format == "PPM" and image.tile[0][0] != "raw":
        return (
            f"Pillow scales values of a PNM with another maximum than 255. {WRITE_PNG}"
        )
    if layout == "grey" and bits not in (8, 16):
        return f"{image.format} with {bits} bits per pixel is not read. {WRITE_PNG}"
    return ""
