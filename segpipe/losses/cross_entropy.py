"""Cross-entropy of every pixel in plain torch, and its class weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.losses.fused import ClassHead, LossPass, Wanted


def evaluate(head: ClassHead, wanted: Wanted) -> LossPass:
    """The pass that `fused.Wanted` describes, in any float type, by autograd through logits at the target's size."""
    factors, slopes = wanted.factors, wanted.slopes
    logits, valid = head.logits.detach().requires_grad_(), head.valid
    classes = torch.arange(logits.shape[1], device=logits.device).view(1, -1, 1, 1)
    with torch.set_grad_enabled(wanted.gradient):
        wide = head.rows.matrix @ (logits @ head.columns.matrix.t())
        # With a reduction, CUDA has no deterministic kernel.
        losses = F.cross_entropy(
            wide,
            head.target.long(),
            weight=head.weights,
            ignore_index=IGNORE_INDEX,
            reduction="none",
            label_smoothing=head.smoothing,
        )

        total = (losses if factors is None else losses * factors).sum()
        found = None
        if wanted.sums or slopes:
            own = (head.target[:, None] == classes).to(wide.dtype)
            probability = wide.softmax(1) * valid[:, None].to(wide.dtype)
            if slopes:
                everywhere, on_target = (each.view(1, -1, 1, 1) for each in slopes)
                total = total + (probability * (everywhere + own * on_target)).sum()
            kinds = torch.stack([probability * own, probability, own]).detach()
            found = kinds.double().sum((1, 3, 4))
        grad = torch.autograd.grad(total, logits)[0] if wanted.gradient else None
    return LossPass(losses.detach(), grad, found if wanted.sums else None)


def class_weights(pixels: Tensor, name: str) -> Tensor:
    """Weight of each class from its pixel count, scaled so that the mean over the training pixels is 1.

    "logX": 1 / log(X + frequency), which lifts rare classes by a factor of at most log(X + 1) / log(X): 36 for X = 1.02
    (plain "log"), 8 for 1.10. A class without pixels gets the weight of frequency 0. Source: ENet, arXiv:1606.02147,
    equation 1.

    "sqrt": 1 / sqrt(frequency), without a bound: a class with 0.01 % of the pixels weighs 100 times as much as one with
    all. A class without pixels gets the weight of a class with one pixel.

    Shapes: int64 (C,) -> float32 (C,).
    """
    frequency = pixels.double() / pixels.sum().clamp_min(1)
    if name == "sqrt":
        divisor = pixels.double().masked_fill(pixels == 0, 1.0).sqrt()
    else:
        offset = float(name.removeprefix("log") or 1.02)
        divisor = torch.log(offset + frequency)
    weights = divisor.reciprocal()  # up to a factor that cancels in the last line
    return (weights / (weights * frequency).sum().clamp_min(1e-12)).float()
