"""Faults planted into a run of 16 processes, each of which must be named when it is compared with a run of 4.

Every fault is one bit, one unit in the last place, or one id, in one place of one step, and goes in underneath the code
that records: the ledger knows nothing of it. A fault inside the network is named by the first statistics or gradient
that it reached.
"""

from __future__ import annotations

import argparse
import os
import queue
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp
from rich.console import Console
from torch import Tensor, nn

from benchmarks import measure as measuring
from segpipe.data.loader import ShardBatch
from segpipe.data.order import Order
from segpipe.determinism import flags
from segpipe.distributed import group as processes
from segpipe.errors import DivergenceError
from segpipe.ledger.divergence import Comparison, compare
from segpipe.ledger.reader import read_run
from segpipe.models.preprocess import Preprocess
from segpipe.run import launch
from segpipe.settings.compose import compose
from segpipe.settings.config import Config
from segpipe.train import checkpoint, step
from segpipe.train import state as optim
from segpipe.train.state import TrainState

MODULE, LAYER, NORM = "ppm.out.0", "ppm.out.0.weight", "ppm.out.1.running_mean"
# Where the faults are: rank 11 of 16 has shard 11, and the scale of fp16 overflows in all steps but 2 of the four.
STEP, SHARD, ROW, RANK = 2, 11, 1, 11
SHARDS = 16
RECIPE = (
    "model=fast_scnn", "data=synthetic", "data.size=[64,96]", "data.num_train=64", "data.num_val=4", "data.workers=0",
    "augment.crop_size=[64,64]", "train.steps=4", "train.progress=false", "train.precision=fp16", "compute.device=cpu",
    "compute.mode=audit", f"compute.shards={SHARDS}", "compute.samples_per_shard=2", "compute.threads=1",
    "loss.name=ohem", "optim.clip_norm=1", "optim.warmup_steps=0", "augment.check=false", "export.enabled=false",
)  # fmt: skip

Enter = Callable[[Any], Any]


@dataclass(frozen=True)
class Plant:
    """A fault, and what must be said of it."""

    what: str
    stage: str | None  # None: the bits are the same, and the environment is named
    put: Callable[[Enter, int], None]  # (enter a context, rank of this process)
    shard: int | None = None
    row: int | None = None  # of the shard's samples
    layer: str | None = None  # tensor that the ledgers name
    stops: bool = False  # whether the ranks find it themselves


class Here:
    """Step and shard whose forward and backward are being computed."""

    step = shard = -1

    @classmethod
    def is_place(cls) -> bool:
        return (cls.step, cls.shard) == (STEP, SHARD)


def nudge(tensor: Tensor, ulps: int = 1) -> None:
    """A number so many further for the largest element, which is positive."""
    with torch.no_grad():
        place = tensor.reshape(-1).argmax()
        at = tuple(int(number) for number in torch.unravel_index(place, tensor.shape))
        bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        bits[at] = bits[at] + ulps


def flip(tensor: Tensor, bit: int = 1) -> None:
    """One bit of the first element of fp32 weights."""
    with torch.no_grad():
        bits = tensor.view(torch.int32)
        first = (0,) * tensor.ndim
        bits[first] = bits[first] ^ bit


