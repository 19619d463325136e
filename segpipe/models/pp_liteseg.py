"""PP-LiteSeg, arXiv:2204.02681: the encoder of STDC, and a decoder that weights two scales by spatial attention.

The published weights are of another framework (PaddleSeg), so there is no map of names.
"""

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    SegmentationNet,
    conv_bn,
    conv_bn_relu,
    init_weights,
    upsample_like,
)
from segpipe.models.resize import adaptive_avg_pool
from segpipe.models.stdc import STDC1, STDC2, STDCEncoder, seg_head

BINS = (1, 2, 4)


def pp_liteseg_t(num_classes: int) -> "PPLiteSeg":
    """PP-LiteSeg-T: 8,141,088 parameters in training, 8,027,808 in inference (19 classes)."""
    return PPLiteSeg(num_classes, STDC1, planes=(32, 64, 128), head_planes=32)


def pp_liteseg_b(num_classes: int) -> "PPLiteSeg":
    """PP-LiteSeg-B: 12,365,952 parameters in training, 12,234,240 in inference (19 classes)."""
    return PPLiteSeg(num_classes, STDC2, planes=(64, 96, 128), head_planes=64)


class PPLiteSeg(SegmentationNet):
    """PP-LiteSeg with an encoder of `blocks` and a decoder of `planes` at strides 8, 16 and 32.

    The heads "aux16" and "aux32" read the decoder at those strides. Pools are exact at multiples of 128.
    """

    def __init__(
        self,
        num_classes: int,
        blocks: tuple[int, int, int],
        *,
        planes: tuple[int, int, int],
        head_planes: int,
    ) -> None:
        super().__init__()
        p8, p16, p32 = planes
        self.encoder = STDCEncoder(blocks)
        self.ppm = SimplePyramid(1024, 128)
        self.fuse32 = AttentionFusion(1024, 128, p32)
        self.fuse16 = AttentionFusion(512, p32, p16)
        self.fuse8 = AttentionFusion(256, p16, p8)
        self.head = seg_head(p8, head_planes, num_classes)
        self.train_only = nn.ModuleDict(
            {
                "aux16": seg_head(p16, 64, num_classes),
                "aux32": seg_head(p32, 64, num_classes),
            }
        )
        init_weights(self)

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits "main" at stride 8 and, with `aux`, "aux16" and "aux32" at strides 16 and 32."""
        stride8, stride16, stride32 = self.encoder(image)
        x32 = self.fuse32(stride32, self.ppm(stride32))
        x16 = self.fuse16(stride16, x32)
        logits = {"main": self.head(self.fuse8(stride8, x16))}
        if aux:
            logits["aux16"] = self.train_only["aux16"](x16)
            logits["aux32"] = self.train_only["aux32"](x32)
        return logits


class SimplePyramid(nn.Module):
    """Sum of averages over 1, 2 and 4 bins per side, each after a 1x1 convolution, then 3x3."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(conv_bn_relu(num_in, num_out, 1) for _ in BINS)
        self.out = conv_bn_relu(num_out, num_out, 3)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | None = None
        for bins, scale in zip(BINS, self.scales, strict=True):
            pooled = upsample_like(scale(adaptive_avg_pool(x, bins)), x)
            total = pooled if total is None else total + pooled
        out: Tensor = self.out(total)
        return out


class AttentionFusion(nn.Module):
    """Fine (B, num_fine, h, w) and coarse features, weighted per pixel against each other -> (B, num_out, h, w)."""

    def __init__(self, num_fine: int, num_coarse: int, num_out: int) -> None:
        super().__init__()
        self.fine = conv_bn_relu(num_fine, num_coarse, 3)
        self.attention = nn.Sequential(
            conv_bn_relu(4, 2, 3), *conv_bn(2, 1, 3), nn.Sigmoid()
        )
        self.out = conv_bn_relu(num_coarse, num_out, 3)

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        fine = self.fine(fine)
        coarse = upsample_like(coarse, fine)
        summary = []
        for features in (fine, coarse):
            summary.append(features.mean(1, keepdim=True))
            summary.append(features.amax(1, keepdim=True))
        # Autocast computes a mean in fp32. Without the cast the rest would run in fp32 as well.
        share = self.attention(torch.cat(summary, dim=1)).to(fine.dtype)
        out: Tensor = self.out(fine * share + coarse * (1 - share))
        return out
