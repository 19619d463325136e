"""Networks built from other packages: encoders of timm, LR-ASPP of torchvision, segmentation-models-pytorch."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.errors import ConfigError, first_line
from segpipe.models.layers import (
    Classifier,
    Features,
    GlobalPool,
    Keys,
    SegHead,
    SegmentationNet,
    conv_bn,
    init_near_zero,
    init_weights,
    separable,
    upsample_like,
)
from segpipe.models.preprocess import IMAGENET_MEAN, IMAGENET_STD
from segpipe.settings.setting import nearest

STRIDES = (8, 16, 32)


class EncoderNet(SegmentationNet):
    """A network on timm's encoder `name`; `pretrained` requests the encoder's weights."""

    def __init__(self, name: str, pretrained: bool) -> None:
        super().__init__()

        if not isinstance(pretrained, bool):
            raise ConfigError(
                f"model.args.pretrained = {pretrained!r}, but true or false was needed. To load encoder weights from a "
                f"file, set model.weights={pretrained} and model.weights_partial=true."
            )
        self.name, self.wants_pretrained = name, pretrained
        self.encoder = create_encoder(name)

    def init_decoder(self) -> None:
        """Initialize everything except the encoder, which timm initializes."""
        for name, part in self.named_children():
            if name != "encoder":
                init_weights(part)

    def pretrained(self) -> tuple[str, dict[str, Tensor]]:
        """timm's weights of the encoder, if the arguments request them. Raises ConfigError if they are unavailable."""
        if not self.wants_pretrained:
            return "", {}
        encoder = create_encoder(self.name, pretrained=True)
        return f"timm's {self.name}", encoder.state_dict(prefix="encoder.")


class TimmEncoder(EncoderNet):
    """timm's `encoder` with a decoder that is `width` channels wide; "aux" reads the encoder at stride 8.

    The decoder sums the encoder's features at strides 32, 16 and 8 from coarse to fine, like a feature pyramid
    (arXiv:1612.03144). The coarsest features are gated by their mean over the image, as in LR-ASPP.

    With `pretrained`, timm's weights of the encoder are loaded for step 0, from timm's cache or from the internet.
    `encoder` may name them, as in "resnet18.a1_in1k". Raises ConfigError when timm is not installed or does not know
    the encoder, and when the encoder has no features at strides 8, 16 and 32.
    """

    scale: Tensor | None
    shift: Tensor | None

    def __init__(
        self,
        num_classes: int,
        *,
        encoder: str = "mobilenetv3_large_100",
        pretrained: bool = False,
        width: int = 128,
    ) -> None:
        super().__init__(encoder, pretrained)

        info = self.encoder.feature_info
        strides, channels = info.reduction(), info.channels()
        if [strides.count(stride) for stride in STRIDES] != [1, 1, 1]:
            raise ConfigError(
                f"model.args.encoder = {encoder}: it has features at strides {', '.join(map(str, strides))}, but one "
                f"each at 8, 16 and 32 was needed. Choose an encoder such as mobilenetv3_large_100 or resnet18."
            )

        self.places = [strides.index(stride) for stride in STRIDES]
        fine, middle, coarse = (channels[place] for place in self.places)
        self.lateral = nn.ModuleList(
            conv_bn(num, width, 1) for num in (fine, middle, coarse)
        )
        self.gate = nn.Sequential(
            GlobalPool(), nn.Conv2d(coarse, width, 1, bias=False), nn.Sigmoid()
        )
        self.smooth = separable(width, width)
        self.head = nn.Sequential(nn.Dropout(0.1), Classifier(width, num_classes, 1))
        self.train_only = nn.ModuleDict({"aux": SegHead(fine, 64, num_classes)})
        self.init_decoder()
        self.published_keys = _file_keys(self.encoder)
        scale, shift = _normalization(encoder)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def features(self, image: Tensor) -> Features:
        """Logits (B, num_classes, H/8, W/8)."""
        if self.scale is not None and self.shift is not None:
            image = image * self.scale + self.shift

        features = self.encoder(image)
        tapped = [features[place] for place in self.places]
        if getattr(self.encoder, "output_fmt", "NCHW") == "NHWC":
            tapped = [feature.permute(0, 3, 1, 2) for feature in tapped]
        fine, _, coarse = tapped
        x = F.relu(self.lateral[2](coarse)) * self.gate(coarse)
        for place in (1, 0):
            finer = self.lateral[place](tapped[place])
            x = F.relu(upsample_like(x, finer) + finer)

        return self.head(self.smooth(x)), {"aux": fine}


