"""DDRNet, arXiv:2101.06085: a context branch and a detail branch at stride 8 that exchange features."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.models.layers import (
    BRANCH_KEYS,
    DAPPM,
    Bottleneck,
    Features,
    ReLU,
    SegHead,
    SegmentationNet,
    basic_stage,
    conv_bn,
    init_weights,
    relu,
    renames,
    stem,
    upsample_like,
)


def ddrnet23_slim(num_classes: int) -> "DDRNet":
    """DDRNet-23-slim: 5,734,342 parameters in training, 5,695,987 in inference (19 classes)."""
    return DDRNet(num_classes, planes=32, head_planes=64)


def ddrnet23(num_classes: int) -> "DDRNet":
    """DDRNet-23: 20,299,366 parameters in training, 20,148,947 in inference (19 classes)."""
    return DDRNet(num_classes, planes=64, head_planes=128)


def ddrnet39(num_classes: int) -> "DDRNet":
    """DDRNet-39: 32,660,838 parameters in training, 32,360,275 in inference (19 classes)."""
    return DDRNet(num_classes, planes=64, head_planes=256, blocks=(3, 4, 3), twice=True)


class DDRNet(SegmentationNet):
    """DDRNet with base width `planes`; `blocks` are for stride 4, for stride 8, and for strides 16 and 32.

    The branches exchange features after stride 16 and after stride 32. With `twice`, stride 16 has a second group of
    as many blocks, and another exchange. The head "aux" reads the detail branch after the last exchange at stride 16.
    """

    size_multiple = 64

    def __init__(
        self,
        num_classes: int,
        *,
        planes: int,
        head_planes: int,
        blocks: tuple[int, int, int] = (2, 2, 2),
        twice: bool = False,
    ) -> None:
        super().__init__()

        c = planes
        first, second, later = blocks
        self.stages = ("3", "3b") if twice else ("3",)
        self.stem = stem(c)
        self.context1 = basic_stage(c, c, first)
        self.context2 = basic_stage(c, 2 * c, second, stride=2)
        self.context3 = basic_stage(2 * c, 4 * c, later, stride=2)
        if twice:
            self.context3b = basic_stage(4 * c, 4 * c, later)

        self.context4 = basic_stage(4 * c, 8 * c, later, stride=2)
        self.context5 = Bottleneck(8 * c, 8 * c, stride=2)
        self.ppm = DAPPM(16 * c, 128, 4 * c)
        for stage in (*self.stages, "4"):
            self.add_module(f"detail{stage}", basic_stage(2 * c, 2 * c, later))

        self.detail5 = Bottleneck(2 * c, 2 * c)
        for stage in self.stages:
            self.add_module(f"to_detail{stage}", conv_bn(4 * c, 2 * c, 1))

        self.to_detail4 = conv_bn(8 * c, 2 * c, 1)
        shrink = partial(conv_bn, kernel=3, stride=2)
        for stage in self.stages:
            self.add_module(f"to_context{stage}", shrink(2 * c, 4 * c))

        self.to_context4 = nn.Sequential(
            *shrink(2 * c, 4 * c, act=ReLU), *shrink(4 * c, 8 * c)
        )
        self.head = SegHead(4 * c, head_planes, num_classes)
        self.train_only = nn.ModuleDict(
            {"aux": SegHead(2 * c, head_planes, num_classes)}
        )
        self.published_keys = (*(TWICE_KEYS if twice else ()), *PUBLISHED_KEYS)
        init_weights(self)

    def features(self, image: Tensor) -> Features:
        """Logits (B, num_classes, H/8, W/8)."""
        stride4 = relu(self.context1(self.stem(image)))
        context = detail = relu(self.context2(stride4))
        for stage in self.stages:
            context, exchanged = self._exchange(stage, context, detail)
            context, detail = relu(context), F.relu(exchanged)

        context, detail = self._exchange("4", context, detail)
        detail = self.detail5(relu(detail))
        context = self.ppm(self.context5(relu(context)))
        main = self.head(detail + upsample_like(context, detail))

        return main, {"aux": exchanged}

    def _exchange(
        self, stage: str, context: Tensor, detail: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One stage of both branches, then each plus a projection of the other, before the final ReLU."""
        context = self.get_submodule(f"context{stage}")(context)
        detail = self.get_submodule(f"detail{stage}")(detail)
        to_detail = self.get_submodule(f"to_detail{stage}")(F.relu(context))
        fused = detail + upsample_like(to_detail, detail)
        to_context = self.get_submodule(f"to_context{stage}")(F.relu(detail))

        return context + to_context, fused


PUBLISHED_KEYS = (
    *BRANCH_KEYS,
    *renames(r"""
    ^layer5\.           layer5.0.
    ^train_only\.aux\.  seghead_extra.
"""),
)
TWICE_KEYS = renames(r"""
    ^detail3\.                   layer3_1_.
    ^detail3b\.                  layer3_2_.
    ^(to_)?(context|detail)3\.   \1\g<2>3_1.
    ^(to_)?(context|detail)3b\.  \1\g<2>3_2.
""")
"""Where stride 16 has two stages."""
