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
from segpipe.train.validate import predict

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


def segment(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Tensor:
    """Class ids of images at their own size; with one view exactly those of `train.validate.predict`.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W).
    """
    if len(how.views) == 1:
        return predict(model, preprocess, image, precision=how.precision)
    return answers(model, preprocess, image, how)[0]


@torch.inference_mode()
def answers(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, how: Inference
) -> Answers:
    """Class ids as from `segment`, and their probability.

    Averages the probabilities (softmax of the logits at the image size) over the views, in their order; the class with
    the largest mean wins.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W), float32 (B, H, W).
    """
    size = (image.shape[1], image.shape[2])
    normalised = preprocess(image)
    if len(how.views) == 1:
        logits = _logits(model, normalised, size, how)
        # Argmax of logits, as in validation: probabilities round small differences to ties.
        best = logits.max(1)
        confidence = (best.values - logits.logsumexp(1)).exp()
        return best.indices.to(torch.uint8), confidence
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
    best = total.max(1)
    return best.indices.to(torch.uint8), best.values / total.sum(1)


def _logits(model: SegmentationNet, view: Tensor, size: Size, how: Inference) -> Tensor:
    """Logits of a preprocessed view, resized to `size`, float32 (B, C, H, W)."""
    with autocast(view.device, how.precision):
        logits = model(view)
    return bilinear(logits.float(), size, align_corners=model.align_corners)
