"""DDRNet-23, arXiv:2101.06085: a context branch and a detail branch at stride 8 that exchange features twice."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.models.layers import (
    BRANCH_KEYS,
    Bottleneck,
    PyramidPool,
    SegHead,
    SegmentationNet,
    basic_stage,
    bn_relu_conv,
    conv_bn,
    init_weights,
    stem,
    upsample_like,
)


def ddrnet23_slim(num_classes: int) -> "DDRNet":
    """DDRNet-23-slim: 5,734,342 parameters in training, 5,695,987 in inference (19 classes)."""
    return DDRNet(num_classes, planes=32, head_planes=64)


class DDRNet(SegmentationNet):
    """DDRNet-23 with base width `planes`. The head "aux" reads the detail branch after the first exchange."""

    def __init__(self, num_classes: int, *, planes: int, head_planes: int) -> None:
        super().__init__()
        c = planes
        self.stem = stem(c)
        self.context1 = basic_stage(c, c, 2)
        self.context2 = basic_stage(c, 2 * c, 2, stride=2)
        self.context3 = basic_stage(2 * c, 4 * c, 2, stride=2)
        self.context4 = basic_stage(4 * c, 8 * c, 2, stride=2)
        self.context5 = Bottleneck(8 * c, 8 * c, stride=2)
        self.ppm = DAPPM(16 * c, 128, 4 * c)
        self.detail3 = basic_stage(2 * c, 2 * c, 2)
        self.detail4 = basic_stage(2 * c, 2 * c, 2)
        self.detail5 = Bottleneck(2 * c, 2 * c)
        self.to_detail3 = conv_bn(4 * c, 2 * c, 1)
        self.to_detail4 = conv_bn(8 * c, 2 * c, 1)
        self.to_context3 = conv_bn(2 * c, 4 * c, 3, stride=2)
        self.to_context4 = nn.Sequential(
            *conv_bn(2 * c, 4 * c, 3, stride=2),
            nn.ReLU(inplace=True),
            *conv_bn(4 * c, 8 * c, 3, stride=2),
        )
        self.head = SegHead(4 * c, head_planes, num_classes)
        self.train_only = nn.ModuleDict(
            {"aux": SegHead(2 * c, head_planes, num_classes)}
        )
        self.published_keys = PUBLISHED_KEYS
        init_weights(self)

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits (B, num_classes, H/8, W/8): "main" and, with `aux`, "aux"."""
        stride4 = F.relu(self.context1(self.stem(image)), inplace=True)
        stride8 = F.relu(self.context2(stride4), inplace=True)
        context, exchanged = self._exchange3(stride8)
        fused = self._exchange4(context, exchanged)
        logits = {"main": self.head(fused)}
        if aux:
            logits["aux"] = self.train_only["aux"](exchanged)
        return logits

    def _exchange3(self, stride8: Tensor) -> tuple[Tensor, Tensor]:
        """Context at stride 16 after its ReLU, and detail at stride 8 before it, as the auxiliary head reads it."""
        context = self.context3(stride8)
        detail = self.detail3(stride8)
        exchanged = detail + upsample_like(self.to_detail3(F.relu(context)), detail)
        context = context + self.to_context3(F.relu(detail))
        return F.relu(context, inplace=True), exchanged

    def _exchange4(self, context: Tensor, exchanged: Tensor) -> Tensor:
        context = self.context4(context)
        detail = self.detail4(F.relu(exchanged))
        fine = detail + upsample_like(self.to_detail4(F.relu(context)), detail)
        context = context + self.to_context4(F.relu(detail))
        fine = self.detail5(F.relu(fine, inplace=True))
        coarse = self.ppm(self.context5(F.relu(context, inplace=True)))
        fused: Tensor = fine + upsample_like(coarse, fine)
        return fused


class DAPPM(PyramidPool):
    """Serial mixing: each scale is added to the previous output and passes a 3x3 convolution."""

    def __init__(self, num_in: int, planes: int, num_out: int) -> None:
        super().__init__(num_in, planes, num_out)
        self.process = nn.ModuleList(bn_relu_conv(planes, planes, 3) for _ in range(4))

    def mix(self, finest: Tensor, coarser: list[Tensor]) -> Tensor:
        """(B, 5 * planes, h, w), finest first."""
        outs = [finest]
        for process, scale in zip(self.process, coarser, strict=True):
            outs.append(process(scale + outs[-1]))
        return torch.cat(outs, dim=1)


PUBLISHED_KEYS = {
    **BRANCH_KEYS,
    "context5.": "layer5.0.",
    **{f"ppm.process.{i}.": f"spp.process{i + 1}." for i in range(4)},
    "to_context3.": "down3.",
    "to_context4.": "down4.",
    "train_only.aux.": "seghead_extra.",
}
