"""Divides a data set into training and validation images, whole sequences at a time.

Neighboring frames of a video show nearly the same scene. With one in training and the next in validation, a network
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
    groups = [name.partition(COPY)[0] for name in names]
    if by == "sequence":
        groups = [sequence(name, pattern) for name in groups]
    found, places = np.unique(groups, return_inverse=True)
    if len(found) < 2:
        raise DataError(
            f"all {len(names)} images are of one {by}, {', '.join(found)}, which cannot be divided. If they are frames "
            "of one video, set by=tail: its last frames. If they are independent photos, set by=image. If sequences "
            "are named in another way, set pattern=REGEX, whose first group is the sequence."
        )
    rows = np.ones((len(names), 1))
    if pixels is not None:
        rows = np.column_stack([rows, pixels])
    weights = np.zeros((len(found), rows.shape[1]))
    np.add.at(weights, places, rows)
    chosen = _nearest_to(weights[:, weights.sum(axis=0) > 0], val, seed)
    return [place in chosen for place in places.tolist()]


def _nearest_to(weights: NDArray[np.float64], val: float, seed: int) -> set[int]:
    """Rows whose share of each column is nearest to `val`: the first column counts as much as all others together.

    A class that one side would lack counts 1 more, more than any share can.
    """
    best, chosen = np.inf, set[int]()
    for trial in range(TRIALS):
        order = generator(sample_key(seed, 0, trial, "split")).permutation(len(weights))
        sums = np.cumsum(weights[order], axis=0)
        lacking = (sums[:-1] == 0) | (sums[:-1] == sums[-1])
        errors = np.abs(sums[:-1] / sums[-1] - val) + lacking
        classes = errors[:, 1:].sum(axis=1) / max(errors.shape[1] - 1, 1)
        scores = errors[:, 0] + classes
        if scores.min() < best:
            best = float(scores.min())
            chosen = set(order[: int(scores.argmin()) + 1].tolist())
    return chosen


def _tails(names: Sequence[str], val: float, pattern: str) -> list[bool]:
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(sequence(name, pattern), []).append(name)
    chosen = set[str]()
    for frames in members.values():
        frames.sort(key=lambda name: (frame(name)[1] or 0, name))
        if len(frames) > 1:
            chosen |= set(frames[-ceil(val * len(frames)) :])
    if not chosen:
        raise DataError(
            "by=tail found no sequence of two or more images. Set by=image, or pattern=REGEX."
        )
    return [name in chosen for name in names]


def shared_sequences(
    train: Sequence[str], val: Sequence[str], pattern: str
) -> dict[str, tuple[int, int]]:
    """Number of training and validation images of each sequence that is in both; `pattern` is `data.sequence`."""
    first, second = (
        Counter(sequence(name.partition(COPY)[0], pattern) for name in names)
        for names in (train, val)
    )
    both = sorted(first.keys() & second.keys())
    return {name: (first[name], second[name]) for name in both}
