"""PIDNet, arXiv:2206.02066: detail (P), context (I) and boundary (D) branches, fused where D sees no boundary."""

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    BRANCH_KEYS,
    DAPPM,
    BasicBlock,
    Bottleneck,
    Features,
    PyramidPool,
    SegHead,
    SegmentationNet,
    basic_stage,
    bn_relu_conv,
    conv_bn,
    init_weights,
    relu,
    renames,
    stem,
    upsample_like,
)


def pidnet_s(num_classes: int) -> "PIDNet":
    """PIDNet-S: 7,720,935 parameters in training, 7,625,715 in inference (19 classes)."""
    return PIDNet(num_classes, planes=32)


def pidnet_m(num_classes: int) -> "PIDNet":
    """PIDNet-M: 28,763,111 parameters in training, 28,538,515 in inference (19 classes)."""
    return PIDNet(num_classes, planes=64)


def pidnet_l(num_classes: int) -> "PIDNet":
    """PIDNet-L: 37,314,311 parameters in training, 36,939,571 in inference (19 classes)."""
    return PIDNet(num_classes, planes=64, large=True)


class PIDNet(SegmentationNet):
    """PIDNet-S (`planes` 32), -M (64) or -L (64, `large`). "aux_p" reads branch P, "boundary" (1 channel) branch D.

    Both auxiliary heads read their branch after its ReLU. The paper's figures show them before it, but the published
    code applies an in-place ReLU to the tapped tensor, and its weights were trained that way.
    """

    size_multiple = 64

    def __init__(self, num_classes: int, *, planes: int, large: bool = False) -> None:
        super().__init__()

        c = planes
        fine, coarse = (3, 4) if large else (2, 3)  # blocks of a stage
        head_planes = 256 if large else 128
        self.stem = stem(c)
        self.context1 = basic_stage(c, c, fine)
        self.context2 = basic_stage(c, 2 * c, fine, stride=2)
        self.context3 = basic_stage(2 * c, 4 * c, coarse, stride=2)
        self.context4 = basic_stage(4 * c, 8 * c, coarse, stride=2)
        self.context5 = nn.Sequential(
            Bottleneck(8 * c, 8 * c, stride=2), Bottleneck(16 * c, 8 * c)
        )
        self.ppm = DAPPM(16 * c, 112, 4 * c) if large else PAPPM(16 * c, 96, 4 * c)
        self.detail3 = basic_stage(2 * c, 2 * c, fine)
        self.detail4 = basic_stage(2 * c, 2 * c, fine)
        self.detail5 = Bottleneck(2 * c, 2 * c)
        self.to_detail3 = conv_bn(4 * c, 2 * c, 1)
        self.to_detail4 = conv_bn(8 * c, 2 * c, 1)
        self.gate3 = PixelAttention(2 * c, c)
        self.gate4 = PixelAttention(2 * c, c)
        planes_d = 2 * c if large else c  # of branch D at stride 8
        self.boundary3 = BasicBlock(2 * c, planes_d)
        block = BasicBlock if large else Bottleneck
        self.boundary4 = block(planes_d, planes_d)
        self.boundary5 = Bottleneck(2 * c, 2 * c)
        self.to_boundary3 = conv_bn(4 * c, planes_d, 3)
        self.to_boundary4 = conv_bn(8 * c, 2 * c, 3)
        self.fusion = Bag(4 * c) if large else LightBag(4 * c)
        self.head = SegHead(4 * c, head_planes, num_classes)
        self.train_only = nn.ModuleDict(
            {
                "aux_p": SegHead(2 * c, head_planes, num_classes),
                "boundary": SegHead(2 * c, c, 1),
            }
        )
        boundary4 = (r"^boundary4\.", "layer4_d." if large else "layer4_d.0.")
        self.published_keys = (boundary4, *PUBLISHED_KEYS)
        init_weights(self)

    def features(self, image: Tensor) -> Features:
        """Logits at stride 8; "boundary" has one channel."""
        stride4 = relu(self.context1(self.stem(image)))
        stride8 = relu(self.context2(stride4))
        stride16 = relu(self.context3(stride8))
        stride32 = relu(self.context4(stride16))

        # Branch P.
        gated = self.gate3(self.detail3(stride8), self.to_detail3(stride16))
        tap_p = relu(gated)
        gated = self.gate4(self.detail4(tap_p), self.to_detail4(stride32))
        detail = self.detail5(relu(gated))

        # Branch D.
        edges = self.boundary3(stride8)
        edges = relu(edges + upsample_like(self.to_boundary3(stride16), edges))
        edges = self.boundary4(edges)
        tap_d = relu(edges + upsample_like(self.to_boundary4(stride32), edges))
        boundary = self.boundary5(tap_d)

        context = upsample_like(self.ppm(self.context5(stride32)), detail)
        main = self.head(self.fusion(detail, context, boundary))

        return main, {"aux_p": tap_p, "boundary": tap_d}


