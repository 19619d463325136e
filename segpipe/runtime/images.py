"""Images in, masks out. numpy reads and writes .npy; Pillow all other formats."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARRAY = ".npy"
Image = NDArray[np.uint8]


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


def picture_path(stem: Path) -> Path:
    """A PNG where Pillow is installed, else an .npy."""
    suffix = ARRAY if find_spec("PIL") is None else ".png"
    return stem.with_name(f"{stem.name}{suffix}")


def write_picture(path: Path, picture: Image) -> None:
    """Write a path of `picture_path`."""
    if path.suffix == ARRAY:
        np.save(path, picture)
        return
    from PIL import Image as pillow  # noqa: N813

    pillow.fromarray(picture).save(path)


def enlarged(mask: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """The mask at this size: each pixel takes the id of the cell in which it lies."""
    rows = np.arange(height) * mask.shape[0] // height
    columns = np.arange(width) * mask.shape[1] // width
    return np.asarray(mask[np.ix_(rows, columns)])
