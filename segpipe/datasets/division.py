"""Divides a data set into training and validation images, whole sequences at a time.

Neighboring frames of a video show nearly the same scene. With one in training and the next in validation, a network
that has memorized the scene scores well and fails on the next street.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

import numpy as np

from segpipe.data import Float64, Int64
from segpipe.data.samples import frame, sequence
from segpipe.errors import DataError
from segpipe.keys import generator, sample_key

TRIALS = 200
COPY = ".rf."  # Roboflow appends this and a digest to the name of each augmented copy of an image


def divide(
    names: Sequence[str],
    *,
    val: float,
    by: str,
    seed: int,
    pattern: str = "",
    pixels: Int64 | None = None,
) -> list[bool]:
    """Whether each image is for validation; depends only on the arguments.

    `by`: "sequence" keeps sequences whole, "image" divides single images, "tail" takes the last frames of each
    sequence. Otherwise chooses, among many random divisions, the one whose shares of images, and of the `pixels`
    (N, C) of each class, are nearest to `val`. Raises DataError if nothing can be divided.
    """
    groups = [name.partition(COPY)[0] for name in names]
    if by == "tail":
        chosen_groups = _tails(set(groups), val, pattern)
        return [group in chosen_groups for group in groups]

    if by == "sequence":
        groups = [sequence(name, pattern) for name in groups]

    found, places = np.unique(groups, return_inverse=True)
    if len(found) < 2:
        raise DataError(
            f"all {len(names)} images belong to one {by}, {', '.join(found)}, which cannot be divided. If they are "
            "frames of one video, set by=tail to validate on its last frames. If they are independent photos, set "
            "by=image. If sequences are named differently, set pattern=REGEX, whose first group is the sequence."
        )

    rows = np.ones((len(names), 1))
    if pixels is not None:
        rows = np.column_stack([rows, pixels])

    weights = np.zeros((len(found), rows.shape[1]))
    np.add.at(weights, places, rows)
    chosen = _nearest_to(weights[:, weights.sum(axis=0) > 0], val, seed)
    return [place in chosen for place in places.tolist()]


def _nearest_to(weights: Float64, val: float, seed: int) -> set[int]:
    """Rows whose share of each column is nearest to `val`: the first column counts as much as all others together.

    A class that one side lacks adds 2 to the error, more than all shares together can.
    """
    num, columns = weights.shape
    best, chosen = np.inf, set[int]()
    for trial in range(TRIALS):
        order = generator(sample_key(seed, 0, trial, "split")).permutation(num)
        sums = np.cumsum(weights[order], axis=0)
        total, firsts = sums[-1], sums[:-1]
        lacking = ((firsts == 0) | (firsts == total)).sum(axis=1)
        errors = np.abs(firsts / total - val)
        classes = errors[:, 1:].sum(axis=1) / max(columns - 1, 1)
        scores = errors[:, 0] + classes + 2 * lacking
        place = int(scores.argmin())
        if scores[place] < best:
            best = scores[place]
            chosen = set(order[: place + 1].tolist())

    return chosen


def _tails(names: Iterable[str], val: float, pattern: str) -> set[str]:
    """The last images of each sequence."""
    members: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (frame(name)[1] or 0, name)):
        members.setdefault(sequence(name, pattern), []).append(name)

    chosen = set[str]()
    for frames in members.values():
        if len(frames) > 1:
            last = min(max(ceil(round(val * len(frames), 9)), 1), len(frames) - 1)
            chosen.update(frames[-last:])

    if not chosen:
        raise DataError(
            "by=tail found no sequence with two or more images. Set by=image, or pattern=REGEX."
        )

    return chosen


def shared_sequences(
    train: Sequence[str], val: Sequence[str], pattern: str
) -> dict[str, tuple[int, int]]:
    """Number of training and validation images of each sequence in both; `pattern` is `data.sequence`."""

    first, second = (
        Counter(sequence(name.partition(COPY)[0], pattern) for name in names)
        for names in (train, val)
    )
    return {name: (first[name], second[name]) for name in sorted(first & second)}
