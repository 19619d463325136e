"""Validation on whole images: each image once, on one rank, at its own size, with integer counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segpipe.data.loader import eval_images
from segpipe.models.resize import bilinear
from segpipe.train.gradients import autocast
from segpipe.train.metrics import confusion

if TYPE_CHECKING:
    from segpipe.data.samples import Samples
    from segpipe.distributed.group import Group
    from segpipe.models.layers import SegmentationNet
    from segpipe.models.preprocess import Preprocess


@dataclass(frozen=True)
class Validation:
    """Confusion matrices of a split, in total and by image index; int64 (C, C) on the CPU."""

    total: Tensor
    per_image: dict[int, Tensor]


@torch.inference_mode()
def predict(model: SegmentationNet, preprocess: Preprocess, image: Tensor, *, precision: str = "fp32") -> Tensor:
    """Class ids of whole images at their own size.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W).
    """
    with autocast(image.device, precision):
        logits = model(preprocess(image))
    size = (image.shape[1], image.shape[2])
    return bilinear(logits.float(), size, align_corners=model.align_corners).argmax(1).to(torch.uint8)


def validate(
    model: SegmentationNet,
    preprocess: Preprocess,
    samples: Samples,
    group: Group,
    *,
    answer: Callable[[SegmentationNet, Preprocess, Tensor], Tensor] | None = None,
    precision: str,
    workers: int,
    start_method: str,
    timeout_s: float = 300.0,
    transport: str = "ring",
    progress: Callable[[int, int], None] = lambda done, total: None,
    see: Callable[[int, Tensor, Tensor], None] = lambda index, pred, target: None,
) -> Validation:
    """Confusion of `model`, which must be in eval mode, over all samples, equal on every rank.

    `answer` gives class ids as `predict` does, which is the default.
    Rank r takes images r, r + R, ...: none is padded, repeated or dropped, whatever the number of ranks.
    `see` gets the index, prediction and target of each of this rank's images, both uint8 (1, H, W).
    """
    assert not model.training
    num_classes = samples.classes.num_classes
    own = range(group.rank, len(samples), group.world_size)
    answer = answer or partial(predict, precision=precision)
    per_image: dict[int, Tensor] = {}
    images = eval_images(
        samples, own, workers=workers, start_method=start_method, timeout_s=timeout_s, transport=transport
    )
    for index, image, target in images:
        pred = answer(model, preprocess, image.to(group.device))
        per_image[index] = confusion(pred, target.to(group.device), num_classes).cpu()
        see(index, pred, target)
        progress(len(per_image), len(own))
    merged = {index: counts for part in group.gather(per_image) for index, counts in part.items()}
    assert len(merged) == len(samples)
    total = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for index in sorted(merged):
        total += merged[index]
    return Validation(total, merged)
