"""Picture files to arrays. A truncated or damaged file is an error that names it.

Pillow reads headers, masks, and images of other formats than PNG and JPEG, which OpenCV
decodes in three quarters of the time. The format is that of the content; the suffix
does not matter. Decoders fill the missing part of a truncated file with grey or black
and carry on, so the end of every file is checked first.
"""

from __future__ import annotations

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
from itertools import chain
from pathlib import Path
from threading import get_native_id
from typing import Any, BinaryIO, NamedTuple, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, TiffImagePlugin

from segpipe.disk import PASSING, patiently
from segpipe.errors import DataError

# The signature of a format, and what its files end with.
PNG = (b"\x89PNG\r\n\x1a\n", b"\x00\x00\x00\x00IEND\xaeB`\x82")
JPEG = (b"\xff\xd8", b"\xff\xd9")
HEAD_BYTES, TAIL_BYTES = 32, 4096
OTHERS = (b"BM", b"II*\0", b"MM\0*", b"RIFF")
# TGA has no signature: only its suffix tells, and Pillow takes other bytes for one.
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")
LAYOUTS = {
    **dict.fromkeys(("1", "L", "LA", "I", "I;16", "I;16B"), "grey"),
    **dict.fromkeys(("P", "PA"), "palette"),
    **dict.fromkeys(("RGB", "RGBA", "RGBX"), "color"),
}
WIDE = ("I", "I;16", "I;16B")  # modes of 16 bits
ORIENTATION_TAG = 0x0112
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_SUBFILE = 258, 262, 254
TIFF_PLACES = ((273, 279), (324, 325))  # offsets and lengths of strips, or of tiles
WRITE_PNG = "Write it as PNG."
LOSSY = (
    "{} loses information, and with it ids at every edge. Export the masks as PNG "
    "from where they were drawn."
)
# How EXIF's orientations turn stored pixels upright, in this order: transpose, flip
# rows, flip columns.
TURNS = {
    1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
    5: (True, False, False), 6: (True, False, True), 7: (True, True, True), 8: (True, True, False),
}  # fmt: skip
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
CHUNK = 32  # items that a thread takes at a time: a task costs 50 us, a small mask 100
Value = int | tuple[int, int, int]  # an id or a color
Pixels = NDArray[np.uint8] | NDArray[np.uint16]
T = TypeVar("T")
R = TypeVar("R")

# Pillow warns of a truncated TIFF, once per process: the error here names the file.
warnings.filterwarnings("ignore", module="PIL")
Image.MAX_IMAGE_PIXELS = None  # data.max_pixels is the limit, for every decoder


class Header(NamedTuple):
    """Properties of a picture file, known without decoding it."""

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


class RawMask(NamedTuple):
    """Pixels of a mask file as they are stored: either `ids` or `rgba` is None."""

    header: Header
    ids: Pixels | None  # grey values or palette indices (H, W)
    rgba: NDArray[np.uint8] | None = None  # colors of the pixels, uint8 (H, W, 4)
    palette: NDArray[np.uint8] | None = None  # colors of the indices, uint8 (n, 4)


def read_header(path: str) -> Header:
    """Header of a picture file. Raises DataError if the file does not reach its end; reads little of a PNG or JPEG."""

    def read() -> Header:
        size = os.stat(path).st_size
        with Path(path).open("rb") as file, _named(path, size):
            return _opened(file, path)[1]

    _check_regular(path)
    try:
        return patiently(Path(path), read)
    except OSError as error:
        raise _unreadable(path, error) from None


def read_image(
    path: str,
    *,
    exif: str = "ignore",
    size: Sequence[int] = (),
    data: bytes | None = None,
) -> NDArray[np.uint8]:
    """RGB pixels, uint8 (H, W, 3): grey is repeated, alpha dropped, and of 16 bits the upper 8 are kept.

    `exif` says what becomes of an EXIF orientation: "apply", "ignore", or "" for what
    makes the image as large as its mask, (height, width) `size`. `data` is the content
    of the file, if it was read and checked before. Raises DataError for a missing,
    truncated or damaged file.
    """
    content = _content(path) if data is None else data
    with _named(path, len(content)):
        image, header = _opened(io.BytesIO(content), path)
        if data is None:
            _check_checksums(image.format, content)
        fast = content.startswith((PNG[0], JPEG[0]))
        pixels = _decode(content) if fast else _rgb(image)
    turn = orientation(header, size, exif, path)
    if turn == 1:
        return pixels
    transpose, rows, columns = TURNS[turn]
    if transpose:
        pixels = pixels.transpose(1, 0, 2)
    return np.ascontiguousarray(pixels[:: -1 if rows else 1, :: -1 if columns else 1])


