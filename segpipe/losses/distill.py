"""Distillation: the outputs of a trained network, the teacher, as targets."""

from typing import NamedTuple

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX


class TeacherLogits(NamedTuple):
    """The teacher's output for a shard: logits (B, C, h, w), and how they are upsampled."""

    logits: Tensor
    align_corners: bool


def distill_sum(
    logits: Tensor, teacher: Tensor, target: Tensor, *, temperature: float
) -> Tensor:
    """KL divergence from the teacher's probabilities, summed over the valid pixels, times the squared temperature.

    Source: arXiv:1503.02531.

    Both logits are first divided by the temperature; its square preserves the gradient's scale. The teacher gets no
    gradient.

    Shapes: logits and teacher float (B, C, H, W), target uint8 (B, H, W) -> 0-d.
    """
    wanted = (teacher.detach() / temperature).log_softmax(1)
    found = (logits / temperature).log_softmax(1)
    losses = (wanted.exp() * (wanted - found)).sum(1) * temperature**2
    return torch.where(target != IGNORE_INDEX, losses, 0.0).sum()
