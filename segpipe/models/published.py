"""Loads the state dicts that the networks' authors publish."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from segpipe.errors import CheckpointError, ConfigError
from segpipe.models import ddrnet, fast_scnn, pidnet
from segpipe.models.layers import SegmentationNet

_BUILD: dict[str, Callable[[int], SegmentationNet]] = {
    "fast_scnn": partial(fast_scnn.FastSCNN, aux=False),
    "ddrnet23_slim": ddrnet.ddrnet23_slim,
    "pidnet_s": pidnet.pidnet_s,
}
_KEYS: dict[str, dict[str, str]] = {
    "fast_scnn": fast_scnn.PUBLISHED_KEYS,
    "ddrnet23_slim": ddrnet.PUBLISHED_KEYS,
    "pidnet_s": pidnet.PUBLISHED_KEYS,
}
_MAX_NAMED = 5


def load(name: str, state_dict: Mapping[str, Tensor], num_classes: int = 19) -> SegmentationNet:
    """The network `name` as published, with its published auxiliary heads and the weights of `state_dict`.

    A prefix `module.` or `model.` that all keys share is dropped. Raises CheckpointError that names the keys when any
    is left over, missing or of another shape, and ConfigError for an unknown name.
    """
    if name not in _BUILD:
        raise ConfigError(f"model.name = {name!r}, but published weights fit one of {', '.join(_BUILD)}.")
    net = _BUILD[name](num_classes)
    given = _without_prefix(state_dict)
    own = net.state_dict()
    published = {published_key(key, _KEYS[name]): key for key in own}
    misshapen = [
        f"{key} {_shape(given[key])}, needed {_shape(own[ours])}"
        for key, ours in published.items()
        if key in given and _shape(given[key]) != _shape(own[ours])
    ]
    problems = {
        "missing": [key for key in published if key not in given],
        "left over": [key for key in given if key not in published],
        "of another shape": misshapen,
    }
    if any(problems.values()):
        listed = "; ".join(_listed(what, keys) for what, keys in problems.items() if keys)
        raise CheckpointError(
            f"state dict does not fit {name} with {num_classes} classes: {listed}. "
            "Check that model name and num_classes are those the weights were trained with."
        )
    net.load_state_dict({ours: given[key] for key, ours in published.items()})
    return net


def published_key(key: str, prefixes: Mapping[str, str]) -> str:
    """Published name of our `key`: its longest prefix among `prefixes`, replaced."""
    longest = max((prefix for prefix in prefixes if key.startswith(prefix)), key=len)
    return prefixes[longest] + key.removeprefix(longest)


def _without_prefix(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    given = dict(state_dict)
    for prefix in ("module.", "model."):
        if all(key.startswith(prefix) for key in given):
            given = {key.removeprefix(prefix): value for key, value in given.items()}
    return given


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _listed(what: str, keys: list[str]) -> str:
    rest = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
    return f"{len(keys)} {what} ({', '.join(keys[:_MAX_NAMED])}{rest})"