def orientation(header: Header, size: Sequence[int], rule: str, path: str) -> int:
    """EXIF orientation to apply to an image so that it lies as its mask of (height, width) `size` does.

    `rule` is that of the class table. Without one, the size decides: a mask of the turned size was drawn on the turned
    image. Raises DataError where both have the same size, since then nothing tells them apart.
    """
    if header.orientation == 1 or rule == "ignore":
        return 1
    if rule == "apply":
        return header.orientation
    if header.upright == header[:2]:
        raise DataError(
            f"{path} has the EXIF orientation {header.orientation}, and its mask has the same size turned or not. Set "
            "`exif: apply` in classes.yaml if the masks were drawn on upright images, as viewers show them, or "
            "`exif: ignore` if on the stored pixels.",
            cause=f"orientation {header.orientation}",
            where=path,
        )
    return header.orientation if tuple(size) == header.upright else 1


def read_mask(path: str) -> RawMask:
    """Pixels of a mask file as stored. Raises DataError for a damaged file, and for formats that lose ids."""
    data = _content(path)
    with _named(path, len(data)):
        image, header = _opened(io.BytesIO(data), path)
        check_mask(header, path)
        _check_checksums(image.format, data)
        pixels = _stored(image)
        if pixels.ndim == 3:
            return RawMask(header, None, np.array(image.convert("RGBA")))
        if header.layout == "grey":
            if header.bits < 8:  # Pillow stretches the values to 0 to 255
                pixels = pixels // np.uint8(255 // (2**header.bits - 1))
            return RawMask(header, pixels)
        image.apply_transparency()
        colors = bytes(image.getpalette("RGBA") or ())
        palette = np.frombuffer(colors, np.uint8).reshape(-1, 4)
        if pixels.max(initial=0) >= len(palette):
            raise ValueError(
                f"is damaged: its palette has {len(palette)} colors, its pixels use "
                "more. Write it again."
            )
        return RawMask(header, pixels, palette=palette)


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


def _content(path: str) -> bytes:
    _check_regular(path)
    try:
        return patiently(Path(path), Path(path).read_bytes)
    except OSError as error:
        raise _unreadable(path, error) from None


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


@contextmanager
def _named(path: str, length: int) -> Iterator[None]:
    """Turns an EOFError, and a ValueError with the rest of a sentence, into a DataError that names the file."""
    try:
        yield
    except EOFError:
        raise DataError(
            f"{path} is truncated: its {length} bytes end before the image does. Copy "
            "it again."
        ) from None
    except ValueError as error:
        raise DataError(f"{path} {error}") from None


def _opened(file: BinaryIO, path: str) -> tuple[ImageFile.ImageFile, Header]:
    """The picture in a file, not decoded yet, and its header; its file reaches the end of the picture."""
    head = file.read(HEAD_BYTES)
    if not head:
        raise ValueError("is empty. Copy it again, or convert it.")
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read()
    for signature, end in (PNG, JPEG):
        if head.startswith(signature) and end not in tail:
            raise EOFError
    formats = (*FORMATS, "TGA") if path.lower().endswith(".tga") else FORMATS
    try:
        image = Image.open(file, formats=formats)
    except Exception as error:  # whatever Pillow raises for damaged data
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if head.startswith(OTHERS):
            raise EOFError from None
        if head.startswith((PNG[0], JPEG[0])):
            raise ValueError(
                "is damaged: its header cannot be read. Copy it again."
            ) from None
        raise ValueError(
            "is neither PNG nor JPEG, BMP, TIFF, WebP, PNM or TGA. Copy it again, or "
            "convert it."
        ) from None
    _check_whole(image, head, size)
    return image, _header(image, head)


