"""The contract of a loss: shards add up, ignored pixels do not count, gradients are finite."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX, plugins
from segpipe.checks.clause import NOTE, Clause, answers, forbidden_ops
from segpipe.checks.tripwire import preserved, seed_globals
from segpipe.errors import ConfigError
from segpipe.losses.total import KEY, check_call, shard_loss, valid_pixels
from segpipe.models import check_model

if TYPE_CHECKING:
    from segpipe.settings.config import Config

CLASSES = 5
SHAPE = (4, 12, 16)  # images, height, width
CLOSE = 1e-4  # relative
CONFIDENT = 40.0  # factor of the logits at which probabilities round to 0 and 1


class LossContract:
    """Checks the loss of a configuration on random logits, on the CPU."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = config.loss.name
        draws = torch.Generator().manual_seed(0)
        batch, height, width = SHAPE
        self.logits = torch.randn(batch, CLASSES, height, width, generator=draws) * 0.5
        self.target = torch.randint(
            0, CLASSES, SHAPE, generator=draws, dtype=torch.uint8
        )
        # Halves with 2 and 1 parts of valid pixels: a mean then differs from a sum also by its weights.
        self.target[batch // 2 :, : height // 2] = IGNORE_INDEX

    def clauses(self) -> Iterator[Clause]:
        """All clauses; the first alone when the function cannot be called."""
        questions = {
            "can be called": self._call,
            "no randomness": self._randomness,  # which breaks others, too
            "shards add up": self._sums,
            "ignored pixels do not count": self._ignored,
            "a batch without labels": self._unlabelled,
            "gradients are finite": self._finite,
            "class weights": self._weights,
            "ops that CUDA repeats": self._ops,
        }
        return answers("loss", questions.items())

    def refusal(self) -> str:
        """Why no training should start with this loss; empty when one may. Raises what the call raises."""
        with preserved():
            return self._call() or self._randomness() or self._sums()

    def total(self, weights: Tensor | None = None, **given: Tensor) -> Tensor:
        """Loss of the batch, or of the `logits` and `target` given, divided by the valid pixels of the batch."""
        plain = replace(
            self.config.loss, backend="plain", dice_weight=0.0, lovasz_weight=0.0
        )
        parts = shard_loss(
            {"main": given.get("logits", self.logits)},
            given.get("target", self.target),
            plain,
            class_weights=weights,
            global_valid=torch.tensor(valid_pixels(self.target)),
            align_corners=False,
        )
        return parts["total"]

    def _call(self) -> str:
        """Whether it takes these arguments. Raises what the call raises."""
        loss = self.config.loss
        if plugins.is_path(loss.name):
            weighted = loss.class_weights != "none"
            check_call(loss.name, loss.args, weighted=weighted)
        self.total()
        return ""

    def _sums(self) -> str:
        """Whether the loss of a batch is the sum of the losses of its halves."""
        whole = float(self.total())
        pairs = zip(self.logits.chunk(2), self.target.chunk(2), strict=True)
        halves = [
            float(self.total(logits=logits, target=target)) for logits, target in pairs
        ]

        if not all(map(math.isfinite, (whole, *halves))):
            return (
                f"{KEY} = {self.name}: the loss of random logits is not finite: {whole:.6g} for a batch, "
                f"{halves[0]:.6g} and {halves[1]:.6g} for its halves. Look for divisions by 0 and logarithms of 0."
            )

        if abs(sum(halves) - whole) <= CLOSE * abs(whole):
            return ""
        mean = " It looks like a mean." if min(halves) <= whole <= max(halves) else ""
        return (
            f"{KEY} = {self.name}: a batch has the loss {whole:.6g}, its halves together {sum(halves):.6g}.{mean} "
            f'Return the loss of each pixel (reduction="none"), or their sum: segpipe divides by the number of valid '
            f"pixels of the whole update."
        )

    def _gradient(self, logits: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and its gradient. Raises ConfigError when there is none."""
        logits = logits.clone().requires_grad_()
        loss = self.total(logits=logits, **given)
        loss.backward()  # type: ignore[no-untyped-call]
        if logits.grad is None:
            raise ConfigError(
                "the loss has no gradient. Compute it from the logits, without detach or numpy."
            )
        return loss.detach(), logits.grad

    def _ignored(self) -> str:
        """Whether other logits of ignored pixels leave it as it is."""
        ignored = self.target == IGNORE_INDEX
        changed = self.logits + 3.0 * ignored.unsqueeze(1)
        changed[:, 0] += 2.0 * ignored

        loss, gradient = self._gradient(self.logits)
        moved, _ = self._gradient(changed)
        if not torch.equal(loss, moved):
            return f"logits of ignored pixels move it from {loss:.6g} to {moved:.6g}. Leave out target == ignore_index."
        if gradient.movedim(1, -1)[ignored].any():
            return "ignored pixels have a gradient. Leave out target == ignore_index."
        return "" if gradient.any() else "the gradient is 0 everywhere."

    def _unlabelled(self) -> str:
        """Whether it is 0 with gradient 0 without a valid pixel."""
        ignored = torch.full_like(self.target, IGNORE_INDEX)
        loss, gradient = self._gradient(self.logits, target=ignored)
        if loss != 0 or gradient.any():
            return f"without a valid pixel it is {loss:.6g}, but 0 with gradient 0 was needed. Do not divide by counts."
        return ""

    def _finite(self) -> str:
        """Whether loss and gradient are finite, also where the network is sure."""
        for factor in (1.0, CONFIDENT):
            loss, gradient = self._gradient(factor * self.logits)
            if not (loss.isfinite() and gradient.isfinite().all()):
                sure = " of a network that is sure of its answers" if factor > 1 else ""
                return f"not finite, or its gradient, for logits{sure}. Use log_softmax, and clamp before log and pow."
        return ""

    def _randomness(self) -> str:
        """Whether the global generators leave it as it is."""
        seed_globals(1)
        first = self.total()
        seed_globals(2)
        second = self.total()
        if not torch.isclose(first, second, rtol=0, atol=0, equal_nan=True):
            return f"{KEY} = {self.name}: two calls with the same logits differ. Draw nothing at random."
        return ""

    def _weights(self) -> str:
        """Whether weights of the classes change it."""
        if plugins.is_path(self.name):
            signature = inspect.signature(plugins.load(KEY, self.name))
            if "class_weights" not in signature.parameters:
                return (
                    f"{NOTE}it has no class_weights, so loss.class_weights must be none"
                )
        weights = torch.tensor([10.0, *[1.0] * (CLASSES - 1)])
        if torch.equal(self.total(weights), self.total()):
            return "class_weights change nothing. Multiply the loss of a pixel by the weight of its class."
        return ""

    def _ops(self) -> str:
        """Whether its ops repeat themselves on a GPU."""
        return forbidden_ops(lambda: self._gradient(self.logits))


def check_plugins(config: Config) -> None:
    """Import the code that the configuration names, and raise ConfigError for what is known to be wrong before it runs.

    Arguments that a signature does not have, and a loss whose shards do not add up.
    """
    for key, path in config.import_paths:
        plugins.load(key, path)
    if config.model.args:
        check_model(config.model.name, config.model.args)
    if plugins.is_path(config.loss.name) and (
        problem := LossContract(config).refusal()
    ):
        raise ConfigError(problem)
