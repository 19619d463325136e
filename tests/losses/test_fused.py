"""Losses that never hold logits at full resolution, against float64 with them; for every backend that a CPU has."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ranks import launched
from segpipe import native
from segpipe.errors import ConfigError, DataError
from segpipe.losses import cross_entropy, fused
from segpipe.losses.boundary import boundary_target
from segpipe.losses.fused import ClassHead, Terms, Wanted, class_loss
from segpipe.losses.total import backend, shard_loss
from segpipe.models.resize import bilinear_axes, bilinear_weights
from segpipe.settings.groups import LossConfig

pytestmark = pytest.mark.usefixtures("strict_torch")
EVALUATE = {"native": fused.native_pass, "plain": cross_entropy.evaluate}
NAMES = list(EVALUATE)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.1},
    {"stride": 2, "aux_stride": 3},
    {"name": "ohem", "ohem_threshold": 0.3, "ohem_min_kept": 0.2},
    {"name": "ohem", "ohem_threshold": 0.9, "ohem_min_kept": 0.0},
    {"dice_weight": 0.7},
    {
        "name": "ohem",
        "ohem_threshold": 0.05,
        "ohem_min_kept": 0.0,
        "dice_weight": 1.0,
    },  # rows of which none is hard
    {"name": "ohem", "dice_weight": 1.0, "stride": 2},
)


def class_head(logits: Tensor, target: Tensor, **fields: Any) -> ClassHead:
    rows, columns = bilinear_axes(logits, (target.shape[1], target.shape[2]))
    return ClassHead(logits, target, rows, columns, **fields)


def upsampled(logits: Tensor, size: tuple[int, int], align_corners: bool) -> Tensor:
    """In float64, at the coordinates of fp32: exact ones would differ by 4e-6."""
    rows, columns = (
        torch.from_numpy(
            bilinear_weights(source, out, np.float32, align_corners=align_corners)
        ).double()
        for source, out in zip(logits.shape[-2:], size, strict=True)
    )
    return rows @ (logits.double() @ columns.t())


def class_reference(
    logits: Tensor,
    target: Tensor,
    config: LossConfig,
    weights: Tensor | None,
    sure: Tensor | None,
    dice: float,
) -> Tensor:
    """The sum over the pixels of a class head, written out in float64."""
    valid = target != 255
    ids = torch.where(valid, target, 0).long()
    scale = (
        torch.ones(logits.shape[1]).double() if weights is None else weights.double()
    )
    log_p, smoothing = logits.log_softmax(1), config.label_smoothing
    plain = log_p.gather(1, ids[:, None])[:, 0]
    on_target = plain * scale[ids]
    losses = -(1 - smoothing) * on_target - smoothing / len(scale) * (
        log_p * scale.view(1, -1, 1, 1)
    ).sum(1)
    losses = torch.where(valid, losses, 0.0)
    kept, ratio = valid, 1.0
    if config.name == "ohem":
        fewest, cut = (
            math.ceil(config.ohem_min_kept * losses.numel()),
            -math.log(config.ohem_threshold),
        )
        # By the probability of the class, whatever it weighs.
        hard = torch.where(valid, -plain.detach(), 0.0)
        ordered = hard.flatten().sort(descending=True).values
        kept = valid & (
            hard >= (min(cut, float(ordered[fewest - 1])) if fewest else cut)
        )
        ratio = float(valid.sum() / kept.sum().clamp_min(1))
    total = losses[kept].sum() * ratio + (
        losses[sure].sum() if sure is not None else 0.0
    )
    if dice:
        p = log_p.exp() * valid[:, None]
        one_hot = F.one_hot(ids, len(scale)).movedim(3, 1) * valid[:, None]
        present = one_hot.sum((0, 2, 3)) > 0
        score = 2 * (p * one_hot).sum((0, 2, 3)) / (p + one_hot).sum((0, 2, 3))
        total = (
            total + dice * (1 - score)[present].mean() * valid.sum()
            if present.any()
            else total
        )
    return total


def reference(
    heads: dict[str, Tensor],
    target: Tensor,
    config: LossConfig,
    weights: Tensor | None,
    align_corners: bool,
) -> Tensor:
    size, total = (
        (target.shape[1], target.shape[2]),
        torch.zeros((), dtype=torch.float64),
    )
    edge = (
        upsampled(heads["boundary"], size, align_corners)
        if "boundary" in heads
        else None
    )
    for name, logits in heads.items():
        wide = upsampled(logits, size, align_corners)
        if name == "boundary":
            band = boundary_target(target, target != 255)
            positives, valid = (
                (band[:, 0] * (target != 255)).sum(),
                (target != 255).sum().clamp_min(1),
            )
            weight = torch.where(
                band > 0.5, (valid - positives) / valid, positives / valid
            ).double()
            losses = weight * F.binary_cross_entropy_with_logits(
                wide, band.double(), reduction="none"
            )
            total = (
                total + config.boundary_weight * losses[(target != 255)[:, None]].sum()
            )
            continue
        stride = config.stride if name == "main" else config.aux_stride
        pick = (slice(stride // 2, None, stride), slice(stride // 2, None, stride))
        seen, main = target[:, *pick], name == "main"
        sure = (
            edge.detach()[:, 0, *pick].sigmoid() > 0.8
            if main and edge is not None
            else None
        )
        found = class_reference(
            wide[:, :, *pick],
            seen,
            config,
            weights,
            sure,
            config.dice_weight if main else 0.0,
        )
        total = total + found * target.numel() / seen.numel() * (
            1.0 if main else config.aux_weight
        )
    return total / (target != 255).sum().clamp_min(1)


def case(number: int) -> tuple[dict[str, Tensor], Tensor, Tensor | None, bool]:
    """Heads, target, class weights and align_corners by number: shapes, scales and ignored pixels of all kinds."""
    random = np.random.default_rng(number)
    torch.manual_seed(number)
    batch, classes = int(random.integers(1, 4)), int(random.choice([2, 3, 19, 40]))
    small = tuple(int(n) for n in random.integers(1, 9, 2))
    scale = random.choice([1.0, 0.6, 2.0, 3.7, 8.0], 2)
    size = tuple(max(1, round(n * s)) for n, s in zip(small, scale, strict=True))
    if number % 4 == 3:
        small, size = (3, 14), (24, 112 + number)  # more than one block of columns
    target = torch.randint(0, classes, (batch, *size), dtype=torch.uint8)
    kind = number % 5
    if kind == 1:
        target[torch.rand(target.shape) < 0.5] = 255
    elif kind == 2:
        target[0] = 255
    elif kind == 3:
        target[:, : size[0] // 2] = 255
    elif kind == 4:
        target[:] = 255 if number % 2 else 1
    heads = {
        "main": torch.randn(batch, classes, *small) * 3,
        "aux": torch.randn(batch, classes, *small),
    }
    if number % 2:
        heads["boundary"] = torch.randn(batch, 1, *small) * 2
    weights = torch.rand(classes) + 0.1 if number % 3 == 0 else None
    return heads, target, weights, bool(random.integers(2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("settings", "half"),
    [*((each, False) for each in SETTINGS), (SETTINGS[-1], True)],
    ids=str,
)
def test_loss_and_gradient_are_those_of_float64(
    name: str, settings: dict[str, Any], half: bool
) -> None:
    for number in range(12):
        heads, target, weights, align_corners = case(number)
        heads = {
            head: logits.bfloat16() if half else logits
            for head, logits in heads.items()
        }
        given = {
            head: logits.clone().requires_grad_() for head, logits in heads.items()
        }
        valid = (target != 255).sum()
        config = LossConfig(backend=name, **settings)
        found = shard_loss(
            given,
            target,
            config,
            class_weights=weights,
            global_valid=valid,
            align_corners=align_corners,
        )
        wide = {
            head: logits.double().requires_grad_() for head, logits in heads.items()
        }
        expected = reference(wide, target, config, weights, align_corners)
        (2 * found["total"]).backward()  # the gradient that comes from above counts
        (2 * expected).backward()
        assert float(found["total"].detach()) == pytest.approx(
            float(expected.detach()), rel=1e-6, abs=1e-9
        )
        for head, logits in given.items():
            assert logits.grad is not None
            assert logits.grad.dtype == logits.dtype
            right = wide[head].grad
            error, size = (logits.grad.double() - right).abs().max(), right.abs().max()
            assert error <= (1e-2 if half else 1e-6) * size, (
                number,
                head,
                float(error / size),
            )


def test_gradcheck_of_the_terms_in_float64() -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 4, (1, 7, 9), dtype=torch.uint8)
    target[0, 2:4] = 255
    weights, sure = torch.rand(4).double(), torch.rand(1, 7, 9) < 0.3
    logits = torch.randn(1, 4, 2, 3).double().requires_grad_()
    head = class_head(logits, target, weights=weights, smoothing=0.1)
    scale = torch.tensor(0.01).double()

    def loss(logits: Tensor) -> Tensor:
        terms = Terms(dice_weight=0.5, sure=sure)
        changed = replace(head, logits=logits)
        return class_loss(changed, terms, scale, cross_entropy.evaluate)[0]

    assert torch.autograd.gradcheck(loss, logits, nondet_tol=0.0)


def test_compiled_any_number_of_threads_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 19, (2, 128, 264), dtype=torch.uint8)
    head = class_head(torch.randn(2, 19, 16, 33), target, smoothing=0.1)
    slopes, factors = (torch.randn(19), torch.randn(19)), torch.rand(2, 128, 264)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(fused.native_pass(head, Wanted(True, True, factors, slopes)))
    for other in found[1:]:
        for part in ("losses", "gradient", "sums"):
            assert torch.equal(getattr(found[0], part), getattr(other, part)), part


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_threads_and_memory_format_give_the_same_bits_of_the_loss(
    settings: dict[str, Any],
) -> None:
    """Of a sum in fp32 over so many pixels the order would depend on the threads."""
    torch.manual_seed(0)
    target, logits = (
        torch.randint(0, 5, (2, 160, 320), dtype=torch.uint8),
        torch.randn(2, 5, 20, 40) * 3,
    )
    found = []
    for threads, memory in (
        (1, torch.contiguous_format),
        (2, torch.contiguous_format),
        (3, torch.channels_last),
    ):
        torch.set_num_threads(threads)
        given = logits.clone(memory_format=memory).requires_grad_()
        config, valid = (
            LossConfig(backend="native", **settings),
            torch.tensor(target.numel()),
        )
        parts = shard_loss(
            {"main": given},
            target,
            config,
            class_weights=None,
            global_valid=valid,
            align_corners=False,
        )
        found.append(
            [
                *(part.detach() for part in parts.values()),
                torch.autograd.grad(parts["total"], given)[0],
            ]
        )
    assert all(
        torch.equal(a, b)
        for other in found[1:]
        for a, b in zip(found[0], other, strict=True)
    )


FLAGS = native.FLAGS  # less its first two, what a machine compiles for
VARIANTS = {
    "sse2": ["-O3", "-march=x86-64"],
    "avx2 and fma": ["-O3", "-mavx2", "-mfma"],
    "avx512": ["-O3", "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"],
    "without optimization": ["-O0"],
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other instruction sets")
def test_any_instruction_set_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with fused multiply-add at hand: contraction is off. Each variant takes its own branch of the compiler."""
    capable, found = torch.backends.cpu.get_cpu_capability(), {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = torch.randint(0, 19, (1, 32, 96), dtype=torch.uint8)
    head = class_head(torch.randn(1, 19, 4, 12) * 3, target, smoothing=0.1)
    slopes, factors = (torch.randn(19), torch.randn(19)), torch.rand(1, 32, 96)
    for name, options in VARIANTS.items():
        if (name == "avx512" and capable != "AVX512") or (
            name == "avx2 and fma" and "AVX" not in capable
        ):
            continue
        monkeypatch.setattr(native, "FLAGS", (*options, *FLAGS[2:]))
        native.load.cache_clear()
        assert fused.library() is not None, name
        given = fused.native_pass(head, Wanted(True, True, factors, slopes))
        pred, counts = fused.classes_and_counts(head)
        found[name] = (given.losses, given.gradient, given.sums, pred, counts)
    native.load.cache_clear()
    first, *others = found.values()
    assert others
    assert all(
        torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other instruction sets")
@pytest.mark.skipif(not shutil.which("gcc"), reason="GCC says what it vectorized")
def test_avx2_computes_what_avx512_computes_in_vectors() -> None:
    """The exponentials of a loss took three times as long, one by one."""
    loops = {}
    for name in ("avx2 and fma", "avx512"):
        command = [
            "gcc",
            *VARIANTS[name],
            *FLAGS[2:],
            "-fopenmp",
            "-S",
            "-o",
            os.devnull,
        ]
        command += ["-fopt-info-vec-optimized", str(fused.SOURCE)]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        loops[name] = set(re.findall(r":(\d+):\d+: optimized: loop vec", told.stderr))
    assert len(loops["avx512"]) > 10
    assert loops["avx2 and fma"] >= loops["avx512"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_reach_loss_and_gradient(
    name: str, number: float
) -> None:
    logits = torch.randn(1, 5, 4, 6)
    logits[0, 2, 1, 2] = number
    logits.requires_grad_()
    target = torch.ones(1, 32, 48, dtype=torch.uint8)
    for settings in ({}, {"name": "ohem"}):
        config = LossConfig(backend=name, **settings)  # type: ignore[arg-type]
        parts = shard_loss(
            {"main": logits},
            target,
            config,
            class_weights=None,
            global_valid=torch.tensor(99),
            align_corners=False,
        )
        (grad,) = torch.autograd.grad(parts["total"], logits)
        assert parts["total"].isnan()
        assert grad.isnan().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_reach_the_gradient_where_no_pixel_counts(
    name: str, number: float
) -> None:
    """With a boundary head or OHEM, rows without a pixel that counts are passed over."""
    target = torch.full((1, 32, 48), 255, dtype=torch.uint8)
    for settings, heads in (({"name": "ohem"}, ("main",)), ({}, ("main", "boundary"))):
        logits = torch.zeros(1, 5, 4, 6)
        logits[0, 2, 1, 2] = number
        logits.requires_grad_()
        given = {
            head: logits if head == "main" else torch.zeros(1, 1, 4, 6)
            for head in heads
        }
        config, valid = LossConfig(backend=name, **settings), torch.tensor(0)  # type: ignore[arg-type]
        found = shard_loss(
            given,
            target,
            config,
            class_weights=None,
            global_valid=valid,
            align_corners=False,
        )
        (grad,) = torch.autograd.grad(found["total"], logits)
        assert not grad.isfinite().all()


def test_a_target_that_is_no_class_is_an_error_as_of_torch() -> None:
    target = torch.full((1, 8, 8), 3, dtype=torch.uint8)
    for name in NAMES:
        with pytest.raises((DataError, IndexError, RuntimeError)):
            shard_loss(
                {"main": torch.randn(1, 3, 2, 2)},
                target,
                LossConfig(backend=name),
                class_weights=None,
                global_valid=torch.tensor(64),
                align_corners=False,
            )


@pytest.mark.parametrize("name", NAMES)
def test_huge_logits_give_the_losses_of_float64(name: str) -> None:
    logits = torch.tensor([[[[1e4]], [[-1e4]], [[3e37]], [[-3e38]]]])
    for right in range(4):
        head = class_head(logits, torch.full((1, 2, 2), right, dtype=torch.uint8))
        found = EVALUATE[name](head, Wanted(gradient=True))
        expected = -logits.double().log_softmax(1)[0, right]
        assert found.losses[0, 0, 0] == pytest.approx(float(expected), rel=1e-6)
        assert found.gradient.flatten().tolist() == [
            4.0 * ((c == 2) - (c == right)) for c in range(4)
        ]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gradient_nothing_is_differentiated(name: str) -> None:
    seen: list[bool] = []
    evaluate: Callable[..., Any] = EVALUATE[name]

    def watched(head: ClassHead, wanted: Wanted) -> Any:
        seen.append(wanted.gradient)
        return evaluate(head, wanted)

    head = class_head(torch.randn(1, 3, 2, 2), torch.ones(1, 8, 8, dtype=torch.uint8))
    total, parts = class_loss(head, Terms(), torch.tensor(1.0), watched)
    assert (seen, total.requires_grad) == ([False], False)
    assert parts["class"] == total
    class_loss(
        replace(head, logits=head.logits.requires_grad_()),
        Terms(),
        torch.tensor(1.0),
        watched,
    )
    assert seen == [False, True]


def test_a_missing_compiler_is_named_before_triton_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles what starts a kernel, with gcc or clang and Python.h: at the first one, in the first update."""
    include = tmp_path / "include"
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(include))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("segpipe.native.shutil.which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for made, compiler, found in (
        (False, "", "plain"),
        (False, "nvc", "plain"),
        (True, "", "plain"),
        (True, "nvc", "triton"),
    ):
        include.mkdir(exist_ok=True)
        (include / "Python.h").touch() if made else None
        monkeypatch.setenv("CC", compiler)
        native.triton_builds.cache_clear()
        with (
            nullcontext()
            if found == "triton"
            else pytest.warns(UserWarning, match="Install gcc and python3-dev")
        ):
            assert backend(LossConfig(), "cuda") == found
    native.triton_builds.cache_clear()


def test_a_kernel_that_does_not_start_is_told_and_torch_computes_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that Triton does not know, a driver that the linker does not find, a cache that cannot be written."""

    def fails(device: torch.device) -> None:
        raise RuntimeError("libcuda.so not found")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr("segpipe.native.find_spec", lambda name: True)
    monkeypatch.setattr("segpipe.native.Path.is_file", lambda path: True)
    for start, expected in ((fails, "plain"), (lambda device: None, "triton")):
        monkeypatch.setattr(native, "start_a_kernel", start)
        native.triton_builds.cache_clear()
        with (
            nullcontext()
            if expected == "triton"
            else pytest.warns(UserWarning, match="libcuda.so not found.*torch computes")
        ):
            assert backend(LossConfig(), "cuda") == expected
    monkeypatch.setattr("segpipe.native.find_spec", lambda name: None)
    native.triton_builds.cache_clear()
    with pytest.warns(
        UserWarning, match="triton is not installed: on a GPU, torch computes"
    ):
        assert backend(LossConfig(), "cuda") == "plain"
    native.triton_builds.cache_clear()


def _started(rank: int) -> str:
    """The kind of kernel that Triton's interpreter started."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    seen = []
    made = triton.jit

    def watched(function: Any) -> Any:
        seen.append(made(function))
        return seen[0]

    triton.jit = watched
    native.start_a_kernel(torch.device("cpu"))
    return type(seen[0]).__name__


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")
def test_the_kernel_that_is_tried_starts_and_compiles_for_an_h100(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Triton's interpreter, which must be chosen before triton is imported; and its code without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    assert launched(1, _started) == ["InterpretedFunction"]
    kernels: list[Any] = []
    made = triton.jit

    def keep(function: Any) -> Any:
        kernels.append(made(function))
        return {(1,): lambda given: None}

    monkeypatch.setattr(triton, "jit", keep)
    native.start_a_kernel(torch.device("cpu"))
    source = ASTSource(kernels[0], {"given": "*fp32"}, {})
    assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_auto_takes_what_the_device_has_and_the_rest_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "triton_builds", lambda: True)
    found = {device: backend(LossConfig(), device) for device in ("cpu", "cuda", "mps")}
    assert found == {"cpu": "native", "cuda": "triton", "mps": "plain"}
    assert backend(LossConfig(name="package.module:Name"), "cuda") == "plain"
    with pytest.raises(
        ConfigError,
        match=r"loss.backend = native on cuda, but a C compiler and a CPU was needed",
    ):
        backend(LossConfig(backend="native"), "cuda")
    monkeypatch.setattr(fused, "library", lambda: None)
    monkeypatch.setattr(native, "triton_builds", lambda: False)
    assert [backend(LossConfig(), device) for device in ("cpu", "cuda")] == [
        "plain",
        "plain",
    ]
    for name, device in (("native", "cpu"), ("triton", "cuda")):
        with pytest.raises(ConfigError, match=f"loss.backend = {name} on {device}"):
            backend(LossConfig(backend=name), device)
