"""Race canary: which samples are repeated and by which worker, what it finds and reports, how often, and its cost."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, nullcontext
from inspect import getgeneratorlocals
from itertools import pairwise
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from torch import Tensor

import impure
from impure import Noise, config
from ranks import launched
from runs import ROOT, run
from segpipe.data.augment import TRANSFORMS, Augmenter
from segpipe.data.data_set import CachedSamples
from segpipe.data.loader import ShardBatch, train_batches
from segpipe.data.order import REPEATS, Member, Order, Request, chosen, requests
from segpipe.errors import ConfigError, ImpureAugmentError
from segpipe.ledger.digest import digest_groups
from segpipe.settings.compose import compose
from segpipe.settings.config import SETTINGS, Config, check
from segpipe.settings.groups import AugmentConfig
from segpipe.train import canary
from segpipe.train.canary import Canary, augment_watched

ORDER = Order(seed=3, num_samples=10, shards=2, samples_per_shard=3)
WORKERS = [0, 1, 2, 3]
Plant = Callable[..., Augmenter]


class Sometimes(impure.Planted):
    """Impure in three calls of ten."""

    def number(self) -> int:
        return int.from_bytes(os.urandom(8)) if os.urandom(1)[0] < 77 else 0


class StaleTarget(A.DualTransform):
    """The image is right; the target is moved by what the call before has drawn."""

    stale = 0

    def __init__(self) -> None:
        super().__init__(p=1.0)

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return img.copy()

    def apply_to_mask(self, mask: np.ndarray, **_: object) -> np.ndarray:
        shift, StaleTarget.stale = StaleTarget.stale, self.py_random.randrange(1, 40)
        return np.roll(mask, shift, axis=1)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """A function that gives a pipeline with one more transform."""

    def planted(kind: type, **changes: object) -> Augmenter:
        monkeypatch.setitem(TRANSFORMS, "planted", kind)
        return Augmenter(config(extra=["planted"], **changes))

    return planted


def batches(
    augmenter: Augmenter, workers: int, samples: object = None, steps: range = range(4)
) -> list[ShardBatch]:
    stream = train_batches(
        samples or Noise(num=10),
        augmenter,
        ORDER,
        shards=range(ORDER.shards),
        steps=steps,
        workers=workers,
        start_method="fork",
        prefetch=2,
        pin_memory=False,
        repeats=Canary(samples or Noise(num=10)),
    )
    with closing(stream):
        return list(stream)


def planned(
    workers: int, every: int, *, steps: int = 40, order: Order = ORDER
) -> list[Request]:
    places = [(step, shard) for step in range(steps) for shard in range(order.shards)]
    return list(requests(places, order, every=every, workers=workers))


# Which samples


def test_one_sample_in_so_many_is_chosen() -> None:
    total = sum(len(chosen(0, epoch, 1000, 100)) for epoch in range(200))
    assert abs(total - 2000) < 5 * 2000**0.5
    assert chosen(0, 0, 50, 1) == frozenset(range(50))
    assert chosen(0, 0, 1000, 0) == frozenset()


def test_the_choice_is_a_function_of_seed_epoch_and_index() -> None:
    found = chosen(0, 1, 1000, 10)
    assert chosen(0, 1, 500, 10) == {index for index in found if index < 500}
    assert chosen(2, 1, 96, 20) == {24, 35, 40, 62, 74, 84, 89}
    assert (
        len({chosen(seed, epoch, 1000, 10) for seed in range(3) for epoch in range(3)})
        == 9
    )
    assert chosen(0, 0, 96, 20) == {41, 42, 64, 77}, (
        "for ever, on every machine and in every process"
    )


def watched(planned_requests: list[Request]) -> set[Member]:
    return {
        task.members[row]
        for task in planned_requests
        if task.place
        for row in task.watched
    }


def test_the_choice_is_the_same_for_any_workers_and_ranks() -> None:
    assert planned(0, 7) == planned(1, 7) != planned(2, 7)
    alone = watched(planned(0, 7))
    assert len(alone) > 20
    for workers in (1, 2, 8):
        assert watched(planned(workers, 7)) == alone
    ranks = [
        requests(
            [(step, rank) for step in range(40)],
            ORDER,
            every=7,
            workers=2,
        )
        for rank in range(2)
    ]
    assert set().union(*(watched(list(rank)) for rank in ranks)) == alone


# By whom


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("every", [0, 1, 3, 40])
def test_every_chosen_sample_is_made_again_by_others(workers: int, every: int) -> None:
    found = planned(workers, every)
    delivered = [task for task in found if task.place]
    assert [task.place for task in delivered] == [
        (step, shard) for step in range(40) for shard in range(2)
    ]
    assert all(
        list(task.members) == ORDER.shard(*task.place)
        for task in delivered
        if task.place
    )
    made: dict[Member, list[int]] = defaultdict(list)
    for number, task in enumerate(found):
        for row in task.watched:
            made[task.members[row]].append(number)
    assert set(made) == watched(found)
    assert bool(made) == bool(every)
    for numbers in made.values():
        assert len(numbers) == 1 + REPEATS
        assert found[numbers[0]].place, "delivered first"
        if workers >= 2:
            turns = [number % workers for number in numbers]
            assert turns[0] not in turns[1:]
            assert len(set(turns)) == min(workers, 1 + REPEATS)


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("every", [1, 3, 40])
def test_the_sample_before_is_another_one_each_time(workers: int, every: int) -> None:
    """Otherwise what carries over from one sample to the next would carry over again; at high rates it may, rarely."""
    found = planned(workers, every)
    last_delivery = max(number for number, task in enumerate(found) if task.place)
    previous: dict[int, Member] = {}
    before: dict[Member, list[Member | None]] = defaultdict(list)
    for number, task in enumerate(found[:last_delivery]):
        turn = number % max(workers, 1)
        for row, member in enumerate(task.members):
            if row in task.watched:
                before[member].append(previous.get(turn))
            previous[turn] = member
    again = {member: others for member, others in before.items() if len(others) > 1}
    alike = [
        member
        for member, others in again.items()
        if member in others or len(set(others)) == 1
    ]
    assert again
    assert len(alike) <= (0.02 * len(again) if every < 40 else 0)


@pytest.mark.parametrize("workers", WORKERS)
def test_other_processes_make_them_again(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: dict[Member, list[int]] = defaultdict(list)
    for name in ("hold", "compare"):
        original = getattr(Canary, name)

        def spied(self, member, frame, made, original=original):
            makers[member].append(made.process)
            original(self, member, frame, made)

        monkeypatch.setattr(Canary, name, spied)
    batches(Augmenter(config(canary=3)), workers)
    assert makers.keys() == watched(planned(workers, 3, steps=4)) != set()
    for first, *others in makers.values():
        assert len(others) == REPEATS
        assert (first in others) == (workers == 0)
        assert len(set(others)) == (2 if workers == 3 else 1)


# What it finds


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("every", [1, 4])
def test_stale_parameters_are_found_and_named(
    plant: Plant, workers: int, every: int
) -> None:
    with pytest.raises(ImpureAugmentError) as caught:
        batches(plant(impure.StaleParameters, canary=every), workers, steps=range(12))
    message = str(caught.value)
    found = re.match(
        r"sample (\d+) \(noise_(\d+)\) of epoch (\d+), augmented again under the same key: "
        r"image \(y, x, channel\) = \(0, \d, \d\) is \d+, then \d+ \(process (\d+), then (\d+)\)\. ",
        message,
    )
    assert found is not None
    index, name, epoch, first, again = map(int, found.groups())
    assert index == name
    assert (epoch, index) in watched(planned(workers, every, steps=12))
    assert (again != first) == (workers > 0)
    assert "not a pure function of sample and key" in message
    assert (
        "the first transform whose output differs is planted (StaleParameters), which"
        in message
    )
    assert "segpipe check-augment" in message
    assert "augment.canary=0" in message
    assert "\n" not in message
    assert caught.value.exit_code == 8
    assert not multiprocessing.active_children()


def test_a_target_alone_is_told_apart(plant: Plant) -> None:
    with pytest.raises(
        ImpureAugmentError,
        match=r": target \(y, x, channel",
    ):
        batches(plant(StaleTarget, canary=1), 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "kind", [impure.SelfCounter, impure.OwnGenerator, impure.Clock, Sometimes]
)
def test_other_impurities_are_found(plant: Plant, kind: type, workers: int) -> None:
    with pytest.raises(ImpureAugmentError, match="not a pure function"):
        batches(plant(kind, canary=1), workers, steps=range(6))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [impure.WorkersRead, impure.WorkersByName])
def test_what_all_workers_of_a_run_agree_on_is_found(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, kind: type, workers: int
) -> None:
    """Repeats are made under another layout; the control is made under the same, and `WorkersRead` goes through."""
    with pytest.raises(
        ImpureAugmentError,
        match=rf"first transform whose output differs is planted \({kind.__name__}\)",
    ):
        batches(plant(kind, canary=1), workers)
    if kind is impure.WorkersRead and workers:
        monkeypatch.setattr(canary, "another_worker", nullcontext)
        assert len(batches(plant(kind, canary=1), workers)) == 8


def test_the_unkeyed_control_is_found() -> None:
    with pytest.raises(ImpureAugmentError):
        batches(Augmenter(config(keyed=False, canary=1)), 2)


def test_a_file_that_changes_is_said_to_be_possible() -> None:
    class Rewritten(Noise):
        def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            return super().read(index + time.perf_counter_ns() % 10**9)

    with pytest.raises(
        ImpureAugmentError,
        match="The sample already differed when it was read: the file was changed meanwhile",
    ):
        batches(Augmenter(config(canary=1)), 0, Rewritten(num=10))


# Which transform it was


@pytest.mark.parametrize(
    "settings_of", [["augment=standard"], ["augment=robust"], ["augment.keyed=false"]]
)
def test_looking_at_a_pipeline_changes_nothing(settings_of: list[str]) -> None:
    """Every shipped pipeline: the same bytes as without a look, and a digest of what every transform was given."""
    shipped = compose([*settings_of, "augment.crop_size=[48,48]"]).augment
    plain, watched_one, samples = Augmenter(shipped), Augmenter(shipped), Noise(num=3)
    gamma = [] if shipped.gamma == [1, 1] else ["Gamma"]
    moved: set[str] = set()
    for key in range(30):
        frame = samples.read(key % 3)
        expected = plain(*frame, key)
        found, made = augment_watched(watched_one, frame, key)
        trail = made.trail
        assert [part.tobytes() for part in found[:2]] == [
            part.tobytes() for part in expected
        ]
        own = ["ScaleCrop", "HorizontalFlip", *gamma, "ColorMatrix"]
        assert [name.split()[0] for name, _ in trail] == [*own, *shipped.extra]
        ends = [
            int(digest_groups([[torch.from_numpy(part) for part in pair]]))
            for pair in (frame, found[:2])
        ]
        assert trail[0][1] == ends[0]
        moved |= {
            name
            for (name, given), (_, gives) in pairwise([*trail, ("", ends[1])])
            if given != gives
        }
    assert moved == {name for name, _ in trail}, (
        "each transform shows in what the next one is given"
    )


@pytest.mark.parametrize(
    "extra",
    [
        ["planted"],
        ["noise", "planted", "jpeg"],
        ["planted", "jpeg", "noise"],
        ["noise", "jpeg", "planted"],
    ],
)
def test_the_first_impure_transform_is_named_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    monkeypatch.setitem(TRANSFORMS, "planted", impure.OwnGenerator)
    with pytest.raises(
        ImpureAugmentError,
        match=r"the first transform whose output differs is planted \(OwnGenerator\)",
    ):
        batches(Augmenter(config(extra=extra, canary=1)), 0)


def test_without_compiled_digests_the_check_is_to_name_it(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would cost more than half a percent; what is delivered is the same."""
    monkeypatch.setattr("segpipe.train.canary.kernels", lambda: None)
    pure = Augmenter(config())
    frame = Noise().read(0)
    found, made = augment_watched(pure, frame, 7)
    assert made.trail == ()
    assert [part.tobytes() for part in found[:2]] == [
        part.tobytes() for part in pure(*frame, 7)
    ]
    with pytest.raises(
        ImpureAugmentError,
        match=r"one of the transforms \(or the file was changed meanwhile\) depends",
    ):
        batches(plant(impure.StaleParameters, canary=1), 0)


