"""The gates: whether a file computes what the trained network computes.

Differences are measured in sigma, the standard deviation of the reference logits over the check set, because an
absolute limit means another thing for every network. Real images are held to their own standard deviation where that
is smaller: untrained weights gave noise and checkerboard 30 times the logits of photographs, which would have hidden
faults on the latter. The reference is the eager deploy model on one CPU thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from segpipe.errors import ConfigError, DataError
from segpipe.export.formats import Answer, Image, Run

MAX_CLASSES = 255  # ids 0..254: 255 in a mask says "no answer"


@dataclass(frozen=True)
class Limits:
    """How far a file may be from the reference."""

    logits_sigma: float = 1e-3  # largest difference of a logit
    agreement: float = 0.9999  # equal pixels of the whole check set
    image_agreement: float = 0.999  # equal pixels of each image
    margin_sigma: float = 2e-3  # a pixel may differ where the reference's two best classes are this close
    confidence_levels: int = 1  # rounding


FP32 = Limits()


@dataclass(frozen=True)
class GateResult:
    """A gate's verdict; `message` says in a line what was found, and against which limit when it failed."""

    name: str
    passed: bool
    figures: dict[str, Any]
    message: str


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
    confidence_difference: int  # largest, in grey levels
    margins: NDArray[np.float32]
    reference_mask: NDArray[np.uint8]
    mask: NDArray[np.uint8]

    @property
    def agreement(self) -> float:
        """Share of equal pixels."""
        return 1.0 - self.margins.size / self.mask.size

    def relative(self, sigma: Sigma) -> float:
        """Largest difference of a logit in sigma; infinite where that means nothing."""
        scale = sigma.of(is_real=self.is_real)
        return self.logits_difference / scale if scale > 0 and math.isfinite(scale) else math.inf

    def unexplained(self, sigma: Sigma, limits: Limits = FP32) -> int:
        """Differing pixels whose reference was not close to a tie."""
        return int(np.count_nonzero(~(self.margins <= limits.margin_sigma * sigma.of(is_real=self.is_real))))


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
        """Standard deviation of all values taken in."""
        mean = self.total / self.count
        return math.sqrt(max(self.squares / self.count - mean * mean, 0.0))


@dataclass(frozen=True)
class Check:
    """An image of the check set; `is_real` when it is one of the split's, not made up."""

    name: str
    image: Image
    is_real: bool = True


class Samples(Protocol):
    """The part of segpipe.data.samples.Samples that is needed here."""

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> tuple[Image, Any]: ...


