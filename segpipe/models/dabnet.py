"""DABNet, arXiv:1907.11357: depthwise asymmetric bottlenecks; each stage's features are concatenated with the image."""

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    Classifier,
    Features,
    SegmentationNet,
    asymmetric,
    init_weights,
    renames,
)

DILATIONS = (4, 4, 8, 8, 16, 16)  # of the second stage; the first uses 2


class DABNet(SegmentationNet):
    """756,643 parameters (19 classes), all used in inference."""

    size_multiple = 8

    def __init__(self, num_classes: int) -> None:
        super().__init__()

        self.stem = nn.Sequential(
            _conv_act(3, 32, stride=2), _conv_act(32, 32), _conv_act(32, 32)
        )
        self.shrink = nn.AvgPool2d(3, 2, 1)
        self.act1 = BNPReLU(32 + 3)
        self.down1 = DABDownsampler(32 + 3, 64)
        self.stage1 = nn.Sequential(*(DABModule(64, 2) for _ in range(3)))
        self.act2 = BNPReLU(2 * 64 + 3)
        self.down2 = DABDownsampler(2 * 64 + 3, 128)
        self.stage2 = nn.Sequential(
            *(DABModule(128, dilation) for dilation in DILATIONS)
        )
        self.act3 = BNPReLU(2 * 128 + 3)
        self.head = Classifier(2 * 128 + 3, num_classes, 1, bias=False)
        self.train_only = nn.ModuleDict()
        init_weights(self, mode="fan_in")

    def features(self, image: Tensor) -> Features:
        """Main logits (B, num_classes, H/8, W/8)."""
        half = self.shrink(image)
        quarter = self.shrink(half)
        eighth = self.shrink(quarter)
        x = self.down1(self.act1(torch.cat([self.stem(image), half], dim=1)))
        x = self.down2(self.act2(torch.cat([self.stage1(x), x, quarter], dim=1)))
        x = self.act3(torch.cat([self.stage2(x), x, eighth], dim=1))

        return self.head(x), {}

    published_keys = renames(r"""
        ^stem\.(\d)\.0\.              init_conv.\1.conv.
        ^stem\.(\d)\.1\.              init_conv.\1.bn_prelu.
        ^act(\d)\.                    bn_prelu_\1.
        ^down(\d)\.conv\.             downsample_\1.conv3x3.conv.
        ^down(\d)\.act\.              downsample_\1.bn_prelu.
        ^stage(\d)\.(\d)\.            DAB_Block_\1.DAB_Module_\1_\2.
        \.before\.0\.                 .bn_relu_1.
        \.before\.1\.                 .conv3x3.conv.
        \.before\.2\.                 .conv3x3.bn_prelu.
        \.near\.                      .dconv
        \.far\.                       .ddconv
        conv0\.                       conv3x1.conv.
        conv1\.                       conv3x1.bn_prelu.
        conv2\.                       conv1x3.conv.
        conv3\.                       conv1x3.bn_prelu.
        \.after\.0\.                  .bn_relu_2.
        \.after\.1\.                  .conv1x1.conv.
        ((bn_prelu|bn_relu)\w*)\.0\.  \1.bn.
        ((bn_prelu|bn_relu)\w*)\.1\.  \1.acti.
        ^head\.                       classifier.0.conv.
    """)


class BNPReLU(nn.Sequential):
    """BatchNorm, then PReLU with one slope per channel."""

    def __init__(self, planes: int) -> None:
        super().__init__(nn.BatchNorm2d(planes, eps=1e-3), nn.PReLU(planes))


class DABDownsampler(nn.Module):
    """Half the size: a strided convolution, concatenated with a max-pooling of the input if the channels grow."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()

        self.grows = num_in < num_out
        num_conv = num_out - num_in if self.grows else num_out
        self.conv = nn.Conv2d(num_in, num_conv, 3, 2, 1, bias=False)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.act = BNPReLU(num_out)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        if self.grows:
            out = torch.cat([out, self.pool(x)], dim=1)
        return self.act(out)


class DABModule(nn.Module):
    """Half the channels, the sum of a plain and a dilated depthwise 3x1 and 1x3 pair, all channels; and a shortcut."""

    def __init__(self, planes: int, dilation: int) -> None:
        super().__init__()

        half = planes // 2
        self.before = nn.Sequential(BNPReLU(planes), *_conv_act(planes, half))
        self.near, self.far = (
            asymmetric(
                half, each, BNPReLU(half), BNPReLU(half), groups=half, bias=False
            )
            for each in (1, dilation)
        )
        self.after = nn.Sequential(
            BNPReLU(half), nn.Conv2d(half, planes, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        half = self.before(x)
        return self.after(self.near(half) + self.far(half)) + x


def _conv_act(num_in: int, num_out: int, *, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
    return nn.Sequential(conv, BNPReLU(num_out))