def test_a_frame_of_a_cache_is_looked_at_where_it_lies() -> None:
    """It is read-only; torch would warn of it, and a copy costs more than its digest."""
    kept = CachedSamples(Noise(num=1), 64)  # type: ignore[arg-type]
    first, again = kept.read(0), kept.read(0)
    assert not again[0].flags.writeable
    trails = [
        augment_watched(Augmenter(config()), frame, 3)[1].trail
        for frame in (Noise(num=1).read(0), first, again)
    ]
    assert trails[0] == trails[1] == trails[2] != ()
    assert not again[0].flags.writeable


def test_off_means_off(plant: Plant) -> None:
    """The control: an impure transform passes where nothing is made again."""
    for workers in (0, 2):
        assert len(batches(plant(impure.StaleParameters, canary=0), workers)) == 8


# What it leaves alone


def whole(found: list[ShardBatch]) -> list[tuple[int, int, bytes, bytes, bytes]]:
    return [
        (
            b.step,
            b.shard,
            b.image.numpy().tobytes(),
            b.target.numpy().tobytes(),
            b.index.numpy().tobytes(),
        )
        for b in found
    ]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("every", [1, 5])
def test_batches_are_the_same_with_it_and_without(workers: int, every: int) -> None:
    expected = whole(batches(Augmenter(config(canary=0)), 0))
    assert whole(batches(Augmenter(config(canary=every)), workers)) == expected


