"""DABNet, arXiv:1907.11357: depthwise asymmetric bottlenecks, and the image beside the features of each stage."""

import torch
from torch import Tensor, nn

from segpipe.models.layers import Classifier, SegmentationNet, init_weights

DILATIONS = (4, 4, 8, 8, 16, 16)  # of the second stage; 2 in the first


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
        self.head = Classifier(2 * 128 + 3, num_classes, bias=False)
        self.train_only = nn.ModuleDict()
        self.published_keys = PUBLISHED_KEYS
        init_weights(self, mode="fan_in")

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits "main" (B, num_classes, H/8, W/8)."""
        half = self.shrink(image)
        quarter = self.shrink(half)
        eighth = self.shrink(quarter)
        x = self.down1(self.act1(torch.cat([self.stem(image), half], dim=1)))
        x = self.down2(self.act2(torch.cat([self.stage1(x), x, quarter], dim=1)))
        x = self.act3(torch.cat([self.stage2(x), x, eighth], dim=1))
        return {"main": self.head(x)}


class BNPReLU(nn.Sequential):
    """BatchNorm, then a ReLU with a slope below 0 per channel."""

    def __init__(self, planes: int) -> None:
        super().__init__(nn.BatchNorm2d(planes, eps=1e-3), nn.PReLU(planes))


class DABDownsampler(nn.Module):
    """Half the size: a strided convolution and, where the channels grow, a max-pooling of the input beside it."""

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
        activated: Tensor = self.act(out)
        return activated


class DABModule(nn.Module):
    """Half the channels, the sum of a plain and a dilated pair of depthwise 3x1 and 1x3, all channels; a shortcut."""

    def __init__(self, planes: int, dilation: int) -> None:
        super().__init__()
        half = planes // 2
        self.before = nn.Sequential(BNPReLU(planes), *_conv_act(planes, half))
        self.near = _pair(half, 1)
        self.far = _pair(half, dilation)
        self.after = nn.Sequential(
            BNPReLU(half), nn.Conv2d(half, planes, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        half = self.before(x)
        out: Tensor = self.after(self.near(half) + self.far(half)) + x
        return out


def _conv_act(num_in: int, num_out: int, *, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
    return nn.Sequential(conv, BNPReLU(num_out))


def _pair(planes: int, dilation: int) -> nn.Sequential:
    column = nn.Conv2d(
        planes, planes, (3, 1), padding=(dilation, 0), dilation=(dilation, 1),
        groups=planes, bias=False,
    )  # fmt: skip
    row = nn.Conv2d(
        planes, planes, (1, 3), padding=(0, dilation), dilation=(1, dilation),
        groups=planes, bias=False,
    )  # fmt: skip
    return nn.Sequential(column, BNPReLU(planes), row, BNPReLU(planes))


PUBLISHED_KEYS = (
    (r"^stem\.(\d)\.0\.", r"init_conv.\1.conv."),
    (r"^stem\.(\d)\.1\.", r"init_conv.\1.bn_prelu."),
    (r"^act(\d)\.", r"bn_prelu_\1."),
    (r"^down(\d)\.conv\.", r"downsample_\1.conv3x3.conv."),
    (r"^down(\d)\.act\.", r"downsample_\1.bn_prelu."),
    (r"^stage(\d)\.(\d)\.", r"DAB_Block_\1.DAB_Module_\1_\2."),
    (r"\.before\.0\.", ".bn_relu_1."),
    (r"\.before\.1\.", ".conv3x3.conv."),
    (r"\.before\.2\.", ".conv3x3.bn_prelu."),
    (r"\.near\.", ".dconv"),
    (r"\.far\.", ".ddconv"),
    (r"conv0\.", "conv3x1.conv."),
    (r"conv1\.", "conv3x1.bn_prelu."),
    (r"conv2\.", "conv1x3.conv."),
    (r"conv3\.", "conv1x3.bn_prelu."),
    (r"\.after\.0\.", ".bn_relu_2."),
    (r"\.after\.1\.", ".conv1x1.conv."),
    (r"((bn_prelu|bn_relu)\w*)\.0\.", r"\1.bn."),
    (r"((bn_prelu|bn_relu)\w*)\.1\.", r"\1.acti."),
    (r"^head\.", "classifier.0.conv."),
)
