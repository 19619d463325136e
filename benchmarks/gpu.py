"""`segpipe gpu-check`: checks that need a GPU, in two calls: is it right, and is it fast.

They run on a CPU too, at small sizes, so that the code itself is tested where there is no GPU; nothing that was
measured there is reported as a GPU's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from benchmarks import gpu_bits, gpu_nccl, gpu_speed
from benchmarks import measure as measuring
from benchmarks.gpu_bench import (
    LEFT_OUT,
    NO_TIME,
    UNFINISHED,
    Bench,
    GoalMissed,
    append,
    latest,
)
from benchmarks.measure import kill_with_children
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.data.ring import SharedBlock, Slots
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.errors import ConfigError, SegpipeError
from segpipe.losses.total import backend, shard_loss, valid_pixels
from segpipe.models import MODELS as ALL_MODELS
from segpipe.models import build_model
from segpipe.models.preprocess import Preprocess
from segpipe.models.resize import bilinear_axes
from segpipe.native import triton_builds
from segpipe.run.launch import train
from segpipe.settings.config import Config
from segpipe.settings.groups import LossConfig
from segpipe.train.recorder import Watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
CONSOLE = Console()
SMI = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,mig.mode.current",
       "--format=csv"]  # fmt: skip
START = "import sys; from benchmarks import gpu; gpu.work(sys.argv[1])"
START_S = 40.0  # for a process to start, beside what a check takes
VERDICTS = ("passed", "goal missed", "FAILED", "left out")
MODELS = {name: ALL_MODELS[name] for name in ("fast_scnn", "ddrnet23_slim", "pidnet_s")}


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
    """The device's preprocessing against the CPU's."""
    image, _ = scenes(bench, 2)
    here, there = (
        Preprocess()(image),
        Preprocess().to(bench.device)(image.to(bench.device)).cpu(),
    )
    difference = float((here - there).abs().max())
    assert difference <= 1e-6, f"preprocessing differs by {difference}"
    return {
        "max_difference": difference,
        "bitwise_equal": torch.equal(here, there),
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
    leaves = {  # copies: a leaf of the CPU would give the device's tensor a history
        name: value.detach().clone().to(device).requires_grad_()
        for name, value in heads.items()
    }
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
    step = TrainStep(config, Watch(Group(0, 1, bench.device), state))
    on_host = scenes(bench, bench.batch)
    valid = torch.tensor(valid_pixels(on_host[1]), device=bench.device)
    image, target = (part.to(bench.device) for part in on_host)
    numbers = torch.zeros(bench.batch, dtype=torch.int64)
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
        return {LEFT_OUT: "give camvid=FOLDER"}
    if bench.too_late(120):  # two runs, each with a validation
        return {LEFT_OUT: NO_TIME}
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
    # The rate falls to 0 at the last step, however many there are; the recipe's schedule is longer than its steps.
    overrides += [f"compute.device={bench.device.type}", "optim.schedule_steps=0"]
    group = Group(0, 1, bench.device)
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


def machine(bench: Bench) -> dict[str, Any]:
    """What everything else stands on: driver, memory, compiler, kernels that build, page-locked memory, bandwidth."""
    told = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(SMI, capture_output=True, text=True, timeout=30).stdout
    figures: dict[str, Any] = {
        "nvidia_smi": told.strip(),
        "compiler": os.environ.get("CC")
        or shutil.which("gcc")
        or shutil.which("clang"),
        "loss": backend(LossConfig(), bench.device.type),
        "disk_free_mib": shutil.disk_usage(ROOT).free >> 20,
        "cores": len(os.sched_getaffinity(0)),
    }
    bench.keep(figures)
    figures["fingerprint"] = measuring.machine()
    if bench.cuda:
        assert figures["compiler"], "no C compiler: Triton cannot start its kernels"
        assert triton_builds(), "Triton starts no kernel"
        from segpipe.models import triton_resize

        compare_resize(triton_resize, bench.device)
        figures["capability"] = torch.cuda.get_device_capability()
        block = SharedBlock(4, 1 << 22)
        figures["page_locked"] = Slots(block, 4, True)._pinned
        bench.keep(figures)
    return figures | gpu_speed.bandwidth(bench)


def compare_resize(kernels: Any, device: torch.device) -> None:
    """Raise AssertionError unless value and gradient of a resize are those of torch on a CPU, up and down."""
    image = (torch.arange(2 * 3 * 5 * 7) * 0.618 % 1.0).view(2, 3, 5, 7)
    for order in (torch.contiguous_format, torch.channels_last):
        for size in ((10, 21), (4, 3)):
            here = image.clone().requires_grad_()
            there = image.to(device).clone(memory_format=order).requires_grad_()
            expected = functional.interpolate(here, size, mode="bilinear")
            found = kernels.bilinear(there, bilinear_axes(there, size), order)
            for out in (expected, found):
                out.square().sum().backward()
            for a, b in ((found, expected), (there.grad, here.grad)):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5, check_device=False)


@dataclass(frozen=True)
class Check:
    """A check: its function, the call that runs it, and its seconds on an H200."""

    measure: Callable[[Bench], dict[str, Any]]
    part: int
    seconds: int


# In the order in which they run, what matters most first. To add a check: a function that takes a Bench and returns
# figures; it raises AssertionError when a promise is broken and GoalMissed for a figure that is too low, returns
# {LEFT_OUT: why} when it does not fit into `bench.seconds_left`, hands `bench.keep` what it has found so far, and runs
# on a CPU at the sizes of tests/cli/test_gpu_check.py. docs/gpu.md says what it proves.
CHECKS: dict[str, Check] = {
    "machine": Check(machine, 1, 5),
    "loss_and_gradients": Check(loss_and_gradients, 1, 15),
    "graphs": Check(gpu_speed.graphs, 1, 90),
    "syncs": Check(gpu_speed.syncs, 1, 15),
    "one_rank": Check(gpu_nccl.one_rank, 1, 20),
    "several_ranks": Check(gpu_nccl.several_ranks, 1, 50),
    "processes": Check(gpu_bits.processes, 1, 120),
    "repeats": Check(gpu_bits.repeats, 1, 70),
    "trained": Check(gpu_bits.trained, 1, 75),
    "steps": Check(steps, 1, 35),
    "digest": Check(gpu_bits.digest, 1, 2),
    "alignment": Check(gpu_speed.alignment, 1, 2),
    "preprocessing": Check(preprocessing, 1, 2),
    "networks": Check(networks, 1, 4),
    "gradients": Check(gradients, 1, 10),
    "ops": Check(gpu_bits.ops, 1, 3),
    "other_graphs": Check(gpu_speed.other_graphs, 1, 40),
    "bandwidth": Check(machine, 2, 5),
    "loss": Check(gpu_speed.loss, 2, 5),
    "memory": Check(gpu_speed.memory, 2, 15),
    "determinism": Check(gpu_speed.determinism, 2, 30),
    "loader": Check(gpu_speed.loader, 2, 35),
    "networks_speed": Check(gpu_speed.networks_speed, 2, 60),
    "loop": Check(gpu_speed.loop, 2, 100),
    "compiled": Check(gpu_bits.compiled, 2, 90),
    "recipes": Check(gpu_speed.recipes, 2, 200),
    "camvid": Check(camvid, 2, 0),  # takes what is left
}
FAILED, MISSED, PASSED = "FAILED", "goal missed", "passed"


def run(
    bench: Bench, chosen: list[str], rows: Path | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each chosen check: its verdict and figures; one that breaks does not keep the others from running.

    Rows go to the file at once, and what a check has found before its end, too. One that was left out, which its
    figures say, has broken nothing and shown nothing.
    """
    for name in chosen:
        started, kept = time.monotonic(), dict[str, Any]()

        def row(verdict: str, figures: dict[str, Any], name: str = name) -> Any:
            where = bench.device.type
            seconds = round(time.monotonic() - started, 1)  # noqa: B023
            estimate = CHECKS[name].seconds
            found = {"check": name, "device": where, "verdict": verdict}
            found |= {"figures": figures, "seconds": seconds, "estimated_s": estimate}
            if rows:
                append(rows, found)
            return found

        def keep(figures: dict[str, Any], kept: dict[str, Any] = kept) -> None:
            kept.update(figures)
            row(UNFINISHED, kept)

        row(UNFINISHED, {})
        try:
            # A check that compares recipes leaves the last one's switches.
            flags.apply(threads=torch.get_num_threads())
            figures = CHECKS[name].measure(replace(bench, keep=keep))
            verdict = LEFT_OUT if LEFT_OUT in figures else PASSED
        except GoalMissed as error:
            figures, verdict = {**kept, "missed": str(error)}, MISSED
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            figures, verdict = {**kept, "error": told}, FAILED
        if bench.cuda:
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
        yield row(verdict, figures)