def test_a_receiver_may_write_into_its_batches(plant: Plant) -> None:
    """No false alarm for pure pipelines; a true one names the pixel as it was before the receiver wrote over it."""

    def overwrite(augmenter: Augmenter) -> None:
        stream = train_batches(
            Noise(num=10),
            augmenter,
            ORDER,
            shards=range(2),
            steps=range(6),
            workers=2,
            start_method="fork",
            prefetch=2,
            pin_memory=False,
            repeats=Canary(Noise(num=10)),
        )
        with closing(stream):
            for batch in stream:
                batch.image.zero_()

    overwrite(Augmenter(config(canary=1)))
    with pytest.raises(ImpureAugmentError) as caught:
        overwrite(plant(impure.StaleParameters, canary=1))
    assert "image (y, x, channel)" in str(caught.value)


def test_nothing_is_kept_when_it_has_been_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Canary] = []
    original = Canary.__init__
    monkeypatch.setattr(
        Canary,
        "__init__",
        lambda self, samples: (made.append(self), original(self, samples))[1],
    )
    batches(Augmenter(config(canary=2)), 2)
    assert [one._held for one in made] == [{}]


# How often


def caught(
    recomputations: int, chosen_samples: list[int], share: float = 0.01
) -> float:
    """How many trainings, with so many chosen samples each, meet a transform that is impure in a share of its calls.

    A sample is told when one of its results, the delivered one and the repeated, is unlike another: when some of the
    calls that made them are hit, but not all alike.
    """
    draws = np.random.Generator(np.random.Philox(1))
    found = []
    for num in chosen_samples:
        hit = draws.random((20, num, 1 + recomputations)) < share
        found.append((hit.any(axis=2) & ~hit.all(axis=2)).any(axis=1).mean())
    return float(np.mean(found))


