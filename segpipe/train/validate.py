"""Validation on whole images: each image once, on one rank, at its own size, with integer counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.data.loader import eval_images
from segpipe.losses import compiled
from segpipe.losses.fused import ClassHead
from segpipe.models.resize import bilinear, bilinear_axes, bilinear_matmul
from segpipe.train.forward import autocast
from segpipe.train.metrics import BINS, Validation, confusion, confusion_of

if TYPE_CHECKING:
    from segpipe.data.data_set import Samples
    from segpipe.data.samples import CachedSamples
    from segpipe.distributed.group import Group
    from segpipe.models.layers import SegmentationNet
    from segpipe.models.preprocess import Preprocess
    from segpipe.settings.groups import DataConfig

Answer = Callable[["SegmentationNet", "Preprocess", Tensor], Tensor]
SPARSE = (
    16  # every 16th row and column: loss and confidences cost under 2 % of a validation
)


@torch.inference_mode()
def predict(
    model: SegmentationNet,
    preprocess: Preprocess,
    image: Tensor,
    *,
    precision: str = "fp32",
) -> Tensor:
    """Class ids of whole images at their own size.

    Shapes: image uint8 (B, H, W, 3) on the device of the model -> uint8 (B, H, W).
    """
    logits = _logits(model, preprocess, image, precision)
    size = (image.shape[1], image.shape[2])
    return _classes(bilinear(logits, size, align_corners=model.align_corners))


def _classes(resized: Tensor) -> Tensor:
    # argmax gives the same, but takes six times as long over an axis that is not the last.
    return resized.max(1).indices.to(torch.uint8)


def _logits(
    model: SegmentationNet, preprocess: Preprocess, image: Tensor, precision: str
) -> Tensor:
    with autocast(image.device, precision):
        logits: Tensor = model(preprocess(image))
    return logits.float()


def classes_and_confusion(
    logits: Tensor, target: Tensor, *, align_corners: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Class ids at the size of the target, and their confusion with it.

    With the `backend` native of the loss, logits are never held at that size; a pixel whose two largest are equal but
    for rounding may then get the other one of the two than by `predict`.

    Shapes: logits float32 (B, C, h, w), target uint8 (B, H, W) -> uint8 (B, H, W), int64 (C, C), on their device.
    """
    size = (target.shape[1], target.shape[2])
    if backend != "native":
        pred = _classes(bilinear(logits, size, align_corners=align_corners))
        return pred, confusion(pred, target, logits.shape[1])
    rows, columns = bilinear_axes(logits, size, align_corners=align_corners)
    head = ClassHead(
        logits.contiguous(), target.contiguous(), rows, columns, IGNORE_INDEX
    )
    pred, counts = compiled.classes_and_counts(head)
    return pred, confusion_of(counts)


def confidences(logits: Tensor, target: Tensor, *, align_corners: bool) -> Tensor:
    """Loss and calibration of every SPARSE-th row and column, summed by bin of confidence.

    Rows are the tenths of the largest probability; columns are the number of labelled pixels, the sum of their largest
    probabilities, the right ones among them, and the sum of their cross-entropies.

    Shapes: logits float32 (B, C, h, w), target uint8 (B, H, W) -> float64 (BINS, 4) on the CPU.
    """
    size = (target.shape[1], target.shape[2])
    resized = bilinear_matmul(
        logits, size, align_corners=align_corners, stride=SPARSE
    ).cpu()
    wanted = target[:, SPARSE // 2 :: SPARSE, SPARSE // 2 :: SPARSE].cpu().long()
    labelled = wanted != IGNORE_INDEX
    log_share = resized.log_softmax(1)
    most, pred = log_share.max(1)
    share = most.exp()[labelled].double()
    right = (pred == wanted)[labelled].double()
    own = torch.where(labelled, wanted, 0)[:, None]
    losses = -log_share.gather(1, own)[:, 0][labelled].double()
    places = (share * BINS).long().clamp_max(BINS - 1)
    sums = [torch.ones_like(share), share, right, losses]
    return torch.stack([torch.bincount(places, each, BINS) for each in sums], 1)


def validate(
    model: SegmentationNet,
    preprocess: Preprocess,
    samples: Samples,
    group: Group,
    data: DataConfig,
    *,
    answer: Answer | None = None,
    precision: str,
    backend: str = "plain",
    cache: CachedSamples | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    see: Callable[[int, Tensor, Tensor], None] = lambda index, pred, target: None,
) -> Validation:
    """Confusion of `model`, which must be in eval mode, over all samples, equal on every rank.

    `answer` gives class ids as `predict` does, which is the default where `backend`, as that of the loss, is plain.
    Rank r takes images r, r + R, ...: none is padded, repeated or dropped, whatever the number of ranks.
    `see` gets the index, prediction and target of each of this rank's images, both uint8 (1, H, W).
    """
    assert not model.training
    num_classes = samples.classes.num_classes
    own = range(group.rank, len(samples), group.world_size)

    @torch.inference_mode()
    def find(image: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if answer:
            pred = answer(model, preprocess, image)
            return pred, confusion(pred, target, num_classes), torch.zeros(BINS, 4)
        logits = _logits(model, preprocess, image, precision)
        corners = model.align_corners
        pred, counts = classes_and_confusion(
            logits, target, align_corners=corners, backend=backend
        )
        return pred, counts, confidences(logits, target, align_corners=corners)

    own_found: dict[int, tuple[Tensor, Tensor]] = {}
    images = eval_images(
        samples,
        own,
        # A GPU is faster than one process that decodes; the start of more costs a CPU more than they save.
        workers=data.workers if group.device.type == "cuda" else min(data.workers, 1),
        start_method=data.start_method,
        timeout_s=data.timeout_s,
        cache=cache,
    )
    for index, image, target in images:
        pred, counts, bins = find(image.to(group.device), target.to(group.device))
        own_found[index] = counts.cpu(), bins
        see(index, pred, target)
        progress(len(own_found), len(own))
    merged: dict[int, tuple[Tensor, Tensor]] = {}
    for part in group.gather(own_found):
        merged |= part
    assert len(merged) == len(samples)
    total = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    calibration = torch.zeros(BINS, 4, dtype=torch.float64)
    for index in sorted(merged):  # sums of floats depend on their order
        total += merged[index][0]
        calibration += merged[index][1]
    return Validation(
        total, {index: counts for index, (counts, _) in merged.items()}, calibration
    )
