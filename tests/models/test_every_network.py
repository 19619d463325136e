"""The contract of every network in MODELS. It is the one place where all of them are tested.

SEGPIPE_EVERY=1 also trains and exports all of them by the command, and trains all of them with 1 and 2 processes, not
one alone; and it puts networks that differ from a smaller one in widths and depths through the tests that take seconds.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import trained_by
from runs import outcome, result, run, updates
from segpipe import IGNORE_INDEX
from segpipe.checks.contracts import NetworkContract
from segpipe.cli.api import evaluate
from segpipe.errors import ConfigError
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models import MODELS, SegmentationNet, build_model
from segpipe.models.layers import Classifier
from segpipe.models.weights import published_key
from segpipe.settings.config import from_mapping
from segpipe.settings.groups import LossConfig
from segpipe.train.checkpoint import load_network

C = 5
SIZE = 64
ARGS: dict[str, dict[str, Any]] = {
    "timm": {"encoder": "mobilenetv4_conv_small_035"},  # expects another normalization
}
MISSING = [] if find_spec("segmentation_models_pytorch") else ["smp"]
NETWORKS = [name for name in MODELS if name not in MISSING]
EVERY = bool(os.environ.get("SEGPIPE_EVERY"))
SIBLINGS = {
    "pidnet_m",
    "pidnet_l",
    "ddrnet23",
    "ddrnet39",
    "regseg_exp53",
    "stdc2",
    "pp_liteseg_b",
    "efficientvit_seg_b1",
}
every_network = pytest.mark.parametrize("name", NETWORKS, scope="module")
every_architecture = pytest.mark.parametrize(
    "name", [name for name in NETWORKS if EVERY or name not in SIBLINGS], scope="module"
)


@pytest.fixture(scope="module")
def fresh(name: str) -> Callable[[], SegmentationNet]:
    """Makes copies of a network with its first weights."""
    torch.manual_seed(0)
    built = build_model(name, C, ARGS.get(name, {}))
    return lambda: copy.deepcopy(built)


def image(height: int = SIZE, width: int = SIZE, batch: int = 2) -> Tensor:
    return torch.randn(
        batch, 3, height, width, generator=torch.Generator().manual_seed(0)
    )


@every_architecture
def test_clauses_of_networks_of_users(name: str) -> None:
    """Weights by the seed, odd sizes, gradients, randomness, batches, ops that CUDA repeats, copies."""
    config = from_mapping(
        {
            "model": {"name": name, "args": ARGS.get(name, {})},
            "augment": {"crop_size": [SIZE, SIZE]},
        }
    )
    problems = {}
    for clause, ask in NetworkContract(config, C, SIZE).questions().items():
        if clause != "the same in another start, on rank 1 of 2":  # seconds
            answer = ask()
            if answer and not answer.startswith("note"):
                problems[clause] = answer
    assert not problems


@every_network
@torch.no_grad()
def test_sizes_and_heads(name: str, fresh: Callable[[], SegmentationNet]) -> None:
    net = fresh().eval()
    side = max(net.size_multiple, SIZE)
    for height, width in ((side, 2 * side), (65, 97)):
        one = image(height, width, 1)
        heads = net.logits(one, aux=True)
        assert set(heads) == {"main", *net.train_only}
        for head, logits in heads.items():
            assert logits.shape[1] == (1 if head == "boundary" else C)
        main = heads["main"]
        assert torch.equal(main, net(one))
        assert torch.equal(main, net.logits(one, aux=False)["main"])
        if height == side:
            stride = net.output_stride
            assert main.shape[2:] == (height // stride, width // stride)


@every_network
@torch.no_grad()
def test_initial_weights_neither_vanish_nor_blow_up(
    name: str, fresh: Callable[[], SegmentationNet]
) -> None:
    """Moments of every layer, those of encoders too, and a first loss of log(classes)."""
    net = fresh().train()
    for key, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.bias.eq(0).all(), key
            assert module.weight.unique().tolist() in ([0.0], [1.0]), key
            assert module.running_mean is not None
            assert module.running_mean.eq(0).all(), key
            assert module.running_var is not None
            assert module.running_var.eq(1).all(), key
        elif isinstance(module, nn.Conv2d) and module.weight.numel() >= 1000:
            std, mean = torch.std_mean(module.weight)
            area = module.weight[0, 0].numel()
            fans = [length * area for length in module.weight.shape[:2]]
            near_zero = isinstance(module, Classifier)
            assert abs(mean) <= 6 * std / module.weight.numel() ** 0.5, key
            assert std**2 * min(fans) <= 2.5, key  # Kaiming: 2
            assert near_zero or std**2 * max(fans) >= 0.25, key  # torch's own: 1/3
    target = torch.randint(0, C, (2, SIZE, SIZE))
    for head, logits in net.logits(image(), aux=True).items():
        if head != "boundary":
            labels = target[:, : logits.shape[2], : logits.shape[3]]
            loss = nn.functional.cross_entropy(logits, labels)
            assert loss.item() == pytest.approx(math.log(C), rel=0.15), head


@every_network
def test_auxiliary_heads_train_themselves_and_the_trunk(
    name: str, fresh: Callable[[], SegmentationNet]
) -> None:
    net = fresh()
    for head in net.train_only:
        net.zero_grad()
        net.logits(image(), aux=True)[head].square().sum().backward()
        reached = {
            key for key, value in net.named_parameters() if value.grad is not None
        }
        own = {
            key
            for key, _ in net.named_parameters()
            if key.startswith(f"train_only.{head}.")
        }
        assert own <= reached
        assert any(not key.startswith("train_only.") for key in reached)
        assert not any(key.startswith(("head.", "classifier.")) for key in reached)


@every_architecture
@torch.no_grad()
def test_channels_last_and_bf16_compute_the_same(
    name: str, fresh: Callable[[], SegmentationNet]
) -> None:
    net = fresh().eval()
    expected = net(image())
    scale = expected.std()
    with torch.autocast("cpu", torch.bfloat16):
        rough = net(image()).float()
    last = net.to(memory_format=torch.channels_last)
    close = last(image().to(memory_format=torch.channels_last))
    assert (close - expected).abs().max() <= 1e-3 * scale
    assert 0 < (rough - expected).abs().mean() <= 0.1 * scale


@every_architecture
def test_one_image_is_learned(name: str, fresh: Callable[[], SegmentationNet]) -> None:
    """With all losses of the heads, by a few updates."""
    net = fresh().train()
    batch = image().clamp(-1, 1)
    target = torch.zeros(2, SIZE, SIZE, dtype=torch.uint8)
    target[:, :, SIZE // 2 :] = 3
    target[:, :4] = IGNORE_INDEX
    batch[:, 0] += 2 * (target == 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    losses: list[float] = []
    while not losses or (losses[-1] > 0.6 * losses[0] and len(losses) < 25):
        heads = net.logits(batch, aux=True)
        parts = shard_loss(
            heads,
            target,
            LossConfig(name="ohem", dice_weight=1.0, boundary_weight=1.0),
            class_weights=None,
            global_valid=torch.tensor(valid_pixels(target)),
            align_corners=net.align_corners,
        )
        optimizer.zero_grad()
        parts["total"].backward()
        optimizer.step()
        losses.append(float(parts["main"]))
    assert losses[-1] <= 0.6 * losses[0], losses


@every_architecture
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_a_traced_network_computes_the_same(
    name: str, fresh: Callable[[], SegmentationNet]
) -> None:
    net = fresh().eval()
    traced = torch.jit.trace(net, image(batch=1), check_trace=False)
    other = image(batch=1).flip(3)
    torch.testing.assert_close(traced(other), net(other), rtol=0, atol=1e-5)


@every_network
def test_no_two_tensors_have_one_published_name(
    name: str, fresh: Callable[[], SegmentationNet]
) -> None:
    net = fresh()
    published = {published_key(key, net.published_keys) for key in net.state_dict()}
    assert len(published) == len(net.state_dict())


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"pidnet-s.*fast_scnn, ddrnet23_slim.*pidnet_s"
    ):
        build_model("pidnet-s", 19)


@pytest.mark.skipif("smp" not in MISSING, reason="segmentation-models-pytorch is here")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'segpipe\[smp\]'") as error:
        build_model("smp", C)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("argument", ["encoder_weights", "activation", "classes"])
def test_what_segpipe_sets_is_no_argument_of_a_network_of_smp(
    monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    """Softmax as its activation was trained with a second softmax in the loss."""
    package = ModuleType("segmentation_models_pytorch")
    package.create_model = lambda arch, encoder, **_: nn.Conv2d(3, C, 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    assert build_model("smp", C).output_stride == 1
    with pytest.raises(
        ConfigError, match=rf"'{argument}'.*segpipe sets classes.*weights"
    ):
        build_model("smp", C, {argument: "softmax2d"})


# With the real command

FILES = ("model.onnx", "model.torchscript.pt")
GATES = ["G1 integrity", "G2 logits", "G3 mask", "G4 preprocessing", "G5 quality", "latency"]  # fmt: skip
SHORT = (
    "data.size=[64,96]", "augment.crop_size=[64,96]", "data.num_train=32", "data.num_val=16", "train.steps=30",
    "compute.shards=1", "compute.samples_per_shard=4", "optim.name=adamw", "optim.lr=0.004", "optim.warmup_steps=5",
    "ema.decay=0.8", "checkpoint.every=0", "export.enabled=true", "export.formats=[onnx,torchscript]",
    "model.standardize=true",
)  # fmt: skip


def of_command(name: str) -> tuple[str, ...]:
    args = ARGS.get(name, {})
    return f"model={name}", *(
        f"model.args.{key}={value}" for key, value in args.items()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_exports")
@pytest.mark.skipif(not EVERY, reason="takes minutes: only with SEGPIPE_EVERY=1")
@pytest.mark.parametrize("name", NETWORKS)
def test_its_files_pass_after_a_short_training(name: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", *of_command(name), *SHORT) == 0
    losses = [line["loss"] for line in updates(tmp_path / "run")]
    assert losses[-1] < 0.9 * losses[0], "the network has learned something"
    assert load_network(tmp_path / "run", "last").preprocess.standardize
    again = evaluate(tmp_path / "run", settings={"data.workers": 0})
    assert again["miou"] == result(tmp_path / "run")["miou"]
    report = json.loads(
        (tmp_path / "run" / "export" / "verify_report.json").read_text()
    )
    assert report["gates"]["eager"]["G6 power"]["passed"]
    for file in FILES:
        assert list(report["gates"][file]) == GATES
        assert all(gate["passed"] for gate in report["gates"][file].values())
        assert report["gates"][file]["G2 logits"]["max_sigma"] <= 1e-3
        assert report["gates"][file]["G3 mask"]["images"] >= 16


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS if EVERY else ["dabnet"])
def test_two_processes_train_the_bits_of_one(name: str, tmp_path: Path) -> None:
    shape = (
        "data.size=[64,64]",
        "augment.crop_size=[64,64]",
        "data.num_val=1",
        "train.steps=2",
        "compute.shards=2",
        "model.standardize=true",
    )
    assert run(tmp_path / "one", *of_command(name), *shape) == 0
    trained_by(2, tmp_path / "two", *of_command(name), *shape)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    assert run(tmp_path / "plain", *of_command(name), *shape[:-1]) == 0
    digests = {result(tmp_path / each)["weights_digest"] for each in ("one", "plain")}
    assert len(digests) == 2, "it trains on standardized images"
