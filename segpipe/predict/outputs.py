"""Output files of one prediction: their paths and what is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segpipe import files
from segpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from segpipe.predict.predictor import Predictor
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


@dataclass(frozen=True)
class Outputs:
    """Outputs below `out` for each image and video."""

    out: Path
    predictor: Predictor
    overlay: bool = True
    alpha: float = 0.5
    frames: bool = False  # whether to write masks of video frames

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the files depend on besides the model."""
        own = {"frames": self.frames, "overlay": self.overlay, "alpha": self.alpha}
        return {**self.predictor.settings, **own}

    def mask(self, source: Input) -> Path:
        """Path of the mask of an image, or of the folder of masks of a video."""
        name = source.place if source.is_video else f"{source.name}.png"
        return self.out / "masks" / name

    def picture(self, source: Input) -> Path:
        """Path of the overlay of an image or a video."""
        suffix = ".mp4" if source.is_video else ".jpg"
        return self.out / "overlays" / f"{source.name}{suffix}"

    def write_image(self, source: Input, image: Pixels, ids: Pixels) -> None:
        """Write overlay and mask of an image."""
        if self.overlay:
            if max(ids.shape) > JPEG_LIMIT:
                raise DataError(
                    f"a JPEG has at most {JPEG_LIMIT} rows and columns. Set overlay=false."
                )
            picture = Image.fromarray(self.blended(image, ids))
            # No chroma subsampling: a pole is 2 pixels wide.
            _save(self.picture(source), picture, "JPEG", quality=90, subsampling=0)
        self.write_mask(self.mask(source), ids)

    def write_mask(self, path: Path, ids: Pixels) -> None:
        """Write a PNG of class ids with the palette of the classes."""
        picture = Image.fromarray(ids)
        colors = np.zeros((256, 3), np.uint8)
        colors[: len(self.predictor.palette)] = self.predictor.palette
        picture.putpalette(colors.tobytes())
        _save(path, picture, "PNG")

    def blended(self, image: Pixels, ids: Pixels) -> Pixels:
        """The image with the colors of its classes."""
        return blend(image, ids, self.predictor.palette, self.alpha)

    def count(self, ids: Pixels) -> NDArray[np.int64]:
        """Pixels of each class."""
        return np.bincount(ids.ravel(), minlength=len(self.predictor.names))

    def shares(self, pixels: Sequence[int]) -> dict[str, float]:
        """Share of the pixels by class."""
        total = max(sum(pixels), 1)
        named = zip(self.predictor.names, pixels, strict=True)
        return {name: count / total for name, count in named}


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
    image: Pixels,
    ids: Pixels,
    palette: Palette,
    opacity: float = 0.65,
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
