"""An ordinary trainer: a DataLoader, a network, a loop, and every random generator seeded."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from examples.race.augment import Uint8
from segpipe.data.data_set import Samples

Pair = tuple[Uint8, Uint8]  # image and target
Augment = Callable[[Uint8, Uint8, random.Random], Pair]
Member = tuple[int, int]  # epoch and index of a sample
THREADS = 4  # per worker, to load the samples of a batch in parallel


@dataclass
class Trained:
    """Last loss of a training run, and every sample as the network saw it."""

    loss: float = 0.0
    seen: dict[Member, Pair] = field(default_factory=dict)


@dataclass
class Frames(Dataset[Any]):
    """Augments samples when they are read."""

    samples: Samples
    augment: Augment

    def __getitems__(self, members: list[Member]) -> list[Any]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.load, members))

    def load(self, member: Member) -> Any:
        """A sample, augmented with its own seeded random numbers."""
        image, target = self.samples.read(member[1])
        image, target = self.augment(image, target, random.Random(f"{member}"))
        return member, torch.from_numpy(image), torch.from_numpy(target)


def train(
    samples: Samples, augment: Augment, *, workers: int, epochs: int, batch: int = 8
) -> Trained:
    """Train a small network; the sample order is always the same."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, samples.classes.num_classes, 3, padding=1),
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    places = [
        (epoch, index) for epoch in range(epochs) for index in range(len(samples))
    ]
    batches = [places[start : start + batch] for start in range(0, len(places), batch)]
    trained = Trained()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="This DataLoader will create", category=UserWarning
        )
        warnings.filterwarnings(
            "ignore",
            message=".*multi-threaded, use of fork",
            category=DeprecationWarning,
        )
        loader = iter(
            DataLoader(
                Frames(samples, augment), batch_sampler=batches, num_workers=workers
            )
        )
    for (epochs_of, indices), image, target in loader:
        logits = network(image.permute(0, 3, 1, 2) / 255)
        loss = F.cross_entropy(logits, target[:, ::2, ::2].long(), ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained.loss = float(loss.detach())
        members = zip(epochs_of.tolist(), indices.tolist(), strict=True)
        trained.seen.update(
            zip(members, zip(image.numpy(), target.numpy(), strict=True), strict=True)
        )
    return trained
