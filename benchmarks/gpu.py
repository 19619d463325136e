"""Checks that need a GPU. Each takes a Bench and returns figures; it raises AssertionError when a promise is broken.

They run on a CPU too, at small sizes, so that the code itself is tested where there is no GPU; nothing that was
measured there is reported as a GPU's.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import gpu_bits, gpu_speed
from benchmarks.gpu_bench import Bench
from segpipe.data.augment import Augmenter
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.errors import ConfigError, SegpipeError
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.models import MODELS as ALL_MODELS
from segpipe.models import build_model
from segpipe.models.preprocess import Preprocess, colored
from segpipe.run.launch import train
from segpipe.settings.config import Config
from segpipe.settings.groups import AugmentConfig, LossConfig
from segpipe.train.recorder import Watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep

CPU = torch.device("cpu")
MODELS = {name: ALL_MODELS[name] for name in ("fast_scnn", "ddrnet23_slim", "pidnet_s")}
GRACE_S = 20.0  # after the time limit; with the default limit a call ends within 10 minutes, whatever hangs
LEFT_OUT = "left out"  # the figure of a check that was not made, or not to its end; it says why


def scenes(bench: Bench, count: int) -> tuple[Tensor, Tensor]:
    """Procedural scenes of the bench's size: uint8 (B, S, S, 3) and uint8 (B, S, S), on the CPU."""
    config = Config()
    samples = open_samples(
        replace(config.data, size=[bench.size, bench.size]), "train", 0
    )
    read = [samples.read(index) for index in range(min(count, 4))]
    images, targets = zip(
        *(read[index % len(read)] for index in range(count)), strict=True
    )
    return torch.stack([torch.from_numpy(i) for i in images]), torch.stack(
        [torch.from_numpy(t) for t in targets]
    )


def preprocessing(bench: Bench) -> dict[str, Any]:
    """The device's preprocessing against the CPU's, and its colors against OpenCV's, which must be equal."""
    image, target = scenes(bench, 2)
    here, there = (
        Preprocess()(image),
        Preprocess().to(bench.device)(image.to(bench.device)).cpu(),
    )
    difference = float((here - there).abs().max())
    assert difference <= 1e-6, f"preprocessing differs by {difference}"
    strong = AugmentConfig(
        [bench.size] * 2,
        brightness=1.0,
        contrast=1.0,
        saturation=1.0,
        hue=0.5,
        color_on="device",
    )
    for key in range(8):
        crop = Augmenter(strong).crop(image[0].numpy(), target[0].numpy(), key)
        assert crop.color is not None
        given = (
            torch.from_numpy(part[None]).to(bench.device)
            for part in (crop.image, crop.color)
        )
        expected, _ = Augmenter(strong)(image[0].numpy(), target[0].numpy(), key)
        assert np.array_equal(colored(*given)[0].cpu().numpy(), expected), (
            f"color differs for key {key}"
        )
    return {
        "max_difference": difference,
        "bitwise_equal": torch.equal(here, there),
        "colors_equal": True,
    }


def loss_and_gradients(bench: Bench) -> dict[str, Any]:
    """Loss and its gradient by the logits on the device against the CPU, both in fp32, OHEM and boundary included."""
    _, target = scenes(bench, 2)
    generator = torch.Generator().manual_seed(0)
    small = bench.size // 8
    heads = {
        "main": torch.randn(2, STREET.num_classes, small, small, generator=generator),
        "aux": torch.randn(2, STREET.num_classes, small, small, generator=generator),
        "boundary": torch.randn(2, 1, small, small, generator=generator),
    }
    figures = {}
    for name in ("cross_entropy", "ohem"):
        config = LossConfig(name=name)
        here, there = (
            _loss(heads, target, config, device)
            for device in (torch.device("cpu"), bench.device)
        )
        worst = max(
            float((a.grad.cpu() - b.grad.cpu()).abs().max() / a.grad.abs().max())
            for a, b in zip(here[1], there[1], strict=True)
            if a.grad is not None and b.grad is not None
        )
        relative = abs(float(here[0]) - float(there[0])) / abs(float(here[0]))
        assert relative <= 1e-5, f"{name}: loss differs by {relative} of itself"
        assert worst <= 1e-4, f"{name}: a gradient differs by {worst} of the largest"
        figures[name] = {"loss_relative": relative, "gradient_relative": worst}
    return figures


