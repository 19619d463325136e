"""STDC-Seg, arXiv:2104.13188: an encoder of short-term dense blocks, and a detail head for training only.

PP-LiteSeg, arXiv:2204.02681: the same encoder, and a decoder that weights two scales by spatial attention. Its
published weights belong to another framework (PaddleSeg), so there is no map of names.
"""

import re

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    Classifier,
    Features,
    GlobalPool,
    Keys,
    SegmentationNet,
    conv_bn,
    conv_bn_relu,
    excitation,
    init_weights,
    nearest_like,
    renames,
    stage,
    upsample_like,
)
from segpipe.models.resize import adaptive_avg_pool

STDC1, STDC2 = (2, 2, 2), (4, 5, 3)  # blocks at strides 8, 16 and 32
BINS = (1, 2, 4)  # of PP-LiteSeg's pyramid


def stdc1(num_classes: int) -> "STDC":
    """STDC1-Seg: 8,572,896 parameters in training, 8,275,104 in inference (19 classes)."""
    return STDC(num_classes, STDC1)


def stdc2(num_classes: int) -> "STDC":
    """STDC2-Seg: 12,603,360 parameters in training, 12,305,568 in inference (19 classes)."""
    return STDC(num_classes, STDC2)


class STDC(SegmentationNet):
    """STDC-Seg with `blocks` at strides 8, 16 and 32. The head "boundary" is the published detail head, at stride 8.

    With `loss.boundary=detail` the Laplacian pyramid of the paper supervises it. Published files also hold
    parts that segmentation does not use: the ImageNet classifier, and detail heads at other strides.
    """

    align_corners = True
    unused_keys = r"backbone\.(features|conv_last|fc|bn|linear)\.|conv_out_sp(2|4|16)\."

    def __init__(self, num_classes: int, blocks: tuple[int, int, int]) -> None:
        super().__init__()

        self.encoder = STDCEncoder(blocks)
        self.mean = nn.Sequential(GlobalPool(), conv_bn_relu(1024, 128, 1))
        self.gate32 = Gate(1024)
        self.gate16 = Gate(512)
        self.smooth32 = conv_bn_relu(128, 128, 3)
        self.smooth16 = conv_bn_relu(128, 128, 3)
        self.fusion = Fusion()
        self.head = seg_head(256, 256, num_classes)
        self.train_only = nn.ModuleDict(
            {
                "aux16": seg_head(128, 64, num_classes),
                "aux32": seg_head(128, 64, num_classes),
                "boundary": seg_head(256, 64, 1),
            }
        )
        self.published_keys = (*_encoder_keys(blocks), *PUBLISHED_KEYS)
        init_weights(self)
        # The authors initialize everything after the encoder with half the variance, by fan-in.
        for name, module in self.named_modules():
            behind = isinstance(module, nn.Conv2d) and not name.startswith("encoder.")
            if behind and not isinstance(module, Classifier):
                nn.init.kaiming_normal_(module.weight, a=1)  # type: ignore[arg-type]

    def features(self, image: Tensor) -> Features:
        """Logits at stride 8; those of "aux32" at stride 16.

        Heads have their published names: "aux16" reads context from stride 16, at stride 8, and so on.
        """
        stride8, stride16, stride32 = self.encoder(image)
        x = self.gate32(stride32)
        x = x + nearest_like(self.mean(stride32), x)
        at16 = self.smooth32(nearest_like(x, stride16))
        x = self.gate16(stride16) + at16
        at8 = self.smooth16(nearest_like(x, stride8))
        main = self.head(self.fusion(torch.cat([stride8, at8], dim=1)))

        return main, {"aux16": at8, "aux32": at16, "boundary": stride8}


class STDCEncoder(nn.Module):
    """(B, 3, H, W) -> features of 256, 512 and 1024 channels at strides 8, 16 and 32."""

    def __init__(self, blocks: tuple[int, int, int]) -> None:
        super().__init__()

        self.stem = nn.Sequential(
            conv_bn_relu(3, 32, 3, stride=2), conv_bn_relu(32, 64, 3, stride=2)
        )
        self.stage8 = stage(STDCModule, 64, 256, blocks[0])
        self.stage16 = stage(STDCModule, 256, 512, blocks[1])
        self.stage32 = stage(STDCModule, 512, 1024, blocks[2])

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stride8 = self.stage8(self.stem(image))
        stride16 = self.stage16(stride8)
        return stride8, stride16, self.stage32(stride16)


