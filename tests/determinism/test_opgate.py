"""The networks and losses call no op that is unsafe on CUDA; planted ones are found, with the line that calls them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.determinism import opgate
from segpipe.determinism.opgate import RULES, check_ops
from segpipe.distributed.group import Group
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models import build_model, resize
from segpipe.models.preprocess import Preprocess
from segpipe.predict.inference import Inference, segment
from segpipe.settings.config import Config
from segpipe.settings.groups import LossConfig
from segpipe.train.metrics import confusion
from segpipe.train.recorder import Watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep

C = STREET.num_classes
IMAGE = torch.randint(
    0, 256, (2, 64, 64, 3), generator=torch.Generator().manual_seed(0)
).to(torch.uint8)
TARGET = torch.randint(
    0, C, (2, 64, 64), generator=torch.Generator().manual_seed(1)
).to(torch.uint8)
TARGET[:, :8] = 255
# The only warning that an op of a plant gives.
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")

PLAIN, FUSED = (
    partial(LossConfig, backend="plain"),
    partial(LossConfig, backend="native"),
)
LOSSES: dict[str, tuple[LossConfig, Tensor | None]] = {
    "cross_entropy": (PLAIN(), None),
    "class weights": (PLAIN(), torch.rand(C)),
    "ohem": (PLAIN(name="ohem"), None),
    "dice": (PLAIN(dice_weight=1.0), None),
    "strided": (PLAIN(stride=2, aux_stride=4), None),
    "all at once": (
        PLAIN(name="ohem", dice_weight=1.0, stride=4, aux_stride=2),
        torch.rand(C),
    ),
    "fused": (
        FUSED(
            name="ohem", dice_weight=1.0, stride=4, aux_stride=2, label_smoothing=0.1
        ),
        torch.rand(C),
    ),
}


@pytest.mark.parametrize("name", ["fast_scnn", "pidnet_s"])
def test_networks_and_all_their_losses_pass(name: str) -> None:
    model = build_model(name, C)
    valid = torch.tensor(valid_pixels(TARGET))

    def update() -> None:
        heads = model.logits(Preprocess()(IMAGE), aux=True)
        for config, weights in LOSSES.values():
            parts = shard_loss(
                heads,
                TARGET,
                config,
                class_weights=weights,
                global_valid=valid,
                align_corners=model.align_corners,
            )
            gradients = torch.autograd.grad(parts["total"], list(heads.values()))
        torch.autograd.backward(list(heads.values()), gradients)
        assert set(heads) == {"main", *model.train_only}

    assert check_ops(update) == []
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_whole_update_and_a_validation_pass() -> None:
    config = Config()
    config.model.name, config.compute.shards, config.compute.samples_per_shard = (
        "fast_scnn",
        2,
        2,
    )
    config.loss.name, config.optim.clip_norm = "ohem", 5.0
    device = torch.device("cpu")
    state = build_state(config, STREET, device)
    step = TrainStep(config, Watch(Group(0, 1, device), state))
    numbers = torch.zeros(2, dtype=torch.int64)

    def update() -> None:
        step(
            [ShardBatch(0, shard, IMAGE, TARGET, numbers, numbers) for shard in (0, 1)],
            torch.tensor(4096),
        )
        step.apply()
        pred = segment(state.model.eval(), Preprocess(), IMAGE, Inference())
        confusion(pred, TARGET, C)

    assert check_ops(update) == []


def test_control_a_network_that_resizes_as_on_a_cpu_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opgate, "as_on_cuda", nullcontext)
    model = build_model("fast_scnn", C)
    violations = check_ops(lambda: model(Preprocess()(IMAGE)).sum().backward())
    assert {(found.op, found.file) for found in violations} == {
        ("aten.upsample_bilinear2d_backward", resize.__file__)
    }


def test_control_a_loss_that_reduces_is_caught() -> None:
    logits = torch.randn(*TARGET.shape[:1], C, *TARGET.shape[1:], requires_grad=True)
    [found] = check_ops(
        lambda: F.cross_entropy(logits, TARGET.long(), ignore_index=255)
    )
    assert (found.op, found.file) == ("aten.nll_loss2d_forward", __file__)
    assert "reduction" in str(found)


IDS = torch.randint(0, C, (2, 8, 8), generator=torch.Generator().manual_seed(2))
ROWS = torch.tensor([1, 2, 1, 2])
GRID = torch.zeros(2, 4, 4, 2)

# Name: (op, a call of it on one line). The input is float (2, C, 8, 8) and wants a gradient.
FORWARD: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "cross_entropy mean": ("nll_loss2d_forward", lambda x: F.cross_entropy(x, IDS)),
    "cross_entropy sum": (
        "nll_loss2d_forward",
        lambda x: F.cross_entropy(x, IDS, reduction="sum"),
    ),
    "histc": ("histc", lambda x: torch.histc(x.detach(), bins=4)),
    "bincount": (
        "bincount",
        lambda x: torch.bincount(IDS.flatten(), weights=x[:, 0].detach().flatten()),
    ),
    "median": ("median", lambda x: x.median(1).values),
    "kthvalue": ("kthvalue", lambda x: x.kthvalue(3, 1).values),
    "put": ("put_", lambda x: x.detach().put_(ROWS, torch.ones(4))),
    "put accumulate": ("put", lambda x: x.put(ROWS, torch.ones(4), accumulate=True)),
    "cumsum": ("cumsum", lambda x: x.cumsum(1)),
    "sort": ("sort", lambda x: x.sort(1).values),
    "argsort": ("sort", lambda x: x.argsort(1)),
    "topk": ("topk", lambda x: x.topk(2, 1).values),
    "scatter_add": (
        "scatter_add_",
        lambda x: torch.zeros(2, C, 8, 8).scatter_add_(1, IDS[:, None], x[:, :1]),
    ),
    "scatter_reduce": (
        "scatter_reduce",
        lambda x: x.scatter_reduce(1, IDS[:, None], x[:, :1], "sum"),
    ),
    "scatter": ("scatter", lambda x: x.scatter(1, IDS[:, None], x[:, :1])),
    "index_add": ("index_add", lambda x: x.index_add(1, ROWS, x[:, :4])),
    "index_reduce": (
        "index_reduce",
        lambda x: x.detach().index_reduce(1, ROWS, x[:, :4].detach(), "mean"),
    ),
    "index_put": (
        "index_put",
        lambda x: x[0].index_put((ROWS,), torch.ones(()), accumulate=True),
    ),
    "max_unpool": (
        "max_unpool2d",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    ),
}
BACKWARD: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "bilinear": (
        "upsample_bilinear2d_backward",
        lambda x: F.interpolate(x, (9, 9), mode="bilinear"),
    ),
    "antialias": (
        "_upsample_bilinear2d_aa_backward",
        lambda x: F.interpolate(x, (5, 5), mode="bilinear", antialias=True),
    ),
    "bicubic": (
        "upsample_bicubic2d_backward",
        lambda x: F.interpolate(x, (9, 9), mode="bicubic"),
    ),
    "linear": (
        "upsample_linear1d_backward",
        lambda x: F.interpolate(x[0], 9, mode="linear"),
    ),
    "trilinear": (
        "upsample_trilinear3d_backward",
        lambda x: F.interpolate(x[None], (2, 9, 9), mode="trilinear"),
    ),
    "adaptive average": (
        "_adaptive_avg_pool2d_backward",
        lambda x: F.adaptive_avg_pool2d(x, 3),
    ),
    "adaptive average 3-D": (
        "_adaptive_avg_pool3d_backward",
        lambda x: F.adaptive_avg_pool3d(x, 2),
    ),
    "adaptive maximum": (
        "adaptive_max_pool2d_backward",
        lambda x: F.adaptive_max_pool2d(x, 3),
    ),
    "adaptive maximum 3-D": (
        "adaptive_max_pool3d_backward",
        lambda x: F.adaptive_max_pool3d(x, 3),
    ),
    "fractional maximum": (
        "fractional_max_pool2d_backward",
        lambda x: F.fractional_max_pool2d(x, 2, 4),
    ),
    "average 3-D": ("avg_pool3d_backward", lambda x: F.avg_pool3d(x, 2)),
    "maximum 3-D": ("max_pool3d_with_indices_backward", lambda x: F.max_pool3d(x, 2)),
    "reflection": (
        "reflection_pad2d_backward",
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    ),
    "reflection 1-D": (
        "reflection_pad1d_backward",
        lambda x: F.pad(x[0], (1, 1), mode="reflect"),
    ),
    "replication": (
        "replication_pad2d_backward",
        lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    ),
    "grid_sample": (
        "grid_sampler_2d_backward",
        lambda x: F.grid_sample(x, GRID, align_corners=False),
    ),
    "a list of indices": ("index_put", lambda x: x[:, ROWS]),
    "a mask": ("index_put", lambda x: x[:, 0][IDS > 2]),
    "gather": ("scatter_add", lambda x: x.gather(1, IDS[:, None])),
    "index_select": ("index_add", lambda x: x.index_select(1, ROWS)),
    "maximum of an axis": ("scatter", lambda x: x.max(1).values),
    "embedding": (
        "embedding_dense_backward",
        lambda x: F.embedding(IDS, x[0].flatten(1)),
    ),
    "embedding_bag": (
        "_embedding_bag_backward",
        lambda x: F.embedding_bag(IDS[0], x[0].flatten(1), mode="max"),
    ),
    "ctc": (
        "_ctc_loss_backward",
        lambda x: F.ctc_loss(
            x[0, :, :4].log_softmax(2), ROWS[:, None], [C] * 4, [1] * 4
        ),
    ),
}
PLANTS = FORWARD | BACKWARD
SAFE: dict[str, Callable[[Tensor], Any]] = {
    "cross_entropy none": lambda x: F.cross_entropy(x, IDS, reduction="none"),
    "adaptive average to 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "maximum with a fixed kernel": lambda x: F.max_pool2d(x, 2),
    "nearest": lambda x: F.interpolate(x, (9, 9), mode="nearest"),
    "zero padding": lambda x: F.pad(x, (1, 1, 1, 1)),
    "index_put without accumulate": lambda x: x[0].index_put((ROWS,), torch.ones(())),
    "put through a mask": lambda x: torch.where(IDS[:, None] > 2, x, 0.0),
    "bincount without weights": lambda x: torch.bincount(IDS.flatten()),
    "cumsum of integers": lambda x: IDS.cumsum(1),
    "stable sort": lambda x: x.detach().sort(dim=1, stable=True).indices,
    "median without indices": lambda x: x.detach().median(),
    "scatter of a number": lambda x: x.scatter(1, IDS[:, None], 1.0),
    "one_hot": lambda x: F.one_hot(IDS, C),
    "scatter_reduce amax": lambda x: x.detach().scatter_reduce(
        1, IDS[:, None], x[:, :1].detach(), "amax"
    ),
    "amax": lambda x: x.amax(1),
    "embedding_bag mean": lambda x: F.embedding_bag(
        IDS[0], x[0].flatten(1), mode="mean"
    ),
}


def leaf() -> Tensor:
    return torch.randn(
        2, C, 8, 8, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()


def both_ways(call: Callable[[Tensor], Any]) -> None:
    out = call(leaf())
    if out.requires_grad:
        out.backward(torch.ones_like(out))


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_op_is_named_with_its_line(name: str) -> None:
    op, call = PLANTS[name]
    violations = check_ops(lambda: both_ways(call))
    line = call.__code__.co_firstlineno
    assert f"aten.{op}" in {found.op for found in violations}
    assert {(found.file, found.line) for found in violations} == {(__file__, line)}
    assert f"{__file__}:{line} calls aten.{op}: it " in "\n".join(map(str, violations))


@pytest.mark.parametrize("name", PLANTS)
def test_control_without_its_rule_a_plant_is_not_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, call = PLANTS[name]
    rules = [rule for rule in RULES if op.rstrip("_") not in rule.ops]
    assert len(rules) == len(RULES) - 1
    monkeypatch.setattr("segpipe.determinism.opgate.RULES", rules)
    violations = check_ops(
        lambda: both_ways(call)
    )  # the backward of a few breaks another rule
    assert f"aten.{op}" not in {found.op for found in violations}


@pytest.mark.parametrize("name", BACKWARD)
def test_the_forward_of_an_op_with_an_unsafe_backward_passes(name: str) -> None:
    assert check_ops(lambda: BACKWARD[name][1](leaf())) == []


@pytest.mark.parametrize("name", SAFE)
def test_what_is_safe_passes(name: str) -> None:
    assert check_ops(lambda: both_ways(SAFE[name])) == []


def test_every_rule_has_a_plant() -> None:
    planted = {op.rstrip("_") for op, _ in PLANTS.values()}
    assert not [rule.ops for rule in RULES if planted.isdisjoint(rule.ops)]


def test_an_op_that_torch_does_not_refuse_is_said_to_be_silent() -> None:
    """Its kernel for CUDA adds atomically and asks for no permission; torch's list of refused ones leaves it out."""
    refused = str(torch.use_deterministic_algorithms.__doc__)
    assert "AdaptiveMaxPool2d" in refused
    assert "AdaptiveMaxPool3d" not in refused
    [found] = check_ops(lambda: both_ways(lambda x: F.adaptive_max_pool3d(x, 3)))
    assert found.rule.state == opgate.SILENT


