"""Losses against slow references in float64, and batches without any labelled pixel."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from segpipe.errors import ConfigError
from segpipe.losses import boundary, cross_entropy
from segpipe.losses.cross_entropy import class_weights
from segpipe.losses.dice import dice_of_sums
from segpipe.losses.fused import ClassHead, Wanted
from segpipe.losses.ohem import hard_pixels, kth_largest
from segpipe.losses.total import PIXEL_TERMS, shard_loss, valid_pixels
from segpipe.models.resize import bilinear, bilinear_axes
from segpipe.settings.groups import LossConfig

pytestmark = pytest.mark.usefixtures("strict_torch")
C = 5
boundary_target = boundary.boundary_target


def head_of(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> ClassHead:
    size = (target.shape[1], target.shape[2])
    rows, columns = bilinear_axes(logits, size)
    return ClassHead(logits, target, rows, columns, weights)


def pixel_losses(
    logits: Tensor, target: Tensor, weights: Tensor | None = None
) -> Tensor:
    return cross_entropy.evaluate(head_of(logits, target, weights), Wanted()).losses


def dice_sum(logits: Tensor, target: Tensor) -> Tensor:
    sums = cross_entropy.evaluate(head_of(logits, target), Wanted(sums=True)).sums
    assert sums is not None
    return dice_of_sums(sums, (target != 255).sum(), torch.float32)[0]


def boundary_sum(logits: Tensor, target: Tensor) -> Tensor:
    given = boundary.as_two_classes(logits, target)
    return pixel_losses(*given).sum()


def ohem_sum(
    losses: Tensor, valid: Tensor, *, threshold: float, min_kept: float
) -> Tensor:
    config = LossConfig(ohem_threshold=threshold, ohem_min_kept=min_kept)
    kept, ratio = hard_pixels(losses, valid, config)
    return torch.where(kept, losses, 0.0).sum() * ratio


def batch(
    seed: int, *, size: tuple[int, int] = (12, 16), count: int = 2, ignored: float = 0.3
) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    target = torch.randint(0, C, (count, *size), generator=random).to(torch.uint8)
    return target.masked_fill(torch.rand(target.shape, generator=random) < ignored, 255)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def reference(
    logits: Tensor, target: Tensor, weights: Tensor | None = None
) -> np.ndarray:
    """Cross-entropy of every pixel in float64, written out."""
    x = logits.double().numpy()
    x = x - x.max(1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    ids = target.numpy().astype(int)
    picked = np.take_along_axis(log_p, np.where(ids == 255, 0, ids)[:, None], 1)[:, 0]
    scale = np.ones(C) if weights is None else weights.double().numpy()
    return np.where(ids == 255, 0.0, -picked * scale[np.where(ids == 255, 0, ids)])


Loss = Callable[..., dict[str, Tensor]]


@pytest.fixture(params=["plain", "auto"])
def loss(request: pytest.FixtureRequest) -> Loss:
    """The loss of a shard, by the plain path and by the one that is used."""

    def parts(
        heads: dict[str, Tensor],
        target: Tensor,
        config: LossConfig,
        valid: int | None = None,
        weights: Tensor | None = None,
        align_corners: bool = False,
    ) -> dict[str, Tensor]:
        count = torch.tensor(valid_pixels(target) if valid is None else valid)
        config = replace(config, backend=request.param)
        return shard_loss(
            heads,
            target,
            config,
            class_weights=weights,
            global_valid=count,
            align_corners=align_corners,
        )

    return parts


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_that_of_float64(weighted: bool) -> None:
    logits, target = noise(2, C, 12, 16), batch(1)
    weights = torch.tensor([0.5, 1.0, 2.0, 0.1, 7.0]) if weighted else None
    found = pixel_losses(logits, target, weights)
    np.testing.assert_allclose(
        found.double().numpy(), reference(logits, target, weights), rtol=2e-6, atol=2e-6
    )
    assert (found[target == 255] == 0).all()


def test_class_weights_have_mean_1_over_the_training_pixels() -> None:
    pixels = torch.tensor([10**9, 10**7, 12345, 0, 3])
    weights = class_weights(pixels, "log").double()
    assert float((weights * pixels).sum() / pixels.sum()) == pytest.approx(1, rel=1e-6)
    frequency = pixels.double() / pixels.sum()
    torch.testing.assert_close(
        weights / weights[0],
        math.log(1.02 + float(frequency[0])) / torch.log(1.02 + frequency),
    )
    assert weights.isfinite().all()
    assert weights[3] == weights.max()


def test_the_offset_of_logarithmic_weights_is_in_their_name() -> None:
    pixels = torch.tensor([9 * 10**8, 10**8, 4 * 10**4, 0])
    weights = class_weights(pixels, "log1.10").double()
    assert float((weights * pixels).sum() / pixels.sum()) == pytest.approx(1, rel=1e-6)
    assert float(weights[3] / weights[1]) == pytest.approx(
        math.log(1.2) / math.log(1.1), rel=1e-4
    )
    assert torch.equal(class_weights(pixels, "log1.02"), class_weights(pixels, "log"))
    assert class_weights(pixels, "log2").isfinite().all()


def test_square_root_weights_of_classes() -> None:
    pixels = torch.tensor([9 * 10**8, 10**8, 4 * 10**4, 0])
    weights = class_weights(pixels, "sqrt").double()
    assert float((weights * pixels).sum() / pixels.sum()) == pytest.approx(1, rel=1e-6)
    torch.testing.assert_close(
        weights / weights[1], torch.tensor([1 / 3, 1, 50, 10**4], dtype=torch.double)
    )
    # Draws that are balanced have means per image: less than a pixel of a rare class.
    mean = class_weights(pixels.double() / 10**6, "sqrt").double()
    torch.testing.assert_close(mean[:3], weights[:3])


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(24, 36), (25, 38)])
def test_strided_loss_uses_the_same_logits_as_the_full_one(
    loss: Loss, stride: int, align_corners: bool, size: tuple[int, int]
) -> None:
    target, logits = batch(2, size=size), noise(2, C, 6, 9)
    found = loss(
        {"main": logits},
        target,
        LossConfig(stride=stride),
        100,
        align_corners=align_corners,
    )["main"]
    full = reference(bilinear(logits, size, align_corners=align_corners), target)
    seen = full[:, stride // 2 :: stride, stride // 2 :: stride]
    assert float(found) == pytest.approx(
        seen.sum() * full.size / seen.size / 100, rel=2e-5
    )


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [(24, 48), (35, 51)])
def test_stride_keeps_the_loss_of_a_constant_image(
    loss: Loss, stride: int, size: tuple[int, int]
) -> None:
    target = torch.full((2, *size), 3, dtype=torch.uint8)
    logits = noise(1, C, 1, 1).expand(2, C, 6, 9)
    parts = loss(
        {"main": logits, "aux": logits},
        target,
        LossConfig(stride=stride, aux_stride=stride, aux_weight=0.5),
    )
    expected = float(F.cross_entropy(logits[:1, :, 0, 0].double(), torch.tensor([3])))
    assert float(parts["main"]) == pytest.approx(expected, rel=1e-5)
    assert float(parts["aux"]) == pytest.approx(0.5 * expected, rel=1e-5)
    assert float(parts["total"]) == pytest.approx(1.5 * expected, rel=1e-5)


def test_strided_loss_has_gradients_only_at_its_pixels(loss: Loss) -> None:
    target = batch(3, ignored=0.0)
    logits = noise(2, C, 12, 16).requires_grad_()
    loss({"main": logits}, target, LossConfig(stride=4))["total"].backward()
    assert logits.grad is not None
    touched = logits.grad.abs().sum((0, 1)) > 0
    expected = torch.zeros(12, 16, dtype=torch.bool)
    expected[2::4, 2::4] = True
    assert torch.equal(touched, expected)


def test_strides_match_the_full_loss_in_expectation(loss: Loss) -> None:
    target, logits = batch(4, size=(96, 128)), noise(2, C, 12, 16)
    full, half = (
        float(loss({"main": logits}, target, LossConfig(stride=n))["main"])
        for n in (1, 2)
    )
    assert half == pytest.approx(full, rel=0.05)
    assert half != full


@pytest.mark.parametrize("name", ["cross_entropy", "ohem"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("elsewhere", [0, 500], ids=["whole step", "this shard"])
def test_nothing_labelled_is_loss_0_and_gradient_0(
    loss: Loss, name: str, stride: int, elsewhere: int
) -> None:
    target = torch.full((2, 12, 16), 255, dtype=torch.uint8)
    heads = {
        head: noise(2, channels, 3, 4)
        for head, channels in (("main", C), ("aux", C), ("boundary", 1))
    }
    heads = {head: logits.requires_grad_() for head, logits in heads.items()}
    config = LossConfig(name=name, stride=stride, aux_stride=stride, dice_weight=1.0)
    parts = loss(heads, target, config, valid=elsewhere)
    parts["total"].backward()
    assert set(parts) == {"main", "dice", "aux", "boundary", "edge", "total"}
    assert all(float(part.detach()) == 0 for part in parts.values())
    assert all(
        logits.grad is not None and not logits.grad.any() for logits in heads.values()
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_shards_add_up_to_the_whole_batch(loss: Loss, stride: int) -> None:
    target, main, aux = batch(5, count=8), noise(8, C, 3, 4), noise(8, C, 3, 4, seed=1)
    target[2:4] = 255  # a shard without labels does not change the others
    config, valid = LossConfig(stride=stride), valid_pixels(target)
    whole = loss({"main": main, "aux": aux}, target, config, valid)
    shards = [
        loss(
            {"main": main[i : i + 2], "aux": aux[i : i + 2]},
            target[i : i + 2],
            config,
            valid,
        )
        for i in (0, 2, 4, 6)
    ]
    for name, value in whole.items():
        assert float(sum(part[name] for part in shards)) == pytest.approx(
            float(value), rel=1e-5
        )
    # The control: the mean over shards, as other trainers take it, differs when shards have different label counts.
    means = [
        loss({"main": main[i : i + 2]}, target[i : i + 2], config)["main"]
        for i in (0, 2, 4, 6)
    ]
    assert float(sum(means)) / 4 != pytest.approx(float(whole["main"]), rel=1e-3)


def test_class_weights_reach_the_loss(loss: Loss) -> None:
    target, logits = torch.zeros(1, 8, 8, dtype=torch.uint8), noise(1, C, 8, 8)
    plain, heavy = (
        loss({"main": logits}, target, LossConfig(), weights=weights)["total"]
        for weights in (torch.ones(C), torch.tensor([3.0, 1, 1, 1, 1]))
    )
    assert float(heavy) == pytest.approx(3 * float(plain), rel=1e-6)


def test_edge_part_counts_only_where_the_boundary_head_is_sure(loss: Loss) -> None:
    target, main = batch(6), noise(2, C, 12, 16)
    boundary = torch.full((2, 1, 12, 16), -10.0)
    boundary[:, :, 4:6] = 10.0
    parts = loss(
        {"main": main, "boundary": boundary.requires_grad_()},
        target,
        LossConfig(boundary_weight=0.0),
    )
    expected = reference(main, target)[:, 4:6].sum() / valid_pixels(target)
    assert float(parts["edge"]) == pytest.approx(expected, rel=1e-5)
    parts["total"].backward()
    assert boundary.grad is not None
    assert not boundary.grad.any()  # no gradient flows through the mask


@pytest.mark.parametrize(("probability", "counted"), [(0.79, False), (0.81, True)])
def test_the_boundary_head_is_sure_above_80_percent(
    loss: Loss, probability: float, counted: bool
) -> None:
    target, main = batch(6), noise(2, C, 12, 16)
    boundary = torch.full((2, 1, 12, 16), math.log(probability / (1 - probability)))
    parts = loss(
        {"main": main, "boundary": boundary}, target, LossConfig(boundary_weight=0.0)
    )
    expected = reference(main, target).sum() / valid_pixels(target) if counted else 0.0
    assert float(parts["edge"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stride", [2, 3])
def test_edge_part_under_stride_counts_what_a_strided_pixel_stands_for(
    loss: Loss, stride: int
) -> None:
    target, main = batch(6, size=(24, 36)), noise(2, C, 6, 9)
    boundary = torch.full((2, 1, 6, 9), 10.0)
    parts = loss(
        {"main": main, "boundary": boundary}, target, LossConfig(stride=stride)
    )
    assert float(parts["edge"]) == pytest.approx(float(parts["main"]), rel=1e-6)


@pytest.mark.parametrize("align_corners", [False, True])
def test_boundary_part_is_weighted_and_at_the_size_of_the_target(
    loss: Loss, align_corners: bool
) -> None:
    target = batch(6, size=(4, 6)).repeat_interleave(6, 1).repeat_interleave(6, 2)
    heads = {"main": noise(2, C, 6, 9), "boundary": noise(2, 1, 6, 9)}
    found = loss(
        heads, target, LossConfig(boundary_weight=7.0), 100, align_corners=align_corners
    )["boundary"]
    logits = bilinear(heads["boundary"], (24, 36), align_corners=align_corners)
    expected = 7.0 * boundary_sum(logits, target) / 100
    assert float(expected) > 1
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_main_and_auxiliary_heads_have_their_own_strides(loss: Loss) -> None:
    target, logits = batch(2, size=(24, 36)), noise(2, C, 6, 9)
    parts = loss(
        {"main": logits, "aux": logits},
        target,
        LossConfig(stride=2, aux_stride=3, aux_weight=0.5),
    )
    alone = {
        n: loss({"main": logits}, target, LossConfig(stride=n))["main"] for n in (2, 3)
    }
    assert float(parts["main"]) == float(alone[2])
    assert float(parts["aux"]) == pytest.approx(0.5 * float(alone[3]), rel=1e-6)
    off = loss({"main": logits, "aux": logits}, target, LossConfig(aux_weight=0.0))
    assert float(off["aux"]) == 0.0


def test_ohem_settings_reach_the_loss(loss: Loss) -> None:
    target, logits = batch(2), noise(2, C, 12, 16)
    losses = pixel_losses(logits, target)
    for threshold, min_kept in ((0.7, 0.0625), (0.2, 0.0625), (0.001, 0.5)):
        config = LossConfig(
            name="ohem", ohem_threshold=threshold, ohem_min_kept=min_kept
        )
        expected = ohem_sum(
            losses, target != 255, threshold=threshold, min_kept=min_kept
        ) / valid_pixels(target)
        assert float(loss({"main": logits}, target, config)["main"]) == pytest.approx(
            float(expected), rel=1e-6
        )


@pytest.mark.parametrize("share", [0.5, 0.93, 0.945])
def test_ohem_leaves_out_a_class_of_weight_0(loss: Loss, share: float) -> None:
    """All other pixels are hard, so it is the cross-entropy; they are not scaled up for those that are left out."""
    target = torch.ones(1, 40, 50, dtype=torch.uint8)
    target.view(-1)[: int(2000 * share)] = 0
    given = [0.0, 0.5, 1.0]
    logits, weights = torch.zeros(1, 3, 10, 13), torch.tensor(given)
    both = [
        loss(
            {"main": logits},
            target,
            LossConfig(name=name, class_weights=given),
            weights=weights,
        )["main"]
        for name in ("ohem", "cross_entropy")
    ]
    assert float(both[0]) == pytest.approx(float(both[1]), rel=1e-6)
    assert float(both[1]) == pytest.approx(math.log(3) * (1 - share) / 2, rel=1e-3)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_dice_part_under_stride_counts_what_a_strided_pixel_stands_for(
    loss: Loss, stride: int
) -> None:
    target, logits = batch(12, size=(24, 36)), noise(2, C, 6, 9)
    parts = loss(
        {"main": logits, "aux": logits},
        target,
        LossConfig(stride=stride, dice_weight=0.7),
    )
    pick = (slice(stride // 2, None, stride), slice(stride // 2, None, stride))
    seen, resized = target[:, *pick], bilinear(logits, (24, 36))[:, :, *pick]
    expected = (
        0.7
        * dice_sum(resized, seen)
        * target.numel()
        / seen.numel()
        / valid_pixels(target)
    )
    assert float(parts["dice"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(parts["total"]) == pytest.approx(
        float(parts["main"] + parts["aux"] + parts["dice"]), rel=1e-6
    )


@pytest.mark.parametrize("backend_name", ["auto", "plain", "native"])
def test_a_loss_that_no_term_computes_is_refused_on_every_backend(
    backend_name: str,
) -> None:
    target, logits = batch(2), noise(2, C, 12, 16)
    config = LossConfig(name="tversky", backend=backend_name)
    with pytest.raises(ConfigError, match="tversky"):
        shard_loss(
            {"main": logits},
            target,
            config,
            class_weights=None,
            global_valid=torch.tensor(1),
            align_corners=False,
        )


def test_every_choice_of_the_setting_is_a_term() -> None:
    (field,) = (each for each in fields(LossConfig) if each.name == "name")
    assert set(field.metadata["choices"]) == PIXEL_TERMS.keys()


# --- OHEM


def ohem_reference(
    losses: np.ndarray, valid: np.ndarray, threshold: float, min_kept: float
) -> float:
    """Sort, cut, sum: losses above the threshold, or the highest `min_kept` with all ties of the last."""
    ordered = np.sort(losses.ravel())[::-1]
    fewest = min(math.ceil(min_kept * losses.size), losses.size)
    cut = float(np.float32(-math.log(max(threshold, 1e-12))))
    if fewest:
        cut = min(cut, float(ordered[fewest - 1]))
    kept = valid & (losses >= cut)
    return float(
        losses[kept].astype(np.float64).sum() * valid.sum() / max(kept.sum(), 1)
    )


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.7, 1.0])
@pytest.mark.parametrize("min_kept", [0.0, 0.1, 0.9, 1.0])
def test_ohem_is_that_of_a_sort(threshold: float, min_kept: float) -> None:
    for seed in range(6):
        target = batch(seed, ignored=(0.0, 0.3, 0.95, 1.0)[seed % 4])
        losses = pixel_losses(noise(2, C, 12, 16, seed=seed), target)
        if seed >= 3:
            losses = (losses * 2).round() / 2  # many ties, also at the cut
        expected = ohem_reference(
            losses.numpy(), (target != 255).numpy(), threshold, min_kept
        )
        found = ohem_sum(losses, target != 255, threshold=threshold, min_kept=min_kept)
        assert float(found) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_ohem_gives_easy_pixels_no_gradient() -> None:
    losses = torch.tensor([[[0.01, 0.02, 2.0, 3.0, 0.0]]], requires_grad=True)
    valid = torch.tensor([[[True, True, True, True, False]]])
    ohem_sum(losses, valid, threshold=0.7, min_kept=0.2).backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[[0.0, 0.0, 2.0, 2.0, 0.0]]]  # 4 valid for 2 kept


def test_ohem_keeps_a_nan() -> None:
    valid = torch.ones(1, 2, 2, dtype=torch.bool)
    for losses in (
        torch.full((1, 2, 2), math.nan),
        torch.tensor([[[0.1, math.nan], [3.0, 0.0]]]),
    ):
        assert ohem_sum(losses, valid, threshold=0.7, min_kept=0.25).isnan()


def test_ohem_keeps_the_hardest_pixel_when_all_are_easy() -> None:
    losses, valid = (
        torch.tensor([[[0.01, 0.03, 0.02, 0.0]]]),
        torch.ones(1, 1, 4, dtype=torch.bool),
    )
    found = ohem_sum(losses, valid, threshold=0.7, min_kept=0.1)
    assert float(found) == pytest.approx(4 * 0.03)
    assert float(ohem_sum(losses, valid, threshold=0.7, min_kept=0.0)) == 0


def special_values(random: np.random.Generator, size: int) -> np.ndarray:
    """Non-negative floats of all magnitudes: bits at random, zeros, denormals, huge ones and many ties."""
    bits = random.integers(0, 0x7F800000, size, dtype=np.int64).astype(np.uint32)
    values = bits.view(np.float32).copy()
    pool = np.array(
        [
            0,
            1e-45,
            1e-40,
            1.1754944e-38,
            1,
            np.nextafter(np.float32(1), 2),
            3.4028235e38,
        ],
        np.float32,
    )
    chosen = random.random(size) < random.random()
    values[chosen] = random.choice(pool, int(chosen.sum()))
    return values


def test_kth_largest_is_that_of_a_sort() -> None:
    random = np.random.default_rng(0)
    for _ in range(150):
        values = special_values(random, int(random.integers(1, 60)))
        ordered = np.sort(values)[::-1]
        for k in {1, len(values), int(random.integers(1, len(values) + 1))}:
            found = kth_largest(torch.from_numpy(values), k).numpy().view(np.int32)
            assert found == ordered[k - 1].view(np.int32), (values, k)


# --- boundary


def slow_boundary(target: np.ndarray, width: int) -> np.ndarray:
    edges = np.zeros(target.shape, np.float32)
    count, height, length = target.shape
    for b, y, x in np.ndindex(count, height, length):
        window = target[
            b, max(y - width, 0) : y + width + 1, max(x - width, 0) : x + width + 1
        ]
        others = set(window.ravel().tolist()) - {255, int(target[b, y, x])}
        edges[b, y, x] = bool(others) and target[b, y, x] != 255
    return edges


@pytest.mark.parametrize("width", [1, 2, 3])
def test_boundary_target_is_that_of_the_definition(width: int) -> None:
    for seed, ignored in ((0, 0.0), (1, 0.5), (2, 0.97), (3, 1.0)):
        blocks = batch(seed, size=(4, 5), ignored=ignored)
        target = blocks.repeat_interleave(5, 1).repeat_interleave(5, 2)
        target[:, 3, 7], target[:, 11, 2] = 255, 254
        found = boundary_target(target, target != 255, width=width)
        assert found.shape == (2, 1, 20, 25)
        np.testing.assert_array_equal(
            found[:, 0].numpy(), slow_boundary(target.numpy(), width)
        )


def test_ignored_pixels_make_no_edge_and_are_none() -> None:
    target = torch.full((1, 8, 8), 4, dtype=torch.uint8)
    target[:, :, 4:] = 255
    assert not boundary_target(target, target != 255).any()
    target[:, :, 4:] = 3  # the control: another class does
    assert boundary_target(target, target != 255).sum() == 8 * 4


def test_boundary_sum_balances_edges_against_the_rest() -> None:
    blocks = batch(7, size=(4, 5), ignored=0.2)
    target = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)
    edge, valid = boundary_target(target, target != 255), target != 255
    logits = noise(2, 1, 32, 40)
    x, e, v = logits[:, 0].double().numpy(), edge[:, 0].numpy(), valid.numpy()
    positives, total = (e * v).sum(), v.sum()
    assert 0 < positives < total / 2
    bce = np.logaddexp(0, x) - x * e
    weight = np.where(e > 0.5, (total - positives) / total, positives / total)
    assert float(boundary_sum(logits, target)) == pytest.approx(
        (bce * weight)[v].sum(), rel=1e-5
    )


def test_dice_is_that_of_float64_over_the_classes_that_occur() -> None:
    target, logits = batch(9), noise(2, C, 12, 16)
    target[target == 3] = 255  # class 3 has no pixel
    x = logits.double().numpy()
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ids = target.numpy()
    losses = [
        1 - 2 * p[:, c][ids == c].sum() / (p[:, c][ids != 255].sum() + (ids == c).sum())
        for c in range(C)
        if c != 3
    ]
    found = float(dice_sum(logits, target))
    assert found == pytest.approx(np.mean(losses) * valid_pixels(target), rel=1e-5)
    with_absent = (
        sum(losses) + 1
    ) / C  # the control: counting absent classes as missed
    assert found != pytest.approx(with_absent * valid_pixels(target), rel=1e-3)


def test_dice_of_a_perfect_prediction_is_0_and_lifts_the_rare_class_most() -> None:
    target = torch.zeros(1, 20, 20, dtype=torch.uint8)
    target[:, :2, :2] = 1
    perfect = F.one_hot(target.long(), 2).permute(0, 3, 1, 2).float() * 50
    assert float(dice_sum(perfect, target)) == pytest.approx(0, abs=1e-4)
    logits = torch.zeros(1, 2, 20, 20, requires_grad=True)
    heads, counted = {"main": logits}, torch.tensor(400)
    given = {"class_weights": None, "global_valid": counted, "align_corners": False}
    losses = [
        shard_loss(heads, target, LossConfig(dice_weight=weight), **given)["total"]  # type: ignore[arg-type]
        for weight in (1.0, 0.0)
    ]
    (grad,) = torch.autograd.grad(losses[0] - losses[1], logits)
    rare, common = grad[0, 1, 0, 0].abs(), grad[0, 1, 10, 10].abs()
    assert rare > 4 * common  # cross-entropy gives both the same


# --- the smallest shards


def test_one_pixel_of_one_class_has_its_whole_dice_loss() -> None:
    target = torch.full((1, 1, 3), 255, dtype=torch.uint8)
    target[0, 0, 1] = 2
    logits = noise(1, C, 1, 3)
    p = float(logits.double().softmax(1)[0, 2, 0, 1])
    assert float(dice_sum(logits, target)) == pytest.approx(
        1 - 2 * p / (p + 1), rel=1e-5
    )


def test_the_one_hardest_pixel_is_kept_where_none_is_hard() -> None:
    losses = torch.tensor([[[0.1, 0.4, 0.2, 0.3]]])
    valid = torch.tensor([[[True, True, True, False]]])
    assert float(
        ohem_sum(losses, valid, threshold=0.01, min_kept=0.2)
    ) == pytest.approx(3 * 0.4)
    assert float(ohem_sum(losses, valid, threshold=0.01, min_kept=0.0)) == 0


@pytest.mark.parametrize("name", ["log", "sqrt"])
@pytest.mark.parametrize("pixels", [[1, 0, 0], [0, 0, 0]])
def test_class_weights_of_a_pixel_or_none_are_finite(
    pixels: list[int], name: str
) -> None:
    weights = class_weights(torch.tensor(pixels), name)
    assert weights.isfinite().all()
    assert weights.dtype == torch.float32
    assert pixels[0] == 0 or float(weights[0]) == pytest.approx(1)


def test_an_image_of_edges_has_no_rest_to_weigh_them_by() -> None:
    """The weight of an edge is the share of the rest, of which there is nothing."""
    target = torch.tensor([[[0, 1, 255]]], dtype=torch.uint8)
    assert float(boundary_sum(torch.full((1, 1, 1, 3), -3.0), target)) == 0


def test_one_labelled_pixel_in_the_whole_step_has_its_whole_loss(loss: Loss) -> None:
    target, logits = torch.full((1, 2, 2), 255, dtype=torch.uint8), noise(1, C, 2, 2)
    target[0, 1, 0] = 3
    found = loss({"main": logits}, target, LossConfig())
    assert float(found["total"]) == pytest.approx(
        float(reference(logits, target).sum()), rel=1e-5
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_ohem_reaches_every_class_head(loss: Loss, stride: int) -> None:
    target, main, aux = batch(10), noise(2, C, 12, 16), noise(2, C, 12, 16, seed=1)
    settings = LossConfig(
        name="ohem",
        ohem_threshold=0.3,
        ohem_min_kept=0.1,
        stride=stride,
        aux_stride=1,
        aux_weight=0.4,
    )
    parts = loss({"main": main, "aux": aux}, target, settings)
    pick = (
        slice(None),
        slice(stride // 2, None, stride),
        slice(stride // 2, None, stride),
    )
    seen = pixel_losses(main[:, :, *pick[1:]], target[pick])
    share = target.numel() / seen.numel() / valid_pixels(target)
    expected = {
        "main": share
        * ohem_reference(seen.numpy(), (target[pick] != 255).numpy(), 0.3, 0.1),
        "aux": 0.4
        * ohem_reference(
            pixel_losses(aux, target).numpy(), (target != 255).numpy(), 0.3, 0.1
        )
        / valid_pixels(target),
    }
    assert {name: float(parts[name]) for name in expected} == pytest.approx(
        expected, rel=1e-5
    )
