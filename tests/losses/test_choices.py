"""Each choice of loss.name is a loss of its own on every backend of a CPU."""

import pytest
import torch

from segpipe import IGNORE_INDEX
from segpipe.errors import ConfigError
from segpipe.losses.total import PIXEL_TERMS, shard_loss
from segpipe.settings.config import SETTINGS
from segpipe.settings.groups import LossConfig

BACKENDS = ("plain", "native")
CHOICES = SETTINGS["loss.name"].choices


def loss(name: str, backend: str) -> tuple[float, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 4, generator=draws).requires_grad_()
    target = torch.randint(0, 3, (2, 16, 16), generator=draws, dtype=torch.uint8)
    config = LossConfig(
        name=name, backend=backend, ohem_threshold=0.3, ohem_min_kept=0.1
    )
    total = shard_loss(
        {"main": logits},
        target,
        config,
        class_weights=None,
        global_valid=torch.tensor(target.numel()),
        align_corners=False,
    )["total"]
    total.backward()
    assert logits.grad is not None
    return float(total.detach()), logits.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_differs_from_cross_entropy(name: str, backend: str) -> None:
    value, grad = loss(name, backend)
    plain_value, plain_grad = loss("cross_entropy", backend)
    is_plain = name == "cross_entropy"
    assert (value == plain_value) == is_plain
    assert torch.equal(grad, plain_grad) == is_plain
    assert value == pytest.approx(loss(name, "plain")[0], rel=1e-5)


def test_every_term_of_pixels_is_a_choice() -> None:
    """One that is computed and not declared is refused as a setting, and no other test asks for it."""
    assert tuple(PIXEL_TERMS) == CHOICES


@pytest.mark.parametrize("name", [name for name in CHOICES if PIXEL_TERMS[name]])
def test_slopes_are_the_derivative_of_the_values(name: str) -> None:
    """All backends take them for the gradient, so comparing backends does not show a wrong one."""
    term = PIXEL_TERMS[name]
    assert term
    draws = torch.Generator().manual_seed(0)
    losses = 0.05 + 3 * torch.rand(2, 8, 8, generator=draws, dtype=torch.float64)
    target = torch.zeros(2, 8, 8, dtype=torch.uint8)
    config = LossConfig(name=name, ohem_threshold=0.3, ohem_min_kept=0.1)
    below, here, above = (
        term(losses + shift, target, None, config) for shift in (-1e-6, 0, 1e-6)
    )
    change = (above.values - below.values).double() / 2e-6
    torch.testing.assert_close(change, here.slopes.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHOICES)
def test_what_does_not_count_has_no_loss_and_no_gradient(
    name: str, backend: str
) -> None:
    """Ignored pixels, whatever lies below them, and pixels of a class of weight 0."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 8, 8, generator=draws)
    target = torch.randint(0, 3, (1, 8, 8), generator=draws, dtype=torch.uint8)
    target[:, :2] = IGNORE_INDEX
    config = LossConfig(
        name=name, backend=backend, ohem_threshold=1.0, ohem_min_kept=1.0
    )

    def of(target: torch.Tensor, logits: torch.Tensor) -> tuple[float, torch.Tensor]:
        logits = logits.clone().requires_grad_()
        total = shard_loss(
            {"main": logits},
            target,
            config,
            class_weights=torch.tensor([1.0, 0.0, 2.0]),
            global_valid=(target != IGNORE_INDEX).sum().clamp(min=1),
            align_corners=False,
        )["total"]
        total.backward()
        assert logits.grad is not None
        return float(total.detach()), logits.grad

    for alone in (torch.full_like(target, IGNORE_INDEX), torch.ones_like(target)):
        value, grad = of(alone, logits)
        assert value == 0
        assert not grad.any()
    value, grad = of(target, logits)
    other = logits.clone()
    other[:, :, :2] += 3
    assert of(target, other)[0] == value
    assert not grad[:, :, :2].any()
    assert value > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_name_raises(backend: str) -> None:
    """A choice that is declared and computed nowhere would train cross-entropy in silence."""
    with pytest.raises(ConfigError, match=r"loss\.name = tversky.*cross_entropy, ohem"):
        loss("tversky", backend)
