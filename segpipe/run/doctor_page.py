"""`segpipe doctor out=doctor.html`: a data set on one page, with pictures of what to look at.

Needs no network, no server and no script, like the report of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
from segpipe.data.overlap import NearDuplicate, near_duplicates, shared_files
from segpipe.data.readers import Value
from segpipe.data.samples import image_files
from segpipe.errors import DataError
from segpipe.run.pictures import blend, jpeg_url, shrink
from segpipe.run.preflight import first_batch, machine, worker_problems
from segpipe.run.report import template

if TYPE_CHECKING:
    from segpipe.data.loader import Pixels
    from segpipe.settings.config import Config

SHOWN_PROBLEMS = 200
SHOWN = 8  # images of a kind
WIDTH, QUALITY = 360, 80  # of a picture, in pixels and per cent
VALUES = 300  # rows of the table of ids and colors


@dataclass(frozen=True)
class Checkup:
    """All that the page is made of."""

    config: Config
    problems: Sequence[str]
    warnings: Sequence[str]
    samples: Mapping[str, DataSet]  # by split
    census: Mapping[str, Census]  # by split


def render(found: Checkup) -> str:
    """The page; the template escapes all text."""
    splits, data = list(found.samples), found.config.data
    leaks = _leaks(found)
    batch, fault = _batch(found)
    return template("doctor.html.j2").render(
        name=Path(data.root).resolve().name if data.root else data.name,
        about=[
            f"data {data.name}",
            data.root,
            *(f"{split}: {len(found.samples[split])} images" for split in splits),
        ],
        problems=found.problems[:SHOWN_PROBLEMS],
        num_problems=len(found.problems),
        warnings=found.warnings,
        splits=[
            _split_row(split, found.samples[split], found.census[split])
            for split in splits
        ],
        split_names=splits,
        classes=_classes(found),
        values=_values(found),
        most_values=VALUES,
        odd=_odd(found),
        leaks=leaks,
        unlabelled=_unlabelled(found),
        grids=[
            (split, _grid(found.samples[split], found.census[split]))
            for split in splits
        ],
        batch=batch,
        machine=machine(found.config),
        machine_faults=[fault] if fault else _worker_faults(found),
        legend=_legend(found),
    )


def _classes_of(found: Checkup) -> ClassTable:
    return next(iter(found.samples.values())).classes


def _split_row(split: str, samples: DataSet, census: Census) -> dict[str, Any]:
    table = census.table
    total = max(int(table.sum()), 1)
    shown = ", ".join(
        f"{height}x{width} ({times})"
        for (height, width), times in census.sizes.most_common(4)
    )
    pairs = samples.file_pairs()
    first = pairs[0] if pairs else None
    return {
        "name": split,
        "images": len(samples),
        "read": len(census.names),
        "sizes": shown
        + (f" and {len(census.sizes) - 4} others" if len(census.sizes) > 4 else ""),
        "kinds": ", ".join(
            f"{kind} ({times})" for kind, times in census.kinds.most_common() if kind
        ),
        "ignored": int(table[:, -2].sum()) / total if len(table) else 0.0,
        "unlabelled": len(census.unlabelled),
        "example": f"{first.image} with {first.mask}" if first else "",
    }


def _classes(found: Checkup) -> list[dict[str, Any]]:
    """A row for each class: shares by split, images that have it, and the weights of loss.class_weights."""
    import torch

    from segpipe.losses.pixelwise import class_weights

    table = _classes_of(found)
    pixels = {
        split: census.table[:, : table.num_classes]
        for split, census in found.census.items()
    }
    train = next(iter(pixels.values())).sum(0)
    weights = {
        kind: class_weights(torch.from_numpy(train), kind).tolist()
        for kind in ("log", "sqrt")
    }
    shares = {
        split: counts.sum(0) / max(int(counts.sum()), 1)
        for split, counts in pixels.items()
    }
    largest = (
        max((float(share.max(initial=0.0)) for share in shares.values()), default=0.0)
        or 1.0
    )
    return [
        {
            "id": place,
            "name": name,
            "color": _hex(table, place),
            "cells": [
                (float(share[place]), int((pixels[split][:, place] > 0).sum()))
                for split, share in shares.items()
            ],
            "bar": float(next(iter(shares.values()))[place]) / largest,
            "log": weights["log"][place],
            "sqrt": weights["sqrt"][place],
        }
        for place, name in enumerate(table.names)
    ]


def _hex(table: ClassTable, place: int) -> str:
    return "#{:02x}{:02x}{:02x}".format(*table.palette[place])


def _meaning(table: ClassTable, train: int) -> str:
    return {IGNORE_INDEX: "ignored", UNKNOWN: "not in the class table"}.get(
        train
    ) or table.names[train]


def _values(found: Checkup) -> list[dict[str, Any]]:
    """What the masks hold, value by value, and what the class table has besides."""
    rows = []
    masks = next(iter(found.samples.values())).mask_table()
    if masks is None:
        return []
    pixels: Counter[Value] = Counter()
    files: Counter[Value] = Counter()
    for census in found.census.values():
        pixels.update(census.values)
        files.update(census.files)
    total = max(sum(pixels.values()), 1)
    known: list[Value] = (
        list(masks.colors) if masks.kind == "colors" else list(masks.classes.train_ids)
    )
    for value in sorted(
        {*known, *pixels}, key=lambda value: (isinstance(value, tuple), value)
    ):
        train = train_id(masks, value)
        color = (
            value
            if isinstance(value, tuple)
            else masks.classes.palette[train]
            if 0 <= train < IGNORE_INDEX
            else None
        )
        rows.append(
            {
                "value": value,
                "color": "#{:02x}{:02x}{:02x}".format(*color) if color else "",
                "meaning": _meaning(masks.classes, train),
                "unknown": train == UNKNOWN,
                "share": pixels[value] / total,
                "files": files[value],
            }
        )
    return rows


def _odd(found: Checkup) -> list[str]:
    """Palette indices that mean one class as ids and another one by their color."""
    lines = {}
    for samples, census in zip(
        found.samples.values(), found.census.values(), strict=True
    ):
        for index, (by_id, by_color) in census.ambiguous.items():
            names = [_meaning(samples.classes, train) for train in (by_id, by_color)]
            lines[index] = (
                f"index {index} is {names[0]} as an id, but its color in the palette is that of {names[1]}"
            )
    return list(lines.values())


def _leaks(found: Checkup) -> dict[str, Any]:
    """Images that training and validation share: byte for byte, nearly, and sequences."""
    if len(found.samples) < 2:
        return {}
    (train, val), (of_train, of_val) = (
        tuple(found.samples.values())[:2],
        tuple(found.census.values())[:2],
    )
    equal = shared_files(image_files(train), image_files(val))
    near = near_duplicates(of_train.looks, of_val.looks)
    pairs = [
        _pair(train, val, of_train, of_val, each) for each in _spread(near, of_val)
    ]
    data = found.config.data
    sequences = (
        shared_sequences(of_train.names, of_val.names, data.sequence)
        if data.name != "synthetic"
        else {}
    )
    return {
        "equal": equal[:SHOWN],
        "num_equal": len(equal),
        "near": pairs,
        "num_near": len(near),
        "images": len(of_val.names),
        "sequences": list(sequences.items())[:20],
        "num_sequences": len(sequences),
    }


def _spread(near: Sequence[NearDuplicate], census: Census) -> list[NearDuplicate]:
    """The nearest pairs, at most one for each image of training."""
    chosen = {each.first: each for each in reversed(near)}
    return sorted(chosen.values(), key=lambda pair: (pair.distance, pair.second))[
        : SHOWN // 2
    ]


def _pair(
    train: DataSet, val: DataSet, of_train: Census, of_val: Census, near: NearDuplicate
) -> dict[str, Any]:
    return {
        "distance": near.distance,
        "images": [
            (census.names[place], _picture(samples, census.places[place]))
            for samples, census, place in (
                (train, of_train, near.first),
                (val, of_val, near.second),
            )
        ],
    }


def _unlabelled(found: Checkup) -> list[tuple[str, str]]:
    """Names and pictures of images whose masks label nothing."""
    return [
        (f"{split}: {samples.name(index)}", _picture(samples, index))
        for split, samples in found.samples.items()
        for index in found.census[split].unlabelled[:SHOWN]
    ]


def _grid(samples: DataSet, census: Census) -> list[tuple[str, list[str]]]:
    """Name, image and overlay of samples from all over a split."""
    number = min(SHOWN, len(census.places))
    chosen = [
        census.places[place * len(census.places) // number] for place in range(number)
    ]
    read = ((samples.name(index), _read(samples, index)) for index in chosen)
    return [
        (name, _both(samples.classes, *sample))
        for name, sample in read
        if sample is not None
    ]


def _batch(found: Checkup) -> tuple[list[tuple[str, list[str]]], str]:
    """The first shard batch as training sees it, or why there is none."""
    if found.problems or not len(next(iter(found.samples.values()))):
        return [], ""
    samples = next(iter(found.samples.values()))
    batch, fault = first_batch(found.config, samples)
    if batch is None:
        return [], fault
    images, targets = batch.finished(), batch.target.numpy()
    names = [samples.name(index) for index in batch.index.tolist()]
    each = zip(names, images, targets, strict=True)
    return [
        (name, _both(samples.classes, image, target)) for name, image, target in each
    ], ""


def _worker_faults(found: Checkup) -> list[str]:
    samples = next(iter(found.samples.values()))
    return (
        list(worker_problems(found.config, samples))
        if len(samples) and not found.problems
        else []
    )


def _read(samples: DataSet, index: int) -> Pixels | None:
    """A sample; None for one that has a problem, such as an id that the table does not have."""
    with suppress(DataError):
        return samples.read(index)
    return None


def _picture(samples: DataSet, index: int) -> str:
    sample = _read(samples, index)
    return (
        ""
        if sample is None
        else jpeg_url(shrink(sample[0], WIDTH, smooth=True), QUALITY)
    )


def _both(
    table: ClassTable, image: NDArray[np.uint8], target: NDArray[np.uint8]
) -> list[str]:
    """An image, and its target as an overlay."""
    small, ids = shrink(image, WIDTH, smooth=True), shrink(target, WIDTH, smooth=False)
    return [
        jpeg_url(small, QUALITY),
        jpeg_url(blend(small, ids, table.palette), QUALITY),
    ]


def _legend(found: Checkup) -> list[tuple[str, str]]:
    """Color and name of the classes that occur."""
    table = _classes_of(found)
    pixels = np.sum([census.table.sum(0) for census in found.census.values()], 0)
    return [
        (_hex(table, place), name)
        for place, name in enumerate(table.names)
        if pixels[place]
    ]
