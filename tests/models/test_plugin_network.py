"""A network of the user: its outputs by name, what it may not do, and how it is built."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from segpipe import plugins
from segpipe.errors import ConfigError
from segpipe.models import build_model, check_model
from segpipe.models.plugin_network import PluginNetwork, ShardGuard, named_heads
from segpipe.settings.config import from_mapping

IMAGE = torch.randn(2, 3, 16, 24)
NETS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        output_stride, align_corners = 16, True  # that of an encoder

        def __init__(self, num_classes, width=4):
            super().__init__()
            self.body = nn.Conv2d(3, width, 3, stride=4, padding=1)
            self.head = nn.Conv2d(width, num_classes, 1)

        def forward(self, image):
            return self.head(self.body(image))

    def build(num_classes):
        return nn.Conv2d(3, num_classes, 2, stride=2)

    def nothing(num_classes):
        return 3
"""


class Outputs(nn.Module):
    """Returns what it is given, and counts its forwards in a buffer if asked to."""

    def __init__(
        self, outputs: Callable[[Tensor], Any], *, counts: bool = False
    ) -> None:
        super().__init__()
        self.conv, self.outputs = nn.Conv2d(3, 5, 1), outputs
        self.norm = nn.BatchNorm2d(5)
        self.register_buffer("seen", torch.zeros(()))
        self.counts = counts

    def forward(self, image: Tensor) -> Any:
        if self.counts:
            self.seen += 1
        return self.outputs(self.norm(self.conv(image)))


def heads(outputs: Callable[[Tensor], Any], **options: Any) -> dict[str, Tensor]:
    return PluginNetwork(Outputs(outputs, **options), 5, "net:Net").logits(
        IMAGE, aux=True
    )


def test_heads_have_names() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert list(named_heads(x, "")) == ["main"]
    assert named_heads([x, y, y], "") == {"main": x, "aux1": y, "aux2": y}
    assert list(named_heads({"aux": y, "main": x, "deep": y}, "")) == [
        "main",
        "aux",
        "deep",
    ]
    assert named_heads({"out": x, "aux": y}, "")["main"] is x
    for wrong in (
        None,
        [],
        {"logits": x},
        {"main": [x]},
        [x, 3],
        {"main": x, "dice": y},
        {"main": x, "total": y},
    ):
        with pytest.raises(
            ConfigError,
            match=r"model.name = net:Net: its forward returned a (NoneType|list|dict)",
        ):
            named_heads(wrong, "net:Net")


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            lambda x: x[:, :4],
            r"head main is torch.float32 \(2, 4, 16, 24\).*float \(2, 5, h, w\) was needed",
        ),
        (lambda x: x.argmax(1), r"head main is torch.int64 \(2, 16, 24\)"),
        (lambda x: x[:1], r"head main is torch.float32 \(1, 5, 16, 24\)"),
        (lambda x: [x, x[:, :1]], "head aux1 is .* logits for 5 classes"),
        (
            lambda x: {"main": x, "boundary": x},
            r"head boundary is .* logits for 1 channel",
        ),
    ],
)
def test_outputs_of_another_shape_are_refused(
    outputs: Callable[[Tensor], Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        heads(outputs)


def test_a_boundary_head_has_one_channel() -> None:
    assert list(heads(lambda x: {"main": x, "boundary": x[:, :1]})) == [
        "main",
        "boundary",
    ]


def test_heads_may_be_fewer_in_eval_mode_only() -> None:
    number = iter([2, 2, 1, 1, 1])
    net = PluginNetwork(Outputs(lambda x: [x] * next(number)), 5, "net:Net")
    assert list(net.logits(IMAGE, aux=True)) == ["main", "aux1"]
    assert list(net.logits(IMAGE, aux=False)) == ["main"]
    assert net.eval()(IMAGE).shape == (2, 5, 16, 24)
    with pytest.raises(
        ConfigError, match="returned the heads main, but before that main, aux1"
    ):
        net.train().logits(IMAGE, aux=True)


def shard(net: nn.Module) -> None:
    """A forward under guard."""
    net = PluginNetwork(net, 5, "net:Net")
    guard = ShardGuard(from_mapping({"model": {"name": "net:Net"}}), net)
    guard.start()
    net.logits(IMAGE, aux=True)
    guard.check(0, 0)


def test_state_outside_batchnorm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"changes net\.seen: shards"):
        shard(Outputs(lambda x: x, counts=True))
    net = PluginNetwork(Outputs(lambda x: x), 5, "net:Net")
    before = net.net.norm.running_mean.clone()
    net.logits(IMAGE, aux=True)
    assert not torch.equal(net.net.norm.running_mean, before)


@pytest.mark.parametrize("way", ["assigned", "written late", "removed"])
def test_state_is_refused_however_and_whenever_it_changes(way: str) -> None:
    net = Outputs(lambda x: x)

    def change(module: nn.Module, inputs: Any) -> None:
        if way == "assigned":
            module.seen = 0.9 * module.seen + 0.1 * inputs[0].mean()
        elif way == "removed":
            module.seen = None
        else:
            module.seen.add_(1)

    shard(net)
    net.register_forward_pre_hook(change)
    with pytest.raises(ConfigError, match=r"changes net\.seen: shards"):
        shard(net)


class OwnNorm(nn.BatchNorm2d):
    """Moves its statistics by hand: in place, by another tensor, or one of its own beside them."""

    def __init__(self, channels: int, way: str) -> None:
        super().__init__(channels)
        self.way = way
        self.register_buffer("largest", torch.ones(()))

    def forward(self, image: Tensor) -> Tensor:
        mean = image.detach().mean((0, 2, 3))
        if self.way == "in place":
            self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
        elif self.way == "replaced":
            self.running_mean = 0.9 * self.running_mean + 0.1 * mean
        elif self.way == "beside":
            self.largest.copy_(mean.max())
        return image - mean[:, None, None]


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("in place", ""),
        (
            "replaced",
            r"replaces net\.norm\.running_mean by another tensor: .* by copy_",
        ),
        ("beside", r"changes net\.norm\.largest: shards"),
    ],
)
def test_a_norm_of_the_user_may_move_what_is_averaged_in_place(
    way: str, says: str
) -> None:
    net = Outputs(lambda x: x)
    net.norm = OwnNorm(5, way)
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
        shard(net)