def check_images(samples: Samples, count: int) -> tuple[list[str], list[Image]]:
    """Names and images of `count` samples evenly spaced through the split, or of all when there are fewer.

    An exported graph has one image size: of a mixed split, those of the commonest size among them are returned.
    """
    count = min(count, len(samples))
    if count == 0:
        raise DataError("data.split holds no image, but the export is checked on real ones. Choose another data.split.")
    indices = [place * len(samples) // count for place in range(count)]
    read = [(samples.name(index), samples.read(index)[0]) for index in indices]
    shape = Counter(image.shape for _, image in read).most_common(1)[0][0]
    kept = [(name, image) for name, image in read if image.shape == shape]
    return [name for name, _ in kept], [image for _, image in kept]


def check_set(images: Sequence[Image], names: Sequence[str]) -> list[Check]:
    """The real images, then constants, noise and a checkerboard of their size. Raises ConfigError for bad images."""
    if not images:
        raise ConfigError("export.images gave no image, but a file is only published after a check on real ones.")
    shape = images[0].shape
    for name, image in zip(names, images, strict=True):
        if image.shape != shape or image.dtype != np.uint8 or image.ndim != 3 or shape[2] != 3:
            raise ConfigError(
                f"check image {name} is {image.dtype} {image.shape}; the graph has one shape, so uint8 {shape} was "
                "needed, (height, width, 3). Give images of one size."
            )
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    squares = ((rows // 8 + columns // 8) % 2 * 255).astype(np.uint8)
    made: dict[str, Image] = {f"constant_{level}": np.full(shape, level, dtype=np.uint8) for level in (0, 128, 255)}
    made["noise"] = np.random.Generator(np.random.Philox(key=0)).integers(0, 256, shape, dtype=np.uint8)
    made["checkerboard"] = np.repeat(squares[..., None], 3, axis=2)
    real = [Check(name, image) for name, image in zip(names, images, strict=True)]
    return [*real, *(Check(name, image, is_real=False) for name, image in made.items())]


@dataclass
class Candidate:
    """A file under test: `probe` gives logits (G2), `shipped` is the file itself (G3)."""

    probe: Run
    shipped: Run
    comparisons: list[Comparison] = field(default_factory=list)


def compare(reference: Run, candidates: Sequence[Candidate], checks: Sequence[Check]) -> Sigma:
    """Sigma; fills each candidate's comparisons. Image by image, since full-resolution logits are large."""
    everything, real = Moments(), Moments()
    for check in checks:
        expected = reference(check.image)
        assert expected.logits is not None
        everything.add(expected.logits)
        if check.is_real:
            real.add(expected.logits)
        for candidate in candidates:
            probe, shipped = candidate.probe(check.image), candidate.shipped(check.image)
            candidate.comparisons.append(compare_answers(check, expected, probe, shipped))
    return Sigma(everything.sigma, real.sigma)


def compare_answers(check: Check, expected: Answer, probe: Answer, shipped: Answer) -> Comparison:
    """Comparison of one image: logits of the probe, mask and confidence of the shipped file."""
    assert expected.logits is not None
    assert probe.logits is not None
    finite = np.isfinite(expected.logits).all() and np.isfinite(probe.logits).all()
    difference = float(np.abs(expected.logits - probe.logits).max()) if finite else math.inf
    # The reference's logits at the differing pixels, (C, n), ascending along the classes.
    ranked = np.sort(expected.logits[:, expected.mask != shipped.mask], axis=0)
    margins = ranked[-1] - ranked[-2] if len(ranked) > 1 else ranked[-1]
    levels = np.abs(expected.confidence.astype(np.int16) - shipped.confidence.astype(np.int16))
    return Comparison(check.name, check.is_real, difference, int(levels.max()), margins, expected.mask, shipped.mask)


def gate_integrity(problems: Sequence[str]) -> GateResult:
    """G1: the file is whole, alone, loadable, and what the manifest says."""
    message = "checker, loader and manifest agree" if not problems else f"G1 integrity: {'; '.join(problems)}"
    return GateResult("G1 integrity", not problems, {"problems": list(problems)}, message)


def gate_logits(comparisons: Sequence[Comparison], sigma: Sigma, limits: Limits = FP32) -> GateResult:
    """G2: no logit is further from the reference's than `limits.logits_sigma`, none is NaN or infinite."""
    worst = max(comparisons, key=lambda entry: entry.relative(sigma))
    relative = worst.relative(sigma)
    figures = {
        "max_sigma": relative if math.isfinite(relative) else None,
        "limit_sigma": limits.logits_sigma,
        "worst": worst.name,
    }
    passed = relative <= limits.logits_sigma
    if passed:
        message = f"largest difference {relative:.1e} sigma"
    elif math.isfinite(relative):
        message = f"G2 logits differ by {relative:.2g} > {limits.logits_sigma:g} sigma (worst: {worst.name})"
    elif math.isfinite(worst.logits_difference):
        message = "G2 logits of the trained network are the same everywhere, which compares with nothing"
    else:
        message = f"G2 logits are NaN or infinite (worst: {worst.name})"
    return GateResult("G2 logits", passed, figures, message)


def gate_mask(comparisons: Sequence[Comparison], sigma: Sigma, limits: Limits = FP32) -> GateResult:
    """G3: masks agree but for pixels at which the reference itself was close to a tie, and confidences to a level."""
    worst = max(comparisons, key=lambda entry: (entry.unexplained(sigma, limits), entry.margins.size))
    pixels = sum(entry.mask.size for entry in comparisons)
    differing = sum(entry.margins.size for entry in comparisons)
    agreement = 1.0 - differing / pixels
    lowest = min(entry.agreement for entry in comparisons)
    unexplained = sum(entry.unexplained(sigma, limits) for entry in comparisons)
    levels = max(entry.confidence_difference for entry in comparisons)
    figures = {
        "agreement": agreement,
        "worst_image_agreement": lowest,
        "unexplained_pixels": unexplained,
        "confidence_levels": levels,
        "worst": worst.name,
        "images": len(comparisons),
    }
    where = f"(worst: {worst.name}, {worst.unexplained(sigma, limits)} unexplained pixels)"
    failures = [
        text
        for failed, text in (
            (agreement < limits.agreement, f"mask agreement {_percent(agreement, limits.agreement)} {where}"),
            (lowest < limits.image_agreement, f"mask agreement {_percent(lowest, limits.image_agreement)} {where}"),
            (unexplained > 0, f"mask differs where the reference is {limits.margin_sigma:g} sigma from a tie {where}"),
            (levels > limits.confidence_levels, f"confidence differs by {levels} > {limits.confidence_levels} levels"),
        )
        if failed
    ]
    equal = f"{differing} of {pixels} pixels differ, each near a tie" if differing else "all pixels equal"
    message = f"G3 {failures[0]}" if failures else equal
    return GateResult("G3 mask", not failures, figures, message)


def _percent(share: float, limit: float) -> str:
    # Rounded down, so that 99.9899 % is not printed as 99.99 % < 99.99 %.
    return f"{math.floor(share * 1e4) / 100:.2f} % < {limit * 100:g} %"
