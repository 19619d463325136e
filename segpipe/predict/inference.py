"""Class ids of images of any size by a trained network: as a whole or in tiles, averaged over flips and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segpipe.errors import ConfigError
from segpipe.models.resize import bilinear
from segpipe.train.forward import AUTOCAST, autocast
from segpipe.train.validate import predict

if TYPE_CHECKING:
    from segpipe.models.layers import SegmentationNet
    from segpipe.models.preprocess import Preprocess

FLIP = "flip"
SMALLEST = 32  # rows and columns; smaller images are padded by their edge pixels
LARGEST_SCALE = 4.0
Size = tuple[int, int]  # height, width
Answers = tuple[Tensor, Tensor]  # class ids, uint8; their probability, float32


@dataclass(frozen=True)
class Inference:
    """How a network looks at an image. The default is one forward of the whole image, as in validation."""

    tile: Size | None = None
    overlap: float = 0.25
    flip: bool = False
    scales: tuple[float, ...] = (1.0,)
    precision: str = "fp32"
    batch: int = 1  # tiles in one forward

    @property
    def views(self) -> list[tuple[float, bool]]:
        """Scale and flip of each forward; the image as it is comes first."""
        flips = (False, True) if self.flip else (False,)
        return [(scale, flip) for scale in self.scales for flip in flips]

    @property
    def described(self) -> dict[str, Any]:
        """What was asked for beyond one forward of the whole image; empty if nothing was."""
        found: dict[str, Any] = {}
        if self.tile:
            found |= {"tile": "x".join(map(str, self.tile)), "overlap": self.overlap}
        views = [FLIP] * self.flip + [f"{scale:g}" for scale in self.scales[1:]]
        if views:
            found["tta"] = ",".join(views)
        return found


def inference(given: Mapping[str, Any]) -> Inference:
    """Inference of a command's keys tile, overlap, tta, and of precision and batch if it has them.

    Raises ConfigError for values that do not fit.
    """
    precision = given.get("precision", "fp32")
    if precision not in ("fp32", *AUTOCAST):
        raise ConfigError(
            f"precision = {precision}, but a run computes in one of fp32, {', '.join(AUTOCAST)}."
        )
    flip, scales = _views(given["tta"])
    return Inference(
        _tile(given["tile"]),
        given["overlap"],
        flip,
        scales,
        precision,
        given.get("batch", 1),
    )


def _tile(text: str) -> Size | None:
    """Height and width of `512x1024`; None for an empty text."""
    if not text:
        return None
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isdecimal() for side in sides):
        raise ConfigError(
            f"tile = {text!r}, but HEIGHTxWIDTH in pixels was needed, such as tile=512x1024."
        )
    height, width = map(int, sides)
    if min(height, width) < SMALLEST:
        raise ConfigError(
            f"tile = {text}, but at least {SMALLEST}x{SMALLEST} was needed."
        )
    return height, width


def _views(tta: Sequence[str]) -> tuple[bool, tuple[float, ...]]:
    scales = set()
    for item in tta:
        if item == FLIP:
            continue
        try:
            scale = float(item)
        except ValueError:
            scale = 0.0
        if not 1 / LARGEST_SCALE <= scale <= LARGEST_SCALE:
            raise ConfigError(
                f"tta = [{', '.join(tta)}]: {item} is neither {FLIP} nor a scale from {1 / LARGEST_SCALE:g} to "
                f"{LARGEST_SCALE:g}. Set for example tta=[flip,0.75,1.25]; scale 1 is always there."
            )
        scales.add(scale)
    return FLIP in tta, (1.0, *sorted(scales - {1.0}))


def segment(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Class ids of images at their own size; in one tile and one view exactly those of `train.validate.predict`.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W).
    """
    is_large = min(image.shape[1:3]) >= SMALLEST
    if is_large and _is_whole(image, how) and len(how.views) == 1:
        return predict(model, preprocess, image, precision=how.precision)
    return answers(model, preprocess, image, how)[0]


def _is_whole(image: Tensor, how: Inference) -> bool:
    """Whether one tile covers the image."""
    height, width = how.tile or image.shape[1:3]
    return height >= image.shape[1] and width >= image.shape[2]


