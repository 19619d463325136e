"""Output files that say which model made them: a stamp inside a PNG, JPEG, MP4 or JSON file, written atomically."""

from __future__ import annotations

import io
import json
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from segpipe import files
from segpipe.errors import ConfigError

Stamp = dict[str, Any]
MARK = "segpipe-prediction"
_START = re.compile(rb"segpipe-prediction (\d{8}) ")
_SEARCHED = 1 << 17  # bytes at the start and at the end of a file in which a stamp lies


def encoded(stamp: Stamp) -> bytes:
    """A stamp as bytes that `read_stamp` finds in any file; plain ASCII."""
    text = json.dumps(stamp, sort_keys=True, allow_nan=False)
    return f"{MARK} {len(text):08} {text}".encode("ascii")


def read_stamp(path: Path) -> Stamp | None:
    """The stamp of a file, or the content of a JSON file; None if it has none, or there is no such file."""
    try:
        with path.open("rb") as file:
            data = file.read(_SEARCHED)
            length = file.seek(0, os.SEEK_END)
            file.seek(max(len(data), length - _SEARCHED))
            data += file.read()
    except OSError:
        return None
    found = _START.search(data)
    text = data[found.end() : found.end() + int(found[1])] if found else data
    try:
        stamp = json.loads(text)
    except ValueError:
        return None
    return stamp if isinstance(stamp, dict) else None


def mask_png(
    ids: NDArray[np.uint8], stamp: Stamp, palette: Sequence[tuple[int, int, int]] | None
) -> bytes:
    """An 8-bit PNG whose pixel values are `ids`: with a palette of 256 colors, or grey if there is none."""
    picture = Image.fromarray(ids)
    if palette is not None:
        colors = np.zeros((256, 3), np.uint8)
        colors[: len(palette)] = palette
        picture.putpalette(colors.tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", pnginfo=_comment(stamp))
    return buffer.getvalue()


def _comment(stamp: Stamp) -> PngInfo:
    info = PngInfo()
    info.add_text("Comment", encoded(stamp).decode())
    return info


def picture_jpeg(pixels: NDArray[np.uint8], stamp: Stamp) -> bytes:
    """A JPEG of RGB pixels (H, W, 3), with color at full resolution: a pole is 2 pixels wide."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(
        buffer, "JPEG", quality=90, subsampling=0, comment=encoded(stamp)
    )
    return buffer.getvalue()


def picture_png(pixels: NDArray[np.uint8], stamp: Stamp) -> bytes:
    """A PNG of RGB pixels (H, W, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=_comment(stamp))
    return buffer.getvalue()


def mp4_box(stamp: Stamp) -> bytes:
    """A box of free space for the end of an MP4 file, which players skip."""
    content = encoded(stamp)
    return struct.pack(">I4s", 8 + len(content), b"free") + content


def put(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there. Raises ConfigError, naming `out`, when that fails."""
    try:
        files.put(path, content)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for an output that cannot be written."""
    return ConfigError(
        f"{path} cannot be written: {error.strerror or error}. Choose another out=, or make room and run the same "
        f"command again: what is whole is kept."
    )