def test_one_impure_call_in_a_hundred_is_caught_within_200000_samples() -> None:
    """200 seeds of ten epochs of 20,000 samples, 20 trainings each."""
    every = AugmentConfig().canary
    assert every == 1000
    numbers = [
        sum(len(chosen(seed, epoch, 20_000, every)) for epoch in range(10))
        for seed in range(200)
    ]
    assert caught(REPEATS, numbers) > 0.99
    assert caught(1, numbers) < 0.99  # the control: one recomputation would not do


# What it costs


def test_nothing_of_a_batch_is_kept_when_the_next_is_asked_for() -> None:
    """A view of a page-locked slot keeps it from the loader, and the host then waits for an update of the GPU."""
    stream = train_batches(
        Noise((64, 64), num=10),
        Augmenter(AugmentConfig(crop_size=[32, 32], canary=1)),
        Order(0, 10, 2, 4),
        shards=range(1),
        steps=range(4),
        workers=0,
        start_method="fork",
        prefetch=1,
        pin_memory=False,
        repeats=Canary(Noise((64, 64), num=10)),
    )
    for batch in stream:
        local = getgeneratorlocals(stream)
        views = {name for name, value in local.items() if _has_pixels(value)}
        assert views == {"data", "image", "target", "epoch", "index"}, batch.step


