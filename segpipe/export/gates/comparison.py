"""A file and the trained network side by side, image by image.

Differences of logits are measured in sigma, the standard deviation of the reference logits over the check set, because
an absolute limit means another thing for every network. Real images are held to their own standard deviation where that
is smaller: untrained weights gave noise and checkerboard 30 times the logits of photographs, which would have hidden
faults on the latter. The reference is the eager deploy model on one CPU thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from segpipe.export.gates.checks import Check
from segpipe.export.graph.profiles import Answer, Image, Run, Runner


@dataclass(frozen=True)
class Sigma:
    """Standard deviation of the reference logits over the check set, and over its real images alone."""

    everything: float
    real: float

    def of(self, *, is_real: bool) -> float:
        """What an image's differences are measured in."""
        return min(self.everything, self.real) if is_real else self.everything


@dataclass(frozen=True)
class Comparison:
    """One image through reference and file. `margins` belongs to the differing pixels, in the reference's logits."""

    name: str
    is_real: bool
    logits_difference: float  # largest; infinite when either side holds NaN or infinity
    confidence_difference: int  # largest, in grey levels; 0 where the file has no confidence
    margins: NDArray[np.float32]
    reference_mask: NDArray[Any]
    mask: NDArray[Any]
    normalised_difference: float = 0.0  # largest; infinite as above

    @property
    def agreement(self) -> float:
        """Share of equal pixels."""
        return 1.0 - self.margins.size / self.mask.size

    def relative(self, sigma: Sigma) -> float:
        """Largest difference of a logit in sigma; infinite where that means nothing."""
        scale = sigma.of(is_real=self.is_real)
        return self.logits_difference / scale if scale > 0 and math.isfinite(scale) else math.inf

    def unexplained(self, sigma: Sigma, margin_sigma: float) -> int:
        """Differing pixels whose reference was further than `margin_sigma` from a tie."""
        return int(np.count_nonzero(~(self.margins <= margin_sigma * sigma.of(is_real=self.is_real))))


@dataclass
class Moments:
    """Running count, sum and sum of squares of logits."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: NDArray[np.float32]) -> None:
        """Takes `values` in."""
        self.count += values.size
        self.total += float(values.sum(dtype=np.float64))
        self.squares += float(np.square(values, dtype=np.float64).sum())

    @property
    def sigma(self) -> float:
        """Standard deviation of all values taken in; NaN of none."""
        if self.count == 0:
            return math.nan
        mean = self.total / self.count
        return math.sqrt(max(self.squares / self.count - mean * mean, 0.0))


@dataclass
class Candidate:
    """A file under test: `probe` gives logits and the normalised image, `shipped` is the file itself.

    `broken` says what was raised when it ran; nothing is compared after that.
    """

    probe: Run
    shipped: Run
    comparisons: list[Comparison] = field(default_factory=list)
    broken: str = ""


def as_trained(reference: Run, preprocess: nn.Module) -> Run:
    """`reference` with the normalised image that training makes of the decoded one, whatever its own graph does."""

    def run(image: Image) -> Answer:
        with torch.no_grad():
            normalised = preprocess(torch.from_numpy(image.copy())[None])[0].numpy()
        return reference(image)._replace(normalised=normalised)

    return run


def compare(reference: Run, candidates: Sequence[Candidate], checks: Sequence[Check], batch_size: int = 1) -> Sigma:
    """Sigma; fills each candidate's comparisons. Batch by batch, since full-resolution logits are large.

    The reference sees every image alone, whatever `batch_size` is; candidates see that many at a time, the last few
    perhaps fewer.
    """
    everything, real = Moments(), Moments()
    for start in range(0, len(checks), batch_size):
        batch = checks[start : start + batch_size]
        expected = [reference(check.image) for check in batch]
        for check, answer in zip(batch, expected, strict=True):
            assert answer.logits is not None
            everything.add(answer.logits)
            if check.is_real:
                real.add(answer.logits)
        for candidate in candidates:
            if not candidate.broken:
                _compare_batch(batch, expected, candidate)
    return Sigma(everything.sigma, real.sigma if real.count else everything.sigma)


def _compare_batch(batch: Sequence[Check], expected: Sequence[Answer], candidate: Candidate) -> None:
    images = [check.image for check in batch]
    try:
        probed, shipped = _answers(candidate.probe, images), _answers(candidate.shipped, images)
        found = [compare_answers(*entry) for entry in zip(batch, expected, probed, shipped, strict=True)]
    except Exception as error:  # whatever the libraries raise: a file that does not run is refused
        candidate.broken = f"{type(error).__name__}: {error} (on {', '.join(check.name for check in batch)})"
    else:
        candidate.comparisons += found


def _answers(run: Run, images: Sequence[Image]) -> list[Answer]:
    if len(images) == 1:
        return [run(images[0])]
    assert isinstance(run, Runner), "a run of one image at a time has no batches"
    return run.batch(images)


def compare_answers(check: Check, expected: Answer, probe: Answer, shipped: Answer) -> Comparison:
    """Comparison of one image: logits and normalised image of the probe, mask and confidence of the shipped file.

    Raises ValueError when an answer has another shape than the reference's.
    """
    _require_shapes(expected, probe)
    _require_shapes(expected, shipped)
    assert expected.logits is not None
    # The reference's logits at the differing pixels, (C, n), ascending along the classes.
    ranked = np.sort(expected.logits[:, expected.mask != shipped.mask], axis=0)
    margins = ranked[-1] - ranked[-2] if len(ranked) > 1 else ranked[-1]
    levels = 0
    if expected.confidence is not None and shipped.confidence is not None:
        levels = int(np.abs(expected.confidence.astype(np.int16) - shipped.confidence.astype(np.int16)).max())
    return Comparison(
        name=check.name,
        is_real=check.is_real,
        logits_difference=_difference(expected.logits, probe.logits),
        confidence_difference=levels,
        margins=margins,
        reference_mask=expected.mask,
        mask=shipped.mask,
        normalised_difference=_difference(expected.normalised, probe.normalised),
    )


def _require_shapes(expected: Answer, found: Answer) -> None:
    # Without it numpy would repeat a mask of one row or column to the size of the other.
    for name, wanted, given in zip(Answer._fields, expected, found, strict=True):
        if wanted is not None and given is not None and wanted.shape != given.shape:
            raise ValueError(f"{name} is {given.shape}, but {wanted.shape} was needed")


def _difference(expected: NDArray[np.float32] | None, found: NDArray[np.float32] | None) -> float:
    """Largest absolute difference; infinite when a side is not there or not finite."""
    if expected is None or found is None or not (np.isfinite(expected).all() and np.isfinite(found).all()):
        return math.inf
    return float(np.abs(expected - found).max())
