"""Class ids of images of any size by a trained network: as a whole or in tiles, averaged over flips and scales."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.distributed.watch.health import is_out_of_memory
from segpipe.errors import ConfigError, OutOfMemory
from segpipe.models.resize import bilinear
from segpipe.predict.outputs import Pixels, Predictor
from segpipe.predict.tiles import LARGEST_OVERLAP, Size, Tiling, parse_size
from segpipe.train.gradients import AUTOCAST, autocast
from segpipe.train.validate import predict

if TYPE_CHECKING:
    from segpipe.models.layers import SegmentationNet
    from segpipe.models.preprocess import Preprocess
    from segpipe.train.checkpoint import TrainedNetwork

FLIP = "flip"
SMALLEST = 32  # rows and columns that a network sees at least; smaller images are padded by their edge pixels
LARGEST_SCALE = 4.0


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
        return [
            (scale, flip)
            for scale in self.scales
            for flip in ((False, True) if self.flip else (False,))
        ]

    @property
    def described(self) -> dict[str, Any]:
        """What was asked for beyond one forward of the whole image; empty if nothing was."""
        tiles = (
            {"tile": "x".join(map(str, self.tile)), "overlap": self.overlap}
            if self.tile
            else {}
        )
        views = [FLIP] * self.flip + [f"{scale:g}" for scale in self.scales[1:]]
        return tiles | ({"tta": ",".join(views)} if views else {})


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
    scales = []
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
        scales.append(scale)
    return FLIP in tta, (1.0, *sorted(set(scales) - {1.0}))


@torch.inference_mode()
def segment(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Class ids of images at their own size; in one tile and one view exactly those of `train.validate.predict`.

    Probabilities (softmax of the logits at the size of the image) are averaged over the views, in their order, and
    then over tiles, with `Tiling.weights`; the class of the largest wins.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W).
    """
    height, width = image.shape[1], image.shape[2]
    if min(height, width) < SMALLEST:
        return segment(model, preprocess, _padded(image), how)[:, :height, :width]
    tiling = Tiling.of((height, width), how.tile, how.overlap)
    if not tiling.is_whole:
        return torch.stack(
            [_in_tiles(model, preprocess, each, how, tiling) for each in image]
        )
    if how.views == [(1.0, False)]:
        return predict(model, preprocess, image, precision=how.precision)
    return _probabilities(model, preprocess, image, how).argmax(1).to(torch.uint8)


def _padded(image: Tensor) -> Tensor:
    """The image with its last row and column repeated, so that no side is shorter than SMALLEST."""
    rows, columns = (
        torch.arange(max(n, SMALLEST), device=image.device).clamp(max=n - 1)
        for n in image.shape[1:3]
    )
    return image[:, rows][:, :, columns]


def _in_tiles(
    model: SegmentationNet,
    preprocess: Preprocess,
    image: Tensor,
    how: Inference,
    tiling: Tiling,
) -> Tensor:
    """Class ids of one image (H, W, 3). Only one strip of tiles is in memory at a time."""
    height, width = tiling.tile
    weights = torch.from_numpy(tiling.weights()).to(image.device)
    ids = torch.empty(tiling.image, dtype=torch.uint8, device=image.device)
    total: Tensor | None = (
        None  # weighted sum of probabilities (C, h, W) of the rows from strip.top on
    )
    for strip in tiling.strips():
        rows = image[strip.top : strip.top + height]
        crops = ((left, rows[:, left : left + width]) for left in strip.lefts)
        for left, found in _each(model, preprocess, crops, how):
            if total is None:
                total = found.new_zeros(len(found), height, tiling.image[1])
            total[:, :, left : left + width] += found * weights
        assert total is not None
        done = strip.done - strip.top
        ids[strip.top : strip.done] = total[:, :done].argmax(0).to(torch.uint8)
        total = torch.cat(
            [total[:, done:], total.new_zeros(len(total), done, tiling.image[1])], 1
        )
    return ids


def _each(
    model: SegmentationNet,
    preprocess: Preprocess,
    crops: Iterator[tuple[int, Tensor]],
    how: Inference,
) -> Iterator[tuple[int, Tensor]]:
    """Place and probabilities (C, h, w) of each crop, `how.batch` of them per forward."""
    pending = list(crops)
    for first in range(0, len(pending), how.batch):
        lefts, images = zip(*pending[first : first + how.batch], strict=True)
        yield from zip(
            lefts,
            _probabilities(model, preprocess, torch.stack(images), how),
            strict=True,
        )


def _probabilities(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Sum over the views of the probabilities of the classes, float32 (B, C, H, W)."""
    size = (image.shape[1], image.shape[2])
    normalised = preprocess(image)
    total: Tensor | None = None
    for scale, flip in how.views:
        view = (
            normalised if scale == 1.0 else bilinear(normalised, _scaled(size, scale))
        )
        with autocast(image.device, how.precision):
            logits = model(view.flip(3) if flip else view)
        found = bilinear(
            logits.float(), size, align_corners=model.align_corners
        ).softmax(1)
        found = found.flip(3) if flip else found
        total = found if total is None else total + found
    assert total is not None
    return total


def _scaled(size: Size, scale: float) -> Size:
    height, width = (max(SMALLEST, round(length * scale)) for length in size)
    return height, width


def of_network(
    trained: TrainedNetwork, device: torch.device, how: Inference, *, raw: bool = False
) -> Predictor:
    """The averaged network of a run; with `raw`, masks hold the ids of the data set's masks."""
    model, preprocess = trained.model.to(device), trained.preprocess.to(device)
    most, warned = trained.config.data.max_pixels, False

    def answer(images: Sequence[Pixels]) -> list[Pixels]:
        nonlocal warned
        height, width, _ = images[0].shape
        if height * width > most and how.tile is None and not warned:
            warned = True
            print(
                f"warning: an image of {height}x{width} has more pixels than data.max_pixels = {most}. As a whole it "
                f"takes minutes and gigabytes: cut such images with tile=, for example tile=1024x1024.",
                file=sys.stderr,
            )
        try:
            ids = segment(
                model, preprocess, torch.from_numpy(np.stack(images)).to(device), how
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"{len(images)} images of {height}x{width} do not fit into the memory of {device}. Set a smaller "
                f"batch=, or cut them with tile=, for example tile=512x1024."
            ) from error
        return list(ids.cpu().numpy())

    return Predictor(
        answer,
        trained.classes.names,
        trained.classes.palette,
        {"weights_digest": trained.weights_digest, "step": trained.step},
        {
            **how.described,
            "precision": how.precision,
            "ids": "raw" if raw else "train",
        },  # the batch changes last bits
        raw_ids=raw_ids(trained.classes.train_ids, trained.classes.num_classes)
        if raw
        else None,
    )


def raw_ids(train_ids: Mapping[int, int], num_classes: int) -> Pixels:
    """The smallest raw id of each class, uint8 (256,). Raises ConfigError for a class that has none from 0 to 255."""
    found: dict[int, int] = {}
    for raw, train in sorted(train_ids.items(), reverse=True):
        if train != IGNORE_INDEX:
            found[train] = raw
    if not all(found.get(train, -1) in range(256) for train in range(num_classes)):
        raise ConfigError(
            "ids = raw, but a class of this run has no id from 0 to 255 in the class table. Leave it out."
        )
    return np.array([found.get(train, IGNORE_INDEX) for train in range(256)], np.uint8)