@torch.inference_mode()
def answers(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Answers:
    """Class ids as by `segment`, and their probability.

    Probabilities (softmax of the logits at the size of the image) are averaged over the views, in their order, and
    then over tiles, weighted by `ramp` along both sides; the class of the largest wins.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W), float32 (B, H, W).
    """
    height, width = image.shape[1], image.shape[2]
    if min(height, width) < SMALLEST:
        ids, confidence = answers(model, preprocess, _padded(image), how)
        return ids[:, :height, :width], confidence[:, :height, :width]
    if not _is_whole(image, how):
        pairs = [_in_tiles(model, preprocess, each, how) for each in image]
        ids, confidence = map(torch.stack, zip(*pairs, strict=True))
        return ids, confidence
    if len(how.views) > 1:
        return _best(_probabilities(model, preprocess, image, how), 1)
    logits = _logits(model, preprocess(image), (height, width), how)
    # Of logits, as in validation: probabilities round small differences to ties.
    best = logits.max(1)
    confidence = (best.values - logits.logsumexp(1)).exp()
    return best.indices.to(torch.uint8), confidence


def _best(total: Tensor, axis: int) -> Answers:
    """The classes with the largest share of a sum of probabilities, and that share."""
    best = total.max(axis)
    return best.indices.to(torch.uint8), best.values / total.sum(axis)


def _padded(image: Tensor) -> Tensor:
    """The image with its last row and column repeated, so that no side is shorter than SMALLEST."""
    rows, columns = (
        torch.arange(max(length, SMALLEST), device=image.device).clamp(max=length - 1)
        for length in image.shape[1:3]
    )
    return image[:, rows][:, :, columns]


def _in_tiles(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Answers:
    """Class ids and their probability, of one image (H, W, 3). Only one row of tiles is in memory at a time."""
    assert how.tile
    size = image.shape[:2]
    height, width = (min(pair) for pair in zip(how.tile, size, strict=True))
    tops = starts(size[0], height, how.overlap)
    lefts = starts(size[1], width, how.overlap)
    weights = torch.outer(ramp(height, how.overlap), ramp(width, how.overlap))
    weights = weights.float().to(image.device)
    ids = torch.empty(size, dtype=torch.uint8, device=image.device)
    confidence = torch.empty(size, device=image.device)
    # Weighted sum of probabilities (C, h, W) of the rows from `top` on.
    total: Tensor | None = None
    for top, below in pairwise([*tops, size[0]]):
        rows = image[top : top + height]
        for first in range(0, len(lefts), how.batch):
            some = lefts[first : first + how.batch]
            tiles = torch.stack([rows[:, left : left + width] for left in some])
            parts = _probabilities(model, preprocess, tiles, how)
            if total is None:
                total = parts.new_zeros(parts.shape[1], height, size[1])
            for left, part in zip(some, parts, strict=True):
                total[:, :, left : left + width] += part * weights
        assert total is not None
        # Rows above the next tiles get nothing more.
        done = below - top
        ids[top:below], confidence[top:below] = _best(total[:, :done], 0)
        total = torch.cat([total[:, done:], torch.zeros_like(total[:, :done])], 1)
    return ids, confidence


def starts(length: int, tile: int, overlap: float) -> list[int]:
    """First pixels of the fewest tiles that cover `length` pixels and overlap by at least this share of a tile."""
    if tile >= length:
        return [0]
    step = max(1, math.floor(tile * (1 - overlap)))
    last = math.ceil((length - tile) / step)
    return [place * (length - tile) // last for place in range(last + 1)]


def ramp(length: int, overlap: float) -> Tensor:
    """Weights along one side of a tile: they rise linearly over the overlap, are 1 inside, and fall again.

    At its edges a network sees the padding of its convolutions instead of the image, so its answers there are worse.
    """
    place = torch.arange(1, length + 1, dtype=torch.float64)
    distance = torch.minimum(place, place.flip(0))
    return (distance / (math.floor(length * overlap) + 1)).clamp(max=1)


def _probabilities(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Sum over the views of the probabilities of the classes, float32 (B, C, H, W)."""
    size = (image.shape[1], image.shape[2])
    normalised = preprocess(image)
    total: Tensor | None = None
    for scale, flip in how.views:
        view = normalised
        if scale != 1.0:
            sides = [max(SMALLEST, round(side * scale)) for side in size]
            view = bilinear(normalised, (sides[0], sides[1]))
        logits = _logits(model, view.flip(3) if flip else view, size, how)
        shares = logits.softmax(1)
        shares = shares.flip(3) if flip else shares
        total = shares if total is None else total + shares
    assert total is not None
    return total


def _logits(model: SegmentationNet, view: Tensor, size: Size, how: Inference) -> Tensor:
    """Logits of a preprocessed view at another size, float32 (B, C, H, W)."""
    with autocast(view.device, how.precision):
        logits = model(view)
    return bilinear(logits.float(), size, align_corners=model.align_corners)
