"""A loss of the user: pixels or sums, the same shards, and what is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.errors import ConfigError
from segpipe.losses import cross_entropy
from segpipe.losses.total import check_call, plugin_sum, shard_loss
from segpipe.settings.groups import LossConfig

LOSSES = """
    import torch.nn.functional as F
    from torch.nn import CrossEntropyLoss

    def pixels(logits, target, *, ignore_index, class_weights=None, factor=1.0):
        assert target.dtype.is_signed
        return factor * F.cross_entropy(
            logits, target, weight=class_weights, ignore_index=ignore_index, reduction="none"
        )

    def total(logits, target, *, ignore_index, factor=1.0):
        return pixels(logits, target, ignore_index=ignore_index, factor=factor).sum()

    def decorated(*args, **kwargs):
        return total(*args, **kwargs)

    def gathered(*maps, ignore_index, factor=1.0):
        return total(*maps, ignore_index=ignore_index, factor=factor)

    module = CrossEntropyLoss()

    def everywhere(logits, target, *, ignore_index):
        return logits.sum(1) * 0 + 1

    def double(logits, target, *, ignore_index):
        return logits.double().sum()

    def rows(logits, target, *, ignore_index):
        return logits.sum((1, 2))
"""
LOGITS = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(
    0, 4, (2, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
)
TARGET[0, :3] = IGNORE_INDEX


@pytest.fixture(autouse=True)
def losses(project: Callable[[str, str], None]) -> None:
    project("losses.py", LOSSES)


def parts(
    name: str,
    heads: tuple[str, ...] = ("main",),
    weights: Tensor | None = None,
    **settings: object,
) -> dict[str, Tensor]:
    logits = {head: LOGITS[:, :1] if head == "boundary" else LOGITS for head in heads}
    config = LossConfig(name=name, backend="plain", **settings)  # type: ignore[arg-type]
    valid = (TARGET != IGNORE_INDEX).sum()
    return shard_loss(
        logits,
        TARGET,
        config,
        class_weights=weights,
        global_valid=valid,
        align_corners=False,
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_the_users_cross_entropy_is_ours(stride: int) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for given in (None, weights):
        heads = ("main", "aux", "boundary")
        ours = parts("cross_entropy", heads, given, stride=stride, dice_weight=1.0)
        theirs = parts("losses:pixels", heads, given, stride=stride, dice_weight=1.0)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name])
    assert torch.equal(
        parts("losses:pixels", args={"factor": 2.0})["main"],
        2 * parts("losses:pixels")["main"],
    )
    assert torch.allclose(parts("losses:total")["main"], parts("cross_entropy")["main"])


def test_ignored_pixels_of_a_map_do_not_count() -> None:
    found = plugin_sum("losses:everywhere", {}, LOGITS, TARGET, None)
    assert found == (TARGET != IGNORE_INDEX).sum()


@pytest.mark.parametrize(
    ("name", "found"),
    [("double", r"torch.float64 \(\)"), ("rows", r"torch.float32 \(2, 8\)")],
)
def test_results_of_another_kind_are_refused(name: str, found: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"losses:{name} returned {found}.*\(2, 6, 8\), or their sum"
    ):
        parts(f"losses:{name}")


def test_calls_are_checked_by_the_signature() -> None:
    def call(name: str, weights: str = "none", **args: float) -> None:
        check_call(LossConfig(name=name, class_weights=weights, args=args))

    call("losses:total", factor=2)
    with pytest.raises(
        ConfigError, match="losses:total must accept the keyword class_w"
    ):
        call("losses:total", "log")
    unknown = r"loss.args.gamma is not an argument of losses:total, which takes factor"
    with pytest.raises(ConfigError, match=unknown):
        call("losses:total", gamma=2)
    with pytest.raises(ConfigError, match="Loss is a class or module, but"):
        call("losses:CrossEntropyLoss")
    with pytest.raises(ConfigError, match="module is a class or module, but a func"):
        call("losses:module")
    call("losses:decorated", "log", factor=2)
    call("losses:gathered", factor=2)


def test_pixels_are_passed_over_only_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    evaluate = cross_entropy.evaluate
    monkeypatch.setattr(
        cross_entropy,
        "evaluate",
        lambda *a, **k: calls.append(1) or evaluate(*a, **k),
    )
    parts("losses:pixels")
    assert not calls
    parts("losses:pixels", ("main", "boundary"))
    assert len(calls) == 2
