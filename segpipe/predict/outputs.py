"""Files of one prediction: where they lie, what their stamp says, and whether they are there already.

The mask of an image and the frames.json of a video hold the stamp: model, settings and source. They are written last,
so a source with an equal stamp is finished.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from segpipe import files
from segpipe.errors import ConfigError, DataError
from segpipe.predict.overlay import beside, blend, legend
from segpipe.predict.sources import Input

if TYPE_CHECKING:
    from segpipe.predict.predictor import Pixels, Predictor

FORMAT = "segpipe-predictions/2"
RESULTS = ("source", "size", "pixels", "frames", "fps")  # parts of a stamp
JPEG_LIMIT = 65500  # pixels along a side
Stamp = dict[str, Any]


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
        """What the answers depend on besides the model."""
        exif = "apply" if self.upright else "ignore"
        return {**self.predictor.settings, "exif": exif}

    def mask(self, source: Input) -> Path:
        """The file with the stamp: of an image its mask, of a video the record of its frames."""
        name = (
            f"{source.place}/frames.json" if source.is_video else f"{source.name}.png"
        )
        return self.out / "masks" / name

    def picture(self, source: Input, suffix: str = "") -> Path:
        """The overlay of an image or a video."""
        suffix = suffix or (".mp4" if source.is_video else ".jpg")
        return self.out / "overlays" / f"{source.name}{suffix}"

    def frame(self, source: Input, number: int) -> Path:
        """The mask of a frame of a video."""
        return self.mask(source).with_name(f"{number:06}.png")

    def stamp(self, source: Input, sha256: str) -> Stamp:
        """The stamp of a source, without results."""
        stamp: Stamp = {
            "format": FORMAT,
            "model": self.predictor.model,
            "settings": self.settings,
            "source": source.place,
            "source_sha256": sha256,
        }
        if self.overlay:
            stamp["overlay"] = {"alpha": self.alpha, "legend": self.legend}
        if source.is_video and self.frames:
            stamp["masks"] = True
        return stamp

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
                picture = beside(picture, self.key(results["pixels"]))
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

    def write_legend(self, source: Input, pixels: Sequence[int]) -> None:
        """Write the legend of a video as a picture of its own."""
        picture = Image.fromarray(self.key(pixels))
        put(self.picture(source, ".legend.png"), _encoded(picture, "PNG"))

    def blended(self, image: Pixels, ids: Pixels) -> Pixels:
        """The image with the colors of its classes."""
        return blend(image, ids, self.predictor.palette, self.alpha)

    def key(self, pixels: Sequence[int]) -> Pixels:
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
        """How what is there for a source differs from what would be written; None if something is missing.

        Raises OSError when the source cannot be read.
        """
        path = self.mask(source)
        unfinished = source.is_video and not path.exists()
        if unfinished:
            path = self.frame(source, 0)
        if not path.exists():
            return None
        found = read_stamp(path)
        if found is None:
            return ["it is no prediction"]
        before, now = _flat(found), _flat(self.stamp(source, files.sha256(source.path)))
        differing = [
            f"{name} {before.get(name)} -> {now.get(name)}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        unfinished |= self.overlay and not self.picture(source).exists()
        return None if unfinished and not differing else differing


def _encoded(picture: Image.Image, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    return buffer.getvalue()


def read_stamp(path: Path) -> Stamp | None:
    """The stamp of a mask, or the content of a JSON file; None if it has none."""
    try:
        if path.suffix == ".json":
            stamp = json.loads(path.read_bytes())
        else:
            with Image.open(path) as picture:
                stamp = json.loads(picture.info["Comment"])
    except (OSError, ValueError, KeyError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _flat(stamp: Stamp) -> dict[str, Any]:
    """The parts that a prediction depends on, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in stamp.items():
        if name in RESULTS:
            continue
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


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
