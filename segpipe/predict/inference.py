"""Class ids for images of any size from a trained network, averaged over flips and scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segpipe.errors import ConfigError
from segpipe.models.layers import SegmentationNet
from segpipe.models.preprocess import Preprocess
from segpipe.models.resize import bilinear
from segpipe.train.forward import AUTOCAST, autocast

FLIP = "flip"
SMALLEST = 32  # smallest height and width of an image
LARGEST_SCALE = 4.0
Size = tuple[int, int]  # height, width
Answers = tuple[Tensor, Tensor]  # class ids, uint8; their probability, float32


@dataclass(frozen=True)
class Inference:
    """Settings of test-time augmentation and precision. The default is one forward, as in validation."""

    flip: bool = False
    scales: tuple[float, ...] = (1.0,)
    precision: str = "fp32"

    @property
    def views(self) -> list[tuple[float, bool]]:
        """Scale and flip of each forward; the unchanged image comes first."""
        flips = (False, True) if self.flip else (False,)
        return [(scale, flip) for scale in self.scales for flip in flips]

    @property
    def described(self) -> dict[str, Any]:
        """Views beyond the first, as recorded in outputs; empty if there are none."""
        views = [FLIP] * self.flip + [f"{scale:g}" for scale in self.scales[1:]]
        return {"tta": ",".join(views)} if views else {}


def inference(given: Mapping[str, Any]) -> Inference:
    """Inference from a command's settings tta and, if given, precision.

    Raises ConfigError for invalid values.
    """
    precision = given.get("precision", "fp32")
    if precision not in ("fp32", *AUTOCAST):
        raise ConfigError(
            f"precision = {precision}, but it must be one of fp32, {', '.join(AUTOCAST)}."
        )
    tta: Sequence[str] = given["tta"]
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
                f"{LARGEST_SCALE:g}. Set for example tta=[flip,0.75,1.25]; scale 1 is always included."
            )
        scales.add(scale)
    return Inference(FLIP in tta, (1.0, *sorted(scales - {1.0})), precision)


@torch.inference_mode()
def segment(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Class ids of images at their own size; with one view exactly those of a validation.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W).
    """
    # argmax gives the same, but takes six times as long over an axis that is not the last.
    return _scores(model, preprocess, image, how).max(1).indices.to(torch.uint8)


@torch.inference_mode()
def answers(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Answers:
    """Class ids as from `segment`, and their probability.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W), float32 (B, H, W).
    """
    scores = _scores(model, preprocess, image, how)
    best = scores.max(1)
    ids = best.indices.to(torch.uint8)
    if len(how.views) == 1:
        return ids, (best.values - scores.logsumexp(1)).exp()
    return ids, best.values / scores.sum(1)


def _scores(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Scores float32 (B, C, H, W), of which the largest decides the class of a pixel.

    One view: logits, as in validation, since probabilities round small differences to ties. Several views: the sum of
    their probabilities (softmax of the logits at the image size), in their order.
    """
    size = (image.shape[1], image.shape[2])
    normalised = preprocess(image)
    if len(how.views) == 1:
        return _logits(model, normalised, size, how)
    total: Any = 0
    for scale, flip in how.views:
        view = normalised
        if scale != 1.0:
            height, width = (max(SMALLEST, round(side * scale)) for side in size)
            view = bilinear(normalised, (height, width))
        logits = _logits(model, view.flip(3) if flip else view, size, how)
        shares = logits.softmax(1)
        shares = shares.flip(3) if flip else shares
        total = total + shares
    summed: Tensor = total
    return summed


def _logits(model: SegmentationNet, view: Tensor, size: Size, how: Inference) -> Tensor:
    """Logits of a preprocessed view, resized to `size`, float32 (B, C, H, W)."""
    with autocast(view.device, how.precision):
        logits = model(view)
    return bilinear(logits.float(), size, align_corners=model.align_corners)
