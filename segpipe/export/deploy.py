"""The one model that is exported in every format and is also the eager reference."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segpipe.resize import bilinear

if TYPE_CHECKING:
    from segpipe.checkpoint import TrainedNetwork

INPUT = "image"
OUTPUTS = ("mask", "confidence")
LOGITS = "logits"  # the extra output on which G2 compares; never shipped


class DeployModel(nn.Module):
    """A camera image to class ids and confidence: preprocessing, network, upsampling and argmax in one graph.

    `preprocess` is the training module itself, so the graph cannot normalise differently from the training.
    """

    def __init__(
        self, network: nn.Module, preprocess: nn.Module, *, align_corners: bool, with_logits: bool = False
    ) -> None:
        super().__init__()
        self.network = network
        self.preprocess = preprocess
        self.align_corners = align_corners
        self.with_logits = with_logits

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """(`mask`, `confidence`), and the full-resolution `logits` in the variant that has them.

        Shapes: image uint8 (1, H, W, 3) RGB -> mask uint8 (1, H, W), class ids, never 255; confidence uint8
        (1, h, w) at the output stride, 255 * largest softmax probability; logits float32 (1, C, H, W).
        """
        logits = self.network(self.preprocess(image))
        confidence = logits.softmax(1).amax(1).mul(255.0).round().to(torch.uint8)
        full = bilinear(logits, (image.shape[1], image.shape[2]), align_corners=self.align_corners)
        mask = full.argmax(1).to(torch.uint8)
        return (mask, confidence, full) if self.with_logits else (mask, confidence)

    def probe(self) -> DeployModel:
        """The same modules and weights with `logits` as third output."""
        variant = DeployModel(self.network, self.preprocess, align_corners=self.align_corners, with_logits=True)
        variant.training = self.training  # of this module alone: train() would set the shared ones too
        return variant


def deploy_model(trained: TrainedNetwork) -> DeployModel:
    """DeployModel of a trained network: a copy on the CPU, fp32, in eval mode, without the training-only heads."""
    network = copy.deepcopy(trained.model)
    del network.train_only
    preprocess = copy.deepcopy(trained.preprocess)
    model = DeployModel(network, preprocess, align_corners=network.align_corners)
    return model.cpu().float().eval().requires_grad_(False)
