"""Networks of segmentation-models-pytorch, by their names there."""

from importlib import import_module
from typing import Any

from torch import nn

from segpipe.errors import ConfigError


def smp(
    num_classes: int,
    *,
    arch: str = "unet",
    encoder: str = "resnet18",
    **args: Any,
) -> nn.Module:
    """The network `arch` on `encoder`, with random weights; `args` are of its class. Logits have the image's size.

    It is trained as a network of the user's: its resizes take torch's slow deterministic path on CUDA, and some need
    sides that are multiples of 32. Raises ConfigError when the package is not installed, or knows no such network.
    """
    try:
        package = import_module("segmentation_models_pytorch")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "model.name = smp needs segmentation-models-pytorch. Run: pip install 'segpipe[smp]'"
        ) from error
    try:
        net: nn.Module = package.create_model(
            arch, encoder, encoder_weights=None, classes=num_classes, **args
        )
    except Exception as error:  # KeyError, TypeError, ValueError ..., by what is wrong
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.args: segmentation-models-pytorch cannot build {arch} on {encoder}: {reason}"
        ) from error
    net.output_stride = 1  # type: ignore[assignment]
    return net