class STDCModule(nn.Module):
    """Four convolutions in a row with concatenated outputs: 1/2, 1/4, 1/8 and 1/8 of the channels."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()

        half, quarter, eighth = num_out // 2, num_out // 4, num_out // 8
        self.convs = nn.ModuleList(
            [
                conv_bn_relu(num_in, half, 1),
                conv_bn_relu(half, quarter, 3),
                conv_bn_relu(quarter, eighth, 3),
                conv_bn_relu(eighth, eighth, 3),
            ]
        )
        self.down: nn.Module = nn.Identity()
        self.skip: nn.Module = nn.Identity()
        if stride == 2:
            self.down = conv_bn(half, half, 3, stride=2, groups=half)
            self.skip = nn.AvgPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.convs[0](x)
        outs = [self.down(first)]
        for conv in self.convs[1:]:
            outs.append(conv(outs[-1]))

        return torch.cat([self.skip(first), *outs[1:]], dim=1)


class Gate(nn.Module):
    """3x3 to 128 channels, each weighted by a gate computed from the means over the image."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.conv = conv_bn_relu(num_in, 128, 3)
        self.weight = nn.Sequential(GlobalPool(), *conv_bn(128, 128, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * self.weight(x)


class Fusion(nn.Module):
    """1x1 of detail and context (B, 384, h, w) to 256 channels, each weighted by 1 + a gate from the image means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv_bn_relu(384, 256, 1)
        self.weight = excitation(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * self.weight(x) + x


def seg_head(num_in: int, planes: int, num_out: int) -> nn.Sequential:
    """3x3 to `planes`, then 1x1 without bias to `num_out` logits."""
    classifier = Classifier(planes, num_out, 1, bias=False)
    return nn.Sequential(conv_bn_relu(num_in, planes, 3), classifier)


def _encoder_keys(blocks: tuple[int, int, int]) -> Keys:
    """Renames of the encoder: published files number stem and blocks consecutively, and repeat each as `features`."""
    places = [(2, "stem.0"), (4, "stem.1")]
    for stride, num_blocks in zip((8, 16, 32), blocks, strict=True):
        places += [(stride, f"stage{stride}.{block}") for block in range(num_blocks)]
    keys = [
        (rf"^encoder\.{re.escape(ours)}\.", f"x{stride}.0.{number}.")
        for number, (stride, ours) in enumerate(places)
    ]
    return *keys, *ENCODER_KEYS


ENCODER_KEYS = renames(r"""
    \.convs\.  .conv_list.
    \.down\.   .avd_layer.
    ^x          cp.backbone.x
""")
PUBLISHED_KEYS = renames(r"""
    ^gate(\d+)\.conv\.       cp.arm\1.conv.
    ^gate(\d+)\.weight\.1\.  cp.arm\1.conv_atten.
    ^gate(\d+)\.weight\.2\.  cp.arm\1.bn_atten.
    ^mean\.1\.               cp.conv_avg.
    ^smooth                  cp.conv_head
    ^fusion\.conv\.          ffm.convblk.
    ^fusion\.weight\.1\.     ffm.conv1.
    ^fusion\.weight\.3\.     ffm.conv2.
    ^head\.                  conv_out.
    ^train_only\.aux         conv_out
    ^train_only\.boundary\.  conv_out_sp8.
    ^(conv_out\w*)\.0\.      \1.conv.
    ^(conv_out\w*)\.1\.      \1.conv_out.
""")


def pp_liteseg_t(num_classes: int) -> "PPLiteSeg":
    """PP-LiteSeg-T: 8,141,088 parameters in training, 8,027,808 in inference (19 classes)."""
    return PPLiteSeg(num_classes, STDC1, planes=(32, 64, 128), head_planes=32)


def pp_liteseg_b(num_classes: int) -> "PPLiteSeg":
    """PP-LiteSeg-B: 12,365,952 parameters in training, 12,234,240 in inference (19 classes)."""
    return PPLiteSeg(num_classes, STDC2, planes=(64, 96, 128), head_planes=64)


class PPLiteSeg(SegmentationNet):
    """PP-LiteSeg with an encoder of `blocks` and a decoder of `planes` at strides 8, 16 and 32.

    The heads "aux16" and "aux32" read the decoder at those strides. Pooling bins are of equal size at multiples of 128.
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
        self.ppm = SimplePyramid()
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

    def features(self, image: Tensor) -> Features:
        """Logits at stride 8; those of "aux16" and "aux32" at strides 16 and 32."""
        stride8, stride16, stride32 = self.encoder(image)
        x32 = self.fuse32(stride32, self.ppm(stride32))
        x16 = self.fuse16(stride16, x32)
        return self.head(self.fuse8(stride8, x16)), {"aux16": x16, "aux32": x32}


class SimplePyramid(nn.Module):
    """1024 to 128 channels: sum of averages over 1, 2 and 4 bins per side, each after a 1x1 convolution, then 3x3."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(conv_bn_relu(1024, 128, 1) for _ in BINS)
        self.out = conv_bn_relu(128, 128, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (
            upsample_like(scale(adaptive_avg_pool(x, bins)), x)
            for bins, scale in zip(BINS, self.scales, strict=True)
        )
        return self.out(sum(others, first))


class AttentionFusion(nn.Module):
    """Fine (B, num_fine, h, w) and coarse features, blended by a weight per pixel -> (B, num_out, h, w)."""

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
        summary = [
            reduce(features, 1, keepdim=True)
            for features in (fine, coarse)
            for reduce in (torch.mean, torch.amax)
        ]
        # Autocast computes a mean in fp32. Without the cast the rest would run in fp32 as well.
        share = self.attention(torch.cat(summary, dim=1)).to(fine.dtype)

        return self.out(fine * share + coarse * (1 - share))
