"""Networks against the published ones (outputs, parameter counts, key maps), and their common interface."""

from typing import Any

import numpy as np
import pytest
import torch
from parity import PARITY, PUBLISHED, description, published_network, state_dict
from torch import Tensor, nn

from segpipe.errors import ConfigError
from segpipe.models import MODELS, SegmentationNet, build_model
from segpipe.models.ddrnet import DDRNet
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.pidnet import PIDNet
from segpipe.models.resize import bilinear

any_model = pytest.mark.parametrize("name", sorted(MODELS))


def reference_image() -> Tensor:
    k, y, x = np.ogrid[:3, :128, :256]
    image = 1.5 * np.sin(0.05 * x + 0.03 * y + k) + 0.3 * np.cos(
        0.4 * x - 0.2 * y * (k + 1)
    )
    return torch.from_numpy(image.astype(np.float32))[None]


def published_heads(name: str, net: SegmentationNet) -> dict[str, Tensor]:
    """All heads on the reference image, with the names and sizes of the reference outputs.

    Those of DDRNet have their names swapped: "aux" is the output of `final_layer`, which reads 128 channels.
    """
    image = reference_image()
    logits = net.logits(image, aux=True)
    if name == "fast_scnn":
        logits = {
            "main": bilinear(
                logits["main"], (image.shape[-2], image.shape[-1]), align_corners=True
            )
        }
    swapped = {"main": "aux", "aux": "main"} if name == "ddrnet23_slim" else {}
    return {swapped.get(head, head): value for head, value in logits.items()}


@torch.no_grad()
def worst_disagreement(name: str, net: SegmentationNet) -> float:
    """Largest |ours - reference| / std(reference) over the heads."""
    worst = 0.0
    with np.load(PARITY / f"{name}.npz") as reference:
        for head, ours in published_heads(name, net.eval()).items():
            expected = torch.from_numpy(reference[head])
            step = ours.shape[-1] // expected.shape[-1]
            worst = max(
                worst,
                float(
                    (ours[..., ::step, ::step] - expected).abs().max() / expected.std()
                ),
            )
    return worst


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_outputs_are_those_of_the_published_network(name: str) -> None:
    net = published_network(name).eval()
    assert set(published_heads(name, net)) == set(description(name)["heads"])
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
def test_control_one_weight_tensor_off_by_a_percent_fails_parity(
    name: str, key: str
) -> None:
    weights = state_dict(name)
    weights[key] *= 1.01
    assert worst_disagreement(name, published_network(name, weights)) > 1e-4


def test_control_the_other_align_corners_fails_parity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = published_network("pidnet_s")
    monkeypatch.setattr(
        "segpipe.models.layers.bilinear",
        lambda x, size: bilinear(x, size, align_corners=True),
    )
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
    assert set(logits) == {"main", *net.train_only}
    channels = {head: 1 if head == "boundary" else 5 for head in logits}
    assert {head: x.shape[1] for head, x in logits.items()} == channels
    assert len({x.shape[2:] for x in logits.values()}) == 1
    if size == (96, 128):
        assert logits["main"].shape[2:] == (
            96 // net.output_stride,
            128 // net.output_stride,
        )
    sum(x.sum() for x in logits.values()).backward()
    assert [
        key for key, parameter in net.named_parameters() if parameter.grad is None
    ] == []


@any_model
def test_auxiliary_heads_train_themselves_and_the_trunk(name: str) -> None:
    net = build_model(name, 5)
    for head in net.train_only:
        net.zero_grad()
        net.logits(torch.randn(2, 3, 64, 64), aux=True)[head].square().sum().backward()
        reached = {
            key
            for key, parameter in net.named_parameters()
            if parameter.grad is not None
        }
        assert {
            key
            for key, _ in net.named_parameters()
            if key.startswith(f"train_only.{head}.")
        } <= reached
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


@torch.no_grad()
def test_where_the_auxiliary_heads_are_attached() -> None:
    """PIDNet's read after a ReLU, DDRNet's before it."""
    image, seen = torch.randn(2, 3, 64, 64), {}
    for name in ("pidnet_s", "ddrnet23_slim"):
        net = build_model(name, 5)
        for head, module in net.train_only.items():
            module.register_forward_pre_hook(
                lambda _, args, key=(name, head): seen.update(
                    {key: args[0].min().item()}
                )
            )
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


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"pidnet-s.*fast_scnn, ddrnet23_slim, pidnet_s"
    ):
        build_model("pidnet-s", 19)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    net = build_model("ddrnet23_slim", 19)
    weight = net.get_parameter("context4.1.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert net.get_parameter("context4.1.bn2.weight").eq(1).all()
    assert net.get_parameter("context4.1.bn2.bias").eq(0).all()
