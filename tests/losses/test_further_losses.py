"""Focal loss, Lovasz-softmax, detail loss and distillation against formulas written out in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import runs
from ranks import trained_by
from segpipe.determinism.opgate import check_ops
from segpipe.errors import ConfigError
from segpipe.losses.boundary import detail_sum, detail_target
from segpipe.losses.distill import TeacherLogits, distill_sum
from segpipe.losses.lovasz import lovasz_sum
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.settings.config import Config
from segpipe.settings.groups import LossConfig
from segpipe.train.checkpoint import check_teacher, read_teacher

pytestmark = pytest.mark.usefixtures("strict_torch")
C = 5


def batch(seed: int, ignored: float) -> tuple[Tensor, Tensor]:
    """Logits (2, C, 6, 8) in float64 and a target without class 3, of which some pixels are ignored."""
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, C, 6, 8, generator=draws, dtype=torch.float64) * 2
    target = torch.randint(0, 3, (2, 6, 8), generator=draws)
    target[0, 0, 0] = 4
    target[torch.rand(target.shape, generator=draws) < ignored] = 255
    return logits, target.to(torch.uint8)


def softmax(logits: Tensor) -> np.ndarray:
    x = logits.double().numpy()
    x = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(x / x.sum(1, keepdims=True))


IGNORED = (0.0, 0.3, 0.9, 1.0)


# --- focal


def focal_sum(p: Tensor, target: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """Over the valid pixels, from the probabilities (B, C, H, W)."""
    total = p.new_zeros(())
    for b, y, x in np.argwhere(target.numpy() != 255):
        label = int(target[b, y, x])
        right = p[b, label, y, x]
        total = total - weights[label] * (1 - right) ** gamma * right.log()
    return total


@pytest.mark.parametrize("backend", ["plain", "native"])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 5.0])
def test_focal_loss_and_gradient_are_those_of_float64(
    backend: str, gamma: float
) -> None:
    for seed, ignored in enumerate(IGNORED):
        logits, target = batch(seed, ignored)
        weights = torch.tensor([1.0, 0.3, 2.0, 5.0, 0.0]) if seed % 2 else None
        given = logits.float().requires_grad_()
        exact = given.detach().double().requires_grad_()
        config = LossConfig(name="focal", focal_gamma=gamma, backend=backend)
        parts = shard_loss(
            {"main": given},
            target,
            config,
            class_weights=weights,
            global_valid=torch.tensor(77),
            align_corners=False,
        )
        parts["total"].backward()
        all_one = torch.ones(C, dtype=torch.float64)
        chosen = all_one if weights is None else weights.double()
        expected = focal_sum(exact.softmax(1), target, chosen, gamma) / 77
        assert parts["main"].item() == pytest.approx(float(expected.detach()), rel=1e-5)
        if ignored == 1.0:
            assert not given.grad.any()
            continue
        expected.backward()
        torch.testing.assert_close(
            given.grad.double(), exact.grad, rtol=1e-5, atol=1e-8
        )


def test_focal_loss_of_a_sure_network_is_finite() -> None:
    for gamma in (0.0, 0.5, 2.0):
        logits = torch.zeros(1, 2, 4, 4)
        logits[:, 0] = 200.0
        logits.requires_grad_()
        for right in (0, 1):
            target = torch.full((1, 4, 4), right, dtype=torch.uint8)
            for backend in ("plain", "native"):
                config = LossConfig(name="focal", focal_gamma=gamma, backend=backend)
                found = shard_loss(
                    {"main": logits},
                    target,
                    config,
                    class_weights=None,
                    global_valid=torch.tensor(16),
                    align_corners=False,
                )["total"]
                (grad,) = torch.autograd.grad(found, logits)
                assert float(found.detach()) == pytest.approx(200.0 * right)
                assert grad.isfinite().all()


# --- Lovasz-softmax


def jaccard_loss(own: np.ndarray, wrong: np.ndarray) -> float:
    """1 - IoU of a class with pixels `own`, where the prediction errs at `wrong`."""
    return 1 - (own & ~wrong).sum() / (own | wrong).sum()


def lovasz_of_the_definition(logits: Tensor, target: Tensor) -> float:
    """Mean over the classes present of the Lovasz extension of the Jaccard loss, set by set."""
    p, ids = (
        softmax(logits).transpose(1, 0, 2, 3).reshape(C, -1),
        target.numpy().ravel(),
    )
    p, ids = p[:, ids != 255], ids[ids != 255]
    losses = []
    for label in sorted(set(ids.tolist())):
        own = ids == label
        errors = np.where(own, 1 - p[label], p[label])
        wrong, before, total = np.zeros_like(own), 0.0, 0.0
        for place in np.argsort(-errors, kind="stable"):
            wrong[place] = True
            now = jaccard_loss(own, wrong)
            total += errors[place] * (now - before)
            before = now
        losses.append(total)
    return float(np.mean(losses)) if losses else 0.0


@pytest.mark.parametrize("ignored", IGNORED)
def test_lovasz_is_that_of_the_definition(ignored: float) -> None:
    for seed in range(4):
        logits, target = batch(seed, ignored)
        found = lovasz_sum(logits.requires_grad_(), target)
        expected = lovasz_of_the_definition(logits.detach(), target)
        wanted = expected * valid_pixels(target)
        assert float(found.detach()) == pytest.approx(wanted, rel=1e-10, abs=1e-12)
        (grad,) = torch.autograd.grad(found, logits)
        assert not grad.movedim(1, -1)[target == 255].any()
        assert grad.any() == (ignored < 1)


def test_lovasz_has_the_gradient_of_differences() -> None:
    logits, target = batch(0, 0.3)
    loss = lambda x: lovasz_sum(x, target)  # noqa: E731
    assert torch.autograd.gradcheck(loss, logits.requires_grad_(), eps=1e-7)


def test_lovasz_of_hard_answers_is_1_less_the_mean_iou() -> None:
    _, target = batch(1, 0.2)
    pred = torch.randint(0, 3, target.shape, generator=torch.Generator().manual_seed(5))
    logits = torch.nn.functional.one_hot(pred, C).movedim(3, 1).double() * 1e3
    valid, ious = target != 255, []
    for label in target[valid].unique():
        own, said = (target == label) & valid, (pred == label) & valid
        ious.append(float((own & said).sum() / (own | said).sum()))
    found = lovasz_sum(logits, target) / valid.sum()
    assert float(found) == pytest.approx(1 - np.mean(ious))
    per_image = np.mean(
        [
            lovasz_of_the_definition(logits[i : i + 1], target[i : i + 1])
            for i in range(2)
        ]
    )
    assert float(found) != pytest.approx(per_image), "the control: the mean per image"


# --- detail


def slow_detail(target: np.ndarray) -> np.ndarray:
    """At full and half resolution: a pixel whose id exceeds the mean of its labelled neighbors; nearest upsampling."""
    count, height, width = target.shape
    edges = np.zeros(target.shape, bool)
    for b, y, x in np.ndindex(count, height, width):
        for stride in (1, 2):
            row, column = y // stride * stride, x // stride * stride
            center = int(target[b, row, column])
            if center == 255 or target[b, y, x] == 255:
                continue
            window = target[
                b, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2
            ].ravel()
            edges[b, y, x] |= sum(center - int(n) for n in window if n != 255) > 0
    return edges


@pytest.mark.parametrize("ignored", IGNORED)
def test_detail_target_is_that_of_the_definition(ignored: float) -> None:
    for seed in range(3):
        _, blocks = batch(seed, ignored)
        target = blocks.repeat_interleave(3, 1).repeat_interleave(4, 2)
        found = detail_target(target)
        np.testing.assert_array_equal(
            found[:, 0].numpy() > 0, slow_detail(target.numpy())
        )


def test_published_detail_target_without_ignored_pixels_and_borders() -> None:
    """That of STDC's code, with its third level, which its threshold drops."""
    _, blocks = batch(3, 0.0)
    target = blocks.repeat_interleave(6, 1).repeat_interleave(6, 2)[:, :32, :48]
    kernel = torch.full((1, 1, 3, 3), -1.0)
    kernel[0, 0, 1, 1] = 8.0
    levels = []
    for stride in (1, 2, 4):
        found = torch.nn.functional.conv2d(
            target[:, None].float(), kernel, stride=stride, padding=1
        )
        sharp = (found.clamp(min=0) > 0.1).float()
        levels.append(torch.nn.functional.interpolate(sharp, target.shape[1:]))
    fused = sum(w * x for w, x in zip((0.6, 0.3, 0.1), levels, strict=True))
    expected = (fused > 0.1)[:, :, 2:-2, 2:-2]
    assert expected.any()
    found = detail_target(target)[:, :, 2:-2, 2:-2] > 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ignored", IGNORED)
