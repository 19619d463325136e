"""How often classes occur in the training samples, and what follows: repeats of samples, weights of classes.

Masks are counted once, at the start of a run that needs it; the run folder keeps the counts in pixels.npz, so a resumed
run has the very same ones.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segpipe.data.order import Draws, Passes, whole_shares
from segpipe.errors import ConfigError, DataError
from segpipe.files import write_atomically

Sets = Sequence[
    tuple[int, float]
]  # of each data set of a mixture, number of samples and weight
FILE_NAME = "pixels.npz"  # in the run folder


@dataclass(frozen=True)
class PixelCounts:
    """Pixels of each class in samples, int64 (n, C), and their indices, int64 (n,)."""

    pixels: NDArray[np.int64]
    indices: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write them. Raises CheckpointError when the disk is full."""
        file = io.BytesIO()
        np.savez_compressed(file, pixels=self.pixels, indices=self.indices)
        write_atomically(path, file.getvalue())


def load(path: Path) -> PixelCounts | None:
    """The counts in a file; None if there is none. Raises DataError when it is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as content:
            return PixelCounts(content["pixels"], content["indices"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is damaged ({error}). Delete it: the masks are then counted again."
        ) from None


def merged(parts: Sequence[PixelCounts]) -> PixelCounts:
    """The counts of all parts, by index."""
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices)
    return PixelCounts(
        np.concatenate([part.pixels for part in parts])[order], indices[order]
    )


def repeat_factors(
    present: NDArray[np.bool_], threshold: float, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How many times each sample comes in a pass: max over its classes of max(1, sqrt(threshold / f)).

    f is the fraction of the samples that hold the class, each counted with its weight.

    Shapes: present bool (n, C), weights (n,) -> float64 (n,). Source: repeat factor sampling of LVIS, arXiv:1908.03195.
    """
    fractions = (present * weights[:, None]).sum(0) / weights.sum()
    factors = np.sqrt(threshold / np.maximum(fractions, np.finfo(float).tiny))
    return np.asarray(np.maximum(1.0, np.where(present, factors, 1.0).max(axis=1)))


def repeats_by_class(
    threshold: float, sets: Sets, counts: PixelCounts
) -> NDArray[np.float64]:
    """Repeats of each sample under data.balance, float64 (n,)."""
    sizes = [size for size, _ in sets]
    weights = np.repeat(_shares(sets) / sizes, sizes)
    return repeat_factors(counts.pixels > 0, threshold, weights)


def repeats_by_sequence(
    sequences: Sequence[Sequence[str]],
) -> NDArray[np.float64]:
    """Repeats of each sample with which every sequence of a data set comes equally often, float64 (n,).

    sequences: that of each sample, for each data set of a mixture. Raises ConfigError when no set has two.
    """
    counts = [Counter(names) for names in sequences]
    if all(len(of_set) == 1 for of_set in counts):
        name = sequences[0][0]
        raise ConfigError(
            f"data.balance_by = sequence, but all training images are of one sequence, {name}. Set data.sequence to a "
            "regular expression that finds it in their names, or data.balance_by=class."
        )
    return np.concatenate(
        [
            [max(of_set.values()) / of_set[name] for name in names]
            for names, of_set in zip(sequences, counts, strict=True)
        ]
    )


def draws(repeats: NDArray[np.float64] | None, sets: Sets, seed: int) -> Draws | None:
    """The order of balanced or mixed samples; None when each is taken once per epoch.

    repeats: of each sample; None: all alike. Raises ConfigError when a data set of a mixture would get less than one
    sample of an epoch.
    """
    if repeats is None and len(sets) == 1:
        return None
    first, passes = 0, []
    for number, (size, _) in enumerate(sets):
        own = np.ones(size) if repeats is None else repeats[first : first + size]
        passes.append(Passes(seed, number, first, own))
        first += size
    numbers = whole_shares(
        [weight for _, weight in sets], sum(one.length for one in passes)
    )
    return Draws(seed, passes, numbers)


def pixels_seen(
    repeats: NDArray[np.float64] | None, sets: Sets, counts: PixelCounts
) -> NDArray[np.int64] | NDArray[np.float64]:
    """Pixels of each class as training meets them, (C,): with the shares of a mixture and with repeats.

    Exact counts where every sample comes once per epoch, else their mean over the samples.
    """
    if repeats is None and len(sets) == 1:
        return np.asarray(counts.pixels.sum(0))
    ends = np.cumsum([size for size, _ in sets])
    factors = (np.ones(ends[-1]) if repeats is None else repeats)[counts.indices]
    number = np.searchsorted(ends, counts.indices, side="right")
    weights = (
        factors * (_shares(sets) / np.bincount(number, factors, len(sets)))[number]
    )
    total: NDArray[np.float64] = (counts.pixels * weights[:, None]).sum(0)
    return total


def _shares(sets: Sets) -> NDArray[np.float64]:
    """Share of each data set in the samples of an epoch, float64 (sets,)."""
    weights = np.array([weight for _, weight in sets])
    return np.asarray(weights / weights.sum())


def check_given_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raise ConfigError unless there is one weight per class, and one above 0."""
    if len(weights) != len(names):
        raise ConfigError(
            f"loss.class_weights holds {len(weights)} weights, but the data set has {len(names)} classes. Give one "
            f"weight for each, in this order: {', '.join(names)}."
        )
    if not any(weights):
        raise ConfigError(
            "loss.class_weights holds only zeros: nothing could be learned. Set one above 0."
        )