def test_a_buffer_may_be_a_cache_for_the_size_of_the_image() -> None:
    net = PluginNetwork(Outputs(lambda x: x), 5, "net:Net")
    guard = ShardGuard(from_mapping({"model": {"name": "net:Net"}}), net)

    def cache(module: nn.Module, inputs: Any) -> None:
        if module.seen.shape != inputs[0].shape[2:]:
            module.seen = torch.ones(inputs[0].shape[2:])

    net.net.register_forward_pre_hook(cache)
    for image in (IMAGE, IMAGE[..., :8], IMAGE):
        guard.start()
        net.logits(image, aux=True)
        guard.check(0, 0)
        assert net.net.seen.shape == image.shape[2:]


def test_it_is_built_from_an_import_path(project: Callable[[str, str], None]) -> None:
    project("net.py", NETS)
    net = build_model("net:Net", 5, {"width": 6})
    assert list(net.state_dict()) == [
        "net.body.weight",
        "net.body.bias",
        "net.head.weight",
        "net.head.bias",
    ]
    assert net.state_dict()["net.body.weight"].shape[0] == 6
    assert (net.output_stride, net.align_corners, list(net.train_only)) == (4, True, [])
    built = build_model("net:build", 5)
    assert (built.output_stride, built.align_corners, built.training) == (
        2,
        False,
        True,
    )
    assert PluginNetwork(nn.PixelUnshuffle(14), 588, "patches").output_stride == 14
    with pytest.raises(
        ConfigError,
        match=r"net:nothing returned a int, but a torch.nn.Module was needed",
    ):
        build_model("net:nothing", 5)
    with pytest.raises(
        ConfigError,
        match=r"model.args.widht is not an argument of net:Net, which takes width\. Did",
    ):
        check_model("net:Net", {"widht": 3})


def test_networks_of_ours_take_their_own_arguments_only() -> None:
    assert not build_model("fast_scnn", 5, {"aux": False}).train_only
    with pytest.raises(
        ConfigError,
        match=r"model.args.planes is not an argument of pidnet_s, which takes none\.",
    ):
        build_model("pidnet_s", 5, {"planes": 3})


def test_a_network_of_our_kind_is_not_wrapped(
    project: Callable[[str, str], None],
) -> None:
    project(
        "net.py",
        "from segpipe.models.fast_scnn import FastSCNN\nclass Mine(FastSCNN): pass",
    )
    assert type(build_model("net:Mine", 5)).__name__ == "Mine"
    plugins.trust(["torch"])
    with pytest.raises(ConfigError, match="must accept the keyword num_classes"):
        build_model("torch.nn:Conv2d", 5)
