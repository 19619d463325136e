"""The interface of all networks, and the blocks that several of them share."""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.models.resize import adaptive_avg_pool, bilinear

Keys = tuple[tuple[str, str], ...]
# Main logits, and by name the features that the training heads read.
Features = tuple[Tensor, Mapping[str, Tensor]]
relu = partial(F.relu, inplace=True)


def renames(table: str) -> Keys:
    """Patterns and replacements, from a table with one pair per line; a missing replacement is empty."""
    return tuple(re.findall(r"(\S+) *(\S*)", table))


class SegmentationNet(nn.Module):
    """A network that computes logits at `output_stride`, and auxiliary logits for training.

    `align_corners` says how logits are upsampled to the image's size. `train_only` holds the heads that exist only for
    training, by name; a network without such heads needs none. `published_keys` are regular expressions with
    replacements that, applied in order, turn names in the state dict into those of published files; `unused_keys`
    matches names in those files that segmentation does not use.

    The image is float (B, 3, H, W), already normalized, at least 32x32. If its sides are multiples of `size_multiple`,
    the sides of the logits are exactly those of the image divided by `output_stride`.
    """

    output_stride: int = 8
    size_multiple: int = 32
    align_corners: bool = False
    train_only: nn.ModuleDict
    published_keys: Keys = ()
    unused_keys: str = ""

    def features(self, image: Tensor) -> Features:
        """Main logits (B, num_classes, h, w) at `output_stride`, and by name the inputs of the `train_only` heads."""
        raise NotImplementedError

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits (B, channels, h, w) per head: "main" at `output_stride` and, with `aux`, those of `train_only`.

        An auxiliary head may have its own stride. "boundary" has one channel, all others have `num_classes`.
        """
        main, read = self.features(image)
        heads = getattr(self, "train_only", {}).items() if aux else ()
        return {"main": main, **{name: head(read[name]) for name, head in heads}}

    def pretrained(self) -> tuple[str, dict[str, Tensor]]:
        """Pretrained weights that the network's arguments request, such as an encoder's: their origin, tensors by name.

        Only called for step 0 of a run.
        """
        return "", {}

    def forward(self, image: Tensor) -> Tensor:
        """Main logits (B, num_classes, h, w) at `output_stride`."""
        return self.logits(image, aux=False)["main"]


class StridedDepthwise(nn.Conv2d):
    """A strided depthwise convolution that runs in fp32 under autocast on a CPU.

    There is no fast bf16 CPU kernel for the gradient of its input: 49 ms instead of 1.5 ms for (8, 384, 40, 52).
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float()).to(x.dtype)


class Classifier(nn.Conv2d):
    """The convolution that computes logits; 1x1 in all networks."""


def init_weights(net: nn.Module, mode: str = "fan_out") -> None:
    """Initialize convolutions by Kaiming normal (relu), BatchNorm with weight 1 and bias 0, classifiers near 0."""
    for module in net.modules():
        if isinstance(module, Classifier):
            init_near_zero(module)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")  # type: ignore[arg-type]
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def init_near_zero(layer: nn.Conv2d | nn.ConvTranspose2d) -> None:
    """Initialize a layer that computes logits so that the first loss is log(classes).

    With Kaiming, whose fan-out is the small number of classes, the first loss on CamVid was 4.9 instead of 2.4, with
    gradient norms of 400.
    """
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def upsample_like(x: Tensor, other: Tensor, *, align_corners: bool = False) -> Tensor:
    """`x` resized bilinearly to the height and width of `other`."""
    return bilinear(x, other.shape[-2:], align_corners=align_corners)


def nearest_like(x: Tensor, other: Tensor) -> Tensor:
    """`x` resized to the height and width of `other`, each value repeated."""
    return F.interpolate(x, other.shape[-2:])


def conv_bn(
    num_in: int,
    num_out: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    bias: bool = False,
    padding: int | None = None,
    act: Callable[[], nn.Module] | None = None,
    names: Sequence[str] = "012",
) -> nn.Sequential:
    """Convolution, by default padded to keep the size, BatchNorm and optionally `act`, named by `names`."""
    kind = StridedDepthwise if groups > 1 and stride > 1 else nn.Conv2d
    pad = kernel // 2 if padding is None else padding
    conv = kind(num_in, num_out, kernel, stride, pad, groups=groups, bias=bias)
    parts = [conv, nn.BatchNorm2d(num_out)]
    if act:
        parts.append(act())

    return nn.Sequential(OrderedDict(zip(names, parts, strict=False)))


ReLU = partial(nn.ReLU, inplace=True)
conv_bn_relu = partial(conv_bn, act=ReLU, names=("conv", "bn", "relu"))


