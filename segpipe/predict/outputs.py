"""Files of one prediction: where they lie, what their stamps say, and whether they are there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import DataError
from segpipe.predict.overlay import beside, blend, legend
from segpipe.predict.sources import Input
from segpipe.predict.stamp import Stamp, mask_png, picture_jpeg, put, read_stamp

FORMAT = "segpipe-predictions/1"
MASKS, OVERLAYS = "masks", "overlays"
FRAMES = "frames.json"  # written after the last mask of a video
FOUND = (
    "source",
    "size",
    "pixels",
    "frames",
    "fps",
    "partial",
)  # parts of a stamp that are results
JPEG_LIMIT = 65500  # pixels along a side
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Predictor:
    """A network that answers images, and what its answers depend on."""

    answer: Callable[
        [Sequence[Pixels]], list[Pixels]
    ]  # class ids (H, W) of images (H, W, 3) of one size
    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    model: dict[str, Any]  # digests of the network
    settings: dict[str, Any]  # of the inference
    note: Callable[[], str] = str  # what to say at the end
    raw_ids: Pixels | None = (
        None  # (256,): what is written for each class id, in place of itself
    )


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
        return {
            **self.predictor.settings,
            "exif": "apply" if self.upright else "ignore",
        }

    def mask(self, source: Input) -> Path:
        """Of an image its mask, of a video the file that says that its masks are complete."""
        if source.is_video:
            return self.out / MASKS / source.place / FRAMES
        return self.out / MASKS / f"{source.name}.png"

    def picture(self, source: Input, suffix: str = "") -> Path:
        """The overlay of an image or a video."""
        return (
            self.out
            / OVERLAYS
            / f"{source.name}{suffix or ('.mp4' if source.is_video else '.jpg')}"
        )

    def frame(self, source: Input, number: int) -> Path:
        """The mask of a frame of a video."""
        return self.mask(source).with_name(f"{number:06}.png")

    def stamp(self, source: Input, sha256: str) -> Stamp:
        """The stamp of a source's files, without results."""
        return {
            "format": FORMAT,
            "model": self.predictor.model,
            "settings": self.settings,
            "source": source.place,
            "source_sha256": sha256,
        }

    def of_picture(self, stamp: Stamp) -> Stamp:
        """The stamp as it is in an overlay."""
        return {**stamp, "overlay": {"alpha": self.alpha, "legend": self.legend}}

    def stamps(self, source: Input, sha256: str) -> dict[Path, Stamp]:
        """Files by which a source is known as finished, with their stamps; the one that is written last is last."""
        stamp = self.stamp(source, sha256)
        found = {self.picture(source): self.of_picture(stamp)} if self.overlay else {}
        if source.is_video and self.frames:
            found[self.frame(source, 0)] = stamp
        if self.frames or not source.is_video:
            found[self.mask(source)] = stamp
        return found

    def write_image(
        self, source: Input, sha256: str, image: Pixels, ids: Pixels
    ) -> Stamp:
        """Write overlay and mask; the stamp of the mask."""
        stamp = self.stamp(source, sha256) | {
            "size": list(ids.shape),
            "pixels": self.count(ids),
        }
        if self.overlay and max(ids.shape) > JPEG_LIMIT:
            raise DataError(
                f"{source.path}: a JPEG has at most {JPEG_LIMIT} rows and columns. Set overlay=false."
            )
        if self.overlay:
            picture = self.blended(image, ids, with_legend=self.legend)
            put(self.picture(source), picture_jpeg(picture, self.of_picture(stamp)))
        self.write_mask(self.mask(source), ids, stamp)
        return stamp

    def write_mask(self, path: Path, ids: Pixels, stamp: Stamp) -> None:
        """Write a PNG of class ids with the palette of the classes, or a grey one of raw ids."""
        raw = self.predictor.raw_ids
        put(
            path,
            mask_png(ids, stamp, self.predictor.palette)
            if raw is None
            else mask_png(raw[ids], stamp, None),
        )

    def blended(self, image: Pixels, ids: Pixels, *, with_legend: bool) -> Pixels:
        """The image with the colors of its classes, and if wanted with the legend of those it has."""
        mixed = blend(image, ids, self.predictor.palette, self.alpha)
        return beside(mixed, self.key(self.count(ids))) if with_legend else mixed

    def key(self, pixels: Sequence[int]) -> Pixels:
        """Legend of the classes that have pixels, the most frequent first."""
        shares = {
            name: share for name, share in self.shares(pixels).items() if share > 0
        }
        palette = dict(zip(self.predictor.names, self.predictor.palette, strict=True))
        return legend(
            dict(sorted(shares.items(), key=lambda entry: -entry[1])), palette
        )

    def count(self, ids: Pixels) -> list[int]:
        """Pixels of each class."""
        counts: list[int] = np.bincount(
            ids.ravel(), minlength=len(self.predictor.names)
        ).tolist()
        return counts

    def shares(self, pixels: Sequence[int]) -> dict[str, float]:
        """Share of the pixels by class."""
        total = max(sum(pixels), 1)
        return {
            name: count / total
            for name, count in zip(self.predictor.names, pixels, strict=True)
        }

    def entry(self, source: Input, stamp: Stamp) -> dict[str, Any]:
        """What predictions.json says of a finished source."""
        height, width = stamp["size"]
        mask, picture = self.mask(source), self.picture(source)
        if source.is_video:
            mask = mask.parent
        files = {"mask": mask} if self.frames or not source.is_video else {}
        files |= {"overlay": picture} if self.overlay else {}
        return {
            "source": source.place,
            "source_sha256": stamp["source_sha256"],
            **{
                name: path.relative_to(self.out).as_posix()
                for name, path in files.items()
            },
            "height": height,
            "width": width,
            **{
                name: stamp[name]
                for name in ("frames", "fps", "partial")
                if name in stamp
            },
            "share": self.shares(stamp["pixels"]),
        }


def differences(path: Path, wanted: Stamp) -> list[str] | None:
    """How the stamp of an existing file differs from the one that is wanted; None if there is no file."""
    if not path.exists():
        return None
    found = read_stamp(path)
    if found is None:
        return ["it is no prediction"]
    before, now = _flat(found), _flat(wanted)
    return [
        f"{name} {before.get(name)} -> {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _flat(stamp: Stamp) -> dict[str, Any]:
    """The parts that a prediction depends on, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in stamp.items():
        if name not in FOUND:
            found |= (
                {f"{name}.{key}": each for key, each in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
    return found