def create_encoder(name: str, *, pretrained: bool = False) -> Any:
    """timm's encoder `name`, which returns features. Raises ConfigError for a name that timm does not know."""
    try:
        timm = import_module("timm")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "This network needs the package timm, which is not installed. Run: pip install 'segpipe[timm]'"
        ) from error

    bare = name.partition(".")[0]
    if not timm.is_model(bare):
        raise ConfigError(
            f"model.args.encoder = {name!r} is not a timm encoder.{nearest(bare, timm.list_models())}"
        )

    try:
        return timm.create_model(name, features_only=True, pretrained=pretrained)
    except Exception as error:  # from timm, the hub's client or the network
        reason = first_line(error)
        problem = f"model.args.encoder = {name}: timm cannot build it as a feature extractor: {reason}"
        if pretrained:
            problem = (
                f"model.args.pretrained = true, but the weights of {name} are neither in timm's cache nor could they "
                f"be downloaded ({reason}). Copy them into HF_HOME (~/.cache/huggingface), or download "
                f"model.safetensors of {name} and set model.args.pretrained=false model.weights=FILE "
                "model.weights_partial=true."
            )
        raise ConfigError(problem) from error


def _file_keys(encoder: Any) -> Keys:
    """Renames ours to the names in timm's files: to extract features, timm flattens `stem.conv` to `stem_conv`."""
    children = [name for name, _ in encoder.named_children()]
    if children in (["model"], ["body"]):  # wrapped, not flattened
        return ((rf"^encoder\.{children[0]}\.", ""),)
    taps = [name.split(".") for name in encoder.feature_info.module_name()]
    parts = "|".join(sorted({"stem", *(tap[0] for tap in taps if len(tap) > 1)}))
    return (r"^encoder\.", ""), (rf"^({parts})_", r"\1.")


def _normalization(encoder: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Scale and shift, (1, 3, 1, 1), from ImageNet's mean and deviation to the encoder's; None if they are equal."""
    config = import_module("timm.models").get_pretrained_cfg(encoder)
    ours = IMAGENET_MEAN, IMAGENET_STD
    if config is None or (tuple(config.mean), tuple(config.std)) == ours:
        return None, None

    mean, std, its_mean, its_std = (
        torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)
        for values in (*ours, config.mean, config.std)
    )
    return (std / its_std).float(), ((mean - its_mean) / its_std).float()


class LRASPP(SegmentationNet):
    """LR-ASPP on MobileNetV3-Large, arXiv:1905.02244: 3,221,198 parameters (19 classes), all used in inference.

    Tensors have torchvision's names.
    """

    size_multiple = 16

    def __init__(self, num_classes: int) -> None:
        super().__init__()

        # A second of imports, including torch's compiler, that other networks do not need.
        from torchvision.models.segmentation import lraspp_mobilenet_v3_large

        net = lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=num_classes
        )
        self.backbone, self.classifier = net.backbone, net.classifier
        self.train_only = nn.ModuleDict()
        init_near_zero(self.classifier.low_classifier)
        init_near_zero(self.classifier.high_classifier)

    def features(self, image: Tensor) -> Features:
        """Main logits (B, num_classes, H/8, W/8)."""
        features, parts = self.backbone(image), self.classifier
        low, high = features["low"], features["high"]
        # torchvision's own forward would resize with an op that is nondeterministic on CUDA.
        context = upsample_like(parts.cbr(high) * parts.scale(high), low)
        return parts.low_classifier(low) + parts.high_classifier(context), {}


def smp(
    num_classes: int, *, arch: str = "unet", encoder: str = "resnet18", **args: Any
) -> nn.Module:
    """The network `arch` on `encoder`, with random weights; `args` go to its class. Logits have the image's size.

    It is trained like a user's network: its resizes take torch's slow deterministic path on CUDA, and some networks
    need sides that are multiples of 32. Raises ConfigError when the package is not installed, or knows no such network.
    """
    try:
        package = import_module("segmentation_models_pytorch")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "model.name = smp needs segmentation-models-pytorch. Run: pip install 'segpipe[smp]'"
        ) from error

    try:
        net: nn.Module = package.create_model(
            arch,
            encoder,
            encoder_weights=None,
            activation=None,
            classes=num_classes,
            **args,
        )
    except Exception as error:  # KeyError, TypeError, ValueError ..., by what is wrong
        raise ConfigError(
            f"model.args: segmentation-models-pytorch cannot build {arch} on {encoder}: {first_line(error)}. segpipe "
            f"sets classes, activation and encoder_weights (use model.weights=FILE model.weights_partial=true)."
        ) from error

    return net
