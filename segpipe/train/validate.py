"""Validation on whole images: each image once, on one rank, at its original size, with integer counts."""

from __future__ import annotations

import copy
import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segpipe import IGNORE_INDEX
from segpipe.data.loader import eval_images
from segpipe.errors import NumericsError
from segpipe.losses import fused
from segpipe.losses.fused import ClassHead
from segpipe.models.preprocess import Preprocess
from segpipe.models.resize import bilinear, bilinear_axes, bilinear_matmul
from segpipe.train.forward import autocast
from segpipe.train.metrics import BINS, Validation, confusion, confusion_of, miou

if TYPE_CHECKING:
    from segpipe.data.data_set import CachedSamples, Samples
    from segpipe.distributed.group import Group
    from segpipe.models.layers import SegmentationNet
    from segpipe.settings.groups import DataConfig

# Every 16th row and column: loss and confidences cost under 2 % of a validation.
SPARSE = 16
# No warning if eval mode keeps this share of a batch's mIoU, or loses at most these points.
LEAST_SHARE, POINTS = 0.85, 0.05
NAMED = 3  # layers in a warning


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

    With the loss `backend` native, logits are never held at that size; where the two largest logits of a pixel are
    equal up to rounding, it may choose the other one than the other backends.

    Shapes: logits float32 (B, C, h, w), target uint8 (B, H, W) -> uint8 (B, H, W), int64 (C, C), on their device.
    """
    size = (target.shape[1], target.shape[2])
    if backend != "native":
        resized = bilinear(logits, size, align_corners=align_corners)
        # argmax gives the same, but takes six times as long over any axis but the last.
        pred = resized.max(1).indices.to(torch.uint8)
        return pred, confusion(pred, target, logits.shape[1])
    rows, columns = bilinear_axes(logits, size, align_corners=align_corners)
    head = ClassHead(logits.contiguous(), target.contiguous(), rows, columns)
    pred, counts = fused.classes_and_counts(head)
    return pred, confusion_of(counts)


def confidences(logits: Tensor, target: Tensor, *, align_corners: bool) -> Tensor:
    """Loss and calibration of every SPARSE-th row and column, summed by confidence bin.

    Rows are tenths of the largest probability. Columns are the number of labelled pixels, the sum of their largest
    probabilities, the number predicted correctly, and the sum of their cross-entropies. All are NaN if a logit is not
    finite.

    Shapes: logits float32 (B, C, h, w), target uint8 (B, H, W) -> float64 (BINS, 4) on the CPU.
    """
    if not logits.isfinite().all():
        return torch.full((BINS, 4), math.nan, dtype=torch.float64)
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
    answer: Callable[[Tensor], Tensor] | None = None,
    precision: str,
    backend: str = "plain",
    cache: CachedSamples | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Validation:
    """Confusion of `model`, in eval mode, over all samples; equal on every rank.

    `answer` maps images uint8 (B, H, W, 3) to class ids, uint8 (B, H, W). Without it, the largest logit decides,
    computed by the loss's `backend`.
    Rank r takes images r, r + R, ...: none is padded, repeated or dropped, for any number of ranks.
    """
    model.train()  # drops what networks such as tiny_vit computed in eval mode from earlier weights
    model.eval()
    num_classes = samples.classes.num_classes
    own = range(group.rank, len(samples), group.world_size)

    own_found: dict[int, tuple[Tensor, Tensor]] = {}
    images = eval_images(
        samples,
        own,
        # A GPU is faster than one decoding process; on a CPU, starting more costs more than it saves.
        workers=data.workers if group.device.type == "cuda" else min(data.workers, 1),
        start_method=data.start_method,
        timeout_s=data.timeout_s,
        cache=cache,
    )
    for index, image, target in images:
        image, target = image.to(group.device), target.to(group.device)
        bins = torch.zeros(BINS, 4)
        with torch.inference_mode():
            if answer:
                counts = confusion(answer(image), target, num_classes)
            else:
                logits = _logits(model, preprocess, image, precision)
                corners = model.align_corners
                _, counts = classes_and_confusion(
                    logits, target, align_corners=corners, backend=backend
                )
                bins = confidences(logits, target, align_corners=corners)
                del logits  # before those of the next image take memory
        own_found[index] = counts.cpu(), bins
        progress(len(own_found), len(own))
    merged = ChainMap(*group.gather(own_found))
    assert len(merged) == len(samples)
    total = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    calibration = torch.zeros(BINS, 4, dtype=torch.float64)
    for index in sorted(merged):  # float sums depend on their order
        counts, bins = merged[index]
        if (
            bins.isnan().any()
        ):  # raised on all ranks, not only on the one that read the image
            raise NumericsError(
                f"the logits of {samples.name(index)} are not finite, so the network has no score. Train with a lower "
                f"optim.lr, or with optim.clip_norm=5."
            )
        total += counts
        calibration += bins
    return Validation(
        total, {index: counts for index, (counts, _) in merged.items()}, calibration
    )


def eval_gap(
    model: SegmentationNet,
    preprocess: Preprocess,
    layers: Sequence[str],
    image: Tensor,
    target: Tensor,
    precision: str,
) -> str:
    """A warning if a training batch scores far worse in eval mode than with its own statistics in BatchNorm `layers`.

    A network can train well and predict nonsense in eval mode, most often where BatchNorm sees 1x1 feature maps: a few
    values per channel, alike in all images, whose mean drifts by many times their spread while running statistics lag.
    Changes nothing, and is not a collective.

    Shapes: image uint8 (B, H, W, 3), target uint8 (B, H, W).
    """
    probe = copy.deepcopy(model)
    distances: dict[str, float] = {}
    for name in layers:
        layer = probe.get_submodule(name)
        layer.register_forward_pre_hook(partial(_take_statistics, distances, name))

    def score(network: SegmentationNet) -> float:
        # Only one image at a time has logits at full resolution, which takes less memory than training.
        with torch.inference_mode():
            logits = _logits(network, preprocess, image, precision)
            corners = network.align_corners
            pairs = zip(torch.split(logits, 1), torch.split(target, 1), strict=True)
            found = [
                classes_and_confusion(*pair, align_corners=corners, backend="plain")[1]
                for pair in pairs
            ]
            return miou(torch.stack(found).sum(0))

    own, running = score(probe), score(model)
    if not own - running > max(POINTS, (1 - LEAST_SHARE) * own):
        return ""
    furthest = sorted(distances.items(), key=lambda item: -item[1])[:NAMED]
    named = [
        f"{name} (by {distance:.1f} standard deviations)" for name, distance in furthest
    ]
    return (
        f"in eval mode a training batch has {100 * running:.1f} % mIoU, but with its own BatchNorm statistics "
        f"{100 * own:.1f} %. Running statistics are furthest from the batch's in {', '.join(named)}. On 1x1 feature "
        f"maps, leave BatchNorm out or raise compute.samples_per_shard; elsewhere lower optim.lr."
    )


def _take_statistics(
    distances: dict[str, float],
    name: str,
    layer: nn.modules.batchnorm._BatchNorm,
    given: tuple[Any, ...],
) -> None:
    """Forward pre-hook: replace the layer's running statistics by its input's, and store their distance.

    The distance is the root mean square change of the output over the batch, averaged over channels.
    """
    if layer.running_mean is None or layer.running_var is None:
        return
    x = given[0].float()
    var, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    spread = (layer.running_var + layer.eps).sqrt()
    shift = (mean - layer.running_mean) / spread
    stretch = (var + layer.eps).sqrt() / spread - 1
    distances[name] = float(torch.hypot(shift, stretch).mean())
    layer.running_mean, layer.running_var = mean, var
