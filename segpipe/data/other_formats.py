"""BMP, TIFF, WebP, PNM and TGA, read by Pillow.

Everything here raises EOFError for a file that ends too early, and ValueError with the
rest of a sentence for a file that is wrong in another way.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from segpipe.data.headers import LOSSY, ORIENTATION_TAG, Header, exif_orientation

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

# Pillow warns of a truncated TIFF, once per process: the error here names the file.
warnings.filterwarnings("ignore", module="PIL")


def open_other(data: bytes, suffix: str) -> Image.Image:
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


def header_of(image: Image.Image) -> Header:
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


def pixels_of(image: Image.Image) -> NDArray[Any]:
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


def rgb_of(image: Image.Image) -> NDArray[np.uint8]:
    """Colors uint8 (H, W, 3): grey is repeated, alpha dropped, of 16 bits the upper 8."""
    pixels = pixels_of(image)
    if image.mode in WIDE:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 2 and image.mode != "P":
        return np.repeat(pixels[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"), np.uint8)


def palette_of(image: Image.Image) -> NDArray[np.uint8]:
    """Colors of the indices, RGBA uint8 (n, 4)."""
    assert image.palette is not None
    colors = np.frombuffer(bytes(image.getpalette("RGBA") or ()), np.uint8)
    return colors.reshape(-1, 4)


def _check_whole(image: Image.Image, data: bytes) -> None:
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


def _pages(image: Image.Image) -> int:
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


def _mask_fault(image: Image.Image, layout: str, bits: int) -> str:
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
