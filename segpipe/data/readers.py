"""Reads image files into arrays. A truncated or damaged file raises an error that names it.

OpenCV decodes PNG and JPEG images and gray PNG masks; Pillow reads BMP, TIFF, WebP and other masks. The content decides
the format, not the suffix. OpenCV silently fills the missing part of a truncated file with gray or black, so the end of
every PNG and JPEG is checked first.
"""

import io
import os
import re
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin

from segpipe.data import Size, Uint8
from segpipe.errors import DataError
from segpipe.files import PASSING, read

# Signature and end marker of each format.
PNG = (b"\x89PNG\r\n\x1a\n", b"\x00\x00\x00\x00IEND\xaeB`\x82")
JPEG = (b"\xff\xd8", b"\xff\xd9")
PART_BYTES, TAIL_BYTES = 2**16, 4096
BY_OPENCV = ("PNG", "JPEG", "MPO")  # MPO: a JPEG with previews
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")
SIGNATURES = (PNG[0], JPEG[0], b"BM", b"II*\0", b"MM\0*", b"RIFF")
LAYOUTS = {
    **dict.fromkeys(("1", "L", "LA", "I", "I;16", "I;16B"), "grey"),
    **dict.fromkeys(("P", "PA"), "palette"),
    **dict.fromkeys(("RGB", "RGBA", "RGBX"), "color"),
}
WIDE = ("I", "I;16", "I;16B")  # 16-bit modes
ORIENTATION_TAG = 0x0112
TRUNCATED = "is truncated: it ends before the image does. Copy it again."
WRITE_PNG = "Write it as PNG."
LOSSY = (
    "it holds {}, which is lossy and destroys ids at every edge. Export the masks as PNG "
    "from the tool that made them; see docs/data.md if there is none."
)
# Messages of libjpeg about files that it decodes anyway. Extraneous bytes, as cameras write them, do no harm.
JPEG_DAMAGE = re.compile(
    "premature end of data segment|Premature end of JPEG file|bad Huffman code"
    "|found marker .* instead of RST.*|Inconsistent progression sequence.*"
    "|Invalid SOS parameters.*"
)
OPAQUE = 255
CHUNK = 32  # items per task of a thread: a task costs 50 us, a small mask 100
# In processor time, which does not depend on the machine's load. 20,000 pairs of 48x64 take 2.5 s in one thread, and
# 4.7 s (5.9 s of processor time) in two.
SMALL_S = 0.001
Progress = Callable[[int, int], None]  # called with done and total
T = TypeVar("T")
R = TypeVar("R")

# Pillow warns about a truncated TIFF only once per process; the errors here name each file.
warnings.filterwarnings("ignore", module="PIL")
Image.MAX_IMAGE_PIXELS = None  # data.max_pixels limits all decoders
# For one text or color profile, 1 MiB by default.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


def silent(done: int, total: int) -> None:
    """Progress callback that does nothing."""


class Header(NamedTuple):
    """Properties of an image file, known without decoding it."""

    height: int
    width: int
    layout: str  # grey, palette or color
    bits: int = 8  # per channel or index
    orientation: int = 1  # EXIF: 2 to 4 mirrored or upside down, 5 to 8 on its side
    mask_fault: str = ""  # why it cannot be a mask; empty if it can

    @property
    def upright(self) -> Size:
        """(height, width) after the orientation is applied."""
        if self.orientation >= 5:
            return self.width, self.height
        return self.height, self.width


Check = Callable[[Header], None]  # raises DataError


def anything(header: Header) -> None:
    """A check that accepts everything."""


class RawMask(NamedTuple):
    """Pixels of a mask file as they are stored."""

    header: Header
    # Ids: gray values or palette indices, uint8 or uint16 (H, W). Or colors: RGBA, uint8 (H, W, 4).
    pixels: NDArray[Any]
    palette: Uint8 | None = None  # colors of the indices, uint8 (n, 4)


def read_file(path: str, *, part: bool = False) -> bytes:
    """Content of a file; with `part`, only head and tail of a large one.

    Raises DataError for anything but a regular file: opening a FIFO blocks forever, and a device has no end.
    """
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):
            raise DataError(
                f"{path} is a folder, a FIFO or a device, but an image file was needed. Remove it."
            )
        if part and state.st_size >= 2 * PART_BYTES:
            return read(path, PART_BYTES, TAIL_BYTES)
        return read(path)
    except OSError as error:
        failed = error.errno in PASSING
        advice = ", in six attempts. Check the disk or the file server" * failed
        raise DataError(f"{path} cannot be read: {error.strerror}{advice}.") from None


