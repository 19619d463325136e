"""G6: faults planted on purpose. Gates that do not refuse all of them prove nothing about the files they pass.

A fault that hardly changes the answers of this network does not test the gates. After few updates, some faults may have
no effect; then the gates are not shown to work, which is a status, not a refusal.
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from segpipe.export.gates.comparison import (
    Check,
    GateResult,
    Sigma,
    compare_answers,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.graph.network import ROBOT, Answer, DeployModel, Run, run_eager
from segpipe.models.preprocess import Preprocess

_MAX_CHECKS = 3  # check images that a control runs on
# Smallest effect that the gates must detect: ten times G2's limit, in standard deviations of the logits.
_EFFECT = 1e-2
# Sides of the image that measures the influence of weights; the larger one, if the smaller one fails, is a multiple of
# 14 and 64
_NOISE, _LARGE = 96, 448


def _bgr(model: DeployModel) -> None:
    model.preprocess.register_forward_pre_hook(lambda _, images: images[0].flip(-1))


def _no_normalisation(model: DeployModel) -> None:
    model.preprocess = Preprocess((0.0,) * 3, (1.0,) * 3)


def _half_mean_and_std(model: DeployModel) -> None:
    model.preprocess = Preprocess((0.5,) * 3, (0.5,) * 3)


def _align_corners_flipped(model: DeployModel) -> None:
    model.align_corners = not model.align_corners


def _one_weight_scaled(model: DeployModel) -> None:
    # The most influential tensor: one chosen by position or size may lie in a branch that is hardly used yet.
    with torch.no_grad():
        _most_influential(model.network).mul_(1.01)


def _most_influential(network: nn.Module) -> Tensor:
    """Convolution weights whose increase by 1 % moves the logits of a noise image most.

    In a network without convolutions, all parameters are candidates.
    """
    convolutions = [
        module.weight for module in network.modules() if isinstance(module, nn.Conv2d)
    ]
    weights = convolutions or list(network.parameters())
    try:
        image = _noise(_NOISE)
        logits = network(image)
    except Exception:  # of a user's network
        image = _noise(_LARGE)
        logits = network(image)

    def influence(weight: Tensor) -> float:
        kept = weight.clone()
        weight.mul_(1.01)
        moved = float((network(image) - logits).abs().max())
        weight.copy_(kept)
        return moved

    return max(weights, key=influence)


def _noise(side: int) -> Tensor:
    return torch.randn((1, 3, side, side), generator=torch.Generator().manual_seed(0))


def _classes_permuted(model: DeployModel) -> None:
    model.network.register_forward_hook(lambda _, images, logits: logits.roll(1, 1))


def _batchnorm_in_training_mode(model: DeployModel) -> None:
    # Only the first: one after global pooling has a single value per channel and would raise.
    for module in model.network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            return


CONTROLS: dict[str, Callable[[DeployModel], None]] = {
    "bgr": _bgr,
    "no_normalisation": _no_normalisation,
    "half_mean_and_std": _half_mean_and_std,
    "align_corners_flipped": _align_corners_flipped,
    "one_weight_scaled": _one_weight_scaled,
    "classes_permuted": _classes_permuted,
    "batchnorm_in_training_mode": _batchnorm_in_training_mode,
}


def gate_power(
    model: DeployModel, reference: Run, checks: Sequence[Check], sigma: Sigma
) -> GateResult:
    """G6: every control that has an effect fails G2, G3 or G4 of fp32. `reference` is `as_trained` of this model.

    Controls run in eager mode in the profile robot, image by image until a gate refuses. The figures list controls that
    the gates miss (`unseen`), those `without_effect` on this network, and those that change nothing (`impossible`): the
    network has no BatchNorm or upsampling, or normalises as the control does.
    """
    refused_by: dict[str, str] = {}
    effects = dict.fromkeys(CONTROLS, 0.0)
    for check in _chosen(checks):
        expected = reference(check.image)
        for name in CONTROLS.keys() - refused_by.keys():
            answer = run_eager(_faulty(model, name))(check.image)
            effects[name] = max(effects[name], _effect(expected, answer))
            if refusing := _refusing(answer, expected, check, sigma):
                refused_by[name] = ", ".join(refusing)

    passing = {name: effects[name] for name in CONTROLS if name not in refused_by}
    unseen = [name for name, effect in passing.items() if effect > _EFFECT]
    without_effect = [name for name, effect in passing.items() if 0 < effect <= _EFFECT]
    impossible = [name for name, effect in passing.items() if effect == 0]
    figures = {
        "refused_by": dict(sorted(refused_by.items())),
        "unseen": unseen,
        "without_effect": without_effect,
        "impossible": impossible,
    }
    finding = f"all {len(CONTROLS) - len(impossible)} negative controls are refused"
    if impossible:
        finding += f"; {', '.join(impossible)} does not apply to this network"
    if without_effect:
        finding = f"no effect on this network: {', '.join(without_effect)}; the other controls are refused"
    failure = ""
    if unseen:
        failure = f"power: negative controls pass: {', '.join(unseen)}, so the gates are inconclusive"
    return GateResult("G6", failure, figures, finding)


def _effect(expected: Answer, answer: Answer) -> float:
    """Largest change of a logit in standard deviations, or of a normalised pixel; independent of the gates' code."""
    logits, normalised = (
        np.abs(np.subtract(getattr(answer, name), getattr(expected, name))).max()
        for name in ("logits", "normalised")
    )
    spread = np.std(np.asarray(expected.logits))
    return float(max(logits / spread if spread > 0 else 0.0, normalised))


def _chosen(checks: Sequence[Check]) -> list[Check]:
    """Real images first, then structured ones: constants reveal little."""
    rank = {"noise": 1, "checkerboard": 2}

    def place(check: Check) -> int:
        return 0 if check.is_real else rank.get(check.name, 3)

    return sorted(checks, key=place)[:_MAX_CHECKS]


def _faulty(model: DeployModel, name: str) -> DeployModel:
    """A copy of the model with the fault, in the profile robot."""
    faulty = copy.deepcopy(model)
    faulty.profile = ROBOT
    CONTROLS[name](faulty)
    return faulty


def _refusing(
    answer: Answer, expected: Answer, check: Check, sigma: Sigma
) -> list[str]:
    """Gates that refuse the answer of a faulty network on this image."""
    comparisons = [compare_answers(check, expected, answer, answer)]
    gates = (
        gate_logits(comparisons, sigma),
        gate_mask(comparisons, sigma),
        gate_preprocessing(comparisons),
    )
    return [result.gate for result in gates if not result.passed]
