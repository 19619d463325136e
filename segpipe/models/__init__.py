"""The networks by name: one architecture per file, implemented from the paper cited at its top."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from segpipe import plugins
from segpipe.errors import ConfigError
from segpipe.models.layers import SegmentationNet
from segpipe.models.plugin_network import PluginNetwork
from segpipe.settings.setting import nearest

KEY = "model.name"
# Module in this folder and name in it; a network's module is imported when the network is requested.
MODELS = {
    "fast_scnn": "fast_scnn:FastSCNN",
    "ddrnet23_slim": "ddrnet:ddrnet23_slim",
    "ddrnet23": "ddrnet:ddrnet23",
    "ddrnet39": "ddrnet:ddrnet39",
    "pidnet_s": "pidnet:pidnet_s",
    "pidnet_m": "pidnet:pidnet_m",
    "pidnet_l": "pidnet:pidnet_l",
    "erfnet": "erfnet:ERFNet",
    "dabnet": "dabnet:DABNet",
    "regseg": "regseg:regseg",
    "regseg_exp53": "regseg:regseg_exp53",
    "bisenetv2": "bisenetv2:BiSeNetV2",
    "stdc1": "stdc:stdc1",
    "stdc2": "stdc:stdc2",
    "pp_liteseg_t": "stdc:pp_liteseg_t",
    "pp_liteseg_b": "stdc:pp_liteseg_b",
    "lraspp": "packages:LRASPP",
    "efficientvit_seg_b0": "efficientvit:efficientvit_seg_b0",
    "efficientvit_seg_b1": "efficientvit:efficientvit_seg_b1",
    "timm": "packages:TimmEncoder",
    "smp": "packages:smp",
}


def build_model(
    name: str,
    num_classes: int,
    args: Mapping[str, Any] = MappingProxyType({}),
    seed: int | None = None,
) -> SegmentationNet:
    """The network `name` with auxiliary heads and initial weights, drawn from torch's global generator.

    `seed` sets that generator after the import of the user's module, which may draw.

    `name` is one of MODELS, or the import path package.module:Name of a class or function, which is called with
    `num_classes` and `args` by keyword and returns a module. Raises ConfigError for an unknown name or argument, and
    for an error in the user's code.
    """
    builder = _builder(name)
    if seed is not None:
        torch.manual_seed(seed)
    net = plugins.call(KEY, name, builder, args, num_classes=num_classes)
    if isinstance(net, SegmentationNet):
        return net

    if not isinstance(net, nn.Module):
        raise ConfigError(
            f"{KEY} = {name} returned a {type(net).__name__}, but a torch.nn.Module was needed."
        )

    return PluginNetwork(net, num_classes, name)


def check_model(name: str, args: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the network exists and takes these arguments. Builds nothing."""
    plugins.check_arguments(KEY, name, _builder(name), args, num_classes=1)


def _builder(name: str) -> Callable[..., Any]:
    if plugins.is_path(name):
        return plugins.load(KEY, name)

    if name not in MODELS:
        raise ConfigError(
            f"{KEY} = {name!r} is not one of {', '.join(MODELS)}.{nearest(name, MODELS)}"
        )

    module, _, builder = MODELS[name].partition(":")

    return getattr(import_module(f"segpipe.models.{module}"), builder)
