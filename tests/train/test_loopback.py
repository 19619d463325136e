"""Several ranks compute what one process computes, in both ways of summing gradients; threads stand for the ranks."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
import torch
from test_gradients import (
    ALONE,
    CPU,
    SIZE,
    B,
    C,
    CountedExchange,
    Net,
    V,
    batches,
    fresh,
    settings,
    updates,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import Loopback
from segpipe.data.loader import ShardBatch
from segpipe.distributed import reduce
from segpipe.distributed.contract import Contract
from segpipe.distributed.group import Group, Level
from segpipe.errors import CollectiveError
from segpipe.ledger.digest import state_digest
from segpipe.models.layers import SegmentationNet
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config
from segpipe.train import step as gradients
from segpipe.train.forward import AllHeads, statistics
from segpipe.train.recorder import Watch
from segpipe.train.state import (
    Ema,
    TrainState,
    build_optimizer,
    freeze,
    learning_rate,
    set_rate,
)
from segpipe.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("strict_torch")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Loopback]:
    """Makes that many ranks, whose collectives take the place of torch's."""

    def made(num_ranks: int) -> Loopback:
        loopback = Loopback(num_ranks)
        monkeypatch.setattr(reduce, "dist", loopback)
        monkeypatch.setattr(reduce, "_all_gather", loopback.all_gather)
        monkeypatch.setattr(
            gradients, "DistributedDataParallel", loopback.data_parallel
        )
        return loopback

    return made


def config_of(mode: str, *, clip_norm: float = 1.0, shards: int = V) -> Config:
    config = settings(mode, shards)
    config.optim.clip_norm = clip_norm
    return config


def state_of(config: Config, *, norm: bool = True, unused: bool = False) -> TrainState:
    """A fresh state, not to be made in a thread: threads share the generator. Without dropout for the same reason."""
    model = fresh(config, unused=unused).model
    assert isinstance(model, Net)
    model.dropout = nn.Dropout(0.0)
    if not norm:
        model.norm = nn.Identity()  # type: ignore[assignment]
    freeze(model, config.model.freeze)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(
        model, Ema(model, config.ema), build_optimizer(model, config.optim), scaler
    )


def group_of(rank: int, world_size: int, *, machines: bool = False) -> Group:
    if not machines:
        return Group(rank, world_size, CPU)
    within, across = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    return Group(rank, world_size, CPU, (Level(2, within), Level(2, across)))  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket_size", [20, 600, 1 << 20])
@pytest.mark.parametrize(
    ("world_size", "machines"), [(2, False), (4, False), (4, True)]
)
def test_elastic_gives_the_bits_of_one_process(
    ranks: Callable[[int], Loopback],
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    machines: bool,
    bucket_size: int,
) -> None:
    """Also with buckets that leave while the backward still runs: none of one bucket, which waits for statistics."""
    monkeypatch.setattr(gradients, "BUCKET_SIZE", bucket_size)
    monkeypatch.setattr(gradients, "_Exchange", CountedExchange)
    monkeypatch.setattr(CountedExchange, "early", [])
    config = config_of("elastic")

    states = [state_of(config, unused=True) for _ in range(world_size)]

    def work(rank: int) -> str:
        return updates(
            states[rank], config, group_of(rank, world_size, machines=machines), 2
        )

    alone = updates(state_of(config, unused=True), config, ALONE, 2)
    assert ranks(world_size).run(work) == [alone] * world_size
    assert len(CountedExchange.early) == 2 * world_size
    overlaps = bucket_size < 1 << 20
    assert all((count > 0) == overlaps for count in CountedExchange.early)