def read_header(path: str) -> Header:
    """Header of an image file; reads only a part of a large PNG or JPEG. Raises DataError for a truncated file."""
    content = read_file(path, part=True)
    with _named(path):
        if content.startswith((PNG[0], JPEG[0])):
            with suppress(ValueError):  # the header may be longer
                return _opened(content)[1]
        return _opened(read_file(path))[1]


def read_image(path: str, *, exif: str = "ignore", size: Sequence[int] = ()) -> Uint8:
    """RGB pixels, uint8 (H, W, 3): gray is repeated, alpha dropped, and 16 bits are cut to the upper 8.

    `exif` says what to do with an EXIF orientation: "apply", "ignore", or "" for whatever
    gives the image the size of its mask, (height, width) `size`. Raises DataError for a
    missing, truncated or damaged file.
    """
    return image_of(read_file(path), path, exif=exif, size=size)[1]


def image_of(
    content: bytes,
    path: str,
    check: Check = anything,
    *,
    exif: str = "ignore",
    size: Sequence[int] = (),
) -> tuple[Header, Uint8]:
    """Header and pixels of an image file with this content; `check` may refuse the header before decoding."""
    with _named(path):
        image, header = _opened(content)
        check(header)
        turn = is_turned(header, size, exif, path)
        if image.format == "PNG":
            _check_checksums(image)
        if image.format in BY_OPENCV:
            stored = 0 if turn else cv2.IMREAD_IGNORE_ORIENTATION
            return header, _decode(content, cv2.IMREAD_COLOR_RGB | stored)
        if turn:
            image = ImageOps.exif_transpose(image)
        return header, _rgb(image, header.bits)


def is_turned(header: Header, size: Sequence[int], rule: str, path: str) -> bool:
    """Whether to apply an image's EXIF orientation so that it matches its mask of (height, width) `size`.

    `rule` comes from the class table. Without one, the size decides: a mask of the turned
    size was drawn on the turned image. Raises DataError if both sizes are equal, since
    the size then decides nothing.
    """
    if header.orientation == 1 or rule:
        return header.orientation != 1 and rule == "apply"
    if header.upright == header[:2]:
        raise DataError(
            f"{path} has the EXIF orientation {header.orientation}, but the size of its mask fits both ways. Set "
            "`exif: apply` in classes.yaml if the masks were drawn on upright images, as viewers show them, or "
            "`exif: ignore` if on the stored pixels.",
            cause=f"orientation {header.orientation}",
            where=path,
        )

    return tuple(size) == header.upright


def read_mask(path: str) -> RawMask:
    """Pixels of a mask file as stored. Raises DataError for a damaged file or a lossy format."""
    return mask_of(read_file(path), path)


def mask_of(content: bytes, path: str, check: Check = anything) -> RawMask:
    """Pixels, as stored, of a mask file with this content; `check` may refuse the header before decoding."""
    with _named(path):
        image, header = _opened(content)
        check(header)
        check_mask(header, path)
        if image.format == "PNG":
            _check_checksums(image)
            if image.mode in ("L", "I;16") and header.bits >= 8:
                ids = _decode(content, cv2.IMREAD_UNCHANGED)
                if ids.ndim == 2:  # not if one value is transparent
                    return RawMask(header, ids)
            image = Image.open(io.BytesIO(content), formats=("PNG",))
        pixels = _stored(image)
        if pixels.ndim == 3:
            return RawMask(header, np.array(image.convert("RGBA")))
        if header.layout == "grey":
            if header.bits < 8:  # Pillow stretches the values to 0 to 255
                pixels = pixels // np.uint8(255 // (2**header.bits - 1))
            return RawMask(header, pixels)
        image.apply_transparency()
        colors = bytes(image.getpalette("RGBA") or ())
        palette = np.frombuffer(colors, np.uint8).reshape(-1, 4)
        if pixels.max(initial=0) >= len(palette):
            raise ValueError(
                f"is damaged: its palette has {len(palette)} colors, but its pixels use more. Write it again."
            )
        return RawMask(header, pixels, palette)


def packed(rgba: Uint8) -> NDArray[np.uint32]:
    """RGBA (..., 4) as one number per pixel, uint32 (n,)."""
    return np.ascontiguousarray(rgba).view("<u4").ravel()


