"""Sources of a prediction, and the files written for them: what is drawn, and how they are written."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from segpipe import files
from segpipe.errors import ConfigError, DataError
from segpipe.runtime.frames import Pixels

VIDEOS = (
    ".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".mjpeg", ".ts", ".wmv",
)  # fmt: skip
JPEG_LIMIT = 65500  # pixels along a side
Palette = Sequence[tuple[int, int, int]]


class Input(NamedTuple):
    """An image or a video."""

    path: Path
    place: str  # relative to the given folder, with suffix
    name: str  # of its outputs: `place` without suffix, unless two sources share it
    live: str = ""  # camera number or stream URL, used instead of `path`
    sha256: str = ""  # of the file

    @property
    def is_video(self) -> bool:
        """Whether it is live or has a video suffix."""
        return bool(self.live) or self.path.suffix.lower() in VIDEOS


def write_overlay(path: Path, picture: Pixels) -> None:
    """Write a JPEG. Raises DataError for a picture that is too large for one."""
    if max(picture.shape) > JPEG_LIMIT:
        raise DataError(
            f"a JPEG has at most {JPEG_LIMIT} rows and columns. Set overlay=false."
        )
    # No chroma subsampling: a pole is 2 pixels wide.
    _save(path, Image.fromarray(picture), "JPEG", quality=90, subsampling=0)


def write_mask(path: Path, ids: Pixels, palette: Palette) -> None:
    """Write a PNG of class ids with the palette of the classes."""
    picture = Image.fromarray(ids)
    colors = np.zeros((256, 3), np.uint8)
    colors[: len(palette)] = palette
    picture.putpalette(colors.tobytes())
    _save(path, picture, "PNG")


def _save(path: Path, picture: Image.Image, kind: str, **how: Any) -> None:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    put(path, buffer.getvalue())


def put(path: Path, content: bytes) -> None:
    """Write a file completely or not at all. Raises ConfigError, naming the path, when that fails."""
    try:
        files.put(path, content)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for an output that cannot be written."""
    return ConfigError(
        f"{path} cannot be written: {error.strerror or error}. Choose another out=, or free disk space and run the "
        f"same command again: complete files are kept."
    )


def blend(
    image: Pixels, ids: Pixels, palette: Palette, opacity: float = 0.65
) -> Pixels:
    """`image` blended with the colors of its classes. Ids beyond the palette, such as 255, get a dark diagonal hatch.

    Shapes: image uint8 (H, W, 3) RGB, ids uint8 (H, W) -> uint8 (H, W, 3).
    """
    lut = np.zeros((256, 3), np.float32)
    lut[: len(palette)] = palette
    mixed = (1 - opacity) * image + opacity * lut[ids]
    row, column = np.indices(ids.shape)
    hatch = np.where((row + column) % 12 < 2, 96, 24)[..., None]
    is_hatched = (ids >= len(palette))[..., None]
    return np.where(is_hatched, hatch, mixed).round().astype(np.uint8)