def _check_whole(image: ImageFile.ImageFile, head: bytes, size: int) -> None:
    """Raise EOFError if the header places pixels behind the end of the file."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        for places, sizes in TIFF_PLACES:
            strips = zip(
                image.tag_v2.get(places, ()), image.tag_v2.get(sizes, ()), strict=False
            )
            if any(place + length > size for place, length in strips):
                raise EOFError
    elif image.format == "WEBP" and size < 8 + int.from_bytes(head[4:8], "little"):
        raise EOFError
    elif image.format == "BMP":
        bits = int.from_bytes(head[28:30], "little")
        if image.mode == "1" and bits == 8:
            raise ValueError(
                "is a BMP of 8 bits with a palette of black and white, which Pillow "
                f"reads as 0 everywhere. {WRITE_PNG}"
            )
        codec, _, start, _ = image.tile[0]
        row = (image.width * bits + 31) // 32 * 4
        if codec == "raw" and start + row * image.height > size:
            raise EOFError


def _header(image: ImageFile.ImageFile, head: bytes) -> Header:
    orientation = _exif_orientation(image.info.get("exif", b""))
    if head.startswith(JPEG[0]):
        fault = LOSSY.format("JPEG")
        return Header(image.height, image.width, "color", 8, orientation, fault)
    layout = LAYOUTS.get(image.mode)
    if layout is None or (image.mode == "I" and image.format != "PPM"):
        raise ValueError(
            f"has pixels of the mode {image.mode}, but grey or RGB of 8 or 16 bits "
            "were needed."
        )
    bits = 16 if image.mode in WIDE else 1 if image.mode == "1" else 8
    if image.format == "PNG":
        bits = head[24]
    elif image.format in ("TIFF", "WEBP") and _pages(image) > 1:
        raise ValueError("holds several pages. Write each as a file.")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = image.tag_v2.get(TIFF_BITS, (1,))[0]
        if image.tag_v2.get(ORIENTATION_TAG, 1) != 1:
            raise ValueError(
                "names an orientation, which decoders treat differently in TIFF. "
                "Write it upright."
            )
    fault = _mask_fault(image, layout, bits)
    return Header(image.height, image.width, layout, bits, orientation, fault)


def _mask_fault(image: ImageFile.ImageFile, layout: str, bits: int) -> str:
    if image.format == "WEBP":
        return LOSSY.format("WebP")
    if "jpeg" in str(image.info.get("compression")):
        return LOSSY.format("JPEG inside TIFF")
    if (
        isinstance(image, TiffImagePlugin.TiffImageFile)
        and image.tag_v2.get(TIFF_PHOTOMETRIC) == 0
    ):
        return f"its grey values are inverted. {WRITE_PNG}"
    if image.format == "PPM" and image.tile[0][0] != "raw":
        return (
            f"Pillow scales values of a PNM with another maximum than 255. {WRITE_PNG}"
        )
    if layout == "color" and bits != 8:
        return f"{bits} bits per channel are more than a color needs. Write it with 8."
    if layout == "grey" and bits not in (8, 16) and image.format != "PNG":
        return f"{image.format} with {bits} bits per pixel is not read. {WRITE_PNG}"
    return ""


def _exif_orientation(block: bytes) -> int:
    """Orientation that EXIF data names, 1 to 8; 1 if it names none or is damaged."""
    if not block:
        return 1
    exif = Image.Exif()
    try:
        exif.load(block)
        value = exif.get(ORIENTATION_TAG)
    except Exception:  # whatever Pillow raises for damaged data
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


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


def _check_checksums(kind: str | None, data: bytes) -> None:
    """Raise ValueError for a PNG with a wrong checksum, which no decoder compares. Other formats have none."""
    if kind != "PNG":
        return
    try:
        Image.open(io.BytesIO(data), formats=("PNG",)).verify()
    except Exception as error:  # whatever Pillow raises for damaged data
        raise ValueError(f"is damaged ({error}). Copy it again.") from None


def _decode(data: bytes) -> NDArray[np.uint8]:
    """RGB of a PNG or JPEG, by OpenCV."""
    pixels = None
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    with suppress(cv2.error):
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if pixels is None:
        raise ValueError("is complete, but cannot be decoded. Write or copy it again.")
    return np.asarray(pixels, np.uint8)


def _stored(image: ImageFile.ImageFile) -> NDArray[Any]:
    """Pixels as they are stored: (H, W) of grey values or indices, or (H, W, channels)."""
    try:
        pixels = np.asarray(image)
    except Exception as error:  # whatever Pillow raises for damaged data
        if "truncated" in str(error):
            raise EOFError from None
        raise ValueError(f"cannot be decoded ({error}). Write it again.") from None
    if image.mode in WIDE:
        return pixels.astype(np.uint16)
    return pixels.astype(np.uint8) * np.uint8(255 if image.mode == "1" else 1)


def _rgb(image: ImageFile.ImageFile) -> NDArray[np.uint8]:
    """Colors uint8 (H, W, 3): grey is repeated, alpha dropped, of 16 bits the upper 8."""
    pixels = _stored(image)
    if image.mode in WIDE:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 2 and image.mode != "P":
        return np.repeat(pixels[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"), np.uint8)


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
        return number if self.kind == "ids" else color_of(number)


def color_of(number: int) -> tuple[int, int, int]:
    """The color R, G, B that a number of MaskValues stands for."""
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
            if Path(path).read_bytes().startswith(JPEG[0]):
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
    given = list(items)
    chunks = [given[start : start + CHUNK] for start in range(0, len(given), CHUNK)]
    threads: list[int] = []
    pool = ThreadPoolExecutor(
        min(16, os.cpu_count() or 1),
        initializer=lambda: threads.append(get_native_id()),
    )
    try:
        results = pool.map(lambda chunk: [work(item) for item in chunk], chunks)
        yield from chain.from_iterable(results)
    finally:
        # A caller that stops at the first problem does not wait for the rest.
        pool.shutdown(cancel_futures=True)
        tasks = [Path(f"/proc/self/task/{number}") for number in threads]
        deadline = time.monotonic() + 5.0
        while any(task.exists() for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.0005)
