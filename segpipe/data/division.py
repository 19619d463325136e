"""Divides a data set into training and validation images, whole sequences at a time.

Neighbouring frames of a video show nearly the same scene. With one in training and the next in validation, a network
that has learned the scene by heart scores well and fails on the next street.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from segpipe.data.samples import frame, sequence
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key

TRIALS = 200
COPY = ".rf."  # Roboflow puts this and a digest behind the name of each of its augmented copies of an image


def divide(
    names: Sequence[str],
    *,
    val: float,
    by: str,
    seed: int,
    pattern: str = "",
    pixels: NDArray[np.int64] | None = None,
) -> list[bool]:
    """Whether each image is for validation, a function of the arguments alone.

    `by`: "sequence" keeps sequences whole, "image" takes images one by one, "tail" takes the last frames of each
    sequence. Of many random divisions, it takes the one whose shares of images, and of the `pixels` (N, C) of each
    class, are nearest to `val`. Raises DataError when nothing can be divided.
    """
    if by == "tail":
        return _tails(names, val, pattern)
    groups = [
        name.partition(COPY)[0]
        if by == "image"
        else sequence(name.partition(COPY)[0], pattern)
        for name in names
    ]
    found = sorted(set(groups))
    if len(found) < 2:
        raise DataError(
            f"all {len(names)} images are of one {by}, {found[0] if found else 'none'}, which cannot be divided. If "
            "they are frames of one video, set by=tail: its last frames. If they are independent photos, set by=image. "
            "If sequences are named in another way, set pattern=REGEX, whose first group is the sequence."
        )
    places = {group: place for place, group in enumerate(found)}
    columns = 1 if pixels is None else 1 + pixels.shape[1]
    weights = np.zeros((len(found), columns))
    for index, group in enumerate(groups):
        weights[places[group], 0] += 1
        if pixels is not None:
            weights[places[group], 1:] += pixels[index]
    chosen = _nearest_to(weights[:, weights.sum(axis=0) > 0], val, seed)
    return [places[group] in chosen for group in groups]


def _nearest_to(weights: NDArray[np.float64], val: float, seed: int) -> set[int]:
    """Rows whose share of each column is nearest to `val`: the first column counts as much as all others together.

    A class that one side would lack counts 1 more, more than any share can.
    """
    best, chosen = np.inf, set[int]()
    for trial in range(TRIALS):
        order = generator(sample_key(seed, 0, trial, "split")).permutation(len(weights))
        sums = np.cumsum(weights[order], axis=0)
        errors = np.abs(sums[:-1] / sums[-1] - val) + (
            (sums[:-1] == 0) | (sums[:-1] == sums[-1])
        )
        scores = errors[:, 0] + (
            errors[:, 1:].mean(axis=1) if errors.shape[1] > 1 else 0.0
        )
        if scores.min() < best:
            best, chosen = (
                float(scores.min()),
                {int(row) for row in order[: int(scores.argmin()) + 1]},
            )
    return chosen


def _tails(names: Sequence[str], val: float, pattern: str) -> list[bool]:
    members: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault(sequence(name, pattern), []).append(index)
    chosen = set[int]()
    for indices in members.values():
        ordered = sorted(
            indices, key=lambda index: (frame(names[index])[1] or 0, names[index])
        )
        chosen |= (
            set(ordered[len(ordered) - ceil(val * len(ordered)) :])
            if len(ordered) > 1
            else set()
        )
    if not chosen:
        raise DataError(
            "by=tail found no sequence of two or more images. Set by=image, or pattern=REGEX."
        )
    return [index in chosen for index in range(len(names))]


def shared_sequences(
    train: Sequence[str], val: Sequence[str], pattern: str
) -> dict[str, tuple[int, int]]:
    """Number of training and validation images of each sequence that is in both; `pattern` is `data.sequence`."""
    counts = [
        Counter(sequence(name.partition(COPY)[0], pattern) for name in names)
        for names in (train, val)
    ]
    return {
        name: (counts[0][name], counts[1][name])
        for name in sorted(counts[0].keys() & counts[1].keys())
    }
