"""`segpipe doctor out=doctor.html`: a data set on one page, with pictures of what to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.catalog import ClassTable, MaskTable
from segpipe.data.data_set import DataSet
from segpipe.data.masks import UNKNOWN, train_id
from segpipe.data.readers import Value
from segpipe.data.samples import image_files
from segpipe.datasets.census import Census
from segpipe.datasets.division import shared_sequences
from segpipe.datasets.overlap import near_duplicates, shared_files
from segpipe.errors import DataError, listed
from segpipe.run.pages import render_page
from segpipe.run.pictures import blend, shrink
from segpipe.run.preflight import first_batch, worker_problems

if TYPE_CHECKING:
    from segpipe.data.data_set import Sample
    from segpipe.settings.config import Config

SHOWN_PROBLEMS = 200
SHOWN = 8  # images of a kind
WIDTH = 360  # of a picture, in pixels
SHOWN_VALUES = 300  # rows of the table of ids and colors
Picture = NDArray[np.uint8]
Shown = tuple[str, Picture | None, Picture | None]  # name, image, overlay


def render(
    config: Config,
    problems: Sequence[str],
    warnings: Sequence[str],
    splits: Sequence[Census],
) -> str:
    """The page as text; `splits` begin with training, and are what can be read of them."""
    data, train = config.data, splits[0].samples
    batch: list[Shown] = []
    faults: list[str] = []
    if not problems:
        shard, fault = first_batch(config, train)
        faults = [fault] if fault else list(worker_problems(config, train))
        if shard is not None:
            pairs = zip(shard.finished(), shard.target.numpy(), strict=True)
            names = map(train.name, shard.index.tolist())
            batch = [
                (name, *_small(train.classes, pair))
                for name, pair in zip(names, pairs, strict=True)
            ]
    masks = train.mask_table()
    return render_page(
        "doctor.html.j2",
        name=Path(data.root).resolve().name if data.root else data.name,
        about=[
            f"data {data.name}",
            data.root,
            *(f"{each.split}: {len(each.samples)} images" for each in splits),
        ],
        problems=problems,
        shown_problems=SHOWN_PROBLEMS,
        warnings=warnings,
        splits=[_split(each) for each in splits],
        classes=_classes(splits, train.classes),
        values=_values(splits, masks) if masks else [],
        most_values=SHOWN_VALUES,
        contradictions=_contradictions(splits),
        leaks=_leaks(config, *splits[:2]) if len(splits) > 1 else {},
        batch=batch,
        machine_faults=faults,
    )


def _split(census: Census) -> dict[str, Any]:
    """A row about a split, with pictures of images without a label, and of samples from all over it."""
    rows, counts = census.rows, census.table
    sizes = Counter(row.size for row in rows).most_common()
    kinds = Counter(row.content.kind for row in rows).most_common()
    pairs = census.samples.file_pairs()
    bare = [
        row.place
        for row, pixels in zip(rows, counts, strict=True)
        if pixels[-2] == pixels.sum()
    ]
    number = min(SHOWN, len(rows))
    places = [len(rows) * place // number for place in range(number)]
    return {
        "name": census.split,
        "images": len(census.samples),
        "read": len(rows),
        "sizes": listed([f"{size[0]}x{size[1]} ({times})" for size, times in sizes], 4),
        "kinds": ", ".join(f"{kind} ({times})" for kind, times in kinds if kind),
        "ignored": int(counts[:, -2].sum()) / max(int(counts.sum()), 1),
        "unlabelled": len(bare),
        "bare": _shown(census.samples, bare[:SHOWN]),
        "example": f"{pairs[0].image} with {pairs[0].mask}" if pairs else "",
        "grid": _shown(census.samples, [rows[place].place for place in places]),
    }


def _classes(splits: Sequence[Census], table: ClassTable) -> list[dict[str, Any]]:
    """A row for each class: shares by split, images that have it, and the weights of loss.class_weights."""
    import torch

    from segpipe.losses.cross_entropy import class_weights

    pixels = [each.table[:, : table.num_classes] for each in splits]
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
            "occurs": any(number[place] for number in images),
            "bar": float(shares[0][place]) / largest,
            "weights": [weight[place] for weight in weights],
        }
        for place, name in enumerate(table.names)
    ]


def _meaning(table: ClassTable, train: int) -> str:
    known = {IGNORE_INDEX: "ignored", UNKNOWN: "not in the class table"}
    return known.get(train) or table.names[train]


def _values(splits: Sequence[Census], masks: MaskTable) -> list[dict[str, Any]]:
    """What the masks hold, value by value, and what the class table has besides."""
    classes = masks.classes
    pixels: Counter[Value] = Counter()
    files: Counter[Value] = Counter()
    for row in (row for each in splits for row in each.rows):
        pixels.update(row.content.values)
        files.update(row.content.values.keys())
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
                "share": pixels[value] / max(pixels.total(), 1),
                "files": files[value],
            }
        )
    return rows


def _contradictions(splits: Sequence[Census]) -> list[str]:
    """Palette indices that mean one class as ids and another one by their color."""
    lines = {}
    for each in splits:
        classes = each.samples.classes
        for row in each.rows:
            for index, pair in row.content.ambiguous.items():
                by_id, by_color = (_meaning(classes, train) for train in pair)
                lines[index] = (
                    f"index {index} is {by_id} as an id, but its color in the palette is that of {by_color}"
                )
    return list(lines.values())


def _leaks(config: Config, train: Census, val: Census) -> dict[str, Any]:
    """Images that training and validation share: byte for byte, nearly, and sequences."""
    first, second = train.rows, val.rows
    near = near_duplicates([row.look for row in first], [row.look for row in second])
    sequences = {}
    if config.data.name != "synthetic":
        names = [row.name for row in first], [row.name for row in second]
        sequences = shared_sequences(*names, config.data.sequence)
    return {
        "equal": shared_files(image_files(train.samples), image_files(val.samples)),
        "near": near,
        "shown": [
            (
                pair.distance,
                _shown(train.samples, [first[pair.first].place]),
                _shown(val.samples, [second[pair.second].place]),
            )
            for pair in near[: SHOWN // 2]
        ],
        "images": len(second),
        "sequences": sequences,
    }


def _shown(samples: DataSet, indices: Iterable[int]) -> list[Shown]:
    """Name, image and overlay of samples; no pictures of one that has a problem, such as an id without a class."""
    rows: list[Shown] = []
    for index in indices:
        image, overlay = None, None
        with suppress(DataError):
            image, overlay = _small(samples.classes, samples.read(index))
        rows.append((samples.name(index), image, overlay))
    return rows


def _small(table: ClassTable, sample: Sample) -> tuple[Picture, Picture]:
    """An image, and its target as an overlay."""
    image = shrink(sample[0], WIDTH, smooth=True)
    target = shrink(sample[1], WIDTH, smooth=False)
    return image, blend(image, target, table.palette)
