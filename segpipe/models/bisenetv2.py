"""BiSeNetV2, arXiv:2004.02147, as in CoinCheung/BiSeNet: a wide detail branch guided by a deep semantic one.

That code differs from the paper in the head's width (1024) and in ReLUs of the semantic branch.
"""

from functools import partial

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    Classifier,
    Features,
    ReLU,
    SegmentationNet,
    conv_bn,
    conv_bn_relu,
    init_weights,
    nearest_like,
    relu,
    renames,
    stage,
)

AUX = {"aux2": (16, 4), "aux3": (32, 8), "aux4": (64, 16), "aux5": (128, 32)}
"""Auxiliary heads: channels and stride of the features they read."""


class BiSeNetV2(SegmentationNet):
    """5,231,487 parameters in training, 3,358,627 in inference (19 classes)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()

        conv3x3 = partial(conv_bn_relu, kernel=3)
        self.detail = nn.Sequential(
            stage(conv3x3, 3, 64, 2),
            stage(conv3x3, 64, 64, 3),
            stage(conv3x3, 64, 128, 3),
        )
        self.stem = Stem()
        self.stage3 = nn.Sequential(Shrink(16, 32), Gather(32))
        self.stage4 = nn.Sequential(Shrink(32, 64), Gather(64))
        self.stage5 = nn.Sequential(
            Shrink(64, 128), Gather(128), Gather(128), Gather(128)
        )
        self.context = ContextEmbedding()
        self.guide = GuidedAggregation()
        self.head = nn.Sequential(
            conv_bn_relu(128, 1024, 3),
            nn.Dropout(0.1),
            Classifier(1024, num_classes, 1),
        )
        self.train_only = nn.ModuleDict(
            {name: _aux_head(*taps, num_classes) for name, taps in AUX.items()}
        )
        init_weights(self)
        for module in self.modules():
            if isinstance(module, Gather | Shrink):
                nn.init.zeros_(module.project[1].weight)  # type: ignore[arg-type]

    def features(self, image: Tensor) -> Features:
        """Logits (B, num_classes, H/8, W/8); the logits of "aux2" to "aux5" have strides 2, 4, 8 and 16."""
        stride4 = self.stem(image)
        stride8 = self.stage3(stride4)
        stride16 = self.stage4(stride8)
        stride32 = self.stage5(stride16)
        fused = self.guide(self.detail(image), self.context(stride32))
        read = (stride4, stride8, stride16, stride32)

        return self.head(fused), dict(zip(AUX, read, strict=True))

    published_keys = renames(r"""
        ^detail\.0\.                       detail.S1.
        ^detail\.1\.                       detail.S2.
        ^detail\.2\.                       detail.S3.
        ^stem\.                            segment.S1S2.
        ^stage([34])\.                     segment.S\1.
        ^stage5\.                          segment.S5_4.
        ^(segment\.S[345]\S*\.\d)\.conv\.  \1.conv1.
        \.expand                           .dwconv
        \.project\.                        .conv2.
        ^context\.mean\.                   segment.S5_5.conv_gap.
        ^context\.last\.                   segment.S5_5.conv_last.
        ^context\.                         segment.S5_5.
        ^guide\.fine\.                     bga.left1.
        ^guide\.coarse\.                   bga.left2.
        ^guide\.fine_gate\.                bga.right1.
        ^guide\.coarse_gate\.              bga.right2.
        ^guide\.                           bga.
        ^train_only\.
        ^aux5\.                            aux5_4.
        ^(head|aux\w+)\.0\.                \1.conv.
        ^head\.2\.                         head.conv_out.1.
        ^(aux\w+)\.3\.                     \1.conv_out.0.1.
        ^(aux\w+)\.4\.                     \1.conv_out.1.
    """)


class Stem(nn.Module):
    """(B, 3, H, W) -> (B, 16, H/4, W/4): convolutions in parallel with a max-pooling."""

    def __init__(self) -> None:
        super().__init__()

        self.conv = conv_bn_relu(3, 16, 3, stride=2)
        self.left = nn.Sequential(
            conv_bn_relu(16, 8, 1), conv_bn_relu(8, 16, 3, stride=2)
        )
        self.right = nn.MaxPool2d(3, 2, 1)
        self.fuse = conv_bn_relu(32, 16, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image)
        return self.fuse(torch.cat([self.left(x), self.right(x)], dim=1))


class Gather(nn.Module):
    """3x3 convolution, depthwise convolution to six times the channels, 1x1 back, and a shortcut.

    The last BatchNorm of a block starts with weight 0.
    """

    def __init__(self, planes: int) -> None:
        super().__init__()

        self.conv = conv_bn_relu(planes, planes, 3)
        self.expand = conv_bn(planes, 6 * planes, 3, groups=planes, act=ReLU)
        self.project = conv_bn(6 * planes, planes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.project(self.expand(self.conv(x))) + x)


class Shrink(nn.Module):
    """Like Gather, at half the size: two depthwise convolutions, and a separable one as the shortcut."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()

        wide = 6 * num_in
        self.conv = conv_bn_relu(num_in, num_in, 3)
        self.expand1 = conv_bn(num_in, wide, 3, stride=2, groups=num_in)
        self.expand2 = conv_bn(wide, wide, 3, groups=wide, act=ReLU)
        self.project = conv_bn(wide, num_out, 1)
        self.shortcut = nn.Sequential(
            *conv_bn(num_in, num_in, 3, stride=2, groups=num_in),
            *conv_bn(num_in, num_out, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.expand2(self.expand1(self.conv(x))))
        return relu(out + self.shortcut(x))


class ContextEmbedding(nn.Module):
    """(B, 128, h, w) plus its mean over the image. In training, BatchNorm sees one value per image."""

    def __init__(self) -> None:
        super().__init__()

        self.bn = nn.BatchNorm2d(128)
        self.mean = conv_bn_relu(128, 128, 1)
        self.last = conv_bn_relu(128, 128, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(self.bn(x.mean((2, 3), keepdim=True)))
        return self.last(mean + x)


class GuidedAggregation(nn.Module):
    """Detail (B, 128, h, w) and context (B, 128, h/4, w/4), each weighted by the other at both sizes."""

    def __init__(self) -> None:
        super().__init__()

        self.fine = _separable()
        self.coarse = nn.Sequential(
            *conv_bn(128, 128, 3, stride=2), nn.AvgPool2d(3, 2, 1)
        )
        self.fine_gate = conv_bn(128, 128, 3)
        self.coarse_gate = _separable()
        self.conv = conv_bn(128, 128, 3, act=ReLU)

    def forward(self, detail: Tensor, context: Tensor) -> Tensor:
        fine = self.fine(detail)
        fine = fine * torch.sigmoid(nearest_like(self.fine_gate(context), fine))
        coarse = self.coarse(detail) * torch.sigmoid(self.coarse_gate(context))

        return self.conv(fine + nearest_like(coarse, fine))


def _separable() -> nn.Sequential:
    pointwise = nn.Conv2d(128, 128, 1, bias=False)
    return nn.Sequential(*conv_bn(128, 128, 3, groups=128), pointwise)


def _aux_head(planes: int, stride: int, num_classes: int) -> nn.Sequential:
    """Logits at half the stride of the features, from stride**2 channels there."""
    return nn.Sequential(
        conv_bn_relu(planes, 128, 3),
        nn.Dropout(0.1),
        nn.Upsample(scale_factor=2),
        conv_bn_relu(128, stride**2, 3),
        Classifier(stride**2, num_classes, 1),
    )
