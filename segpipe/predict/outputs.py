"""Files of one prediction: where they lie, what is drawn, and whether they are there already.

The mask of an image and the frames.json of a video hold the stamp: model, settings and source. They are written last,
so a source with an equal stamp is finished.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from segpipe import files
from segpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from segpipe.predict.predictor import Pixels, Predictor

FORMAT = "segpipe-predictions/3"
VIDEOS = (
    *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm"),
    *(".mpg", ".mpeg", ".mjpeg", ".ts", ".wmv"),
)
JPEG_LIMIT = 65500  # pixels along a side
FONT_SIZE, ROW, MARGIN = 14, 20, 8  # pixels
Palette = Sequence[tuple[int, int, int]]
Stamp = dict[str, Any]


class Input(NamedTuple):
    """An image or a video."""

    path: Path
    place: str  # relative to the folder that was given, with suffix
    name: str  # of its outputs: `place` without suffix, unless two sources share that

    @property
    def is_video(self) -> bool:
        """Whether its suffix is that of a video."""
        return self.path.suffix.lower() in VIDEOS


@dataclass(frozen=True)
class Outputs:
    """What is written, below `out`, for each image and video."""

    out: Path
    predictor: Predictor
    overlay: bool = True
    alpha: float = 0.5
    legend: bool = True
    frames: bool = False  # masks of the frames of a video
    upright: bool = True  # images are turned as their EXIF orientation says

    @property
    def settings(self) -> dict[str, Any]:
        """What the files depend on besides the model."""
        drawn = {"alpha": self.alpha, "legend": self.legend} if self.overlay else {}
        exif = "apply" if self.upright else "ignore"
        own = {"exif": exif, "frames": self.frames, "overlay": self.overlay}
        return {**self.predictor.settings, **own, **drawn}

    def mask(self, source: Input) -> Path:
        """The file with the stamp: of an image its mask, of a video the record of its frames."""
        name = f"{source.name}.png"
        if source.is_video:
            name = f"{source.place}/frames.json"
        return self.out / "masks" / name

    def picture(self, source: Input) -> Path:
        """The overlay of an image or a video."""
        suffix = ".mp4" if source.is_video else ".jpg"
        return self.out / "overlays" / f"{source.name}{suffix}"

    def stamp(self, source: Input, sha256: str) -> Stamp:
        """The stamp of a source, without results."""
        return {
            "format": FORMAT,
            "model": self.predictor.model,
            "settings": self.settings,
            "source": source.place,
            "source_sha256": sha256,
        }

    def write_image(
        self, source: Input, sha256: str, image: Pixels, ids: Pixels
    ) -> Stamp:
        """Write overlay and mask; the stamp of the mask."""
        results = {"size": list(ids.shape), "pixels": self.count(ids)}
        stamp = self.stamp(source, sha256) | results
        if self.overlay:
            if max(ids.shape) > JPEG_LIMIT:
                raise DataError(
                    f"{source.path}: a JPEG has at most {JPEG_LIMIT} rows and columns. Set overlay=false."
                )
            picture = self.blended(image, ids)
            if self.legend:
                picture = beside(picture, self._key(results["pixels"]))
            # Color at full resolution: a pole is 2 pixels wide.
            how = {"quality": 90, "subsampling": 0, "comment": json.dumps(stamp)}
            put(self.picture(source), _encoded(Image.fromarray(picture), "JPEG", **how))
        self.write_mask(self.mask(source), ids, stamp)
        return stamp

    def write_mask(self, path: Path, ids: Pixels, stamp: Stamp) -> None:
        """Write a PNG of class ids with the palette of the classes, or a grey one of raw ids."""
        raw = self.predictor.raw_ids
        picture = Image.fromarray(ids if raw is None else raw[ids])
        if raw is None:
            colors = np.zeros((256, 3), np.uint8)
            colors[: len(self.predictor.palette)] = self.predictor.palette
            picture.putpalette(colors.tobytes())
        comment = PngInfo()
        comment.add_text("Comment", json.dumps(stamp))
        put(path, _encoded(picture, "PNG", pnginfo=comment))

    def blended(self, image: Pixels, ids: Pixels) -> Pixels:
        """The image with the colors of its classes."""
        return blend(image, ids, self.predictor.palette, self.alpha)

    def _key(self, pixels: Sequence[int]) -> Pixels:
        """Legend of the classes that have pixels, the most frequent first."""
        shares = self.shares(pixels)
        names = sorted(shares, key=lambda name: -shares[name])
        palette = dict(zip(self.predictor.names, self.predictor.palette, strict=True))
        return legend({name: shares[name] for name in names if shares[name]}, palette)

    def count(self, ids: Pixels) -> list[int]:
        """Pixels of each class."""
        counts = np.bincount(ids.ravel(), minlength=len(self.predictor.names))
        return [int(count) for count in counts]

    def shares(self, pixels: Sequence[int]) -> dict[str, float]:
        """Share of the pixels by class."""
        total = max(sum(pixels), 1)
        named = zip(self.predictor.names, pixels, strict=True)
        return {name: count / total for name, count in named}

    def entry(self, source: Input, stamp: Stamp) -> dict[str, Any]:
        """What predictions.json says of a finished source."""
        height, width = stamp["size"]
        entry: dict[str, Any] = {
            "source": source.place,
            "source_sha256": stamp["source_sha256"],
            "height": height,
            "width": width,
            "share": self.shares(stamp["pixels"]),
        }
        mask = self.mask(source)
        if source.is_video:
            entry |= {"frames": stamp["frames"], "fps": stamp["fps"]}
            mask = mask.parent
        if self.frames or not source.is_video:
            entry["mask"] = mask.relative_to(self.out).as_posix()
        if self.overlay:
            entry["overlay"] = self.picture(source).relative_to(self.out).as_posix()
        return entry

    def differences(self, source: Input) -> list[str] | None:
        """Parts of the stamp in which what is there differs from what would be written; None if something is missing.

        Raises OSError when the source cannot be read.
        """
        path = self.mask(source)
        if not path.exists():
            return None
        before, now = read_stamp(path), self.stamp(source, files.sha256(source.path))
        differing = [key for key in now if before.get(key) != now[key]]
        is_lost = self.overlay and not self.picture(source).exists()
        return None if is_lost and not differing else differing


def _encoded(picture: Image.Image, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    return buffer.getvalue()


def read_stamp(path: Path) -> Stamp:
    """The stamp of a mask, or the content of a JSON file; empty if it has none."""
    try:
        if path.suffix == ".json":
            return dict(json.loads(path.read_bytes()))
        with Image.open(path) as picture:
            return dict(json.loads(picture.info["Comment"]))
    except (OSError, ValueError, TypeError, KeyError):
        return {}


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


def blend(
    image: NDArray[np.uint8],
    ids: NDArray[np.uint8],
    palette: Palette,
    opacity: float = 0.65,
) -> NDArray[np.uint8]:
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


def legend(
    shares: Mapping[str, float], palette: Mapping[str, tuple[int, int, int]]
) -> NDArray[np.uint8]:
    """A dark panel with a line for each class: color, name, and share of the pixels. uint8 (h, w, 3)."""
    texts = [f"{name}  {100 * share:.1f} %" for name, share in shares.items()]
    longest = max((_font().getlength(text) for text in texts), default=0)
    width = 2 * MARGIN + ROW + round(longest)
    panel = Image.new("RGB", (width, 2 * MARGIN + ROW * len(texts)), (24, 24, 24))
    draw = ImageDraw.Draw(panel)
    for place, (name, text) in enumerate(zip(shares, texts, strict=True)):
        top = MARGIN + ROW * place
        draw.rectangle((MARGIN, top + 4, MARGIN + 12, top + 16), fill=palette[name])
        draw.text((MARGIN + ROW, top + 2), text, fill=(235, 235, 235), font=_font())
    return np.asarray(panel, np.uint8)


def beside(picture: NDArray[np.uint8], panel: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Both side by side, uint8 (H, W, 3); the lower one is filled up from below."""
    height = max(len(picture), len(panel))
    parts = [
        np.pad(part, ((0, height - len(part)), (0, 0), (0, 0)), constant_values=24)
        for part in (picture, panel)
    ]
    return np.hstack(parts)


@cache
def _font() -> Any:
    """A font that has more than Latin letters, of matplotlib."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(str(path), FONT_SIZE)