def _has_pixels(value: object) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(part, Tensor | np.ndarray | memoryview) for part in parts)


def test_it_costs_at_most_half_a_percent_of_the_loaders_time() -> None:
    """Processor time of reading and augmenting with one sample in 4 chosen, scaled to one in 1000; and of planning."""
    order, num_steps = Order(0, 1000, 2, 4), 6

    def seconds(every: int) -> float:
        stream = train_batches(
            Noise((360, 480), num=1000),
            Augmenter(AugmentConfig(crop_size=[256, 320], canary=every)),
            order,
            shards=range(2),
            steps=range(num_steps),
            workers=0,
            start_method="fork",
            prefetch=1,
            pin_memory=False,
            repeats=Canary(Noise(num=1000)),
        )
        before = time.process_time()
        for _ in stream:
            pass
        return time.process_time() - before

    def planning(every: int) -> float:
        before = time.process_time()
        planned(2, every, steps=500, order=order)
        return (time.process_time() - before) / (500 * 8)

    share = len(watched(planned(0, 4, steps=num_steps, order=order))) / (num_steps * 8)
    assert share > 0.15

    def cost() -> tuple[float, float]:
        """Of what is made again, and with the planning of it, as parts of the loader's time."""
        pairs = [(seconds(0), seconds(4)) for _ in range(7)]
        repeats = (
            float(np.median([often / plain - 1 for plain, often in pairs]))
            / share
            / 1000
        )
        bookkeeping = min(planning(1000) for _ in range(3)) - min(
            planning(0) for _ in range(3)
        )
        return repeats, repeats + bookkeeping / (
            min(plain for plain, _ in pairs) / (num_steps * 8)
        )

    seconds(4)
    measured = []
    for _ in range(
        3
    ):  # other work on the machine makes processor time longer, now of one kind and now of the other
        measured.append(cost())
        repeats, all_of_it = measured[-1]
        if repeats > 0.001 and all_of_it <= 0.005:
            return
    pytest.fail(f"what is made again, and all, of the loader's time: {measured}")


# Settings and ranks


def test_its_setting_is_checked_and_free() -> None:
    with pytest.raises(
        ConfigError, match=r"augment.canary = -1, but a value of 0 to 1000000"
    ):
        check(Config(augment=AugmentConfig(canary=-1)), world_size=1)
    assert SETTINGS["augment.canary"].free


def _started(rank: int, folder: str, changes: tuple[str, ...]) -> int:
    runpy.run_path(str(ROOT / "examples" / "race" / "start.py"))
    return run(Path(folder), *changes)


@pytest.mark.slow
def test_all_ranks_end_when_one_finds_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rate at which rank 1 alone has samples to make again, after its first step."""
    order = Order(0, 16, 4, 2)

    def shards_of(every: int) -> set[tuple[int, int]]:
        return {
            (step, shard)
            for step in range(9)
            for shard in range(4)
            if any(
                index in chosen(0, epoch, 16, every)
                for epoch, index in order.shard(step, shard)
            )
        }

    every = next(
        every
        for every in range(5, 500)
        if (found := shards_of(every))
        and all(shard >= 2 and 1 <= step <= 4 for step, shard in found)
    )
    changes = (
        "augment.extra=[racy]",
        f"augment.canary={every}",
        "train.steps=9",
        "data.workers=1",
        "compute.shards=4",
    )
    codes = launched(2, _started, str(tmp_path / "run"), changes)
    assert codes == [ImpureAugmentError.exit_code] * 2
    said = capfd.readouterr().err
    assert re.search(
        r"^rank 1: sample \d+ \(train_0000\d\d\) of epoch \d+, augmented again",
        said,
        re.M,
    )
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "result.json").exists()
