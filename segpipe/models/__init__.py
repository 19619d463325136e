"""The networks by name: one architecture per file, implemented from the paper cited at its top."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from segpipe.errors import ConfigError
from segpipe.models.ddrnet import ddrnet23_slim
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.layers import SegmentationNet
from segpipe.models.pidnet import pidnet_s
from segpipe.models.timm_encoder import TimmEncoder
from segpipe.settings.setting import nearest

MODELS: dict[str, Callable[..., SegmentationNet]] = {
    "fast_scnn": FastSCNN,
    "ddrnet23_slim": ddrnet23_slim,
    "pidnet_s": pidnet_s,
    "timm": TimmEncoder,
}


def build_model(name: str, num_classes: int, args: Mapping[str, Any] = MappingProxyType({})) -> SegmentationNet:
    """The network `name` with auxiliary heads and fresh weights, drawn from torch's global generator.

    Raises ConfigError for an unknown name or argument.
    """
    if name not in MODELS:
        raise ConfigError(f"model.name = {name!r} is not one of {', '.join(MODELS)}.{nearest(name, list(MODELS))}")
    try:
        return MODELS[name](num_classes, **args)
    except TypeError as error:
        raise ConfigError(f"model.args = {dict(args)} does not fit model.name = {name}: {error}.") from error
