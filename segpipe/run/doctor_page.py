"""`segpipe doctor out=doctor.html`: a data set on one page, with pictures of what to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable
from segpipe.data.census import Census
from segpipe.data.data_set import DataSet
from segpipe.data.division import shared_sequences
from segpipe.data.masks import UNKNOWN, train_id
from segpipe.data.overlap import near_duplicates, shared_files
from segpipe.data.readers import Value
from segpipe.data.samples import image_files
from segpipe.errors import DataError, listed
from segpipe.run.pages import render_page
from segpipe.run.pictures import blend, shrink
from segpipe.run.preflight import first_batch, machine, worker_problems

if TYPE_CHECKING:
    from segpipe.data.loader import Pixels
    from segpipe.settings.config import Config

SHOWN_PROBLEMS = 200
SHOWN = 8  # images of a kind
SHOWN_SEQUENCES = 20
WIDTH = 360  # of a picture, in pixels
SHOWN_VALUES = 300  # rows of the table of ids and colors

Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Checkup:
    """All that the page is made of."""

    config: Config
    problems: Sequence[str]
    warnings: Sequence[str]
    samples: Mapping[str, DataSet]  # by split
    census: Mapping[str, Census]  # by split

    @property
    def splits(self) -> list[tuple[str, DataSet, Census]]:
        return [
            (split, samples, self.census[split])
            for split, samples in self.samples.items()
        ]

    @property
    def first(self) -> DataSet:
        """The samples of training."""
        return next(iter(self.samples.values()))


def render(found: Checkup) -> str:
    """The page as text."""
    data, table = found.config.data, found.first.classes
    sizes = [f"{split}: {len(samples)} images" for split, samples, _ in found.splits]
    pixels = np.sum([census.table.sum(0) for _, _, census in found.splits], 0)
    occurring = np.flatnonzero(pixels[: table.num_classes])
    batch, faults = _training(found)
    return render_page(
        "doctor.html.j2",
        name=Path(data.root).resolve().name if data.root else data.name,
        about=[f"data {data.name}", data.root, *sizes],
        problems=found.problems[:SHOWN_PROBLEMS],
        num_problems=len(found.problems),
        warnings=found.warnings,
        splits=[_split_row(*split) for split in found.splits],
        classes=_classes(found, table),
        values=_values(found),
        most_values=SHOWN_VALUES,
        contradictions=_contradictions(found),
        leaks=_leaks(found),
        unlabelled=_unlabelled(found),
        grids={
            split: _grid(samples, census) for split, samples, census in found.splits
        },
        batch=batch,
        machine=machine(found.config),
        machine_faults=faults,
        occurring=[table.names[place] for place in occurring],
        colors=[table.palette[place] for place in occurring],
    )


def _split_row(split: str, samples: DataSet, census: Census) -> dict[str, Any]:
    counts = census.table
    sizes = [
        f"{height}x{width} ({times})"
        for (height, width), times in census.sizes.most_common()
    ]
    kinds = census.kinds.most_common()
    pairs = samples.file_pairs()
    example = f"{pairs[0].image} with {pairs[0].mask}" if pairs else ""
    return {
        "name": split,
        "images": len(samples),
        "read": len(census.names),
        "sizes": listed(sizes, 4),
        "kinds": ", ".join(f"{kind} ({times})" for kind, times in kinds if kind),
        "ignored": int(counts[:, -2].sum()) / max(int(counts.sum()), 1),
        "unlabelled": len(census.unlabelled),
        "example": example,
    }


def _classes(found: Checkup, table: ClassTable) -> list[dict[str, Any]]:
    """A row for each class: shares by split, images that have it, and the weights of loss.class_weights."""
    import torch

    from segpipe.losses.cross_entropy import class_weights

    pixels = [census.table[:, : table.num_classes] for _, _, census in found.splits]
    images = [(counts > 0).sum(0).tolist() for counts in pixels]
    shares = [counts.sum(0) / max(int(counts.sum()), 1) for counts in pixels]
    largest = max(float(share.max()) for share in shares) or 1.0
    train = torch.from_numpy(pixels[0].sum(0))
    weights = [class_weights(train, kind).tolist() for kind in ("log", "sqrt")]
    return [
        {
            "name": name,
            "color": table.palette[place],
            "cells": [
                (float(share[place]), number[place])
                for share, number in zip(shares, images, strict=True)
            ],
            "bar": float(shares[0][place]) / largest,
            "weights": [weight[place] for weight in weights],
        }
        for place, name in enumerate(table.names)
    ]


def _meaning(table: ClassTable, train: int) -> str:
    known = {IGNORE_INDEX: "ignored", UNKNOWN: "not in the class table"}
    return known.get(train) or table.names[train]


def _values(found: Checkup) -> list[dict[str, Any]]:
    """What the masks hold, value by value, and what the class table has besides."""
    masks = found.first.mask_table()
    if masks is None:
        return []
    classes = masks.classes
    pixels: Counter[Value] = Counter()
    files: Counter[Value] = Counter()
    for census in found.census.values():
        pixels.update(census.values)
        files.update(census.files)
    total = max(sum(pixels.values()), 1)
    values: set[Value] = set(pixels)
    values.update(masks.colors if masks.kind == "colors" else classes.train_ids)
    rows = []
    for value in sorted(values, key=lambda value: (isinstance(value, tuple), value)):
        train = train_id(masks, value)
        color = value if isinstance(value, tuple) else None
        if color is None and 0 <= train < IGNORE_INDEX:
            color = classes.palette[train]
        rows.append(
            {
                "value": value,
                "color": color,
                "meaning": _meaning(classes, train),
                "unknown": train == UNKNOWN,
                "share": pixels[value] / total,
                "files": files[value],
            }
        )
    return rows


def _contradictions(found: Checkup) -> list[str]:
    """Palette indices that mean one class as ids and another one by their color."""
    lines = {}
    for _, samples, census in found.splits:
        for index, pair in census.ambiguous.items():
            by_id, by_color = (_meaning(samples.classes, train) for train in pair)
            lines[index] = (
                f"index {index} is {by_id} as an id, but its color in the palette is "
                f"that of {by_color}"
            )
    return list(lines.values())


def _leaks(found: Checkup) -> dict[str, Any]:
    """Images that training and validation share: byte for byte, nearly, and sequences."""
    if len(found.splits) < 2:
        return {}
    (_, train, of_train), (_, val, of_val) = found.splits[:2]
    data = found.config.data
    equal = shared_files(image_files(train), image_files(val))
    near = near_duplicates(of_train.looks, of_val.looks)
    nearest = {pair.first: pair for pair in reversed(near)}  # one for a training image
    pairs = sorted(nearest.values(), key=lambda pair: (pair.distance, pair.second))
    sequences = {}
    if data.name != "synthetic":
        sequences = shared_sequences(of_train.names, of_val.names, data.sequence)
    return {
        "equal": equal[:SHOWN],
        "num_equal": len(equal),
        "near": [
            (
                pair.distance,
                _shown(train, [of_train.places[pair.first]]),
                _shown(val, [of_val.places[pair.second]]),
            )
            for pair in pairs[: SHOWN // 2]
        ],
        "num_near": len(near),
        "images": len(of_val.names),
        "sequences": list(sequences.items())[:SHOWN_SEQUENCES],
        "num_sequences": len(sequences),
    }


def _unlabelled(found: Checkup) -> list[tuple[str, Picture | None]]:
    """Names and pictures of images whose masks label nothing."""
    return [
        (f"{split}: {name}", image)
        for split, samples, census in found.splits
        for name, image, _ in _shown(samples, census.unlabelled[:SHOWN])
    ]


def _grid(samples: DataSet, census: Census) -> list[tuple[str, Picture, Picture]]:
    """Name, image and overlay of samples from all over a split."""
    count = len(census.places)
    places = [count * place // min(SHOWN, count) for place in range(min(SHOWN, count))]
    rows = _shown(samples, [census.places[place] for place in places])
    return [
        (name, image, overlay)
        for name, image, overlay in rows
        if image is not None and overlay is not None
    ]


def _training(
    found: Checkup,
) -> tuple[list[tuple[str, Picture, Picture]], list[str]]:
    """The first shard batch as training sees it, and what is wrong with this machine."""
    samples = found.first
    if found.problems or not len(samples):
        return [], []
    batch, fault = first_batch(found.config, samples)
    if batch is None:
        return [], [fault]
    pairs = zip(batch.finished(), batch.target.numpy(), strict=True)
    shown = [
        (samples.name(index), *_small(samples.classes, pair))
        for index, pair in zip(batch.index.tolist(), pairs, strict=True)
    ]
    return shown, list(worker_problems(found.config, samples))


def _shown(
    samples: DataSet, indices: Iterable[int]
) -> list[tuple[str, Picture | None, Picture | None]]:
    """Name, image and overlay of samples; no pictures of one that has a problem, such as an id without a class."""
    rows = []
    for index in indices:
        image, overlay = None, None
        with suppress(DataError):
            image, overlay = _small(samples.classes, samples.read(index))
        rows.append((samples.name(index), image, overlay))
    return rows


def _small(table: ClassTable, sample: Pixels) -> tuple[Picture, Picture]:
    """An image, and its target as an overlay."""
    image = shrink(sample[0], WIDTH, smooth=True)
    target = shrink(sample[1], WIDTH, smooth=False)
    return image, blend(image, target, table.palette)
