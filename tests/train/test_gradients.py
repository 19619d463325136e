"""Gradients: the tree keeps its bits for any schedule and any machines, torch's DDP across a resume."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tables import CAMVID
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ranks import gloo
from segpipe.data.loader import ShardBatch
from segpipe.distributed.contract import Contract
from segpipe.distributed.group import Group, Level
from segpipe.distributed.reduce import FlatLayout, TreeSum
from segpipe.errors import CollectiveError, ConfigError
from segpipe.ledger.digest import state_digest
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config, check, from_mapping
from segpipe.train import forward
from segpipe.train import step as gradients
from segpipe.train.forward import AllHeads
from segpipe.train.recorder import Watch
from segpipe.train.state import (
    Ema,
    TrainState,
    build_optimizer,
    build_state,
)
from segpipe.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("strict_torch")
CPU = torch.device("cpu")
ALONE = Group(0, 1, CPU)
RANKS, V, B, C, SIZE = 4, 4, 2, 5, 16
SCALE = 2.0**24  # too large for the first updates in fp16
DAWDLING: dict[str, Callable[[int], float]] = {  # seconds by rank, before each update
    "dawdling ranks": lambda rank: 0.1 * random.SystemRandom().random(),
    "rank 0 first": lambda rank: 0.03 * rank,
    "rank 0 last": lambda rank: 0.03 * (RANKS - 1 - rank),
}


class Net(SegmentationNet):
    """Declares its layers in the order of use, which is DDP's first order in a bucket; gradients come in the other."""

    def __init__(
        self, *, unused: bool = False, norm: bool = True, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(3, 16, 3, stride=4, padding=1),
            nn.Conv2d(16, 24, 3, padding=1),
        )
        self.norm = nn.BatchNorm2d(24) if norm else nn.Identity()
        self.main, self.aux = nn.Conv2d(24, C, 1), nn.Conv2d(24, C, 1)
        self.dropout = nn.Dropout(dropout)
        if unused:
            self.unused = nn.Parameter(
                torch.ones(7, 2)
            )  # of the group with weight decay

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        x = self.dropout(F.relu(self.norm(self.second(F.relu(self.first(image))))))
        return (
            {"main": self.main(x), "aux": self.aux(x)}
            if aux
            else {"main": self.main(x)}
        )


