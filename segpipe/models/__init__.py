"""The networks by name: one architecture per file, made from the paper cited on its top."""

import difflib
from collections.abc import Callable

from segpipe.errors import ConfigError
from segpipe.models.ddrnet import ddrnet23_slim
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.layers import SegmentationNet
from segpipe.models.pidnet import pidnet_s

MODELS: dict[str, Callable[[int], SegmentationNet]] = {
    "fast_scnn": FastSCNN,
    "ddrnet23_slim": ddrnet23_slim,
    "pidnet_s": pidnet_s,
}


def build_model(name: str, num_classes: int) -> SegmentationNet:
    """The network `name` in training form, auxiliary heads included, with fresh weights from torch's global generator.

    Raises ConfigError for an unknown name.
    """
    if name not in MODELS:
        nearest = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"model.name = {name!r} is none of {', '.join(MODELS)}. Nearest: {nearest}.")
    return MODELS[name](num_classes)


__all__ = ["MODELS", "SegmentationNet", "build_model"]