def bn_relu_conv(
    num_in: int, num_out: int, kernel: int, *, groups: int = 1
) -> nn.Sequential:
    """BatchNorm, ReLU, convolution without bias: the pre-activation order of the pyramid pooling."""
    conv = nn.Conv2d(
        num_in, num_out, kernel, padding=kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(nn.BatchNorm2d(num_in), ReLU(), conv)


def separable(num_in: int, num_out: int, *, stride: int = 1) -> nn.Sequential:
    """A depthwise 3x3 and a 1x1 convolution, each with BatchNorm and ReLU."""
    depthwise = conv_bn(num_in, num_in, 3, stride=stride, groups=num_in, act=ReLU)
    return nn.Sequential(*depthwise, *conv_bn(num_in, num_out, 1, act=ReLU))


def stem(planes: int) -> nn.Sequential:
    """Two 3x3 stride-2 convolutions with bias: (B, 3, H, W) -> (B, planes, H/4, W/4)."""
    layer = partial(conv_bn, kernel=3, stride=2, bias=True, act=ReLU)
    return nn.Sequential(*layer(3, planes), *layer(planes, planes))


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.Module:
    if stride == 1 and num_in == num_out:
        return nn.Identity()
    return conv_bn(num_in, num_out, 1, stride=stride)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; ReLU after the sum only with `final_relu`."""

    def __init__(
        self, num_in: int, num_out: int, *, stride: int = 1, final_relu: bool = False
    ) -> None:
        super().__init__()

        self.conv1, self.bn1 = conv_bn(num_in, num_out, 3, stride=stride)
        self.conv2, self.bn2 = conv_bn(num_out, num_out, 3)
        self.downsample = _shortcut(num_in, num_out, stride)
        self.final_relu = final_relu

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.downsample(x)
        return relu(out) if self.final_relu else out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, num_in -> planes -> planes -> 2 * planes, and a shortcut; no final ReLU."""

    def __init__(self, num_in: int, planes: int, *, stride: int = 1) -> None:
        super().__init__()

        self.conv1, self.bn1 = conv_bn(num_in, planes, 1)
        self.conv2, self.bn2 = conv_bn(planes, planes, 3, stride=stride)
        self.conv3, self.bn3 = conv_bn(planes, 2 * planes, 1)
        self.downsample = _shortcut(num_in, 2 * planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)))
        out = relu(self.bn2(self.conv2(out)))
        return self.downsample(x) + self.bn3(self.conv3(out))


def basic_stage(
    num_in: int, num_out: int, num_blocks: int, *, stride: int = 1
) -> nn.Sequential:
    """`num_blocks` basic blocks, the first with `stride`; the last without its final ReLU."""
    block = partial(BasicBlock, final_relu=True)
    blocks = stage(block, num_in, num_out, num_blocks, stride=stride)
    blocks[-1].final_relu = False  # type: ignore[assignment]
    return blocks


def stage(
    block: Callable[..., nn.Module],
    num_in: int,
    num_out: int,
    num_blocks: int,
    *,
    stride: int = 2,
) -> nn.Sequential:
    """`num_blocks` of `block(num_in, num_out, stride=...)`, the first with `stride`."""
    first = block(num_in, num_out, stride=stride)
    later = (block(num_out, num_out, stride=1) for _ in range(num_blocks - 1))
    return nn.Sequential(first, *later)


def asymmetric(
    planes: int,
    dilation: int,
    between: nn.Module,
    after: nn.Module,
    *,
    groups: int = 1,
    bias: bool = True,
) -> nn.Sequential:
    """A dilated 3x1, `between`, a dilated 1x3, and `after`; the convolutions keep the size."""
    conv = partial(nn.Conv2d, planes, planes, groups=groups, bias=bias)
    column = conv((3, 1), padding=(dilation, 0), dilation=(dilation, 1))
    row = conv((1, 3), padding=(0, dilation), dilation=(1, dilation))
    return nn.Sequential(column, between, row, after)


class InvertedResidual(nn.Module):
    """1x1 to `ratio` times the width, depthwise 3x3, linear 1x1; a shortcut if the shape does not change.

    `act` and `names` as for `conv_bn`.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        stride: int = 1,
        ratio: int = 6,
        act: Callable[[], nn.Module] = ReLU,
        names: Sequence[str] = "012",
    ) -> None:
        super().__init__()

        wide = ratio * num_in
        conv = partial(conv_bn, names=names)
        self.expand = conv(num_in, wide, 1, act=act)
        self.depthwise = conv(wide, wide, 3, stride=stride, groups=wide, act=act)
        self.project = conv(wide, num_out, 1)
        self.has_shortcut = stride == 1 and num_in == num_out

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.depthwise(self.expand(x)))
        return x + out if self.has_shortcut else out


class SegHead(nn.Module):
    """BN, ReLU, 3x3 to `planes`, BN, ReLU, 1x1 to `num_out` logits. Does not modify its input."""

    def __init__(self, num_in: int, planes: int, num_out: int) -> None:
        super().__init__()

        self.bn1 = nn.BatchNorm2d(num_in)
        self.conv1 = nn.Conv2d(num_in, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = Classifier(planes, num_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(relu(self.bn1(x)))
        return self.conv2(relu(self.bn2(x)))


class GlobalPool(nn.Module):
    """Mean over height and width, kept as (B, C, 1, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return adaptive_avg_pool(x, 1)


def excitation(planes: int, hidden: int, *, bias: bool) -> nn.Sequential:
    """Weights of `planes` channels, 0 to 1, computed from their means over the image by two 1x1 convolutions."""
    return nn.Sequential(
        GlobalPool(),
        nn.Conv2d(planes, hidden, 1, bias=bias),
        ReLU(),
        nn.Conv2d(hidden, planes, 1, bias=bias),
        nn.Sigmoid(),
    )


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
        return self.compression(mixed) + self.shortcut(x)


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


BRANCH_KEYS = renames(r"""
    ^stem\.                 conv1.
    ^to_detail              compression
    ^to_context             down
    ^context                layer
    ^detail5\.              layer5_.0.
    ^detail(\w+)\.          layer\1_.
    ^ppm\.scales\.          spp.scale
    ^ppm\.process\.0\.(\d)  spp.process1.\1
    ^ppm\.process\.1\.(\d)  spp.process2.\1
    ^ppm\.process\.2\.(\d)  spp.process3.\1
    ^ppm\.process\.3\.(\d)  spp.process4.\1
    ^ppm\.                  spp.
    ^head\.                 final_layer.
""")
"""`published_keys` of the parts that PIDNet and DDRNet share."""