class Repeated(Net):
    """Uses a layer twice under checkpoints that are reentrant."""

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        first = self.first

        def layer(x: Tensor) -> Tensor:
            return first(x)[..., : SIZE // 4, : SIZE // 4]

        image = image.requires_grad_()
        x = checkpoint(layer, image, use_reentrant=True)
        x = x + checkpoint(layer, image, use_reentrant=True)
        return {"main": self.main(self.second(x))}


def settings(mode: str, shards: int = V, precision: str = "fp32") -> Config:
    compute = {"mode": mode, "shards": shards, "samples_per_shard": B, "threads": 1}
    optim = {"lr": 0.1, "warmup_steps": 0, "clip_norm": 1.0}
    augment, train = {"crop_size": [SIZE, SIZE]}, {"precision": precision}
    return from_mapping(
        {"compute": compute, "optim": optim, "augment": augment, "train": train}
    )


def fresh(config: Config, **kind: Any) -> TrainState:
    torch.manual_seed(0)
    model = Net(**kind).train()
    scaler = torch.amp.GradScaler(
        "cpu", enabled=config.train.precision == "fp16", init_scale=SCALE
    )
    return TrainState(
        model, Ema(model, config.ema), build_optimizer(model, config.optim), scaler
    )


def batches(step: int, shards: int = V) -> list[ShardBatch]:
    generator = torch.Generator().manual_seed(step)
    image = torch.randint(0, 256, (shards, B, SIZE, SIZE, 3), generator=generator).to(
        torch.uint8
    )
    target = torch.randint(0, C, (shards, B, SIZE, SIZE), generator=generator).to(
        torch.uint8
    )
    ids = torch.zeros(B, dtype=torch.int64)
    return [
        ShardBatch(step, shard, image[shard], target[shard], ids, ids)
        for shard in range(shards)
    ]


def updates(
    state: TrainState,
    config: Config,
    group: Group,
    count: int,
    *,
    dawdle: Callable[[], None] = lambda: None,
) -> str:
    """Digest of weights, statistics and average after `count` more updates; before each this rank waits."""
    step, own = (
        TrainStep(config, Watch(group, state)),
        group.own_shards(config.compute.shards),
    )
    for _ in range(count):
        shards = batches(state.step, config.compute.shards)
        dawdle()
        step(
            [shards[shard] for shard in own],
            torch.tensor(sum(valid_pixels(batch.target) for batch in shards)),
        )
        step.apply()
    return state_digest(state.model.state_dict()) + state_digest(
        state.ema.model.state_dict()
    )


def resumed(config: Config, group: Group) -> str:
    """As `updates` of four, with everything but the state rebuilt in the middle."""
    state = fresh(config)
    updates(state, config, group, 2)
    other = fresh(config)
    other.model.load_state_dict(copy.deepcopy(state.model.state_dict()))
    other.ema.model.load_state_dict(copy.deepcopy(state.ema.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
    other.step = state.step
    return updates(other, config, group, 2)


def gradients_of_a_step(mode: str, group: Group) -> dict[str, Any]:
    """Gradients of one update without clipping, of a network whose loss does not depend on how shards are grouped."""
    config = settings(mode)
    config.optim.clip_norm = 0.0
    state, shards = fresh(config, norm=False, dropout=0.0), batches(0)
    valid = torch.tensor(sum(valid_pixels(batch.target) for batch in shards))
    TrainStep(config, Watch(group, state))(
        [shards[shard] for shard in group.own_shards(V)], valid
    )
    return {
        name: p.grad.numpy().copy()
        for name, p in state.model.named_parameters()
        if p.grad is not None
    }


class CountedExchange(gradients._Exchange):
    """Counts the buckets that left while the backward still ran."""

    early: ClassVar[list[int]] = []

    def send_rest(self) -> None:
        self.early.append(len(self.layout.buckets) - 1 - self._next)
        Traced.events.append("backward ends")
        super().send_rest()


class Traced(Contract):
    """Remembers the order of the collectives."""

    events: ClassVar[list[str]] = []

    def enter(self, op: str, tensor: Tensor | None = None, *, level: int = 0) -> None:
        super().enter(op, tensor, level=level)
        self.events.append(f"{op} {0 if tensor is None else tensor.numel()}")


class ByArrival:
    """The control for RankSum: contributions are added in order of arrival."""

    order: ClassVar[tuple[int, ...]] = ()

    def __init__(self, group: Group, leaves: int) -> None:
        self.world_size = group.world_size

    def start(self, parts: list[Tensor], into: Tensor) -> None:
        (part,) = parts
        everyone = [torch.empty_like(part) for _ in range(self.world_size)]
        dist.all_gather(everyone, part.clone())
        first, *others = (everyone[rank] for rank in self.order)
        into.copy_(first)
        for other in others:
            into.add_(other)

    def finish(self) -> None:
        """Nothing is under way."""


def _by_arrival(config: Config, group: Group, order: tuple[int, ...]) -> str:
    usual, ByArrival.order = gradients.RankSum, order
    gradients.RankSum = ByArrival  # type: ignore[assignment, misc]
    try:
        return updates(fresh(config, unused=True), config, group, 4)
    finally:
        gradients.RankSum = usual  # type: ignore[misc]


def _work(rank: int) -> dict[str, Any]:
    torch.set_deterministic_debug_mode("error")
    group = Group(rank, RANKS, CPU)
    within = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    across = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    machines = Group(rank, RANKS, CPU, (Level(2, within), Level(2, across)))
    elastic, ddp, off = (settings(mode) for mode in ("elastic", "ddp", "off"))
    half = settings("elastic", precision="fp16")
    gradients._Exchange = CountedExchange  # type: ignore[misc]
    found: dict[str, Any] = {
        "one bucket": updates(fresh(elastic, unused=True), elastic, group, 4)
    }
    gradients.BUCKET_SIZE = 600
    CountedExchange.early.clear()
    Traced.events.clear()
    found["many buckets"] = updates(
        fresh(elastic, unused=True),
        elastic,
        Group(rank, RANKS, CPU, contract=Traced()),
        4,
    )
    found["collectives"] = ", ".join(Traced.events)
    found["sent early"] = " ".join(map(str, CountedExchange.early))
    gradients.BUCKET_SIZE = (
        20  # less than the statistics, which are known after the backward only
    )
    found["tiny buckets"] = updates(fresh(elastic, unused=True), elastic, group, 4)
    found["two machines"] = updates(fresh(elastic, unused=True), elastic, machines, 4)
    for name, seconds in DAWDLING.items():
        late = updates(
            fresh(elastic, unused=True),
            elastic,
            group,
            4,
            dawdle=lambda s=seconds: time.sleep(s(rank)),
        )
        found[name] = late
    found["fp16"] = updates(fresh(half, unused=True), half, group, 4)
    found["by arrival"] = _by_arrival(elastic, group, (0, 1, 2, 3))
    found["by arrival, the other way"] = _by_arrival(elastic, group, (3, 2, 1, 0))
    found["ddp"] = updates(fresh(ddp), ddp, group, 4)
    found["ddp again"] = updates(fresh(ddp), ddp, group, 4)
    found["ddp resumed"] = resumed(ddp, group)
    for mode in ("ddp", "off"):
        found[f"{mode} gradients"] = gradients_of_a_step(mode, group)
        state = fresh(settings(mode), unused=True)
        updates(state, settings(mode), group, 2)
        unused = state.model.unused
        found[f"{mode} unused"] = torch.equal(
            unused, torch.ones_like(unused)
        ) and not state.optimizer.state.get(unused)
    usual = gradients.DistributedDataParallel
    gradients.DistributedDataParallel = lambda network, **how: usual(  # type: ignore[misc, assignment]
        network, **{**how, "find_unused_parameters": False}
    )
    found["rebuilt"] = updates(fresh(off), off, group, 4)
    found["rebuilt resumed"] = resumed(off, group)
    gradients.DistributedDataParallel = usual  # type: ignore[misc]
    state = fresh(ddp)
    state.model.__class__ = Repeated
    with pytest.raises(CollectiveError) as refused:
        updates(state, ddp, group, 1)
    found["ddp reentrant"] = str(refused.value)
    return found


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return gloo(RANKS, _work)


@pytest.mark.slow
def test_all_ranks_hold_the_same_weights(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert all(
            answer[name] == found
            for name, found in answers[0].items()
            if isinstance(found, str)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["one bucket", "many buckets", "tiny buckets", "two machines", *DAWDLING]
)
def test_elastic_gives_the_bits_of_one_process(
    answers: list[dict[str, Any]], how: str
) -> None:
    elastic = settings("elastic")
    assert answers[0][how] == updates(fresh(elastic, unused=True), elastic, ALONE, 4)


@pytest.mark.slow
def test_the_control_a_sum_in_order_of_arrival_depends_on_it(
    answers: list[dict[str, Any]],
) -> None:
    assert (
        len(
            {
                answers[0][how]
                for how in ("by arrival", "by arrival, the other way", "rank 0 first")
            }
        )
        == 3
    )
    assert answers[0]["rank 0 first"] == answers[0]["rank 0 last"]


@pytest.mark.slow
def test_buckets_leave_while_the_backward_runs(answers: list[dict[str, Any]]) -> None:
    counts = [int(count) for count in answers[0]["sent early"].split()]
    assert [count > 0 for count in counts] == [True] * 4


@pytest.mark.slow
def test_sums_come_back_while_the_backward_runs(answers: list[dict[str, Any]]) -> None:
    """In one order on all ranks; the last bucket, which holds the statistics, leaves when the backward is over."""
    events = answers[0]["collectives"].split(", ")
    steps = [
        list(step) for over, step in groupby(events, "backward ends".__eq__) if not over
    ]
    there, back = "all_to_all", "all_gather"
    # Each step here is the rest of an update and what the next one sends early.
    assert len(steps) == 5
    second = [event.split()[0] for event in steps[1][-5:]]
    assert second == [there, there, back, there, back]
    sizes = [
        [event.split()[1] for event in events if event.startswith(op)]
        for op in (there, back)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "off"])
def test_ddp_trains_a_network_with_a_parameter_that_nobody_uses(
    answers: list[dict[str, Any]], mode: str
) -> None:
    assert all(answer[f"{mode} unused"] for answer in answers)


@pytest.mark.slow
def test_the_loss_scale_of_fp16_moves_alike_on_any_number_of_processes(
    answers: list[dict[str, Any]],
) -> None:
    """Over four updates of which the first overflow and are left out, and the last is not."""
    config = settings("elastic", precision="fp16")
    state, seen = fresh(config, unused=True), []
    for _ in range(4):
        before = state_digest(dict(state.model.named_parameters()))
        alone = updates(state, config, ALONE, 1)
        seen.append(
            (
                state.scaler.get_scale(),
                state_digest(dict(state.model.named_parameters())) != before,
            )
        )
    assert answers[0]["fp16"] == alone
    assert not seen[0][1]
    assert seen[-1][1]
    assert seen[-1][0] < SCALE


def test_no_bucket_leaves_before_statistics_and_figures_are_in_it() -> None:
    """They are copied after the backward; only gradients may be sent while it runs."""
    early, late = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(25))
    tensors = [
        torch.zeros(300),
        torch.zeros(3),
        early,
        late,
    ]  # statistics, figures, and two parameters
    layout = FlatLayout(tensors, bucket_size=256)
    sent: list[int] = []

    class Across:
        def start(self, parts: list[Tensor], into: Tensor) -> None:
            assert into.numel() == parts[0].numel()
            sent.append(parts[0].numel())

    flat, total = layout.new(), layout.new()
    views, parameters = layout.views(flat), [early, late]
    exchange = gradients._Exchange(
        layout, TreeSum(1), flat, views, parameters, Across(), total
    )  # type: ignore[arg-type]
    early.grad, late.grad = torch.ones(10), torch.ones(25)
    assert exchange.on_grad_ready(1)
    assert exchange.on_grad_ready(0)
    assert sent == [128]
    assert not exchange.on_grad_ready(1), "a part of a gradient that has left"
    assert exchange.on_grad_ready(0), "another part of one that has not"
    exchange.send_rest()
    assert sent == [128, 256, 384]


@pytest.mark.parametrize("name", ["fast_scnn", "pidnet_s"])
def test_every_view_starts_at_the_same_512_bytes_for_any_number_of_ranks(
    name: str,
) -> None:
    """CUDA kernels add in another order where a tensor starts between two multiples of 16 bytes; no CPU kernel does."""
    model = build_model(name, C).to(memory_format=torch.channels_last)

    def places(world_size: int) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
        group = Group(0, world_size, CPU)
        config = SimpleNamespace(
            compute=SimpleNamespace(compile=False, cuda_graph="off", mode="elastic"),
            model=SimpleNamespace(name=name),
            train=SimpleNamespace(precision="fp32"),
        )
        loss = SimpleNamespace(
            state=SimpleNamespace(model=model),
            group=group,
            config=config,
            norms=forward.Norms(model),
        )
        parts = dict.fromkeys(("main", "aux", "total"), torch.zeros(()))
        layout = gradients.ElasticGradients(cast(Any, loss))._layout_for(parts)
        views = layout.views(layout.new())
        assert views[0].data_ptr() % 64 == 0
        return [
            (4 * view.storage_offset(), view.shape, view.stride()) for view in views
        ]

    alone = places(1)
    assert [start % 512 for start, *_ in alone] == [0] * len(alone)
    assert [places(world_size) for world_size in range(2, 17)] == [alone] * 15


@pytest.mark.slow
def test_ddp_repeats_its_bits_and_keeps_them_across_a_resume(
    answers: list[dict[str, Any]],
) -> None:
    assert answers[0]["ddp"] == answers[0]["ddp again"] == answers[0]["ddp resumed"]


@pytest.mark.slow
def test_the_control_ddp_that_rebuilds_its_buckets_differs_after_a_resume(
    answers: list[dict[str, Any]],
) -> None:
    assert answers[0]["rebuilt"] != answers[0]["rebuilt resumed"]


@pytest.mark.slow
def test_ddp_names_the_checkpoint_that_it_cannot_take(
    answers: list[dict[str, Any]],
) -> None:
    assert "use_reentrant=False" in answers[0]["ddp reentrant"]


@pytest.mark.slow
def test_the_control_ddp_depends_on_the_number_of_processes(
    answers: list[dict[str, Any]],
) -> None:
    ddp = settings("ddp")
    assert answers[0]["ddp"] != updates(fresh(ddp), ddp, ALONE, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "off"])
def test_ddp_of_several_processes_computes_the_gradients_of_one(
    answers: list[dict[str, Any]], mode: str
) -> None:
    """DDP takes the mean over the ranks, where the loss is already divided by the pixels of all of them."""
    alone = gradients_of_a_step(mode, ALONE)
    for answer in answers:
        for name, grad in answer[f"{mode} gradients"].items():
            np.testing.assert_allclose(
                grad, alone[name], rtol=1e-4, atol=1e-6, err_msg=name
            )


def test_at_one_shard_and_one_process_all_modes_are_one() -> None:
    found = set()
    for mode in ("off", "ddp", "elastic", "audit"):
        config = settings(mode, shards=1)
        state = fresh(config)
        step, batch = TrainStep(config, Watch(ALONE, state)), batches(0)[0]
        step([batch], torch.tensor(valid_pixels(batch.target)))
        step.apply()
        found.add(state_digest(state.model.state_dict()))
    assert len(found) == 1


def test_statistics_over_all_ranks_are_refused_where_they_break_a_promise() -> None:
    config = from_mapping({"model": {"norm": "sync"}})
    with pytest.raises(
        ConfigError, match=r"model\.norm = sync, but compute\.mode = elastic"
    ):
        check(config, world_size=1)
    config.compute.mode = "ddp"
    check(config, world_size=1)
    with pytest.raises(ConfigError, match="needs a GPU"):
        build_state(config, CAMVID, CPU)


@pytest.mark.parametrize("mode", ["off", "ddp", "audit"])
def test_a_compiled_network_is_refused_where_it_breaks_a_promise(mode: str) -> None:
    config = from_mapping({"compute": {"compile": True}})
    check(config, world_size=1)
    config.compute.mode = mode
    with pytest.raises(
        ConfigError, match=rf"compute\.compile = true, but compute\.mode = {mode}"
    ):
        check(config, world_size=1)


def test_with_sync_batchnorm_norms_keep_the_names_of_the_weights() -> None:
    plain = build_state(from_mapping({}), CAMVID, CPU).model
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(
        build_state(from_mapping({}), CAMVID, CPU).model
    )
    assert list(synchronised.state_dict()) == list(plain.state_dict())
    converted = sum(
        isinstance(module, nn.SyncBatchNorm) for module in synchronised.modules()
    )
    assert (
        converted
        == sum(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
        > 0
    )


def shard_losses(
    weights: Tensor | None = None, *, step: int = 0, align_corners: bool = False
) -> dict[int, Tensor]:
    """Losses of an update of which every shard holds the same images and targets."""
    config = settings("elastic")
    state = fresh(config)
    state.step, state.model.align_corners = step, align_corners
    same = [batches(0)[0]._replace(shard=shard) for shard in range(V)]
    valid = torch.tensor(V * valid_pixels(same[0].target))
    return TrainStep(config, Watch(ALONE, state), weights)(same, valid).shard_losses


def test_dropout_is_keyed_by_step_and_shard() -> None:
    losses, again, later = shard_losses(), shard_losses(), shard_losses(step=1)
    assert list(losses) == list(range(V))
    assert len({float(loss) for loss in losses.values()}) == V, (
        "equal images, so only dropout can differ"
    )
    assert {shard: float(loss) for shard, loss in again.items()} == {
        s: float(loss) for s, loss in losses.items()
    }
    assert all(float(losses[shard]) != float(later[shard]) for shard in losses)


def test_class_weights_and_the_corners_of_the_network_reach_the_loss() -> None:
    plain = shard_losses()
    weighted = shard_losses(torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0]))
    assert all(float(weighted[shard]) > float(plain[shard]) for shard in plain)
    assert all(
        float(loss) != float(plain[shard])
        for shard, loss in shard_losses(align_corners=True).items()
    )


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_network_runs_in_the_configured_precision_and_the_loss_in_fp32(
    precision: str, dtype: torch.dtype | None
) -> None:
    config = settings("elastic", precision=precision)
    state = fresh(config)
    inside: set[torch.dtype] = set()
    state.model.main.register_forward_hook(lambda *call: inside.add(call[2].dtype))  # type: ignore[operator, union-attr]
    loss = gradients.BatchLoss(config, Watch(ALONE, state), None)
    batch = batches(0)[0]
    parts = loss(AllHeads(state.model), batch, torch.tensor(V * B * SIZE * SIZE))
    assert inside == {dtype or torch.float32}
    assert {part.dtype for part in parts.values()} == {torch.float32}


