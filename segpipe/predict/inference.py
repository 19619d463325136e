"""Class ids of images of any size by a trained network: as a whole or in tiles, averaged over flips and scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segpipe.errors import ConfigError
from segpipe.models.resize import bilinear
from segpipe.predict.tiles import LARGEST_OVERLAP, Size, Strip, Tiling, parse_size
from segpipe.train.forward import AUTOCAST, autocast
from segpipe.train.validate import predict

if TYPE_CHECKING:
    from segpipe.models.layers import SegmentationNet
    from segpipe.models.preprocess import Preprocess

FLIP = "flip"
SMALLEST = 32  # rows and columns; smaller images are padded by their edge pixels
LARGEST_SCALE = 4.0
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
    tile, overlap = parse_size("tile", given["tile"]), given["overlap"]
    if tile is not None and min(tile) < SMALLEST:
        raise ConfigError(
            f"tile = {given['tile']}, but at least {SMALLEST}x{SMALLEST} was needed."
        )
    assert 0 <= overlap <= LARGEST_OVERLAP
    flip, scales = _views(given["tta"])
    return Inference(tile, overlap, flip, scales, precision, given.get("batch", 1))


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
    tile = how.tile or image.shape[1:3]
    covered = tile[0] >= image.shape[1] and tile[1] >= image.shape[2]
    if covered and len(how.views) == 1 and min(image.shape[1:3]) >= SMALLEST:
        return predict(model, preprocess, image, precision=how.precision)
    return answers(model, preprocess, image, how)[0]


@torch.inference_mode()
def answers(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Answers:
    """Class ids as by `segment`, and their probability.

    Probabilities (softmax of the logits at the size of the image) are averaged over the views, in their order, and
    then over tiles, with `Tiling.weights`; the class of the largest wins.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W), float32 (B, H, W).
    """
    height, width = image.shape[1], image.shape[2]
    if min(height, width) < SMALLEST:
        ids, confidence = answers(model, preprocess, _padded(image), how)
        return ids[:, :height, :width], confidence[:, :height, :width]
    tiling = Tiling.of((height, width), how.tile, how.overlap)
    if not tiling.is_whole:
        found = [_in_tiles(model, preprocess, each, how, tiling) for each in image]
        return (
            torch.stack([ids for ids, _ in found]),
            torch.stack([confidence for _, confidence in found]),
        )
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
    model: SegmentationNet,
    preprocess: Preprocess,
    image: Tensor,
    how: Inference,
    tiling: Tiling,
) -> Answers:
    """Class ids and their probability, of one image (H, W, 3). Only one strip of tiles is in memory at a time."""
    height, width = tiling.tile
    device = image.device
    weights = torch.from_numpy(tiling.weights()).to(device)
    ids = torch.empty(tiling.image, dtype=torch.uint8, device=device)
    confidence = torch.empty(tiling.image, device=device)
    # Weighted sum of probabilities (C, h, W) of the rows from strip.top on.
    total: Tensor | None = None
    for strip in tiling.strips():
        rows = image[strip.top : strip.top + height]
        for left, found in _each(model, preprocess, rows, strip, width, how):
            if total is None:
                total = found.new_zeros(len(found), height, tiling.image[1])
            total[:, :, left : left + width] += found * weights
        assert total is not None
        done = strip.done - strip.top
        place = slice(strip.top, strip.done)
        ids[place], confidence[place] = _best(total[:, :done], 0)
        below = total.new_zeros(len(total), done, tiling.image[1])
        total = torch.cat([total[:, done:], below], 1)
    return ids, confidence


def _each(
    model: SegmentationNet,
    preprocess: Preprocess,
    rows: Tensor,
    strip: Strip,
    width: int,
    how: Inference,
) -> Iterator[tuple[int, Tensor]]:
    """First column and probabilities (C, h, w) of each tile of a strip, `how.batch` of them per forward."""
    for first in range(0, len(strip.lefts), how.batch):
        lefts = strip.lefts[first : first + how.batch]
        tiles = torch.stack([rows[:, left : left + width] for left in lefts])
        found = _probabilities(model, preprocess, tiles, how)
        yield from zip(lefts, found, strict=True)


def _probabilities(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Sum over the views of the probabilities of the classes, float32 (B, C, H, W)."""
    height, width = size = (image.shape[1], image.shape[2])
    normalised = preprocess(image)
    total: Tensor | None = None
    for scale, flip in how.views:
        view = normalised
        if scale != 1.0:
            rows = max(SMALLEST, round(height * scale))
            columns = max(SMALLEST, round(width * scale))
            view = bilinear(normalised, (rows, columns))
        logits = _logits(model, view.flip(3) if flip else view, size, how)
        found = logits.softmax(1)
        found = found.flip(3) if flip else found
        total = found if total is None else total + found
    assert total is not None
    return total


def _logits(model: SegmentationNet, view: Tensor, size: Size, how: Inference) -> Tensor:
    """Logits of a preprocessed view at another size, float32 (B, C, H, W)."""
    with autocast(view.device, how.precision):
        logits = model(view)
    return bilinear(logits.float(), size, align_corners=model.align_corners)