def check_mask(header: Header, path: str) -> None:
    """Raise DataError for a format that cannot hold a mask."""
    fault = header.mask_fault
    if header.orientation != 1:
        fault = (
            fault or "a mask with an EXIF orientation. Write it upright, without EXIF."
        )
    if fault:
        raise DataError(f"{path} cannot be a mask: {fault}", cause=fault, where=path)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Converts a ValueError with the rest of a sentence to a DataError that names the file."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"{path} {error}") from None


def _opened(content: bytes) -> tuple[Image.Image, Header]:
    """Image and header of a complete file. PNG and JPEG are not decoded yet."""
    if not content:
        raise ValueError("is empty. Copy it again, or convert it.")

    for signature, end in (PNG, JPEG):
        is_torn = content.startswith(signature) and end not in content[-TAIL_BYTES:]
        if is_torn and not (signature == JPEG[0] and _jpeg_ends(content)):
            raise ValueError(TRUNCATED)

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        scaled = image.format == "PPM" and image.tile[0][0] != "raw"
        # Pillow turns a TIFF when it loads it, and forgets its orientation.
        turned = getattr(image, "tag_v2", {}).get(ORIENTATION_TAG, 1) != 1
        pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        if image.format not in BY_OPENCV:
            image.load()
    except Exception as error:  # whatever Pillow raises for damaged data
        if content.startswith(SIGNATURES):
            reason = str(error).partition(" <")[0]  # without an address in memory
            raise ValueError(
                f"is truncated or damaged ({reason}), or has pixels of a kind that Pillow does not read, such as "
                "64-bit floats. Copy it again, or write it as PNG: gray or RGB with 8 or 16 bits."
            ) from None
        raise ValueError(
            "is neither PNG nor JPEG, BMP, TIFF, WebP or PNM. Copy it again, or convert it."
        ) from None

    if scaled:
        raise ValueError(
            f"is a PNM in text form, with 16 bits per color or with a maximum other than 255 or 65535. {WRITE_PNG}"
        )
    if pages > 1:
        raise ValueError("has several pages. Write each to its own file.")
    if turned:
        raise ValueError(
            "has an orientation, which decoders treat differently in TIFF. Write it upright."
        )
    return image, _header(image, content)


def _jpeg_ends(content: bytes) -> bool:
    """Whether the end marker comes anywhere after the first scan: phones append a video of any length."""
    at = 2
    while content[at : at + 1] == b"\xff" and content[at + 1 : at + 2] != b"\xda":
        at += 2 + int.from_bytes(content[at + 2 : at + 4])
    return JPEG[1] in content[at:]


def _check_checksums(image: Image.Image) -> None:
    """Raise ValueError for a PNG with a wrong checksum; decoders check only some. Pillow then closes it."""
    try:
        image.verify()
    except Exception as error:  # whatever Pillow raises for damaged data
        raise ValueError(f"is damaged ({error}). Copy it again.") from None


def _header(image: Image.Image, content: bytes) -> Header:
    """Header of an image file."""
    # In a PNG it may come after the pixels, where Pillow has not looked yet.
    late = content.partition(b"eXIf")[2] if image.format == "PNG" else b""
    orientation = _exif_orientation(image.info.get("exif", late))
    layout = LAYOUTS.get(image.mode)
    if image.format in ("JPEG", "MPO"):
        return Header(
            image.height, image.width, "color", 8, orientation, LOSSY.format("JPEG")
        )
    if layout is None or (image.mode == "I" and image.format != "PPM"):
        raise ValueError(
            f"has pixels of mode {image.mode} (F: floats, I: 32 bits), but gray or RGB with 8 or 16 bits was needed. "
            f"{WRITE_PNG}"
        )
    if image.format == "BMP" and image.mode == "1":
        raise ValueError(
            f"is a black-and-white BMP, and Pillow reads some of these as 0 everywhere. {WRITE_PNG}"
        )

    bits = 16 if image.mode in WIDE else 8
    if image.format == "PNG":
        bits = content[content.index(b"IHDR") + 12]  # per channel
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))[0]
        inverted = image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
        if inverted and bits > 8:  # Pillow inverts others
            raise ValueError(
                f"has {bits}-bit gray values in which 0 is white. {WRITE_PNG}"
            )

    fault = _mask_fault(image, layout, bits)
    return Header(image.height, image.width, layout, bits, orientation, fault)