def test_detail_sum_is_that_of_float64(ignored: float) -> None:
    logits, target = batch(2, ignored)
    given = logits[:, :1].clone().requires_grad_()
    valid, x = (target != 255).numpy(), logits[:, 0].numpy()
    edge = detail_target(target)[:, 0].numpy()
    entropy = (np.logaddexp(0, x) - x * edge)[valid].sum()
    p = np.where(valid, 1 / (1 + np.exp(-x)), 0)
    dice = [
        1 - (2 * (a * b).sum() + 1) / ((a + b).sum() + 1)
        for a, b in zip(p, edge, strict=True)
    ]
    found = detail_sum(given, target)
    assert float(found.detach()) == pytest.approx(entropy + np.mean(dice) * valid.sum())
    (grad,) = torch.autograd.grad(found, given)
    assert not grad[:, 0][target == 255].any()
    assert grad.any() == (ignored < 1)


def test_the_boundary_head_learns_what_the_setting_says() -> None:
    logits, target = batch(4, 0.2)
    edges = logits[:, :1].float().requires_grad_()
    parts = {
        what: shard_loss(
            {"main": logits.float(), "boundary": edges},
            target,
            LossConfig(boundary=what, boundary_weight=3.0),
            class_weights=None,
            global_valid=torch.tensor(10),
            align_corners=False,
        )
        for what in ("band", "detail")
    }
    expected = 3.0 * detail_sum(edges, target) / 10
    assert parts["detail"]["boundary"].item() == pytest.approx(expected.item())
    assert parts["band"]["boundary"].item() != pytest.approx(expected.item())
    assert "edge" in parts["band"]
    assert "edge" not in parts["detail"], "an idea of PIDNet, not of STDC"
    (found,) = torch.autograd.grad(parts["detail"]["total"], edges)
    torch.testing.assert_close(found, torch.autograd.grad(expected, edges)[0])