def work(given: str) -> None:
    """A process that runs the checks whose names come in, one after the other, and answers each with a line."""
    told = json.loads(given)
    stacks = open(told["stacks"], "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    answers = os.fdopen(told["answers"], "w")
    flags.set_environment()
    flags.apply(threads=torch.get_num_threads())
    for line in sys.stdin:
        bench = bench_of(told["keys"], float(line.split()[1]))
        [row] = run(bench, [line.split()[0]], Path(told["keys"]["out"]))
        print(json.dumps(row), file=answers, flush=True)


class Worker:
    """The process that runs checks: one that hangs or breaks the GPU's context is replaced by a fresh one."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._out = Path(given["out"])
        self._stacks = self._out.with_suffix(".stacks")
        self._out.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = os.pipe()
        self._answers = os.fdopen(ours, "rb", buffering=0)
        told = {"keys": given, "stacks": str(self._stacks), "answers": theirs}
        command = [sys.executable, "-c", START, json.dumps(told)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, pass_fds=[theirs], cwd=ROOT
        )
        os.close(theirs)

    def row(self, name: str, seconds: float, limit: float) -> dict[str, Any]:
        """The row of a check, which has `seconds` for its parts and is killed after `limit`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(name, seconds, file=self._process.stdin, flush=True)
        end, text = time.monotonic() + limit, b""
        while not text.endswith(b"\n") and time.monotonic() < end:
            if select.select([self._answers], [], [], 0.2)[0]:
                part = self._answers.read(1 << 16)
                if not part:
                    break
                text += part
        if text.endswith(b"\n"):
            row: dict[str, Any] = json.loads(text)
            return row
        found = latest(self._out).get(name, {})
        if found.get("verdict") != UNFINISHED:  # of an earlier call
            found = {"check": name, "figures": {}}
        found["figures"]["error"] = self._end(limit)
        found["verdict"] = FAILED
        append(self._out, found)
        return found

    def _end(self, limit: float) -> str:
        """End the process; why."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            told = self._stacks.read_text()[-6000:]
            return f"no answer within {limit:.0f} s. Stacks: {told}"
        return f"the process ended with {code}; what it printed is above"

    def close(self) -> None:
        """End it with all that it started; one that the driver holds is not waited for."""
        kill_with_children(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._answers.close()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()


def bench_of(given: dict[str, Any], seconds: float) -> Bench:
    # With its number, as a tensor says it: caches and self-tests of kernels are kept by device.
    cuda = given["device"] == "cuda"
    return Bench(
        torch.device("cuda", torch.cuda.current_device()) if cuda else CPU,
        time.monotonic() + seconds,
        **{name: given[name] for name in ("size", "batch", "updates")},
        camvid=Path(given["camvid"]) if given["camvid"] else None,
        folder=Path(given["folder"]).absolute(),
    )


def needs_gpu() -> None:
    """Raise ConfigError where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"gpu-check needs a GPU, but torch sees none: nothing was checked. The driver may be too old for CUDA "
            f"{torch.version.cuda}: see nvidia-smi. `device=cpu size=64 batch=2 updates=1` tries the checks out."
        )


