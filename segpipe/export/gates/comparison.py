"""Side-by-side comparison of a file and the trained network, image by image.

The reference is the eager deploy model on one CPU thread. Differences of logits are measured in its sigma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from segpipe.export.gates.limits import Sigma
from segpipe.export.graph.profiles import Answer, Image, Run, Runner

if TYPE_CHECKING:
    from segpipe.export.gates.check_set import Check


@dataclass(frozen=True)
class ImageComparison:
    """One image through reference and file. `margins`: reference top-1 minus top-2 logit at the differing pixels."""

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
        """Largest logit difference in sigma; infinite when sigma is 0 or not finite."""
        scale = sigma.of(is_real=self.is_real)
        return self.logits_difference / scale if scale > 0 and math.isfinite(scale) else math.inf

    def unexplained(self, sigma: Sigma, margin_sigma: float) -> int:
        """Number of differing pixels whose reference was not within `margin_sigma` of a tie; NaN margins count."""
        return int(np.count_nonzero(~(self.margins <= margin_sigma * sigma.of(is_real=self.is_real))))


@dataclass
class Moments:
    """Running count, sum and sum of squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: NDArray[np.float32]) -> None:
        """Adds `values`."""
        self.count += values.size
        self.total += float(values.sum(dtype=np.float64))
        self.squares += float(np.square(values, dtype=np.float64).sum())

    @property
    def sigma(self) -> float:
        """Standard deviation of all values; NaN without any."""
        if self.count == 0:
            return math.nan
        mean = self.total / self.count
        return math.sqrt(max(self.squares / self.count - mean * mean, 0.0))


@dataclass
class Candidate:
    """An opened file and its probe, with the comparisons so far. After an error (`broken`) nothing more is compared."""

    probe: Run
    shipped: Run
    comparisons: list[ImageComparison] = field(default_factory=list)
    broken: str = ""


def as_trained(reference: Run, preprocess: nn.Module) -> Run:
    """`reference`, with the normalised image taken from the training module rather than from its own graph."""

    def run(image: Image) -> Answer:
        with torch.no_grad():
            normalised = preprocess(torch.from_numpy(image.copy())[None])[0].numpy()
        return reference(image)._replace(normalised=normalised)

    return run


def compare(reference: Run, candidates: Sequence[Candidate], checks: Sequence[Check], batch_size: int = 1) -> Sigma:
    """Sigma of the check set, after filling the comparisons of all candidates.

    Works batch by batch, since full-resolution logits are large. The reference always gets single images; candidates
    get `batch_size` at a time, the last batch possibly fewer.
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
    except Exception as error:  # the libraries raise many types; a file that does not run is refused
        candidate.broken = f"{type(error).__name__}: {error} (on {', '.join(check.name for check in batch)})"
    else:
        candidate.comparisons += found


def _answers(run: Run, images: Sequence[Image]) -> list[Answer]:
    if len(images) == 1:
        return [run(images[0])]
    assert isinstance(run, Runner), "a plain Run takes one image at a time"
    return run.batch(images)


def compare_answers(check: Check, expected: Answer, probe: Answer, shipped: Answer) -> ImageComparison:
    """ImageComparison of one image: logits and normalised image of the probe, mask and confidence of the shipped file.

    Raises ValueError when an answer has another shape than the reference's.
    """
    _require_shapes(expected, probe)
    _require_shapes(expected, shipped)
    assert expected.logits is not None
    # Reference logits at the differing pixels, (C, n), sorted over the classes.
    ranked = np.sort(expected.logits[:, expected.mask != shipped.mask], axis=0)
    margins = ranked[-1] - ranked[-2] if len(ranked) > 1 else ranked[-1]
    levels = 0
    if expected.confidence is not None and shipped.confidence is not None:
        levels = int(np.abs(expected.confidence.astype(np.int16) - shipped.confidence.astype(np.int16)).max())
    return ImageComparison(
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
    # numpy would broadcast a mask of one row or column.
    for name, wanted, given in zip(Answer._fields, expected, found, strict=True):
        if wanted is not None and given is not None and wanted.shape != given.shape:
            raise ValueError(f"{name} has shape {given.shape}, but the reference has {wanted.shape}")


def _difference(expected: NDArray[np.float32] | None, found: NDArray[np.float32] | None) -> float:
    """Largest absolute difference; infinite when a side is missing or not finite."""
    if expected is None or found is None or not (np.isfinite(expected).all() and np.isfinite(found).all()):
        return math.inf
    return float(np.abs(expected - found).max())
