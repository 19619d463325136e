"""State dicts that the networks' authors publish, in our networks."""

from collections.abc import Callable, Mapping

from torch import Tensor

from segpipe.errors import CheckpointError
from segpipe.models import MODELS, build_model, ddrnet, fast_scnn, pidnet
from segpipe.models.layers import SegmentationNet

_KEYS: dict[str, dict[str, str]] = {
    "fast_scnn": fast_scnn.PUBLISHED_KEYS,
    "ddrnet23_slim": ddrnet.PUBLISHED_KEYS,
    "pidnet_s": pidnet.PUBLISHED_KEYS,
}
_BUILD: dict[str, Callable[[int], SegmentationNet]] = {
    **MODELS,
    "fast_scnn": lambda num_classes: fast_scnn.FastSCNN(num_classes, aux=False),
}
# The reference outputs of DDRNet bear each other's names: the published code returns the final layer first, and its
# "aux" is what `final_layer` computes. `logits` and `forward` are not touched by this; `heads` of a loaded network is.
_REFERENCE_NAMES = {"ddrnet23_slim": {"main": "aux", "aux": "main"}}
_MAX_NAMED = 5


def load(name: str, state_dict: Mapping[str, Tensor], num_classes: int = 19) -> SegmentationNet:
    """The network `name` as published, auxiliary heads included where it has any, with the weights of `state_dict`.

    A `module.` or `model.` in front of every key is dropped. Raises CheckpointError, with the keys, when any key is
    left over, missing or of another shape; ConfigError for an unknown name.
    """
    net = _BUILD[name](num_classes) if name in _BUILD else build_model(name, num_classes)
    given = _without_prefix(state_dict)
    own = net.state_dict()
    published = {published_key(key, _KEYS[name]): key for key in own}
    problems = [
        _listed("missing", [key for key in published if key not in given]),
        _listed("left over", [key for key in given if key not in published]),
        _listed(
            "of another shape",
            [
                f"{key} {_shape(given[key])}, needed {_shape(own[ours])}"
                for key, ours in published.items()
                if key in given and _shape(given[key]) != _shape(own[ours])
            ],
        ),
    ]
    if any(problems):
        raise CheckpointError(
            f"state dict does not fit {name} with {num_classes} classes: {'; '.join(filter(None, problems))}. "
            "Check that model name and num_classes are those the weights were trained with."
        )
    net.load_state_dict({ours: given[key] for key, ours in published.items()})
    net.reference_names = _REFERENCE_NAMES.get(name, {})
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


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _listed(what: str, items: list[str]) -> str:
    if not items:
        return ""
    rest = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return f"{len(items)} {what} ({', '.join(items[:_MAX_NAMED])}{rest})"
