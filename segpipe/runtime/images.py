"""Pictures in and out: .npy, .ppm and .pgm by numpy alone, every other format where Pillow is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ARRAY, _PLAIN = ".npy", ".ppm"  # suffixes that numpy alone reads
_PPM = re.compile(rb"P6\s+(?:#.*\n\s*)*(\d+)\s+(\d+)\s+255\s")


def require_readable(path: Path) -> None:
    """Raises ValueError where reading need not be tried: no such file, or a picture for Pillow, which is not there."""
    if path.suffix not in (_ARRAY, _PLAIN):
        _pillow(path)
    if not path.is_file():
        raise ValueError(f"{path} cannot be read: there is no such file.")


def read_image(path: Path) -> NDArray[np.uint8]:
    """Image as stored: uint8 (H, W, 3) RGB from a picture, whatever the array is from .npy.

    Raises ValueError that names the file when it cannot be read.
    """
    try:
        if path.suffix == _ARRAY:
            return np.asarray(np.load(path, allow_pickle=False))
        if path.suffix == _PLAIN:
            return _read_ppm(path)
        with _pillow(path).open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except Exception as error:  # for torn files Pillow raises SyntaxError, struct.error and errors of its own
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}).") from None


def _read_ppm(path: Path) -> NDArray[np.uint8]:
    content = path.read_bytes()
    head = _PPM.match(content)
    if head is None:
        raise ValueError("a binary PPM (P6) with levels 0 to 255 was needed")
    width, height = int(head[1]), int(head[2])
    pixels = np.frombuffer(content, np.uint8, offset=head.end())
    if pixels.size < height * width * 3:
        raise ValueError(f"{pixels.size} bytes of pixels, {height * width * 3} were needed")
    return pixels[: height * width * 3].reshape(height, width, 3)


def _pillow(path: Path) -> Any:
    """The module PIL.Image, with which to read `path`."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(f"{path}: without Pillow only {_ARRAY} and {_PLAIN} are read; pip install pillow.") from None
    return Image


def write_picture(stem: Path, picture: NDArray[np.uint8]) -> Path:
    """Path of the written picture: PNG where Pillow is, else .ppm for (H, W, 3) and .pgm for (H, W)."""
    try:
        from PIL import Image
    except ImportError:
        path = stem.with_name(f"{stem.name}.{'ppm' if picture.ndim == 3 else 'pgm'}")
        kind = "P6" if picture.ndim == 3 else "P5"
        path.write_bytes(f"{kind}\n{picture.shape[1]} {picture.shape[0]}\n255\n".encode() + picture.tobytes())
        return path
    path = stem.with_name(f"{stem.name}.png")
    Image.fromarray(picture).save(path)
    return path


def overlay(image: NDArray[np.uint8], mask: NDArray[np.uint8], palette: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Half image, half colours of the classes, uint8 (H, W, 3); where there is no answer the image is dark."""
    colors = np.zeros((256, 3), dtype=np.uint16)
    colors[: len(palette)] = palette
    return ((image.astype(np.uint16) + colors[mask]) // 2).astype(np.uint8)
