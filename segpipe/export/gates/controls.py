"""G6: faults planted on purpose, each of which the other gates must refuse; gates that see none prove nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from segpipe.export.gates.checks import Check
from segpipe.export.gates.comparison import Sigma, compare_answers
from segpipe.export.gates.limits import GateResult, gate_logits, gate_mask, gate_preprocessing
from segpipe.export.graph.deploy import DeployModel
from segpipe.export.graph.formats import run_eager
from segpipe.export.graph.profiles import Answer, Run
from segpipe.models.preprocess import Preprocess

_MOST = 3  # check images on which a control is tried
NAME = "G6 power"


class _Swapped(nn.Module):
    """A preprocessing that sees BGR."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor) -> Tensor:
        swapped: Tensor = self.inner(image.flip(-1))
        return swapped


class _Permuted(nn.Module):
    """A network whose classes changed places."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor) -> Tensor:
        permuted: Tensor = self.inner(image).roll(1, 1)
        return permuted


def _bgr(model: DeployModel) -> None:
    model.preprocess = _Swapped(model.preprocess)


def _no_normalisation(model: DeployModel) -> None:
    model.preprocess = Preprocess((0.0,) * 3, (1.0,) * 3)


def _half_mean_and_std(model: DeployModel) -> None:
    model.preprocess = Preprocess((0.5,) * 3, (0.5,) * 3)


def _align_corners_flipped(model: DeployModel) -> None:
    model.align_corners = not model.align_corners


def _one_weight_scaled(model: DeployModel) -> None:
    # The largest: the first or the last would be seen too easily, and one picked by its place may lie in a branch that
    # the network has hardly learned to use.
    convolutions = [module for module in model.network.modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        max(convolutions, key=lambda module: module.weight.numel()).weight.mul_(1.01)


def _classes_permuted(model: DeployModel) -> None:
    model.network = _Permuted(model.network)


def _batchnorm_in_training_mode(model: DeployModel) -> None:
    # The first alone: those after a global pooling have one value per channel and would raise an error.
    next(module for module in model.network.modules() if isinstance(module, nn.BatchNorm2d)).train()


CONTROLS: dict[str, Callable[[DeployModel], None]] = {
    "bgr": _bgr,
    "no_normalisation": _no_normalisation,
    "half_mean_and_std": _half_mean_and_std,
    "align_corners_flipped": _align_corners_flipped,
    "one_weight_scaled": _one_weight_scaled,
    "classes_permuted": _classes_permuted,
    "batchnorm_in_training_mode": _batchnorm_in_training_mode,
}


def gate_power(model: DeployModel, reference: Run, checks: Sequence[Check], sigma: Sigma) -> GateResult:
    """G6: every control fails G2, G3 or G4 of fp32. `reference` is `as_trained` of this model.

    Controls are tried in eager mode under the profile robot, image by image until one of the gates refuses.
    """
    noticed: dict[str, str] = {}
    for check in _chosen(checks):
        expected = reference(check.image)
        for name in [name for name in CONTROLS if name not in noticed]:
            refusing = _refusing(_faulty(model, name), expected, check, sigma)
            if refusing:
                noticed[name] = ", ".join(refusing)
    unseen = [name for name in CONTROLS if name not in noticed]
    message = f"all {len(CONTROLS)} negative controls are refused"
    if unseen:
        message = f"G6 power: the gates pass {', '.join(unseen)}, so what they pass proves nothing"
    return GateResult(NAME, not unseen, {"refused_by": noticed, "unseen": unseen}, message)


def _chosen(checks: Sequence[Check]) -> list[Check]:
    """Real images first, then structured ones: a constant shows little."""
    rank = {"noise": 1, "checkerboard": 2}
    return sorted(checks, key=lambda check: 0 if check.is_real else rank.get(check.name, 3))[:_MOST]


def _faulty(model: DeployModel, name: str) -> DeployModel:
    faulty = copy.deepcopy(model.as_robot())
    CONTROLS[name](faulty)
    return faulty


def _refusing(faulty: DeployModel, expected: Answer, check: Check, sigma: Sigma) -> list[str]:
    """Short names of the gates that refuse the faulty network on this image."""
    answer = run_eager(faulty)(check.image)
    found = [compare_answers(check, expected, answer, answer)]
    gates = (gate_logits(found, sigma), gate_mask(found, sigma), gate_preprocessing(found))
    return [gate.name.split()[0] for gate in gates if not gate.passed]
