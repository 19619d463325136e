"""The networks by name: one architecture per file, implemented from the paper cited at its top."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from segpipe import plugins
from segpipe.errors import ConfigError
from segpipe.models import resize
from segpipe.models.bisenetv2 import BiSeNetV2
from segpipe.models.dabnet import DABNet
from segpipe.models.ddrnet import ddrnet23, ddrnet23_slim, ddrnet39
from segpipe.models.efficientvit import efficientvit_seg_b0, efficientvit_seg_b1
from segpipe.models.erfnet import ERFNet
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.layers import SegmentationNet
from segpipe.models.lraspp import LRASPP
from segpipe.models.pidnet import pidnet_l, pidnet_m, pidnet_s
from segpipe.models.plugin_network import PluginNetwork
from segpipe.models.pp_liteseg import pp_liteseg_b, pp_liteseg_t
from segpipe.models.regseg import regseg, regseg_exp53
from segpipe.models.smp import smp
from segpipe.models.stdc import stdc1, stdc2
from segpipe.models.timm_encoder import TimmEncoder
from segpipe.settings.setting import nearest

KEY = "model.name"
MODELS: dict[str, Callable[..., nn.Module]] = {
    "fast_scnn": FastSCNN,
    "ddrnet23_slim": ddrnet23_slim,
    "ddrnet23": ddrnet23,
    "ddrnet39": ddrnet39,
    "pidnet_s": pidnet_s,
    "pidnet_m": pidnet_m,
    "pidnet_l": pidnet_l,
    "erfnet": ERFNet,
    "dabnet": DABNet,
    "regseg": regseg,
    "regseg_exp53": regseg_exp53,
    "bisenetv2": BiSeNetV2,
    "stdc1": stdc1,
    "stdc2": stdc2,
    "pp_liteseg_t": pp_liteseg_t,
    "pp_liteseg_b": pp_liteseg_b,
    "lraspp": LRASPP,
    "efficientvit_seg_b0": efficientvit_seg_b0,
    "efficientvit_seg_b1": efficientvit_seg_b1,
    "timm": TimmEncoder,
    "smp": smp,
}


def build_model(
    name: str, num_classes: int, args: Mapping[str, Any] = MappingProxyType({})
) -> SegmentationNet:
    """The network `name` with auxiliary heads and fresh weights, drawn from torch's global generator.

    `name` is one of MODELS, or the import path package.module:Name of a class, or a function, that is called with
    `num_classes` and `args` by keyword and returns a module. Raises ConfigError for an unknown name or argument, and
    for an error in the user's code.
    """
    net = plugins.call(KEY, name, _builder(name), args, num_classes=num_classes)
    if not isinstance(net, nn.Module):
        raise ConfigError(
            f"{KEY} = {name} returned a {type(net).__name__}, but a torch.nn.Module was needed."
        )
    return (
        net
        if isinstance(net, SegmentationNet)
        else PluginNetwork(net, num_classes, name)
    )


def check_model(name: str, args: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the network exists and takes these arguments. Builds nothing."""
    plugins.check_arguments(KEY, name, _builder(name), args, num_classes=1)


def _triton_resize() -> Any:
    from segpipe.models import (
        triton_resize,
    )  # seconds to import, and not installed everywhere

    return triton_resize


resize.import_kernels = _triton_resize


def _builder(name: str) -> Callable[..., Any]:
    if plugins.is_path(name):
        found: Callable[..., Any] = plugins.load(KEY, name)
        return found
    if name not in MODELS:
        raise ConfigError(
            f"{KEY} = {name!r} is not one of {', '.join(MODELS)}.{nearest(name, list(MODELS))}"
        )
    return MODELS[name]
