"""Whether BatchNorm's running statistics serve: a training batch, scored with them and with its own statistics.

A network can train well and answer nonsense in eval mode, most often where BatchNorm sees maps of one pixel: a few
values per channel, alike in all images, whose mean drifts by many times their spread while running statistics follow.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segpipe.data.augment import Augmenter
from segpipe.keys import sample_key
from segpipe.models.preprocess import Preprocess
from segpipe.models.resize import bilinear
from segpipe.train.batches import order_of
from segpipe.train.forward import autocast, norms
from segpipe.train.metrics import confusion, miou

if TYPE_CHECKING:
    from segpipe.models.layers import SegmentationNet
    from segpipe.settings.config import Config
    from segpipe.train.training import Run

SETTLED = 50  # updates; of a BatchNorm's first statistics, 0.9**50 = 0.5 % is left
# A batch keeps this share of its mIoU in eval mode, or loses no more than these points.
LEAST_SHARE, POINTS = 0.85, 0.05
NAMED = 3  # layers in a warning


def is_due(config: Config, step: int) -> bool:
    """Whether the validation after `step` updates is the first of the run whose statistics are settled."""
    steps = config.train.steps
    every = config.train.validate_every or steps
    return step == min(-(-SETTLED // every) * every, steps) >= SETTLED


def eval_gap(run: Run) -> str:
    """A warning if the averaged network is far worse in eval mode on the run's first batch; empty if not.

    Changes nothing of the run, and needs no other process.
    """
    config, samples, device = run.config, run.train_samples, run.group.device
    augmenter = Augmenter(config.augment)
    images, targets = [], []
    for epoch, index in order_of(config, samples, run.counts).shard(0, 0):
        key = sample_key(config.seed, epoch, index, "augment")
        image, target = augmenter(*samples.read(index), key)
        images.append(torch.from_numpy(image))
        targets.append(torch.from_numpy(target))
    gathering = set(norms(run.state.model))
    named = run.state.model.named_modules()
    return gap(
        run.state.ema.model,
        [name for name, module in named if module in gathering],
        torch.stack(images).to(device),
        torch.stack(targets).to(device),
        num_classes=samples.classes.num_classes,
        precision=config.train.precision,
    )


def gap(
    model: SegmentationNet,
    layers: Sequence[str],
    image: Tensor,
    target: Tensor,
    *,
    num_classes: int,
    precision: str = "fp32",
) -> str:
    """The warning of `eval_gap` for a network in eval mode with these BatchNorm layers.

    Shapes: image uint8 (B, H, W, 3), target uint8 (B, H, W).
    """
    probe = copy.deepcopy(model)
    found: dict[str, tuple[float, str]] = {}
    for name in layers:
        layer = probe.get_submodule(name)
        layer.register_forward_pre_hook(partial(_take_statistics, found, name))

    own = _score(probe, image, target, num_classes, precision)
    running = _score(model, image, target, num_classes, precision)
    if not own - running > max(POINTS, (1 - LEAST_SHARE) * own):
        return ""
    furthest = sorted(found.items(), key=lambda item: -item[1][0])[:NAMED]
    named = [
        f"{name} ({seen}; off by {distance:.1f} standard deviations)"
        for name, (distance, seen) in furthest
    ]
    return (
        f"in eval mode a training batch has {100 * running:.1f} % mIoU, with its own BatchNorm statistics "
        f"{100 * own:.1f} %. Running statistics are furthest from the batch's in {', '.join(named)}. On maps of one "
        f"pixel, leave BatchNorm out or raise compute.samples_per_shard; elsewhere lower optim.lr."
    )


@torch.inference_mode()
def _score(
    model: SegmentationNet,
    image: Tensor,
    target: Tensor,
    num_classes: int,
    precision: str,
) -> float:
    """mIoU of a batch. One image at a time has logits at full resolution, so training needs more memory."""
    device, size = image.device, (target.shape[1], target.shape[2])
    with autocast(device, precision):
        logits = model(Preprocess().to(device)(image))
    counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
    for one, wanted in zip(
        torch.split(logits.float(), 1), torch.split(target, 1), strict=True
    ):
        full = bilinear(one, size, align_corners=model.align_corners)
        counts += confusion(full.max(1).indices, wanted, num_classes)
    return miou(counts.cpu())


def _take_statistics(
    found: dict[str, tuple[float, str]],
    name: str,
    layer: nn.modules.batchnorm._BatchNorm,
    given: tuple[Any, ...],
) -> None:
    """Give the layer the statistics of its input, and note how far its running ones were.

    The distance is that of outputs, root mean square over the batch, averaged over channels.
    """
    if layer.running_mean is None or layer.running_var is None:
        return
    x = given[0].float()
    var, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    spread = (layer.running_var + layer.eps).sqrt()
    shift = (mean - layer.running_mean) / spread
    stretch = (var + layer.eps).sqrt() / spread - 1
    shape = "x".join(map(str, x.shape[2:]))
    seen = f"maps of {shape}, {x.numel() // x.shape[1]} values per channel"
    found[name] = float(torch.hypot(shift, stretch).mean()), seen
    layer.running_mean, layer.running_var = mean, var
