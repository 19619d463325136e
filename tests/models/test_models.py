"""The networks against the published ones: outputs, parameter counts, key maps; and their common interface."""

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.errors import CheckpointError, ConfigError
from segpipe.models import MODELS, SegmentationNet, build_model, published
from segpipe.models.ddrnet import DDRNet
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.pidnet import PIDNet
from segpipe.models.resize import bilinear

PARITY = Path(__file__).resolve().parents[1] / "data" / "parity"
any_model = pytest.mark.parametrize("name", sorted(MODELS))


def synthetic(key: str, shape: list[int]) -> Tensor:
    count = int(np.prod(shape))
    c, i = zlib.crc32(key.encode()) % 10007, np.arange(count, dtype=np.float64)
    u = np.sin(0.73 * i + c) * np.cos(0.0137 * ((c % 7) + 1) * i + 0.5 * c)
    if key.endswith("num_batches_tracked"):
        return torch.tensor(0)
    if key.endswith("running_mean"):
        u = 0.1 * u
    elif key.endswith("running_var"):
        u = 1 + 0.5 * u
    elif len(shape) == 1:
        u = 1 + 0.1 * u if key.endswith("weight") else 0.05 * u
    else:
        u = 1.4 * u * np.sqrt(2 * shape[0] / count)
    return torch.from_numpy(u.astype(np.float32).reshape(shape))


def reference_image() -> Tensor:
    k, y, x = np.ogrid[:3, :128, :256]
    image = 1.5 * np.sin(0.05 * x + 0.03 * y + k) + 0.3 * np.cos(0.4 * x - 0.2 * y * (k + 1))
    return torch.from_numpy(image.astype(np.float32))[None]


@cache
def description(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((PARITY / f"{name}.json").read_text())
    return loaded


def state_dict(name: str) -> dict[str, Tensor]:
    return {key: synthetic(key, shape) for key, shape in description(name)["state_dict"]}


@torch.no_grad()
def worst_disagreement(name: str, net: SegmentationNet) -> float:
    """Largest |ours - reference| / std(reference) over the heads."""
    worst = 0.0
    with np.load(PARITY / f"{name}.npz") as reference:
        for head, ours in net.eval().heads(reference_image()).items():
            expected = torch.from_numpy(reference[head])
            step = ours.shape[-1] // expected.shape[-1]
            worst = max(worst, float((ours[..., ::step, ::step] - expected).abs().max() / expected.std()))
    return worst


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@any_model
def test_outputs_are_those_of_the_published_network(name: str) -> None:
    net = published.load(name, state_dict(name)).eval()
    assert set(net.heads(reference_image())) == set(description(name)["heads"])
    assert count(net) == description(name)["parameters"]
    assert worst_disagreement(name, net) <= 1e-4


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fast_scnn", "global_feature_extractor.ppm.conv3.conv.0.weight"),
        ("ddrnet23_slim", "spp.scale3.3.weight"),
        ("pidnet_s", "spp.scale3.3.weight"),
    ],
)
def test_control_one_weight_tensor_off_by_a_percent_fails_parity(name: str, key: str) -> None:
    weights = state_dict(name)
    weights[key] *= 1.01
    assert worst_disagreement(name, published.load(name, weights)) > 1e-4


def test_control_the_other_align_corners_fails_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    net = published.load("pidnet_s", state_dict("pidnet_s"))
    monkeypatch.setattr("segpipe.models.layers.bilinear", lambda x, size: bilinear(x, size, align_corners=True))
    assert worst_disagreement("pidnet_s", net) > 1e-4


@pytest.mark.parametrize(
    ("net", "train", "inference"),
    [
        (lambda: build_model("fast_scnn", 19), 1_157_174, 1_138_051),
        (lambda: FastSCNN(19, aux=False), 1_138_051, 1_138_051),
        (lambda: build_model("ddrnet23_slim", 19), 5_734_342, 5_695_987),
        (lambda: DDRNet(19, planes=64, head_planes=128), 20_299_366, 20_148_947),
        (lambda: build_model("pidnet_s", 19), 7_720_935, 7_625_715),
        (lambda: PIDNet(19, planes=64), 28_763_111, 28_538_515),
    ],
)
def test_parameter_counts(net: Any, train: int, inference: int) -> None:
    with torch.device("meta"):
        built = net()
    assert (count(built), count(built) - count(built.train_only)) == (train, inference)


