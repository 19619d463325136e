"""Images in, pictures of the answers out. numpy reads and writes .npy; Pillow all other formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARRAY = ".npy"
SUFFIXES = (ARRAY, ".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
Image = NDArray[np.uint8]


def files_of(sources: Sequence[Path], out: Path) -> list[Path]:
    """Images; of a folder those in it, by name.

    Raises ValueError for what is missing or empty, and where answers would overwrite an image or each other.
    """
    files: list[Path] = []
    for source in sources:
        if not source.is_dir():
            files.append(source)
            continue
        inside = [path for path in source.iterdir() if path.suffix.lower() in SUFFIXES]
        if not inside:
            raise ValueError(f"{source} holds no image: {', '.join(SUFFIXES)}.")
        files += sorted(inside)
    stems: dict[str, Path] = {}
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} cannot be read: no such file.")
        if path.parent.resolve() == out.resolve():
            raise ValueError(f"{path} lies in --out. Choose another folder for it.")
        other = stems.setdefault(path.stem, path)
        if other != path:
            raise ValueError(
                f"{other} and {path} would both be written to {path.stem}_mask. Run them one by one."
            )
    return files


def read_image(path: Path) -> Image:
    """Image as stored: uint8 (H, W, 3) RGB from a picture, any array from .npy. Raises ValueError with the path."""
    try:
        if path.suffix.lower() == ARRAY:
            return np.asarray(np.load(path, allow_pickle=False))
        return _decoded(path)
    # Decoders raise SyntaxError, struct.error and types of their own for damaged files.
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error})."
        ) from None


def _decoded(path: Path) -> Image:
    try:
        from PIL import Image as pillow  # noqa: N813
    except ImportError:
        raise ValueError(f"only {ARRAY} is read without Pillow") from None
    with pillow.open(path) as picture:
        if picture.mode.startswith(("I", "F")):  # convert() would clip them to white
            raise ValueError(f"mode {picture.mode}, but 8 bits per channel were needed")
        return np.asarray(picture.convert("RGB"))


def write_picture(stem: Path, picture: Image) -> None:
    """Write a PNG with Pillow, an .npy without it."""
    try:
        from PIL import Image as pillow  # noqa: N813
    except ImportError:
        np.save(stem.with_name(f"{stem.name}{ARRAY}"), picture)
        return
    pillow.fromarray(picture).save(stem.with_name(f"{stem.name}.png"))


def overlay(image: Image, mask: Image, palette: Image) -> Image:
    """Average of the image and the colors of its classes, uint8 (H, W, 3)."""
    height, width, _ = image.shape
    colors = palette[enlarged(mask, height, width)]
    mixed: NDArray[np.uint16] = (image.astype(np.uint16) + colors) // 2
    return mixed.astype(np.uint8)


def enlarged(mask: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """The mask at this size: each pixel takes the id of the cell in which it lies."""
    rows = np.arange(height) * mask.shape[0] // height
    columns = np.arange(width) * mask.shape[1] // width
    return np.asarray(mask[np.ix_(rows, columns)])
