"""C6: an update of PIDNet-S at 512x512, batch 2, against the steps of other recipes, on one batch, interleaved."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import profile

from benchmarks import measure as measuring
from benchmarks.baselines import loops
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.losses.boundary import boundary_target
from segpipe.models import build_model
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config
from segpipe.train.recorder import Watch, spent
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step

MUST = {"fp32": 1.3, "bf16": 2.0}  # PIDNet-style step in fp32 over ours
SIZE, BATCH, THREADS = 512, 2, 2
OURS = ("segpipe fp32", "segpipe bf16")  # arms of which the parts are shown
SMOKE = {"SIZE": 64, "THREADS": 1, "OURS": OURS[:1]}


@dataclass(frozen=True)
class Scene:
    """What all arms train on."""

    device: torch.device
    size: int = 512
    batch: int = 2

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 (B, S, S, 3) and uint8 (B, S, S): blocks of classes under noise, 3 % of the pixels ignored."""
        random = torch.Generator().manual_seed(0)
        blocks = torch.randint(
            0,
            STREET.num_classes,
            (self.batch, self.size // 32, self.size // 32),
            generator=random,
        )
        target = (
            blocks.repeat_interleave(32, 1).repeat_interleave(32, 2).to(torch.uint8)
        )
        target[torch.rand(target.shape, generator=random) < 0.03] = 255
        noise = torch.randint(
            0, 64, (self.batch, self.size, self.size, 3), generator=random
        )
        image = noise + 16 * torch.where(target == 255, 0, target).unsqueeze(-1)
        return image.to(torch.uint8), target


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of every arm, ratios to the PIDNet-style step, the parts of ours, and the same loss in both."""
    scene = Scene(torch.device("cpu"), SIZE, BATCH)
    flags.set_environment()
    updates = arms(scene, threads=THREADS)
    seconds = measuring.interleaved(
        {name: update.run for name, update in updates.items()},
        repeats=given.repeats or 20,
        prepare=lambda name: updates[name].prepare(),
    )
    ratios = {
        name: measuring.ratio(seconds["PIDNet-style fp32"], seconds[name])
        for name in seconds
    }
    verdicts = {
        name: measuring.holds(ratios[f"segpipe {name}"], at_least=must)
        for name, must in MUST.items()
    }
    return {
        "what": f"pidnet_s, {scene.size}x{scene.size}, batch {scene.batch}, {THREADS} threads, one process, one shard",
        "machine": measuring.machine(),
        "seconds": {
            name: measuring.summary(values) for name, values in seconds.items()
        },
        "speedup_over_pidnet_style_fp32": ratios,
        "bf16_over_pidnet_style_bf16": measuring.ratio(
            seconds["PIDNet-style bf16"], seconds["segpipe bf16"]
        ),
        "parts_ms": {name: parts(updates[name]) for name in OURS},
        "quality": quality(scene),
        "must": MUST,
        "verdicts": verdicts,
        "passed": all(verdicts.values()),
    }


@dataclass(frozen=True)
class Update:
    """One arm: `run` does a step, `prepare` sets torch's switches as it has them."""

    run: Callable[[], Any]
    prepare: Callable[[], None]
    step: TrainStep | None = None  # of ours
    between_logs: Callable[[], Any] = lambda: (
        None
    )  # of ours: a step without a wait at its end


def arms(scene: Scene, *, threads: int = THREADS) -> dict[str, Update]:
    """Ours in fp32 and bf16; theirs in fp32 and NCHW as published, and in bf16 with channels_last."""
    found = {
        f"segpipe {precision}": ours(scene, precision, threads) for precision in MUST
    }
    for name, step in (
        ("PIDNet-style", loops.pidnet_style),
        ("torchvision-style", loops.torchvision_style),
    ):
        found[f"{name} fp32"] = theirs(scene, step, "fp32", threads)
        found[f"{name} bf16"] = theirs(scene, step, "bf16", threads)
    return found


def ours(
    scene: Scene,
    precision: str,
    threads: int = THREADS,
    mode: str = "elastic",
    *,
    model: str = "pidnet_s",
    cuda_graph: bool = False,
    compiled: bool = False,
) -> Update:
    """A whole update as training does it, without the ledger, which C9 measures."""
    config = Config()
    config.model.name, config.train.precision, config.compute.mode = (
        model,
        precision,
        mode,
    )
    config.compute.compile = compiled
    config.compute.shards, config.compute.samples_per_shard, config.compute.threads = (
        1,
        scene.batch,
        threads,
    )
    config.compute.cuda_graph, config.augment.crop_size = (
        "on" if cuda_graph else "off",
        [scene.size, scene.size],
    )
    kept = min(
        loops.OHEM_KEPT / (scene.batch * scene.size**2), 1.0
    )  # as many pixels as the other recipe
    config.loss.name, config.loss.ohem_threshold, config.loss.ohem_min_kept = (
        "ohem",
        loops.OHEM_THRESHOLD,
        kept,
    )
    prepare = partial(flags.apply, threads, mode)
    prepare()
    state = build_state(config, STREET, scene.device)
    step = TrainStep(config, Watch(Group(0, 1, scene.device), state))
    ids = torch.zeros(scene.batch, dtype=torch.int64)
    image, target = scene.tensors()
    if scene.device.type == "cuda":
        image, target = image.pin_memory(), target.pin_memory()

    def between_logs() -> None:
        train_step(
            step, [ShardBatch(state.step, 0, image, target, ids, ids)], wait=False
        )

    def run() -> None:
        between_logs()
        wait(scene.device)

    return Update(run, prepare, step, between_logs)


def theirs(
    scene: Scene,
    step: Callable[..., dict[str, float]],
    precision: str,
    threads: int = THREADS,
    *,
    compiled: bool = False,
) -> Update:
    """The same network under another recipe; in bf16 also in channels_last, as a tuned copy of the recipe would be."""
    torch.manual_seed(0)
    model = build_model("pidnet_s", STREET.num_classes).train().to(scene.device)
    image, target = scene.tensors()
    seen = Preprocess()(image).contiguous()
    bf16 = precision == "bf16"
    if bf16:
        model, seen = (
            model.to(memory_format=torch.channels_last),
            seen.to(memory_format=torch.channels_last),
        )
    edges = boundary_target(target, target != 255)[:, 0].float()
    batch = loops.Batch(
        *(value.to(scene.device) for value in (seen, target.long(), edges))
    )
    optimizer = loops.optimizer_of(model)
    if compiled:
        model.logits = torch.compile(model.logits)  # type: ignore[method-assign]

    def amp() -> Any:
        return (
            torch.autocast(scene.device.type, torch.bfloat16)
            if bf16
            else contextlib.nullcontext()
        )

    def run() -> dict[str, float]:
        figures = step(model, optimizer, batch, amp)
        wait(scene.device)
        return figures

    return Update(run, partial(flags.apply, threads, "off"))


def parts(update: Update, *, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of each part of an update of ours: medians would need a sync, so means."""
    assert update.step is not None
    update.prepare()
    with profile() as trace:
        for _ in range(rounds):
            update.run()
    seconds = spent(trace, update.step.group.device)
    found = {name: round(1000 * each / rounds, 2) for name, each in seconds.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def quality(scene: Scene) -> dict[str, float]:
    """Both recipes share the plain cross-entropy of the auxiliary head: its value on equal weights and images."""
    step = ours(scene, "fp32").step
    assert step is not None
    image, target = scene.tensors()
    model = step.state.model
    with torch.no_grad():
        logits = model.logits(
            Preprocess().to(scene.device)(image.to(scene.device)), aux=True
        )["aux_p"].double()
        resized = torch.nn.functional.interpolate(
            logits, size=target.shape[-2:], mode="bilinear"
        )
        wanted = torch.nn.functional.cross_entropy(
            resized, target.long().to(scene.device), ignore_index=255
        )
    ids = torch.zeros(scene.batch, dtype=torch.int64)
    found = step(
        [ShardBatch(0, 0, image, target, ids, ids)],
        (target != 255).sum().to(scene.device),
    ).parts["aux_p"]
    exact = step.config.loss.aux_weight * float(wanted)
    return {
        "auxiliary_loss": round(float(found), 6),
        "relative_error_against_float64": abs(float(found) - exact) / exact,
    }


def wait(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
