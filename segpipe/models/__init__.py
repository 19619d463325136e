"""The networks by name: one architecture per file, implemented from the paper cited at its top."""

from collections.abc import Callable

from segpipe.errors import ConfigError
from segpipe.models.ddrnet import ddrnet23_slim
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.layers import SegmentationNet
from segpipe.models.pidnet import pidnet_s
from segpipe.settings.setting import nearest

MODELS: dict[str, Callable[[int], SegmentationNet]] = {
    "fast_scnn": FastSCNN,
    "ddrnet23_slim": ddrnet23_slim,
    "pidnet_s": pidnet_s,
}


def build_model(name: str, num_classes: int) -> SegmentationNet:
    """The network `name` with auxiliary heads and fresh weights, drawn from torch's global generator.

    Raises ConfigError for an unknown name.
    """
    if name not in MODELS:
        raise ConfigError(f"model.name = {name!r} is not one of {', '.join(MODELS)}.{nearest(name, list(MODELS))}")
    return MODELS[name](num_classes)
