"""The interface of all networks, and the blocks that several of them share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.models.resize import adaptive_avg_pool, bilinear


class SegmentationNet(nn.Module):
    """A network that computes logits at `output_stride`, and auxiliary logits for training.

    `align_corners` says how the main logits are upsampled to the image's size. `train_only` holds the modules of the
    heads that exist for training only, by name; a network without such heads needs none. `published_keys` maps prefixes
    of names in the state dict to those in published files. The image is float (B, 3, H, W), already normalized, at
    least 32x32.
    """

    output_stride: int = 8
    align_corners: bool = False
    train_only: nn.ModuleDict
    published_keys: Mapping[str, str] = MappingProxyType({})

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits (B, channels, h, w) per head at `output_stride`: "main" and, with `aux`, those of `train_only`."""
        raise NotImplementedError

    def pretrained(self) -> tuple[str, dict[str, Tensor]]:
        """Weights that the network's arguments ask for, such as an encoder's: where they are from, and tensors by name.

        Called for step 0 of a run only.
        """
        return "", {}

    def forward(self, image: Tensor) -> Tensor:
        """Main logits (B, num_classes, h, w) at `output_stride`."""
        return self.logits(image, aux=False)["main"]


class StridedDepthwise(nn.Conv2d):
    """A strided depthwise convolution that runs in fp32 under autocast on a CPU.

    There the gradient of its input has no fast bf16 kernel: 49 ms instead of 1.5 ms for (8, 384, 40, 52).
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float()).to(x.dtype)


class Classifier(nn.Conv2d):
    """The 1x1 convolution with bias that computes logits."""

    def __init__(self, num_in: int, num_classes: int) -> None:
        super().__init__(num_in, num_classes, 1)


def init_weights(net: nn.Module) -> None:
    """Initialize convolutions with Kaiming normal (fan out, relu) and BatchNorm with weight 1, bias 0.

    Classifiers start near 0 instead, so that the first loss is log(classes). With Kaiming, whose fan out is the small
    number of classes, it was 4.9 instead of 2.4 on CamVid, with gradient norms of 400.
    """
    for module in net.modules():
        if isinstance(module, Classifier):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(cast(Tensor, module.bias))
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def upsample_like(x: Tensor, other: Tensor) -> Tensor:
    """`x` resized to the height and width of `other`, bilinear, align_corners False."""
    return bilinear(x, (other.shape[-2], other.shape[-1]))


def conv_bn(
    num_in: int,
    num_out: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    bias: bool = False,
) -> nn.Sequential:
    """Convolution with "same" padding, then BatchNorm."""
    conv = nn.Conv2d(
        num_in, num_out, kernel, stride, kernel // 2, groups=groups, bias=bias
    )
    return nn.Sequential(conv, nn.BatchNorm2d(num_out))


def bn_relu_conv(
    num_in: int, num_out: int, kernel: int, *, groups: int = 1
) -> nn.Sequential:
    """BatchNorm, ReLU, convolution without bias: the pre-activation order of the pyramid pooling."""
    conv = nn.Conv2d(
        num_in, num_out, kernel, padding=kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(nn.BatchNorm2d(num_in), nn.ReLU(inplace=True), conv)


def stem(planes: int) -> nn.Sequential:
    """Two 3x3 stride-2 convolutions with bias: (B, 3, H, W) -> (B, planes, H/4, W/4)."""
    first = conv_bn(3, planes, 3, stride=2, bias=True)
    second = conv_bn(planes, planes, 3, stride=2, bias=True)
    return nn.Sequential(*first, nn.ReLU(inplace=True), *second, nn.ReLU(inplace=True))


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.Sequential | None:
    return (
        conv_bn(num_in, num_out, 1, stride=stride)
        if stride != 1 or num_in != num_out
        else None
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; ReLU after the sum only with `final_relu`."""

    def __init__(
        self, num_in: int, num_out: int, *, stride: int = 1, final_relu: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.downsample = _shortcut(num_in, num_out, stride)
        self.final_relu = final_relu

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out)) + (
            x if self.downsample is None else self.downsample(x)
        )
        return F.relu(out, inplace=True) if self.final_relu else out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, num_in -> planes -> planes -> 2 * planes, and a shortcut; no final ReLU."""

    def __init__(self, num_in: int, planes: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 2 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * planes)
        self.downsample = _shortcut(num_in, 2 * planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        shortcut = x if self.downsample is None else self.downsample(x)
        total: Tensor = shortcut + self.bn3(self.conv3(out))
        return total


def basic_stage(
    num_in: int, num_out: int, num_blocks: int, *, stride: int = 1
) -> nn.Sequential:
    """`num_blocks` basic blocks, the first with `stride`; the last without its final ReLU."""
    first = BasicBlock(num_in, num_out, stride=stride, final_relu=num_blocks > 1)
    later = (
        BasicBlock(num_out, num_out, final_relu=i < num_blocks - 1)
        for i in range(1, num_blocks)
    )
    return nn.Sequential(first, *later)


class SegHead(nn.Module):
    """BN, ReLU, 3x3 to `planes`, BN, ReLU, 1x1 to `num_out` logits. Does not modify its input."""

    def __init__(self, num_in: int, planes: int, num_out: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(num_in)
        self.conv1 = nn.Conv2d(num_in, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = Classifier(planes, num_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(F.relu(self.bn1(x), inplace=True))
        logits: Tensor = self.conv2(F.relu(self.bn2(x), inplace=True))
        return logits


class GlobalPool(nn.Module):
    """Mean over height and width, kept as (B, C, 1, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return adaptive_avg_pool(x, 1)


class PyramidPool(nn.Module):
    """Pyramid pooling of PIDNet and DDRNet; subclasses define how the scales are mixed.

    Shapes: (B, num_in, h, w) -> (B, num_out, h, w). In training, the global scale gives BatchNorm one value per
    image, so a batch needs at least two images.
    """

    def __init__(self, num_in: int, planes: int, num_out: int) -> None:
        super().__init__()
        pools = [*(nn.AvgPool2d(2 * s + 1, s, s) for s in (2, 4, 8)), GlobalPool()]
        pooled = (
            nn.Sequential(pool, *bn_relu_conv(num_in, planes, 1)) for pool in pools
        )
        self.scales = nn.ModuleList([bn_relu_conv(num_in, planes, 1), *pooled])
        self.compression = bn_relu_conv(5 * planes, num_out, 1)
        self.shortcut = bn_relu_conv(num_in, num_out, 1)

    def mix(self, finest: Tensor, coarser: list[Tensor]) -> Tensor:
        """(B, 5 * planes, h, w) from the finest scale and the four coarser ones, already upsampled to it."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        finest, *coarser = (scale(x) for scale in self.scales)
        mixed = self.mix(finest, [upsample_like(scale, finest) for scale in coarser])
        out: Tensor = self.compression(mixed) + self.shortcut(x)
        return out


BRANCH_KEYS = {
    "stem.": "conv1.",
    **{f"context{i}.": f"layer{i}." for i in range(1, 6)},
    "ppm.": "spp.",
    **{f"ppm.scales.{i}.": f"spp.scale{i}." for i in range(5)},
    "detail3.": "layer3_.",
    "detail4.": "layer4_.",
    "detail5.": "layer5_.0.",
    "to_detail3.": "compression3.",
    "to_detail4.": "compression4.",
    "head.": "final_layer.",
}
"""Key prefix of what PIDNet and DDRNet share -> prefix in the published state dict; the longest match counts."""
