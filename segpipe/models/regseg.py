"""RegSeg, arXiv:2111.09957: residual blocks whose grouped convolutions have two dilations, and a small decoder."""

from functools import partial

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    Classifier,
    Features,
    SegmentationNet,
    conv_bn,
    conv_bn_relu,
    excitation,
    init_weights,
    relu,
    renames,
    stage,
    upsample_like,
)

# Dilations of the blocks at stride 16 after the first.
DILATIONS = ((1,), (1, 2), *[(1, 4)] * 4, *[(1, 14)] * 7)


def regseg(num_classes: int) -> "RegSeg":
    """RegSeg exp48_decoder26: 3,334,951 parameters (19 classes), all used in inference."""
    return RegSeg(
        num_classes, planes=(48, 128, 256, 320), blocks=(1, 3), group_width=16, decoder=(128, 8, 64)
    )  # fmt: skip


def regseg_exp53(num_classes: int) -> "RegSeg":
    """RegSeg exp53_decoder29: 6,131,579 parameters (19 classes), all used in inference."""
    return RegSeg(
        num_classes, planes=(48, 120, 336, 384), blocks=(2, 6), group_width=24, decoder=(256, 16, 128)
    )  # fmt: skip


class RegSeg(SegmentationNet):
    """RegSeg with `planes` at strides 4, 8, 16 and after the last block, and `blocks` at strides 4 and 8.

    `decoder`: widths of its features from strides 16 and 8, of those from stride 4, and of its 3x3 convolutions.
    """

    output_stride = 4
    size_multiple = 16

    def __init__(
        self,
        num_classes: int,
        *,
        planes: tuple[int, int, int, int],
        blocks: tuple[int, int],
        group_width: int,
        decoder: tuple[int, int, int],
    ) -> None:
        super().__init__()

        p4, p8, p16, last = planes
        self.stem = conv_bn_relu(3, 32, 3, stride=2)
        block = partial(DBlock, group_width=group_width)
        self.stage4 = stage(block, 32, p4, blocks[0])
        self.stage8 = stage(block, p4, p8, blocks[1])
        self.stage16 = nn.Sequential(
            block(p8, p16, stride=2),
            *(block(p16, p16, dilations=each) for each in DILATIONS[:-1]),
            block(p16, last, dilations=DILATIONS[-1]),
        )
        deep, fine, width = decoder
        self.head16 = conv_bn_relu(last, deep, 1)
        self.head8 = conv_bn_relu(p8, deep, 1)
        self.head4 = conv_bn_relu(p4, fine, 1)
        self.conv8 = conv_bn_relu(deep, width, 3)
        self.conv4 = conv_bn_relu(width + fine, width, 3)
        self.head = Classifier(width, num_classes, 1)
        self.train_only = nn.ModuleDict()
        single = () if blocks[0] > 1 else SINGLE_KEYS
        self.published_keys = (*single, *PUBLISHED_KEYS)
        init_weights(self)

    def features(self, image: Tensor) -> Features:
        """Main logits (B, num_classes, H/4, W/4)."""
        stride4 = self.stage4(self.stem(image))
        stride8 = self.stage8(stride4)
        x16 = self.head16(self.stage16(stride8))
        x8 = self.head8(stride8)
        x8 = self.conv8(x8 + upsample_like(x16, x8))
        x4 = self.head4(stride4)
        joined = torch.cat([upsample_like(x8, x4), x4], dim=1)

        return self.head(self.conv4(joined)), {}


class DBlock(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions with squeeze-and-excitation, and a shortcut.

    The channels of the 3x3 are divided evenly among `dilations`.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        group_width: int,
        dilations: tuple[int, ...] = (1,),
        stride: int = 1,
    ) -> None:
        super().__init__()

        share = num_out // len(dilations)
        self.conv1, self.bn1 = conv_bn(num_in, num_out, 1)
        self.conv2 = nn.ModuleList(
            nn.Conv2d(
                share, share, 3, stride, dilation, dilation, share // group_width, bias=False
            )
            for dilation in dilations
        )  # fmt: skip
        self.bn2 = nn.BatchNorm2d(num_out)
        self.gate = excitation(num_out, num_in // 4, bias=True)
        self.conv3, self.bn3 = conv_bn(num_out, num_out, 1)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            shrink = nn.AvgPool2d(2, ceil_mode=True) if stride > 1 else nn.Identity()
            self.shortcut = nn.Sequential(shrink, *conv_bn(num_in, num_out, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)))
        parts = zip(self.conv2, out.chunk(len(self.conv2), dim=1), strict=True)
        out = torch.cat([conv(part) for conv, part in parts], dim=1)
        out = relu(self.bn2(out))
        out = self.bn3(self.conv3(out * self.gate(out)))

        return relu(out + self.shortcut(x))


SINGLE_KEYS = renames(r"""
    ^stage4\.0\.  stage4.
""")
"""For a stage of one block, which is not a list in the published network."""
PUBLISHED_KEYS = renames(r"""
    ^stage                                         body.stage
    (stage(4|8)(\.\d)?|stage16\.[01])\.conv2\.0\.  \1.conv2.
    \.conv2\.(\d)\.                                .conv2.convs.\1.
    \.gate\.1\.                                    .se.conv1.
    \.gate\.3\.                                    .se.conv2.
    \.shortcut\.1\.                                .shortcut.conv.
    \.shortcut\.2\.                                .shortcut.bn.
    ^(head16|head8|head4|conv8|conv4)\.            decoder.\1.
    ^head\.                                        decoder.classifier.
""")