def _wrap(enter: Enter, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, *arguments)`."""
    original = getattr(owner, name)
    enter(
        mock.patch.object(
            owner, name, lambda *given, **named: around(original, *given, **named)
        )
    )


def watch_place(enter: Enter) -> None:
    """Keep `Here` up to date."""

    def around(
        call: Any, loss: Any, network: Any, batch: ShardBatch, valid: Tensor
    ) -> Any:
        Here.step, Here.shard = loss.state.step, batch.shard
        return call(loss, network, batch, valid)

    _wrap(enter, step.BatchLoss, "__call__", around)


def scale_low(enter: Enter) -> None:
    """Start with a loss scale at which no update overflows, or a fault would be put into one that is left out."""

    def around(build: Any, *given: Any) -> TrainState:
        state: TrainState = build(*given)
        state.scaler._init_scale = 256.0
        return state

    _wrap(enter, checkpoint, "build_state", around)


def sample_bit(name: str) -> Callable[[Enter, int], None]:
    """A pixel's lowest bit, or another class for a pixel, between loader and training."""

    def put(enter: Enter, rank: int) -> None:
        def around(
            call: Any, update: step.TrainStep, shards: list[ShardBatch], valid: Tensor
        ) -> Any:
            if update.state.step == STEP:
                shards = [
                    _changed(batch) if batch.shard == SHARD else batch
                    for batch in shards
                ]
            return call(update, shards, valid)

        def _changed(batch: ShardBatch) -> ShardBatch:
            changed = getattr(batch, name).clone()
            changed[ROW, 5, 6] = changed[ROW, 5, 6] ^ 1
            return batch._replace(**{name: changed})

        _wrap(enter, step.TrainStep, "__call__", around)

    return put


def other_order(
    choose: Callable[[list[Any]], list[Any]],
) -> Callable[[Enter, int], None]:
    """Another choice of samples for the shard."""

    def put(enter: Enter, rank: int) -> None:
        def around(
            shard: Any, order: Order, step_: int, shard_: int
        ) -> list[tuple[int, int]]:
            entries: list[tuple[int, int]] = shard(order, step_, shard_)
            return choose(entries) if (step_, shard_) == (STEP, SHARD) else entries

        _wrap(enter, Order, "shard", around)

    return put


def preprocessed(enter: Enter, rank: int) -> None:
    """One value of the normalised batch."""

    def around(forward: Any, module: Preprocess, *given: Tensor | None) -> Tensor:
        seen: Tensor = forward(module, *given)
        if Here.is_place():
            seen = seen.clone()
            nudge(seen)
        return seen

    _wrap(enter, Preprocess, "forward", around)


def in_forward(enter: Enter, rank: int) -> None:
    """The output of one convolution."""

    def hook(module: nn.Module, _: Any, output: Tensor) -> None:
        if module.training and Here.is_place():
            nudge(output)

    _with_model(
        enter, lambda model: model.get_submodule(MODULE).register_forward_hook(hook)
    )


def in_backward(enter: Enter, rank: int) -> None:
    """The gradient of one weight in the backward of one shard."""

    def hook(grad: Tensor) -> Tensor:
        if Here.is_place():
            grad = grad.clone()
            nudge(grad)
        return grad

    _with_model(enter, lambda model: model.get_parameter(LAYER).register_hook(hook))


def _with_model(enter: Enter, use: Callable[[nn.Module], Any]) -> None:
    """Do `use` with the network of the run."""
    build = checkpoint.build_state

    def around(*given: Any) -> TrainState:
        found = build(*given)
        use(found.model)
        return found

    enter(mock.patch.object(checkpoint, "build_state", around))


def reduced_on_one_rank(enter: Enter, rank: int) -> None:
    """The reduced gradient of one weight, on one rank alone."""

    def around(unpack: Any, own: step.ElasticGradients, *given: Any) -> step.Reduced:
        reduced: step.Reduced = unpack(own, *given)
        grad = own.state.model.get_parameter(LAYER).grad
        if own.state.step == STEP and rank == RANK and grad is not None:
            nudge(grad, ulps=1 << 12)  # 1 may be lost in the rounding of the momentum
        return reduced

    _wrap(enter, step.ElasticGradients, "_unpack", around)


def rate(enter: Enter, rank: int) -> None:
    """The learning rate of one step."""

    def around(learning_rate: Any, number: int, *given: Any) -> float:
        found: float = learning_rate(number, *given)
        return found * (1 + 1e-15) if number == STEP else found

    _wrap(enter, step, "learning_rate", around)


def scale(enter: Enter, rank: int) -> None:
    """The loss scale after one step."""

    def around(update: Any, own: optim.Ema, number: int) -> None:
        if number == STEP:
            _STATE[0].scaler.update(float(_STATE[0].scaler.get_scale() * 2))
        update(own, number)

    _keep_state(enter)
    _wrap(enter, optim.Ema, "update", around)


def after_update(
    change: Callable[[TrainState], None], *, one_rank: bool = False
) -> Callable[[Enter, int], None]:
    """Something of the state, when an update is done and before it is written down."""

    def put(enter: Enter, rank: int) -> None:
        def around(update: Any, own: optim.Ema, number: int) -> None:
            update(own, number)
            if number == STEP and (not one_rank or rank == RANK):
                change(_STATE[0])

        _keep_state(enter)
        _wrap(enter, optim.Ema, "update", around)

    return put


_STATE: list[TrainState] = []


def _keep_state(enter: Enter) -> None:
    build = checkpoint.build_state

    def around(*given: Any) -> TrainState:
        _STATE[:] = [build(*given)]
        return _STATE[0]

    enter(mock.patch.object(checkpoint, "build_state", around))


def _momentum(state: TrainState) -> None:
    kept = state.optimizer.state[state.model.get_parameter(LAYER)]
    nudge(
        next(
            value
            for _, value in sorted(kept.items())
            if isinstance(value, Tensor) and value.ndim
        )
    )


def package(enter: Enter, rank: int) -> None:
    """Another version of albumentations, as far as the run can see."""
    found = flags.fingerprint
    enter(
        mock.patch.object(
            flags, "fingerprint", return_value={**found(), "albumentations": "2.0.9"}
        )
    )


PLANTS: dict[str, Plant] = {
    "pixel": Plant("one bit of one pixel", "augment", sample_bit("image"), SHARD, ROW),
    "mask": Plant("one id of one mask", "augment", sample_bit("target"), SHARD, ROW),
    "swap": Plant("two samples of a shard swapped", "order", other_order(lambda x: x[::-1]), SHARD, 0),
    "duplicate": Plant("a sample given twice", "order", other_order(lambda x: [x[0], x[0]]), SHARD, ROW),
    "preprocess": Plant("1 ulp in the normalised batch", "preprocess", preprocessed, SHARD),
    "forward": Plant("1 ulp in the output of a layer", "forward", in_forward, SHARD, layer=NORM),
    "backward": Plant(
        "1 ulp in the gradient of a layer", "backward", in_backward, SHARD, layer=LAYER
    ),
    "reduced": Plant("4096 ulp in one rank's gradient", "reduction", reduced_on_one_rank, layer=LAYER, stops=True),
    "lr": Plant("learning rate of one step", "optimizer", rate),
    "scaler": Plant("loss scale of one step", "optimizer", scale),
    "optimizer": Plant("1 ulp in a momentum", "optimizer", after_update(_momentum), layer=LAYER),
    "weight": Plant(
        "one bit of a weight on one rank", "weights",
        after_update(lambda state: flip(state.model.get_parameter(LAYER)), one_rank=True), layer=LAYER, stops=True,
    ),
    "norm": Plant(
        "1 ulp in a running mean", "bn_ema", after_update(lambda state: nudge(state.model.get_buffer(NORM))), layer=NORM
    ),
    "ema": Plant(
        "1 ulp in an averaged weight", "bn_ema",
        after_update(lambda state: nudge(state.ema.model.get_parameter(LAYER))), layer=LAYER,
    ),
    "package": Plant("another version of a package", None, package),
}  # fmt: skip


def problems(plant: Plant, found: Comparison, stopped: str) -> list[str]:
    """What was not said of a plant as it should have been; empty when all was."""
    if plant.stage is None:
        named = found.verdict == "identical" and list(found.fingerprint) == [
            "albumentations"
        ]
        return [] if named else [f"{found.verdict}, fingerprint {found.fingerprint}"]
    if (
        plant.stops
    ):  # the ranks find it, and the comparison says that not all of the run is evidence
        wrong = [] if found.verdict == "identical_up_to" else [found.verdict]
        if f"rank {RANK} in session 0 differs from rank" not in found.sentence:
            wrong.append(found.sentence)
        if plant.layer not in stopped or f"rank {RANK} " not in stopped:
            wrong.append(f"in the run: {stopped or 'not stopped'}")
        return wrong
    order = Order(0, 64, SHARDS, 2).shard(STEP, SHARD)
    sample = order[plant.row][1] if plant.row is not None else None
    wanted = {
        "verdict": "diverged",
        "step": STEP,
        "stage": plant.stage,
        "shard": plant.shard,
        "sample": sample,
    }
    if plant.layer is not None:
        wanted["layer"] = plant.layer
    wrong = [
        f"{name} {getattr(found, name)}, not {value}"
        for name, value in wanted.items()
        if getattr(found, name) != value
    ]
    if stopped:
        wrong.append(f"in the run: {stopped}")
    return wrong


def settings(folder: Path) -> Config:
    """Configuration of the run in `folder`."""
    return compose([*RECIPE, f"run.root={folder.parent}", f"run.name={folder.name}"])


def planted_run(folder: Path, name: str, group: processes.Group) -> str:
    """What the run in `folder` said when it stopped itself; empty when it came to its end. On every rank of `group`."""
    config = settings(folder)
    if group.is_main:
        launch.prepare(config, group.world_size)
    group.barrier()
    with ExitStack() as stack:
        watch_place(stack.enter_context)
        scale_low(stack.enter_context)
        if name:
            PLANTS[name].put(stack.enter_context, group.rank)
        try:
            launch.train(config, group, Console(quiet=True))
        except DivergenceError as error:
            return str(error)
    return ""


@dataclass(frozen=True)
class Job:
    """Runs of one group of processes."""

    world_size: int
    folder: Path
    names: list[str]  # "" is a run without a fault
    rank: int  # the faulty one
    shard: int  # the faulty one
    recipe: tuple[str, ...]


def _rank(rank: int, job: Job, port: int, said: Any) -> None:
    here = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": job.world_size,
    }
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT=str(port), OMP_NUM_THREADS="1"
    )
    config = settings(job.folder / "baseline")
    flags.apply(1, config.compute.mode)
    group = processes.join(config.compute, {})
    for name in job.names:
        stopped = planted_run(job.folder / (name or "baseline"), name, group)
        if rank == 0:
            said.put((name, stopped))
    processes.leave(group)


def _drive(job: Job, said: Any) -> None:
    """The ranks, forked from this process, for which torch was imported and which has no threads."""
    global RANK, SHARD, RECIPE
    RANK, SHARD, RECIPE = job.rank, job.shard, job.recipe
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    with measuring.held_port() as port:
        ranks = [
            context.Process(target=_rank, args=(rank, job, port, said))
            for rank in range(job.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


def run_all(
    world_size: int,
    folder: Path,
    names: list[str],
    *,
    rank: int = RANK,
    shard: int = SHARD,
    recipe: tuple[str, ...] | None = None,
) -> dict[str, str]:
    """Runs of `names` by one group of processes; what each said when it stopped."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.plants"])  # once for all groups
    said = context.Queue()
    driver = context.Process(
        target=_drive,
        args=(Job(world_size, folder, names, rank, shard, recipe or RECIPE), said),
    )
    driver.start()
    found: dict[str, str] = {}
    while len(found) < len(names):
        try:
            name, stopped = said.get(timeout=1.0)
        except queue.Empty:
            if not driver.is_alive():
                raise RuntimeError(
                    f"the processes ended after {list(found)}, before {names[len(found)]!r}"
                ) from None
            continue
        found[name] = stopped
        Console(stderr=True).print(
            f"{world_size} processes: {name or 'without a fault'} done", soft_wrap=True
        )
    driver.join()
    return found


WORLDS = (4, 16)  # processes without and with faults
SMOKE = {
    "PLANTS": {"pixel": replace(PLANTS["pixel"], shard=2)}, "WORLDS": (1, 2), "SHARD": 2, "SHARDS": 3,
    "RECIPE": (*RECIPE, "train.steps=3", "train.precision=fp32", "data.num_val=1", "compute.shards=3"),
}  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """What was said of every plant; passed when step, stage, shard or sample, and layer are right for all of them, and
    the run without a fault is identical."""
    rows = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run_all(WORLDS[0], folder / "few", [""])
        said = run_all(WORLDS[1], folder / "many", ["", *PLANTS], shard=SHARD)
        baseline = read_run(folder / "few" / "baseline")
        control = compare(baseline, read_run(folder / "many" / "baseline"))
        for name, plant in PLANTS.items():
            found = compare(baseline, read_run(folder / "many" / name))
            row = {
                "plant": name,
                "what": plant.what,
                "said": found.sentence,
                "stopped": said[name].replace(text, "FOLDER"),
                "wrong": problems(plant, found, said[name]),
            }
            rows.append(row)
            Console(stderr=True).print(rows[-1], soft_wrap=True)
    return {
        "what": f"{' '.join(RECIPE)}; {WORLDS[1]} processes with a fault against {WORLDS[0]} without",
        "machine": measuring.machine(),
        "control": control.sentence,
        "plants": rows,
        "passed": control.verdict == "identical"
        and not any(row["wrong"] for row in rows),
    }
