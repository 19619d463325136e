"""Whether the loader gives the same bytes under every layout of its workers, and different ones on every rank.

What a pipeline does alone is the matter of segpipe/purity/checker.py; here it runs inside real workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from segpipe.data.augment import Augmenter
from segpipe.data.catalog import ClassTable
from segpipe.data.loader import ShardBatch, train_batches
from segpipe.data.order import Order
from segpipe.data.samples import CachedSamples, Samples
from segpipe.keys import sample_key
from segpipe.purity.probes import Finding, first_difference

Uint8 = NDArray[np.uint8]
Layout = tuple[int, str]  # workers, start method
LAYOUTS: tuple[Layout, ...] = (
    (0, "fork"),
    *((workers, method) for method in ("fork", "forkserver", "spawn") for workers in (1, 2, 3, 8)),
)
RANKS = 16
STEPS = range(8)  # every worker of the largest layout has more than one batch
DISTINCT = 0.99  # share of the outputs of one image that must differ from all others
WORKERS = (
    "No worker may see another random state than the one that the sample's key gives: set augment.keyed=true, and keep "
    "no random state in a transform."
)


@dataclass(frozen=True)
class OneImage:
    """The first sample under every index: whatever differs between two outputs came from the augmentation."""

    samples: Samples

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return 10

    def name(self, index: int) -> str:
        return self.samples.name(0)

    def read(self, index: int) -> tuple[Uint8, Uint8]:
        return self.samples.read(0)


def check_layouts(
    augmenter: Augmenter,
    samples: Samples,
    layouts: Sequence[Layout] = LAYOUTS,
    *,
    report: Callable[[str, Finding | None], None] = lambda layout, finding: None,
) -> list[Finding]:
    """One finding per layout whose bytes differ from those that every sample has on its own.

    `report(layout, finding or None)` is called after each. Starts all their processes, which costs seconds for each
    layout that does not fork.
    """
    order = Order(0, len(OneImage(samples)), shards=2, samples_per_shard=2)
    findings = []
    for workers, method in layouts:
        batches = _batches(augmenter, samples, order, range(2), workers, method)
        differing = next((found for batch in batches if (found := _first(augmenter, samples, batch))), None)
        layout = f"{method} x {workers}" if workers else "no workers"
        detail = f"{layout}: {differing}"
        finding = Finding(augmenter.name, "worker layouts", detail, WORKERS) if differing else None
        report(layout, finding)
        findings += [finding] if finding else []
    return findings


def check_diversity(
    augmenter: Augmenter, samples: Samples, *, ranks: int = RANKS, workers: int = 2, method: str = "fork"
) -> list[Finding]:
    """A finding when fewer than 99 % of the outputs of one image differ, over the samples of all ranks.

    A pipeline that knows few outputs, such as a flip alone, is measured by how many it gives one after another.
    """
    order = Order(0, len(OneImage(samples)), shards=ranks, samples_per_shard=1)
    batches = [
        batch
        for rank in range(ranks)
        for batch in _batches(augmenter, samples, order, range(rank, rank + 1), workers, method)
    ]
    found = {(batch.image.numpy().tobytes(), batch.target.numpy().tobytes()) for batch in batches}
    alone, frame = augmenter.fresh(), samples.read(0)
    possible = {tuple(part.tobytes() for part in alone(*frame, _key(*ids))) for batch in batches for ids in _ids(batch)}
    if len(found) >= DISTINCT * len(possible):
        return []
    detail = f"{ranks} ranks with {workers} workers each give {len(found)} distinct outputs of {len(batches)}"
    return [Finding(augmenter.name, "diversity", detail, WORKERS)]


def _batches(
    augmenter: Augmenter, samples: Samples, order: Order, shards: range, workers: int, method: str
) -> list[ShardBatch]:
    stream = train_batches(
        CachedSamples(OneImage(samples), 64),
        augmenter,
        order,
        seed=0,
        shards=shards,
        steps=STEPS,
        workers=workers,
        start_method=method,
        prefetch=2,
        pin_memory=False,
    )
    with closing(stream):
        return list(stream)


def _first(augmenter: Augmenter, samples: Samples, batch: ShardBatch) -> str:
    """Where a batch differs first from its samples augmented one by one in this process; empty where it does not."""
    alone, frame = augmenter.fresh(), samples.read(0)
    for row, ids in enumerate(_ids(batch)):
        seen = batch.image[row].numpy(), batch.target[row].numpy()
        found = first_difference(alone(*frame, _key(*ids)), seen)
        if found is not None:
            return f"step {batch.step}, shard {batch.shard}, sample {row}: {found}"
    return ""


def _ids(batch: ShardBatch) -> list[tuple[int, int]]:
    return list(zip(batch.epoch.tolist(), batch.index.tolist(), strict=True))


def _key(epoch: int, index: int) -> int:
    return sample_key(0, epoch, index, "augment")