# --- distillation


@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_distillation_is_that_of_the_formula(
    ignored: float, temperature: float
) -> None:
    logits, target = batch(0, ignored)
    teacher = batch(9, 0.0)[0].requires_grad_()
    q = softmax(teacher.detach() / temperature)
    p = softmax(logits / temperature)
    divergence = (q * np.log(q / p)).sum(1) * temperature**2
    found = distill_sum(
        logits.requires_grad_(),
        teacher,
        target,
        temperature=temperature,
    )
    expected = divergence[target.numpy() != 255].sum()
    assert float(found.detach()) == pytest.approx(expected, abs=1e-12)
    found.backward()
    assert teacher.grad is None
    slope = np.where((target != 255).numpy()[:, None], (p - q) * temperature, 0)
    np.testing.assert_allclose(logits.grad.numpy(), slope, atol=1e-12)


def test_whole_terms_follow_weight_stride_and_the_size_of_the_teacher() -> None:
    logits, target = batch(1, 0.2)
    target = target.repeat_interleave(4, 1).repeat_interleave(4, 2)
    teacher = TeacherLogits(torch.randn(2, C, 3, 4), True)
    config = LossConfig(
        lovasz_weight=0.5, teacher_weight=2.0, temperature=3.0, stride=2
    )
    parts = shard_loss(
        {"main": logits.float()},
        target,
        config,
        class_weights=None,
        global_valid=torch.tensor(100),
        align_corners=False,
        teacher=teacher,
    )
    resize = torch.nn.functional.interpolate
    pick = (slice(None), slice(None), slice(1, None, 2), slice(1, None, 2))
    size = target.shape[1:]
    wide = resize(logits, size, mode="bilinear")[pick]
    taught = resize(teacher.logits.double(), size, mode="bilinear", align_corners=True)
    seen = target[:, 1::2, 1::2]
    distilled = distill_sum(wide, taught[pick], seen, temperature=3.0)
    expected = {
        "lovasz": 0.5 * 4 * float(lovasz_sum(wide, seen)) / 100,
        "teacher": 2.0 * 4 * float(distilled) / 100,
    }
    found = {name: float(parts[name]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    assert float(parts["total"]) == pytest.approx(
        float(parts["main"]) + sum(found.values()), rel=1e-6
    )


# --- all


def test_their_ops_repeat_themselves_on_a_gpu() -> None:
    """None is refused under deterministic algorithms."""
    logits, target = batch(0, 0.2)

    def everything() -> None:
        heads = {
            "main": logits.float().requires_grad_(),
            "boundary": logits[:, :1].float().requires_grad_(),
        }
        config = LossConfig(name="focal", lovasz_weight=1.0, boundary="detail")
        teacher = TeacherLogits(logits.float(), False)
        given = {"class_weights": None, "align_corners": False, "teacher": teacher}
        parts = shard_loss(heads, target, config, global_valid=torch.tensor(9), **given)
        parts["total"].backward()

    assert [str(found) for found in check_ops(everything)] == []


def result(folder: Path) -> dict[str, object]:
    found = json.loads((folder / "result.json").read_text())
    return {name: found[name] for name in runs.DIGESTS}


def test_one_and_two_processes_learn_the_same_bits_with_them(tmp_path: Path) -> None:
    """From a teacher, with all terms; the control: another temperature gives other bits."""
    assert (
        runs.run(tmp_path / "teacher", "train.steps=1", "compute.shards=1", "seed=7")
        == 0
    )
    terms = (
        "loss.name=focal", "loss.lovasz_weight=0.5", f"loss.teacher={tmp_path / 'teacher'}", "loss.temperature=2",
        "train.steps=2", "compute.shards=2", "data.num_val=1",
    )  # fmt: skip
    assert runs.run(tmp_path / "one", *terms) == 0
    trained_by(2, tmp_path / "two", *terms)
    assert result(tmp_path / "one") == result(tmp_path / "two")
    assert runs.run(tmp_path / "other", *terms, "loss.temperature=3") == 0
    assert result(tmp_path / "other") != result(tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert len(config["loss"]["teacher_sha256"]) == 64


def test_a_teacher_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = f"loss.teacher={tmp_path / 'no'}"
    assert runs.run(tmp_path / "run", missing) == 2
    assert "Set it to the folder of a finished run" in capsys.readouterr().err
    assert runs.run(tmp_path / "teacher", "train.steps=1") == 0
    config = Config()
    config.loss.teacher = str(tmp_path / "teacher")
    known = read_teacher(config).classes.names
    check_teacher(config, known)
    with pytest.raises(ConfigError, match="has the classes"):
        check_teacher(config, (*known, "one more"))
    config.model.standardize = True
    with pytest.raises(ConfigError, match=r"Set model\.standardize=False"):
        check_teacher(config, known)
    config.model.standardize = False
    teacher = f"loss.teacher={tmp_path / 'teacher'}"
    other = f"loss.teacher_sha256={'0' * 64}"
    assert runs.run(tmp_path / "run", teacher, other) == 2
    assert "This is not the intended file" in capsys.readouterr().err