class PixelAttention(nn.Module):
    """(1 - s) detail + s up(context), where s is how well the two agree at each pixel.

    Shapes: detail (B, num_in, h, w) and context (B, num_in, any size) -> (B, num_in, h, w).
    """

    def __init__(self, num_in: int, planes: int) -> None:
        super().__init__()
        self.key = conv_bn(num_in, planes, 1)
        self.query = conv_bn(num_in, planes, 1)

    def forward(self, detail: Tensor, context: Tensor) -> Tensor:
        agreement = self.key(detail) * upsample_like(self.query(context), detail)
        # Autocast sums in fp32. Without the cast the rest of the branch would run in fp32 as well.
        share = torch.sigmoid(agreement.sum(dim=1, keepdim=True)).to(detail.dtype)
        return (1 - share) * detail + share * upsample_like(context, detail)


class LightBag(nn.Module):
    """Fusion that weights detail at boundaries and context elsewhere; all tensors (B, num_in, h, w)."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.detail = conv_bn(num_in, num_in, 1)
        self.context = conv_bn(num_in, num_in, 1)

    def forward(self, detail: Tensor, context: Tensor, boundary: Tensor) -> Tensor:
        edge = torch.sigmoid(boundary)
        fine = self.detail((1 - edge) * context + detail)
        return fine + self.context(context + edge * detail)


class Bag(nn.Module):
    """Like LightBag, with a single 3x3 convolution for both."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.conv = bn_relu_conv(num_in, num_in, 3)

    def forward(self, detail: Tensor, context: Tensor, boundary: Tensor) -> Tensor:
        edge = torch.sigmoid(boundary)
        return self.conv(edge * detail + (1 - edge) * context)


class PAPPM(PyramidPool):
    """Parallel mixing: one grouped convolution processes all scales."""

    def __init__(self, num_in: int, planes: int, num_out: int) -> None:
        super().__init__(num_in, planes, num_out)
        self.process = bn_relu_conv(4 * planes, 4 * planes, 3, groups=4)

    def mix(self, finest: Tensor, coarser: list[Tensor]) -> Tensor:
        """(B, 5 * planes, h, w), finest first."""
        summed = torch.cat([scale + finest for scale in coarser], dim=1)
        return torch.cat([finest, self.process(summed)], dim=1)


PUBLISHED_KEYS = (
    *BRANCH_KEYS,
    *renames(r"""
    ^spp\.process\.          spp.scale_process.
    ^gate(\d)\.key\.         pag\1.f_x.
    ^gate(\d)\.query\.       pag\1.f_y.
    ^boundary5\.             layer5_d.0.
    ^boundary3\.             layer3_d.
    ^to_boundary             diff
    ^fusion\.detail\.        dfm.conv_p.
    ^fusion\.context\.       dfm.conv_i.
    ^fusion\.                dfm.
    ^train_only\.aux_p\.     seghead_p.
    ^train_only\.boundary\.  seghead_d.
"""),
)