def test_a_forward_before_the_gate_is_named_by_its_backward() -> None:
    out = F.adaptive_avg_pool2d(leaf(), 3).sum()
    [found] = check_ops(lambda: out.backward())
    assert (
        found.line
        == test_a_forward_before_the_gate_is_named_by_its_backward.__code__.co_firstlineno
        + 2
    )


class Gather(torch.autograd.Function):
    """Its backward, written in Python, calls the op itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].index_add(1, ROWS, grads[0][:, :4])


def test_an_own_backward_is_named_by_its_own_line() -> None:
    [found] = check_ops(lambda: Gather.apply(leaf()).sum().backward())
    assert found.line == Gather.backward.__code__.co_firstlineno + 2


def test_inference_mode_hides_nothing() -> None:
    @torch.inference_mode()
    def loss() -> Tensor:
        return F.cross_entropy(leaf() * 1, IDS)

    [found] = check_ops(loss)
    assert found.op == "aten.nll_loss2d_forward"
    assert found.line == test_inference_mode_hides_nothing.__code__.co_firstlineno + 3


def test_a_line_in_a_loop_is_named_once_and_different_lines_each() -> None:
    def loss() -> None:
        for _ in range(3):
            torch.histc(leaf().detach())
        torch.histc(leaf().detach())

    assert len(check_ops(loss)) == 2


def test_an_error_inside_comes_through_and_the_gate_leaves_nothing_behind() -> None:
    def broken() -> None:
        torch.histc(leaf().detach())
        assert resize._as_on_cuda
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_ops(broken)
    assert not resize._as_on_cuda
    assert not torch.is_anomaly_enabled()
    torch.histc(leaf().detach())
