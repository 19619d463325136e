"""Training loops as two well-known recipes write them: what a step does besides the network.

Written afresh. They take what their loaders would deliver, normalised float images and int64 targets, so that what
segpipe does on the device and they in the loader (normalisation, boundary targets) is not counted against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = 255
AUX_WEIGHT, BOUNDARY_WEIGHT = 0.4, 20.0
OHEM_THRESHOLD, OHEM_KEPT, EDGE = 0.9, 131072, 0.8


@dataclass(frozen=True)
class Batch:
    """On the device: image float (B, 3, H, W), target int64 (B, H, W), edges float (B, H, W)."""

    image: Tensor
    target: Tensor
    edges: Tensor


Context = Callable[[], Any]  # autocast, or none


def pidnet_style(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, amp: Context
) -> dict[str, float]:
    """One step: heads resized to the image, OHEM by a sort, boolean masks, and every figure read on the host.

    Source: PIDNet, arXiv:2206.02066, section 3.4, and the loop that goes with it.
    """
    with amp():
        heads = model.logits(batch.image, aux=True)  # type: ignore[operator]
    size = batch.target.shape[-2:]
    main, aux, edges = (
        F.interpolate(
            heads[name].float(), size=size, mode="bilinear", align_corners=False
        )
        for name in ("main", "aux_p", "boundary")
    )
    accuracy = _pixel_accuracy(main, batch.target)
    semantic = AUX_WEIGHT * F.cross_entropy(
        aux, batch.target, ignore_index=IGNORE
    ) + ohem_by_sort(main, batch.target)
    boundary = BOUNDARY_WEIGHT * _weighted_bce(edges, batch.edges)
    filler = torch.full_like(batch.target, IGNORE)
    at_edges = ohem_by_sort(
        main, torch.where(torch.sigmoid(edges[:, 0]) > EDGE, batch.target, filler)
    )
    loss = semantic + boundary + at_edges
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return {
        "loss": loss.item(),
        "accuracy": accuracy.item(),
        "semantic": semantic.item(),
        "boundary": boundary.item(),
    }


def ohem_by_sort(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the pixels whose class is predicted with less than the threshold, of at least OHEM_KEPT."""
    losses = F.cross_entropy(
        logits, target, ignore_index=IGNORE, reduction="none"
    ).view(-1)
    mask = target.view(-1) != IGNORE
    known = torch.where(target == IGNORE, 0, target)
    chances = F.softmax(logits, dim=1).gather(1, known.unsqueeze(1)).view(-1)[mask]
    if not chances.numel():
        return logits.sum() * 0
    ordered, places = chances.contiguous().sort()
    threshold = torch.clamp(
        ordered[min(OHEM_KEPT, ordered.numel() - 1)], min=OHEM_THRESHOLD
    )
    kept = losses[mask][places][ordered < threshold]
    return kept.mean()


def _weighted_bce(logits: Tensor, edges: Tensor) -> Tensor:
    """Binary cross-entropy in which both classes weigh the share of the other."""
    flat, wanted = logits.permute(0, 2, 3, 1).reshape(1, -1), edges.reshape(1, -1)
    positive, negative = wanted == 1, wanted == 0
    weight = torch.zeros_like(flat)
    number, others = positive.sum(), negative.sum()
    weight[positive] = others * 1.0 / (number + others)
    weight[negative] = number * 1.0 / (number + others)
    return F.binary_cross_entropy_with_logits(flat, wanted, weight, reduction="mean")


def _pixel_accuracy(logits: Tensor, target: Tensor) -> Tensor:
    predicted = logits.argmax(dim=1)
    valid = (target != IGNORE).long()
    right = torch.sum(valid * (predicted == target).long())
    return right.float() / (valid.sum().float() + 1e-10)


def torchvision_style(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, amp: Context
) -> dict[str, float]:
    """One step: every head resized to the image, mean cross-entropy of each, the auxiliary one by half.

    Source: the reference recipe for segmentation of torchvision.
    """
    with amp():
        heads = model.logits(batch.image, aux=True)  # type: ignore[operator]
        size = batch.target.shape[-2:]
        main, aux = (
            F.interpolate(heads[name], size=size, mode="bilinear", align_corners=False)
            for name in ("main", "aux_p")
        )
        loss = F.cross_entropy(main, batch.target, ignore_index=IGNORE)
        loss = loss + 0.5 * F.cross_entropy(aux, batch.target, ignore_index=IGNORE)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return {"loss": loss.item(), "rate": optimizer.param_groups[0]["lr"]}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD as both recipes use it: one group, with weight decay on everything."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