def _mask_fault(image: Image.Image, layout: str, bits: int) -> str:
    if image.mode == "1" and image.format == "PPM":
        return f"values of a PBM are read as 0 and 255. {WRITE_PNG}"
    if image.format == "WEBP":
        return LOSSY.format("WebP")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        if "jpeg" in str(image.info.get("compression")):
            return LOSSY.format("JPEG inside TIFF")
        if image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:
            return f"its gray values are inverted. {WRITE_PNG}"

    is_wide = bits == 16 and layout != "color"
    if bits == 8 or is_wide or (image.format == "PNG" and bits < 8):
        return ""
    return f"{bits} bits per channel of {layout} are not supported. Write it as PNG with 8."


def _exif_orientation(block: bytes) -> int:
    """Orientation in EXIF data, 1 to 8; 1 if it is missing or damaged."""
    exif = Image.Exif()
    try:
        exif.load(block)
        value = exif.get(ORIENTATION_TAG)
    except Exception:  # whatever Pillow raises for damaged data
        return 1

    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decode(content: bytes, flags: int) -> NDArray[Any]:
    """Pixels of a PNG or JPEG, decoded by OpenCV."""
    pixels = None
    with suppress(cv2.error):
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    if pixels is None:
        raise ValueError("is complete, but cannot be decoded. Write or copy it again.")
    return np.asarray(pixels)


def _stored(image: Image.Image) -> NDArray[Any]:
    """Pixels as stored: gray values or indices (H, W), or (H, W, channels)."""
    try:
        pixels = np.array(image.convert("L") if image.mode == "1" else image)
    except Exception as error:  # whatever Pillow raises for damaged data
        raise ValueError(f"cannot be decoded ({error}). Write it again.") from None

    return pixels.astype(np.uint16) if image.mode in WIDE else pixels


def _rgb(image: Image.Image, bits: int) -> Uint8:
    """RGB uint8 (H, W, 3): gray is repeated, alpha dropped, 16 or 12 bits cut to the upper 8."""
    if image.mode in WIDE:
        image = Image.fromarray((_stored(image) >> bits - 8).astype(np.uint8))
    return np.asarray(image.convert("RGB"), np.uint8)


@contextmanager
def decoders_heard() -> Iterator[Callable[[], str]]:
    """A function that returns what decoders have written to stderr within the block.

    OpenCV decodes damaged parts of a JPEG as gray areas and reports it only there. So
    file descriptor 2 of the whole process points to a file within the block; other
    text in it is passed on at the end.
    """
    if sys.stderr is None:  # closed, as in a daemon
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
            others = [line for line in lines if not JPEG_DAMAGE.search(line)]
            sys.stderr.write("".join(others))


def jpeg_damage(path: str) -> str:
    """A message for a JPEG that decodes only in part; empty for any other file."""
    with decoders_heard() as written:
        with suppress(DataError, OSError):
            if Path(path).read_bytes().startswith(JPEG[0]):
                read_image(path)
        damage = JPEG_DAMAGE.search(written())

    if damage is None:
        return ""

    return f"{path} is damaged: the decoder reports {damage[0]!r} and fills the rest with gray. Copy it again."


def threaded(
    work: Callable[[T], R],
    items: Iterable[T],
    progress: Progress = silent,
    *,
    allowed: bool = True,
) -> list[R]:
    """Results of `work` in the order of `items`; uses threads if `allowed` and items take longer than SMALL_S.

    Decoders release the GIL. No thread outlives the call: an ending thread frees OpenCV's thread-local memory under a
    lock, and a loader process forked at that moment would inherit the locked lock and hang.
    """
    given = list(items)
    results: list[R] = []
    size = 1
    # Threads that constantly exchange the GIL cost more than they save.
    while len(results) < len(given):
        begun = time.thread_time()
        part = [work(item) for item in given[len(results) : len(results) + size]]
        results += part
        progress(len(results), len(given))
        if time.thread_time() - begun <= SMALL_S * len(part):
            size = CHUNK
        elif allowed:
            break

    left = range(len(results), len(given), CHUNK)
    chunks = [given[at : at + CHUNK] for at in left]
    threads: list[int] = []
    pool = ThreadPoolExecutor(
        min(16, os.cpu_count() or 1),
        initializer=lambda: threads.append(get_native_id()),
    )
    try:
        for part in pool.map(lambda chunk: [work(item) for item in chunk], chunks):
            results += part
            progress(len(results), len(given))
        return results
    finally:
        # After an error, do not wait for the rest.
        pool.shutdown(cancel_futures=True)
        tasks = [Path(f"/proc/self/task/{number}") for number in threads]
        deadline = time.monotonic() + 5.0
        while any(task.exists() for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.0005)