@pytest.mark.parametrize("mode", ["elastic", "ddp"])
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_tf32_holds_in_both_passes_of_the_network_and_nowhere_else(
    mode: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    config = settings(mode, precision=precision)
    state = fresh(config)
    found: dict[str, tuple[bool, bool]] = {}

    def look(place: str) -> None:
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        found[place] = products.allow_tf32, convolutions.allow_tf32

    def loss(*given: Any, **named: Any) -> dict[str, Tensor]:
        look("loss")
        return shard_loss(*given, **named)

    monkeypatch.setattr(gradients, "shard_loss", loss)
    weight = state.model.first.weight  # type: ignore[union-attr]
    weight.register_hook(lambda grad: look("backward"))  # type: ignore[operator]
    state.model.main.register_forward_hook(lambda *call: look("forward"))  # type: ignore[operator, union-attr]
    TrainStep(config, Watch(ALONE, state))(batches(0), torch.tensor(V * B * SIZE**2))
    look("after")
    inside = (precision == "tf32",) * 2
    outside = (False, False)
    expected = {"forward": inside, "loss": outside}
    assert found == {**expected, "backward": inside, "after": outside}


class Seen(Watch):
    """Keeps what an update shows to its watch."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(ALONE, state)
        self.inputs: list[Tensor] = []
        self.shards: list[tuple[Any, ...]] = []
        self.batches: list[int] = []

    def forward(self, seen: Tensor, heads: Mapping[str, Tensor]) -> None:
        assert list(heads) == ["main", "aux"]
        self.inputs.append(seen)

    def shard(
        self,
        batch: ShardBatch,
        loss: Tensor,
        statistics: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        copies = [
            [value.clone() for value in values] for values in (statistics, gradients)
        ]
        self.shards.append((batch.shard, loss.item(), *copies))

    def whole_batch(self, shards: Sequence[ShardBatch]) -> None:
        self.batches += [batch.shard for batch in shards]


@pytest.mark.parametrize("mode", ["elastic", "ddp"])
def test_the_watch_sees_the_input_and_what_each_shard_adds(mode: str) -> None:
    config, shards = settings(mode), batches(0)
    state = fresh(config, dropout=0.0)
    watch, before = Seen(state), state_digest(state.model.state_dict())
    valid = torch.tensor(V * B * SIZE * SIZE)
    result = TrainStep(config, watch)(shards, valid)
    assert state_digest(state.model.state_dict()) == before, (
        "nothing moves before `apply`"
    )
    assert torch.equal(
        torch.cat(watch.inputs),
        Preprocess()(torch.cat([batch.image for batch in shards])),
    )
    if mode == "ddp":
        assert (watch.batches, watch.shards) == ([0, 1, 2, 3], [])
        return
    assert (watch.batches, [shown[0] for shown in watch.shards]) == ([], [0, 1, 2, 3])
    assert {shard: loss for shard, loss, *_ in watch.shards} == {
        shard: float(loss) for shard, loss in result.shard_losses.items()
    }
    for shard, _, statistics, grads in watch.shards:
        twin = fresh(config, dropout=0.0)
        alone = TrainStep(settings(mode, shards=1), Watch(ALONE, twin))
        alone.gradients([shards[shard]._replace(shard=0)], valid)
        assert all(
            map(
                torch.equal,
                grads,
                [parameter.grad for parameter in twin.model.parameters()],
            )
        )
        twin = fresh(config, dropout=0.0)
        twin.model.logits(watch.inputs[shard], aux=True)
        assert all(map(torch.equal, statistics, forward.statistics(twin.model)))


def test_memory_for_gradients_grows_with_the_depth_of_the_tree_and_is_kept() -> None:
    """Four shards need three vectors, and no more are made in later updates."""
    config = settings("elastic")
    step = TrainStep(config, Watch(ALONE, fresh(config)))
    assert isinstance(step.gradients, gradients.ElasticGradients)
    found = []
    for _ in range(3):
        step(batches(0), torch.tensor(V * B * SIZE * SIZE))
        step.apply()
        found.append([vector.data_ptr() for vector in step.gradients._views])
    assert len(found[0]) == 3
    assert found[0] == found[1] == found[2]
