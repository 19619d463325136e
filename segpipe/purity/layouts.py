"""Checks inside real loader workers: the same bytes under every worker layout, different ones on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from segpipe.data.loader import ShardBatch, train_batches
from segpipe.data.order import Order
from segpipe.data.samples import CachedSamples
from segpipe.keys import sample_key
from segpipe.native import one_thread
from segpipe.purity.probes import Finding, Frame, first_difference

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter
    from segpipe.data.catalog import ClassTable
    from segpipe.data.data_set import Samples

Layout = tuple[int, str]  # workers, start method
LAYOUTS: tuple[Layout, ...] = (
    (0, "fork"),
    *(
        (workers, method)
        for method in ("fork", "forkserver", "spawn")
        for workers in (1, 2, 3, 8)
    ),
)
RANKS = 16
STEPS = range(8)  # every worker of the largest layout gets more than one batch
DISTINCT = 0.99  # share of the outputs of one image that must differ from all others
ADVICE = (
    "A worker must use no random state other than the one from the sample's key: set augment.keyed=true, and keep "
    "no random state in a transform."
)


@dataclass(frozen=True)
class OneImage:
    """The first sample under every index, so that outputs differ by their augmentation only."""

    samples: Samples

    @property
    def classes(self) -> ClassTable:
        return self.samples.classes

    def __len__(self) -> int:
        return 10

    def name(self, index: int) -> str:
        return self.samples.name(0)

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return self.samples.read(0)


def check_layouts(
    augmenter: Augmenter,
    samples: Samples,
    layouts: Sequence[Layout] = LAYOUTS,
    *,
    report: Callable[[str, Finding | None], None] = lambda layout, finding: None,
) -> list[Finding]:
    """A finding for each layout in which a sample's bytes differ from those of augmenting it alone.

    `report(layout, finding or None)` is called after each. Starts all their processes, which costs seconds for each
    layout that does not fork.
    """
    order = Order(0, len(OneImage(samples)), shards=2, samples_per_shard=2)
    findings = []
    for workers, method in layouts:
        batches = _batches(augmenter, samples, order, range(2), workers, method)
        differing = next(
            (
                found
                for batch in batches
                if (found := _first(augmenter, samples, batch))
            ),
            None,
        )
        layout = f"{method} x {workers}" if workers else "no workers"
        finding = (
            Finding(augmenter.name, "worker layouts", f"{layout}: {differing}", ADVICE)
            if differing
            else None
        )
        report(layout, finding)
        findings += [finding] if finding else []
    return findings


def check_diversity(
    augmenter: Augmenter,
    samples: Samples,
    *,
    ranks: int = RANKS,
    workers: int = 2,
    method: str = "fork",
) -> list[Finding]:
    """A finding when fewer than 99 % of the outputs of one image differ, over the samples of all ranks.

    A pipeline with few possible outputs, such as a flip alone, is measured by how many it gives in one process.
    """
    order = Order(0, len(OneImage(samples)), shards=ranks, samples_per_shard=1)
    batches = [
        batch
        for rank in range(ranks)
        for batch in _batches(
            augmenter, samples, order, range(rank, rank + 1), workers, method
        )
    ]
    found = {
        (batch.finished().tobytes(), batch.target.numpy().tobytes())
        for batch in batches
    }
    alone = (
        augmenter.fresh()
    )  # one for all batches: an unkeyed pipeline repeats itself when rebuilt
    possible = {
        (image.tobytes(), target.tobytes())
        for batch in batches
        for image, target in _augmented(alone, samples, batch)
    }
    if len(found) >= DISTINCT * len(possible):
        return []
    detail = f"{ranks} ranks with {workers} workers each give {len(found)} distinct outputs of {len(batches)}"
    return [Finding(augmenter.name, "diversity", detail, ADVICE)]


def _batches(
    augmenter: Augmenter,
    samples: Samples,
    order: Order,
    shards: range,
    workers: int,
    method: str,
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


@one_thread()
def _augmented(
    augmenter: Augmenter, samples: Samples, batch: ShardBatch
) -> list[Frame]:
    """The samples of a batch, augmented one by one in this process."""
    frame, places = (
        samples.read(0),
        zip(batch.epoch.tolist(), batch.index.tolist(), strict=True),
    )
    return [
        augmenter(*frame, sample_key(0, epoch, index, "augment"))
        for epoch, index in places
    ]


def _first(augmenter: Augmenter, samples: Samples, batch: ShardBatch) -> str:
    """Where a batch first differs from its samples augmented alone; empty when it does not."""
    images = batch.finished()
    for row, expected in enumerate(_augmented(augmenter.fresh(), samples, batch)):
        difference = first_difference(
            expected, (images[row], batch.target[row].numpy())
        )
        if difference is not None:
            return f"step {batch.step}, shard {batch.shard}, sample {row}: {difference}"
    return ""