@pytest.mark.parametrize(
    ("world_size", "shards"),
    [*((r, 16) for r in (2, 3, 5, 7, 8, 12, 16)), *((r, 6) for r in range(2, 7))],
)
def test_any_number_of_processes_up_to_the_shards_gives_the_bits_of_one(
    ranks: Callable[[int], Loopback],
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    shards: int,
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_SIZE", 600)
    config = config_of("elastic", shards=shards)
    states = [state_of(config, unused=True) for _ in range(world_size)]
    alone = updates(state_of(config, unused=True), config, ALONE, 2)
    found = ranks(world_size).run(
        lambda rank: updates(states[rank], config, group_of(rank, world_size), 2)
    )
    assert found == [alone] * world_size


@pytest.mark.parametrize("mode", ["elastic", "ddp"])
@pytest.mark.parametrize(
    "frozen", [["first.*", "second.*", "norm.*"], ["main.*", "aux.weight"]]
)
def test_frozen_parts_and_scaled_rates_give_the_same_bits_on_any_number_of_ranks(
    ranks: Callable[[int], Loopback], mode: str, frozen: list[str]
) -> None:
    """Weights and statistics of frozen parts stay as they are, in all ranks; the others move."""
    config = config_of(mode)
    config.model.freeze, config.optim.lr_scale = frozen, {"aux.bias": 10.0}
    states = [state_of(config) for _ in range(4)]

    def work(rank: int) -> str:
        states[rank].model.train()  # which an update takes back for frozen parts
        return updates(states[rank], config, group_of(rank, 4), 2)

    found = ranks(4).run(work)
    alone, before = state_of(config), values(state_of(config))
    digest = updates(alone, config, ALONE, 2)
    assert found == ([digest] * 4 if mode == "elastic" else found[:1] * 4)
    for state in (alone, states[3]):
        for name, value in values(state).items():
            if name == "second.bias":  # BatchNorm behind it takes its gradient away
                continue
            kept = any(fnmatchcase(name, pattern) for pattern in frozen)
            assert torch.equal(value, before[name]) == kept, name


class Sometimes(Net):
    """Its head `spare` is used for the images of step 0, of shard 2 of step 2, and never else."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.spare, self.never = nn.Conv2d(24, C, 1), nn.Conv2d(24, C, 1)

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        heads = super().logits(image, aux=aux)
        if bool((image[0, 0, 0, 0] - image[0, 0, 0, 1]).abs() < 1e-6):
            heads["main"] = heads["main"] + self.spare(
                torch.relu(self.second(torch.relu(self.first(image))))
            )
        return heads


def of_some_shards(step: int) -> list[ShardBatch]:
    made = batches(step)
    for batch in made:
        uses = step == 0 or (step, batch.shard) == (2, 2)
        batch.image[0, 0, 1] = (
            batch.image[0, 0, 0] if uses else batch.image[0, 0, 0] ^ 128
        )
    return made


def losses_in_turn(model: nn.Module, step: int) -> None:
    """Backward of all shards into `.grad`, as torch accumulates it; every shard starts from the step's statistics."""
    before = [value.clone() for value in statistics(model)]  # type: ignore[arg-type]
    for batch in of_some_shards(step):
        for value, kept in zip(statistics(model), before, strict=True):
            value.copy_(kept)
        loss = gradients.BatchLoss(
            config_of("elastic"), Watch(ALONE, TrainState(model, *[None] * 3)), None
        )  # type: ignore
        valid = torch.tensor(V * B * SIZE * SIZE)
        parts = loss(AllHeads(model), batch._replace(shard=0), valid)
        parts["total"].backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_parameter_without_gradient_is_left_as_torch_leaves_it(
    ranks: Callable[[int], Loopback], world_size: int, name: str
) -> None:
    """Without weight decay and momentum when no shard used it; moved on every rank when one shard of one rank did."""
    config = config_of("elastic", clip_norm=0.0)
    config.optim.name, config.optim.weight_decay = name, 0.1
    states = []
    for _ in range(world_size + 1):
        torch.manual_seed(0)
        model = Sometimes().train()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        states.append(
            TrainState(
                model,
                Ema(model, config.ema),
                build_optimizer(model, config.optim),
                scaler,
            )
        )
    *states, plain = states

    def work(rank: int) -> list[dict[str, Tensor]]:
        group = Group(rank, world_size, CPU)
        step, seen = TrainStep(config, Watch(group, states[rank])), []
        for number in range(4):
            shards = of_some_shards(number)
            step(
                [shards[shard] for shard in group.own_shards(V)],
                torch.tensor(V * B * SIZE * SIZE),
            )
            step.apply()
            seen.append(values(states[rank]))
        return seen

    found = ranks(world_size).run(work) if world_size > 1 else [work(0)]
    for other in found[1:]:
        assert all(
            torch.equal(a[key], b[key])
            for a, b in zip(found[0], other, strict=True)
            for key in a
        )
    weights = [step["spare.weight"] for step in found[0]]
    assert [not torch.equal(a, b) for a, b in pairwise(weights)] == [False, True, False]
    assert torch.equal(found[0][-1]["never.weight"], values(plain)["never.weight"])
    for number in range(4):  # the same with torch alone
        losses_in_turn(plain.model, number)
        set_rate(
            plain.optimizer, learning_rate(number, config.train.steps, config.optim)
        )
        plain.optimizer.step()
        plain.optimizer.zero_grad(set_to_none=True)
        for key, parameter in plain.model.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), found[0][number][key], rtol=1e-3, atol=1e-4, msg=key
            )