def _loss(
    heads: dict[str, Tensor], target: Tensor, config: LossConfig, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    leaves = {name: value.to(device).requires_grad_() for name, value in heads.items()}
    valid = torch.tensor(valid_pixels(target), device=device)
    parts = shard_loss(
        leaves,
        target.to(device),
        config,
        class_weights=None,
        global_valid=valid,
        align_corners=False,
    )
    parts["total"].backward()  # type: ignore[no-untyped-call]
    return parts["total"].detach(), list(leaves.values())


def gradients(bench: Bench) -> dict[str, Any]:
    """Gradients of all parameters of every network on the device, in fp32, against float64 on the CPU.

    fp32 on the CPU stands beside it: one ReLU at 0 that falls to the other side moves a small tensor by up to 0.7 %.
    """
    image, target = scenes(replace(bench, size=min(bench.size, 128)), 4)
    figures = {}
    for name in MODELS:
        exact = _gradients(name, image, target, CPU, torch.float64)
        rounding, found = (
            _farthest(_gradients(name, image, target, device, torch.float32), exact)
            for device in (CPU, bench.device)
        )
        assert found <= 0.03, (
            f"{name}: a gradient differs by {found} of itself, a CPU's by {rounding}"
        )
        figures[name] = {"relative": found, "relative_on_cpu": rounding}
    return figures


def _gradients(
    name: str, image: Tensor, target: Tensor, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Of each parameter, as float64 on the CPU.

    In eval mode: with the statistics of a few pooled values, rounding alone moves gradients by up to 4 % on a CPU.
    """
    torch.manual_seed(0)
    model = build_model(name, STREET.num_classes).eval().to(device, dtype)
    heads = model.logits(Preprocess().to(device)(image.to(device)).to(dtype), aux=True)
    valid = torch.tensor(valid_pixels(target), device=device)
    parts = shard_loss(
        heads,
        target.to(device),
        LossConfig(),
        class_weights=None,
        global_valid=valid,
        align_corners=model.align_corners,
    )
    parts["total"].backward()  # type: ignore[no-untyped-call]
    return [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]


def _farthest(found: list[Tensor], exact: list[Tensor]) -> float:
    """Largest distance of two tensors as a share of the second; of tiny ones, of a thousandth of the largest."""
    least = 1e-3 * max(float(tensor.norm()) for tensor in exact)
    return max(
        float((a - b).norm()) / max(float(b.norm()), least)
        for a, b in zip(found, exact, strict=True)
    )


def steps(bench: Bench) -> dict[str, Any]:
    """A real update of every network in fp32, bf16 and fp16: finite, and the same bits twice."""
    figures: dict[str, Any] = {}
    for model in MODELS:
        for precision in ("fp32", "bf16", "fp16"):
            small = replace(bench, size=min(bench.size, 256))
            first, second = (
                _updates(small, model, precision, updates=3) for _ in range(2)
            )
            assert torch.isfinite(first["loss"]), (
                f"{model} {precision}: loss {first['loss']}"
            )
            same = torch.equal(first["weights"], second["weights"])
            assert same, (
                f"{model} {precision}: the same three updates gave different weights"
            )
            figures[f"{model}_{precision}"] = {
                "loss": float(first["loss"]),
                "same_bits": same,
            }
    return figures


def speed(bench: Bench) -> dict[str, Any]:
    """Images per second and peak memory of a full update of every network at the bench's size, without the loader."""
    figures: dict[str, Any] = {}
    for model in MODELS:
        for precision in ("fp32", "bf16"):
            if bench.seconds_left < 60 and bench.device.type == "cuda":
                figures[f"{model}_{precision}"] = "left out: no time"
                continue
            done = _updates(bench, model, precision, updates=bench.updates)
            figures[f"{model}_{precision}"] = {
                key: done[key] for key in ("images_per_second", "peak_memory_mib")
            }
    return figures


def _updates(
    bench: Bench, model: str, precision: str, *, updates: int
) -> dict[str, Any]:
    """Runs `updates` updates after two to warm up, on one shard of `bench.batch` scenes."""
    cuda = bench.device.type == "cuda"
    config = Config()
    config.model.name, config.train.precision, config.train.steps = (
        model,
        precision,
        updates + 2,
    )
    config.compute.shards, config.compute.samples_per_shard = 1, bench.batch
    config.loss.name, config.optim.clip_norm = "ohem", 5.0
    state = build_state(config, STREET, bench.device)
    step = TrainStep(config, Watch(Group(0, 0, 1, bench.device), state))
    image, target = (part.to(bench.device) for part in scenes(bench, bench.batch))
    numbers = torch.zeros(bench.batch, dtype=torch.int64)
    valid = torch.tensor(valid_pixels(target), device=bench.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = 0.0
    for number in range(updates + 2):
        if number == 2:
            _wait(bench.device)
            started = time.perf_counter()
        result = step([ShardBatch(number, 0, image, target, numbers, numbers)], valid)
        step.apply()
    _wait(bench.device)
    seconds = time.perf_counter() - started
    return {
        "loss": result.loss.cpu(),
        "weights": torch.cat(
            [
                value.detach().float().flatten().cpu()
                for value in state.model.state_dict().values()
            ]
        ),
        "images_per_second": round(updates * bench.batch / seconds, 1),
        "peak_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20)
        if cuda
        else None,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def networks(bench: Bench) -> dict[str, Any]:
    """Eval logits of every network on the device against the CPU, fp32."""
    image, _ = scenes(replace(bench, size=min(bench.size, 256)), 2)
    figures = {}
    for name in MODELS:
        torch.manual_seed(0)
        model = build_model(name, STREET.num_classes).eval()
        with torch.inference_mode():
            here = model(Preprocess()(image))
            there = model.to(bench.device)(
                Preprocess().to(bench.device)(image.to(bench.device))
            ).cpu()
        difference = float((here - there).abs().max() / here.std())
        assert difference <= 1e-3, (
            f"{name}: logits differ by {difference} of their standard deviation"
        )
        figures[name] = {"max_difference_sigma": difference}
    return figures


def camvid(bench: Bench) -> dict[str, Any]:
    """CamVid from scratch in the time that is left: the schedule is cut to fit, the figure is of that many steps."""
    if bench.camvid is None:
        return {LEFT_OUT: "give --camvid FOLDER"}
    if bench.too_late(120):  # two runs, each with a validation
        return {LEFT_OUT: gpu_bits.NO_TIME}
    from segpipe.settings.compose import compose

    overrides = [
        "experiment=camvid_cpu",
        f"data.root={bench.camvid}",
        "model=ddrnet23_slim",
    ]
    overrides += [
        "run.name=gpu_check_camvid",
        f"run.root={bench.folder}",
        "run.exists=replace",
        "data.workers=8",
    ]
    overrides += [
        "compute.samples_per_shard=12",
        "export.enabled=false",
        "train.progress=false",
    ]
    # The rate falls to 0 at the last step, however many there are; the recipe's own end is after 6000.
    overrides += [f"compute.device={bench.device.type}", "optim.schedule_steps=0"]
    group = Group(0, 0, 1, bench.device)
    probe = compose([*overrides, "train.steps=60", "train.log_every=60"])
    _, _, warm = train(probe, group, Console(quiet=True))
    rate = warm["images_per_second"] / probe.global_batch
    count = max(int((bench.seconds_left - 45) * rate), 60)
    config = compose(
        [
            *overrides,
            f"train.steps={count}",
            f"train.validate_every={max(count // 8, 1)}",
        ]
    )
    _, _, result = train(config, group, Console())
    return {
        key: result[key]
        for key in (
            "miou",
            "iou",
            "steps",
            "images_per_second",
            "train_seconds",
            "ema_digest",
        )
    }


# In the order in which they run. To add a check: a function that takes a Bench and returns figures, raises
# AssertionError when a promise is broken, returns {LEFT_OUT: why} when it does not fit into `bench.seconds_left`, and
# runs on a CPU at the sizes of tests/cli/test_gpu_check.py.
CHECKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "preprocessing": preprocessing,
    "networks": networks,
    "loss_and_gradients": loss_and_gradients,
    "gradients": gradients,
    "steps": steps,
    "speed": speed,
    "graphs": gpu_speed.graphs,
    "syncs": gpu_speed.syncs,
    "alignment": gpu_speed.alignment,
    "recipes": gpu_speed.recipes,
    "loader": gpu_speed.loader,
    "digest": gpu_bits.digest,
    "ops": gpu_bits.ops,
    "repeats": gpu_bits.repeats,
    "processes": gpu_bits.processes,
    "cost": gpu_bits.cost,
    "camvid": camvid,
}


def run(bench: Bench, chosen: list[str]) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Name, whether it kept its promise, and figures of each chosen check; one that breaks does not keep the others
    from running. One that was left out, which its figures say, has broken nothing and shown nothing."""
    for name in chosen:
        started = time.monotonic()
        try:
            flags.apply(
                threads=torch.get_num_threads()
            )  # a check that compares recipes leaves the last one's switches
            figures, passed = CHECKS[name](bench), True
        except Exception as error:
            figures, passed = {"error": f"{type(error).__name__}: {error}"}, False
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        yield name, passed, {**figures, "seconds": round(time.monotonic() - started, 1)}


def check(given: dict[str, Any]) -> int:
    """Exit code of `segpipe gpu-check`; `given` are the values of its keys."""
    names = list(CHECKS) if given["only"] == ["all"] else given["only"]
    if unknown := [name for name in names if name not in CHECKS]:
        raise ConfigError(f"only = {unknown[0]} is not one of {', '.join(CHECKS)}.")
    console = Console()
    if given["device"] == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"gpu-check needs a GPU, but torch sees none: nothing was checked. The driver may be too old for CUDA "
            f"{torch.version.cuda}: see nvidia-smi."
        )
    flags.apply(threads=torch.get_num_threads())
    bench = Bench(
        # With its number, as a tensor says it: caches and self-tests of kernels are kept by device.
        torch.device("cuda", torch.cuda.current_device())
        if given["device"] == "cuda"
        else torch.device("cpu"),
        time.monotonic() + given["seconds"],
        **{name: given[name] for name in ("size", "batch", "updates")},
        camvid=Path(given["camvid"]) if given["camvid"] else None,
        folder=Path(given["folder"]),
    )
    # A kernel or a collective that hangs cannot be interrupted: the process ends, and says where each thread stood.
    # What was found until then is printed and in the report.
    faulthandler.dump_traceback_later(
        given["seconds"] + GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr
    )
    report: dict[str, Any] = {
        "fingerprint": flags.fingerprint(),
        "device": given["device"],
        "checks": {},
    }
    failed = False
    for name, sound, figures in run(bench, names):
        failed = failed or not sound
        verdict = (
            "FAILED" if not sound else LEFT_OUT if LEFT_OUT in figures else "passed"
        )
        report["checks"][name] = {"passed": verdict == "passed", **figures}
        console.print(
            f"{verdict}  {name}  {json.dumps(figures)}", markup=False, soft_wrap=True
        )
        if given["out"]:
            Path(given["out"]).write_text(json.dumps(report, indent=2) + "\n")
    faulthandler.cancel_dump_traceback_later()
    return SegpipeError.exit_code if failed else 0
