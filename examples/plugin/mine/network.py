"""LR-ASPP of torchvision, with an auxiliary head for training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models.segmentation import lraspp_mobilenet_v3_large


class LrAspp(nn.Module):
    """Logits at stride 8. torchvision resizes them to the image; here segpipe does, in training and on the robot."""

    def __init__(self, num_classes: int, aux: bool = True) -> None:
        super().__init__()
        net = lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=num_classes
        )
        self.backbone, self.classifier = net.backbone, net.classifier
        self.aux = nn.Conv2d(40, num_classes, 1) if aux else None

    def forward(self, image: Tensor) -> Any:
        features = self.backbone(
            image
        )  # low: 40 channels at stride 8, high: 960 at stride 16
        logits = self.classifier(features)
        if self.aux is None or not self.training:
            return logits
        return {"main": logits, "aux": self.aux(features["low"])}


def tiny(num_classes: int, width: int = 8) -> nn.Module:
    """A function that returns a module also works. This network is for quick tests: it trains in a second."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(inplace=True),
        nn.Conv2d(2 * width, num_classes, 1),
    )
