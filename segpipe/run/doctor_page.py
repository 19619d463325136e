"""`segpipe doctor out=doctor.html`: a data set on one page, with pictures of what to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import DataSet
from segpipe.data.pack import Sample
from segpipe.datasets.census import Census, near_duplicates
from segpipe.errors import DataError, SegpipeError, listed
from segpipe.predict.outputs import blend
from segpipe.run.pages import render_page, shrink
from segpipe.settings.config import Config

if TYPE_CHECKING:
    from segpipe.data.loader import ShardBatch

SHOWN_PROBLEMS = 200
SHOWN = 8  # images of a kind
WIDTH = 360  # of a picture, in pixels
Shown = tuple[str, list[NDArray[np.uint8]]]  # name; image and overlay, or nothing


def render(
    config: Config,
    problems: Sequence[str],
    warnings: Sequence[str],
    splits: Sequence[Census],
) -> str:
    """The page as text; `splits` begin with training, and are what can be read of them."""
    data, train = config.data, splits[0].samples
    batch: list[Shown] = []
    if not problems:
        shard, fault = _first_batch(config, train)
        warnings = [*warnings, fault] if fault else warnings
        if shard is not None:
            pairs = zip(shard.finished(), shard.target.numpy(), strict=True)
            for index, pair in zip(shard.index.tolist(), pairs, strict=True):
                batch.append((train.name(index), _small(train.classes, pair)))
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
        near=_near(*splits[:2]) if len(splits) > 1 else None,
        batch=batch,
    )


def _split(census: Census) -> dict[str, Any]:
    """A row about a split, with pictures of images without a label, and of samples from all over it."""
    rows, counts = census.rows, census.table
    sizes = Counter(row.size for row in rows).most_common()
    kinds = Counter(row.content.kind for row in rows).most_common()
    bare = np.flatnonzero(counts[:, -2] == counts.sum(1))
    number = min(SHOWN, len(rows))
    spread = [len(rows) * place // number for place in range(number)]
    return {
        "name": census.split,
        "images": len(census.samples),
        "read": len(rows),
        "sizes": listed([f"{size[0]}x{size[1]} ({times})" for size, times in sizes], 4),
        "kinds": ", ".join(f"{kind} ({times})" for kind, times in kinds if kind),
        "ignored": int(counts[:, -2].sum()) / max(int(counts.sum()), 1),
        "unlabelled": len(bare),
        "bare": _shown(census, bare[:SHOWN].tolist()),
        "grid": _shown(census, spread),
    }


def _classes(splits: Sequence[Census], table: ClassTable) -> list[dict[str, Any]]:
    """A row for each class: shares by split, images that have it, and the weights of loss.class_weights."""
    import torch

    from segpipe.losses.cross_entropy import class_weights

    pixels = [each.table[:, : table.num_classes] for each in splits]
    images = [(counts > 0).sum(0).tolist() for counts in pixels]
    shares = [counts.sum(0) / max(int(counts.sum()), 1) for counts in pixels]
    train = torch.from_numpy(pixels[0].sum(0))
    weights = [class_weights(train, kind).tolist() for kind in ("log", "sqrt")]
    return [
        {
            "name": name,
            "color": table.palette[place],
            "shares": [float(share[place]) for share in shares],
            "images": [number[place] for number in images],
            "weights": [weight[place] for weight in weights],
        }
        for place, name in enumerate(table.names)
    ]


def _near(train: Census, val: Census) -> dict[str, Any]:
    """Images of validation that look like one of training."""
    looks = ([row.look for row in each.rows] for each in (train, val))
    pairs = near_duplicates(*looks)
    return {
        "pairs": pairs,
        "images": len(val.rows),
        "shown": [
            (pair.distance, [*_shown(train, [pair.first]), *_shown(val, [pair.second])])
            for pair in pairs[: SHOWN // 2]
        ],
    }


def _shown(census: Census, places: Iterable[int]) -> list[Shown]:
    """Names and pictures of rows; no pictures of one that has a problem, such as an id without a class."""
    samples: DataSet = census.samples
    found: list[Shown] = []
    for place in places:
        index, pictures = census.rows[place].place, []
        with suppress(DataError):
            pictures = _small(samples.classes, samples.read(index))
        found.append((samples.name(index), pictures))
    return found


def _small(table: ClassTable, sample: Sample) -> list[NDArray[np.uint8]]:
    """An image, and its target as an overlay."""
    image = shrink(sample[0], WIDTH, smooth=True)
    target = shrink(sample[1], WIDTH, smooth=False)
    return [image, blend(image, target, table.palette)]


def _first_batch(config: Config, samples: DataSet) -> tuple[ShardBatch | None, str]:
    """The first shard batch as training would see it, made by one loader process, or a message why there is none."""
    import torch

    from segpipe.distributed.group import Group
    from segpipe.train.batches import shard_stream

    workers = min(config.data.workers, 1)
    data = replace(config.data, workers=workers, cache_mib=0, balance=0.0)
    # Without a canary.
    alone = replace(config, data=data, compute=replace(config.compute, mode="off"))
    group = Group(0, 0, 1, torch.device("cpu"))
    try:
        with closing(shard_stream(alone, group, samples, range(1), None)) as batches:
            return next(batches), ""
    except SegpipeError as error:
        return None, str(error)