class Repeated(SegmentationNet):
    """Uses a block of 1.2 million weights three times in an update, under checkpoints."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 128, 8, stride=8)
        self.block = nn.Conv2d(128, 128, 9, padding=4)
        self.main = nn.Conv2d(128, C, 1)
        self.reentrant = reentrant

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        x = self.stem(image)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return {"main": self.main(x)}


def repeated(config: Config, *, reentrant: bool) -> TrainState:
    torch.manual_seed(0)
    model = Repeated(reentrant=reentrant).train()
    optimizer = build_optimizer(model, config.optim)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, Ema(model, config.ema), optimizer, scaler)


def test_a_block_used_three_times_gives_the_bits_of_one_process(
    ranks: Callable[[int], Loopback],
) -> None:
    config = config_of("elastic")
    states = [repeated(config, reentrant=False) for _ in range(2)]
    alone = updates(repeated(config, reentrant=False), config, ALONE, 2)
    found = ranks(2).run(
        lambda rank: updates(states[rank], config, group_of(rank, 2), 2)
    )
    assert found == [alone] * 2


def test_a_part_of_a_gradient_that_comes_too_late_ends_the_run(
    ranks: Callable[[int], Loopback],
) -> None:
    """A reentrant checkpoint adds to the gradient in three parts, and the first completes its bucket."""
    config = config_of("elastic")
    states = [repeated(config, reentrant=True) for _ in range(4)]
    with pytest.raises(CollectiveError, match=r"block\.bias .*use_reentrant=False"):
        ranks(4).run(lambda rank: updates(states[rank], config, group_of(rank, 4), 2))


def values(state: TrainState) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.model.state_dict().items()}


@pytest.mark.parametrize("mode", ["ddp", "off"])
def test_ddp_moves_the_weights_as_one_process_does(
    ranks: Callable[[int], Loopback], mode: str
) -> None:
    """Up to rounding, on a network without BatchNorm: DDP takes means over the ranks where the loss needs sums."""
    config = config_of(mode, clip_norm=0.0)

    states = [state_of(config, norm=False) for _ in range(4)]

    def work(rank: int) -> dict[str, Tensor]:
        updates(states[rank], config, group_of(rank, 4), 2)
        return values(states[rank])

    alone, start = state_of(config, norm=False), values(state_of(config, norm=False))
    updates(alone, config, ALONE, 2)
    moved = {name: value - start[name] for name, value in values(alone).items()}
    for found in ranks(4).run(work):
        for name, value in found.items():
            torch.testing.assert_close(
                value - start[name],
                moved[name],
                rtol=1e-3,
                atol=1e-6,
                msg=f"{mode} {name}",
            )


@pytest.mark.parametrize(
    ("mode", "world_size"), [("ddp", 4), ("ddp", 2), ("elastic", 4), ("elastic", 2)]
)
def test_statistics_are_the_mean_over_ranks(
    ranks: Callable[[int], Loopback], mode: str, world_size: int
) -> None:
    """Over the shards in mode elastic; DDP computes all shards of a rank as one batch."""
    config = config_of(mode)

    states = [state_of(config) for _ in range(world_size)]

    def work(rank: int) -> tuple[list[Tensor], str]:
        updates(states[rank], config, group_of(rank, world_size), 1)
        return statistics(states[rank].model), state_digest(
            states[rank].model.state_dict()
        )

    images = [batch.image for batch in batches(0)]
    if mode == "ddp":
        size = V // world_size
        images = [
            torch.cat(images[first : first + size]) for first in range(0, V, size)
        ]
    singles = []
    for image in images:
        twin = state_of(config).model
        twin.logits(Preprocess()(image), aux=True)
        singles.append(statistics(twin))
    found = ranks(world_size).run(work)
    assert V == 4
    for single in zip(found[0][0], *singles, strict=True):
        torch.testing.assert_close(
            single[0], torch.stack(single[1:]).mean(0), rtol=1e-5, atol=1e-6
        )
    assert len({digest for _, digest in found}) == 1


class Noted(Contract):
    """Remembers what was announced of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def enter(self, op: str, tensor: Tensor | None = None, *, level: int = 0) -> None:
        self.calls += [op] if op.endswith("DDP") else []


@pytest.mark.parametrize("mode", ["ddp", "off"])
def test_each_place_where_ddp_communicates_is_announced(
    ranks: Callable[[int], Loopback], mode: str
) -> None:
    config = config_of(mode)
    states = [state_of(config) for _ in range(2)]
    contracts = [Noted() for _ in range(2)]
    loopback = ranks(2)

    def built(rank: int) -> TrainStep:
        group = Group(rank, 2, CPU, contract=contracts[rank])
        return TrainStep(config, Watch(group, states[rank]))

    steps = loopback.run(built)
    assert [each.calls for each in contracts] == [["wrap of DDP"]] * 2
    valid = torch.tensor(V * B * SIZE * SIZE)
    loopback.run(lambda rank: steps[rank](batches(0)[2 * rank : 2 * rank + 2], valid))
    expected = ["wrap of DDP", "backward of DDP"]
    assert [each.calls for each in contracts] == [expected] * 2


def test_one_process_announces_nothing() -> None:
    config, contract = config_of("ddp"), Noted()
    step = TrainStep(
        config, Watch(Group(0, 1, CPU, contract=contract), state_of(config))
    )
    step(batches(0), torch.tensor(V * B * SIZE * SIZE))
    assert contract.calls == []