def check(given: dict[str, Any]) -> int:
    """Exit code of `segpipe gpu-check`; `given` are the values of its keys."""
    chosen = [
        name
        for name, each in CHECKS.items()
        if given["part"] in ("all", str(each.part))
    ]
    if given["only"] != ["all"]:
        chosen = given["only"]
    if unknown := [name for name in chosen if name not in CHECKS]:
        raise ConfigError(f"only = {unknown[0]} is not one of {', '.join(CHECKS)}.")
    if given["camvid"] and "camvid" not in chosen:
        raise ConfigError(
            f"camvid = {given['camvid']}, but part = {given['part']} does not train on it. Set part=2, or leave it out."
        )
    if given["device"] == "cuda":
        needs_gpu()
    given = {**given, "out": str(Path(given["out"]).absolute())}
    out, deadline = Path(given["out"]), time.monotonic() + given["seconds"]
    append(out, {"check": "call", "figures": {**given, **measuring.code(ROOT)}})
    verdicts: dict[str, str] = {}
    worker: Worker | None = None
    try:
        for name in chosen:
            left, estimate = deadline - time.monotonic(), CHECKS[name].seconds
            if left < (max(estimate / 2, 10) if given["device"] == "cuda" else 5):
                row = {
                    "check": name,
                    "verdict": LEFT_OUT,
                    "figures": {LEFT_OUT: NO_TIME},
                }
                append(out, row)
            else:
                worker = worker or Worker(given)
                # A hang must leave time for the others.
                patience = 2 * estimate + START_S if estimate else left
                limit = min(patience, left) if given["device"] == "cuda" else left
                row = worker.row(name, limit - 2, limit)
            verdicts[name] = row["verdict"]
            told = json.dumps(row["figures"])
            CONSOLE.print(
                f"{row['verdict']}  {name}  {told}", markup=False, soft_wrap=True
            )
            if row["verdict"] == FAILED and worker:
                worker.close()
                worker = None
    finally:
        if worker:
            worker.close()
    counts = ", ".join(f"{list(verdicts.values()).count(v)} {v}" for v in (*VERDICTS,))
    CONSOLE.print(f"{counts}. Rows: {out}", soft_wrap=True)
    return SegpipeError.exit_code if FAILED in verdicts.values() else 0


if __name__ == "__main__":
    work(sys.argv[1])