@any_model
@pytest.mark.parametrize("size", [(65, 97), (33, 40), (96, 128)])
def test_any_size_in_training(name: str, size: tuple[int, int]) -> None:
    net = build_model(name, 5)
    logits = net.logits(torch.randn(2, 3, *size), aux=True)
    assert set(logits) == {"main", *net.aux_heads}
    channels = {head: 1 if head == "boundary" else 5 for head in logits}
    assert {head: x.shape[1] for head, x in logits.items()} == channels
    assert len({x.shape[2:] for x in logits.values()}) == 1
    if size == (96, 128):
        assert logits["main"].shape[2:] == (96 // net.output_stride, 128 // net.output_stride)
    sum(x.sum() for x in logits.values()).backward()
    assert [key for key, parameter in net.named_parameters() if parameter.grad is None] == []


@any_model
def test_auxiliary_heads_train_themselves_and_the_trunk(name: str) -> None:
    net = build_model(name, 5)
    for head in net.aux_heads:
        net.zero_grad()
        net.logits(torch.randn(2, 3, 64, 64), aux=True)[head].square().sum().backward()
        reached = {key for key, parameter in net.named_parameters() if parameter.grad is not None}
        assert {key for key, _ in net.named_parameters() if key.startswith(f"train_only.{head}.")} <= reached
        assert next(iter(net.state_dict())) in reached
        assert not any(key.startswith(("head.", "classifier.")) for key in reached)


@any_model
@torch.no_grad()
def test_all_ways_to_the_main_logits_agree(name: str) -> None:
    net = build_model(name, 5).eval()
    image = torch.randn(1, 3, 65, 97)
    main = net(image)
    assert torch.equal(main, net.logits(image, aux=False)["main"])
    assert torch.equal(main, net.logits(image, aux=True)["main"])
    heads = net.heads(image)
    assert set(heads) == {"main", *net.aux_heads}
    if heads["main"].shape != main.shape:
        main = F.interpolate(main, size=(65, 97), mode="bilinear", align_corners=net.align_corners)
    assert torch.equal(heads["main"], main)


@torch.no_grad()
def test_where_the_auxiliary_heads_listen() -> None:
    """PIDNet's read after a ReLU, DDRNet's before it."""
    image, seen = torch.randn(2, 3, 64, 64), {}
    for name in ("pidnet_s", "ddrnet23_slim"):
        net = build_model(name, 5)
        for head, module in net.train_only.items():
            module.register_forward_pre_hook(lambda _, args, key=(name, head): seen.update({key: args[0].min().item()}))
        net.logits(image, aux=True)
    assert seen["pidnet_s", "aux_p"] == seen["pidnet_s", "boundary"] == 0
    assert seen["ddrnet23_slim", "aux"] < 0


@any_model
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@torch.no_grad()
def test_a_traced_network_computes_the_same(name: str) -> None:
    net = build_model(name, 5).eval()
    traced = torch.jit.trace(net, torch.randn(1, 3, 64, 96), check_trace=False)
    image = torch.randn(1, 3, 64, 96)
    torch.testing.assert_close(traced(image), net(image), rtol=0, atol=1e-6)


@any_model
@pytest.mark.parametrize("prefix", ["module.", "model.", "module.model."])
def test_published_prefixes_are_dropped_when_all_keys_have_them(name: str, prefix: str) -> None:
    weights = state_dict(name)
    net = published.load(name, {prefix + key: value for key, value in weights.items()})
    assert torch.equal(next(net.parameters()), next(published.load(name, weights).parameters()))
    key, *others = weights
    mixed = {prefix + key: weights[key], **{other: weights[other] for other in others}}
    with pytest.raises(CheckpointError, match=f"1 left over \\({prefix}{key}\\)"):
        published.load(name, mixed)


@any_model
def test_published_keys_that_do_not_fit_are_named(name: str) -> None:
    weights = state_dict(name)
    key = next(key for key, value in weights.items() if value.ndim == 4)
    with pytest.raises(CheckpointError, match=rf"1 missing \({key}\)\."):
        published.load(name, {other: value for other, value in weights.items() if other != key})
    with pytest.raises(CheckpointError, match=r"1 left over \(loss\.weight\)\."):
        published.load(name, {**weights, "loss.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=rf"1 of another shape \({key} \(2, 3\), needed \(32, 3, 3, 3\)\)\."):
        published.load(name, {**weights, key: torch.zeros(2, 3)})
    with pytest.raises(CheckpointError, match=r"with 7 classes: .* of another shape"):
        published.load(name, weights, num_classes=7)


@any_model
def test_published_errors_name_five_keys_then_count(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"\d+ missing \(([^,]+, ){4}[^,]+ and \d+ more\)"):
        published.load(name, {})


def test_published_key_maps_know_every_key() -> None:
    """No part of a network keeps our name by accident."""
    for name in MODELS:
        net = published._BUILD[name](19)
        keys = [published.published_key(key, published._KEYS[name]) for key in net.state_dict()]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("make", [build_model, lambda name, num: published.load(name, {}, num)])
def test_an_unknown_name_lists_the_valid_ones_and_the_nearest(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"pidnet-s.*fast_scnn, ddrnet23_slim, pidnet_s\. Nearest: pidnet_s\."):
        make("pidnet-s", 19)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    net = build_model("ddrnet23_slim", 19)
    weight = net.get_parameter("context4.1.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert net.get_parameter("context4.1.bn2.weight").eq(1).all()
    assert net.get_parameter("context4.1.bn2.bias").eq(0).all()
