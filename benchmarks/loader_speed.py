"""C1, C2, C2b, C3, C4: the loader beside the recipes of torchvision, mmseg and PIDNet, on frames of 2048x1024.

64 frames drawn into a temporary folder, crops of 1024x1024, factors 0.5 to 2 log-uniform, flips, color. C1 to C3 take
the time of one process for read and augmentation, which has the memory settings of segpipe's workers for all recipes;
C4 that of batches from two loader processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import frames
from benchmarks import measure as measuring
from benchmarks.baselines.recipes import Mmseg, Pidnet, Recipe, Torchvision
from segpipe.data import augment
from segpipe.data.augment import Augmenter
from segpipe.data.data_set import FileSamples
from segpipe.data.loader import train_batches
from segpipe.data.order import Order
from segpipe.data.ring import keep_memory
from segpipe.data.samples import open_samples
from segpipe.keys import sample_key
from segpipe.settings.groups import AugmentConfig, DataConfig

NUM, SIZE, CROP, SCALE = 64, frames.SIZE, 1024, (0.5, 2.0)
MUST = {
    "C1": {"torchvision": 1.8},
    "C2": {"torchvision": 15.0, "mmseg": 12.0, "pidnet": 20.0},
    "C2b": {"torchvision": 1.0},
    "C3": {"torchvision": 7.0},
    "C4": {"torchvision": 12.0},
}
SMOKE = {"NUM": 4, "SIZE": (128, 256), "CROP": 128, "TIMED": 1}
PART = 4  # samples of a timed call
BATCH, WORKERS, PREFETCH, TIMED = 4, 2, 2, 8  # of C4


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each arm, ratios of the recipes to segpipe, and how far its pixels are from a float64 reference."""
    keep_memory()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="segpipe-loader-") as folder:
        root = Path(folder)
        frames.write(root / "set", NUM, size=SIZE, jpeg=given.claim == "C3")
        samples = _opened(DataConfig(name="folder", root=str(root / "set")))
        if given.claim == "C4":
            seconds = _delivery(
                samples, _packed(samples, root / "pack"), given.repeats or 12
            )
        else:
            arms = _arms(given.claim, samples, root)
            seconds = measuring.interleaved(
                arms, repeats=given.repeats or (5 if given.claim == "C2b" else 24)
            )
        quality = _quality(samples)
    ratios = {
        name: measuring.ratio(found, seconds["segpipe"])
        for name, found in seconds.items()
        if name != "segpipe"
    }
    must = MUST[given.claim]
    return {
        "what": __doc__,
        "machine": measuring.machine(),
        "load": os.getloadavg(),
        "samples_per_call": {"C2b": NUM, "C4": BATCH * TIMED}.get(given.claim, PART),
        "arms": {name: measuring.summary(found) for name, found in seconds.items()},
        "times_as_fast": ratios,
        "quality": quality,
        "must": must,
        "passed": _exact(quality)
        and all(ratios[name]["low"] >= least for name, least in must.items()),
    }


def _exact(quality: dict[str, Any]) -> bool:
    return bool(
        quality["image_levels"] <= 1
        and quality["colour_levels"] <= 1
        and quality["labels_differ"] == 0
    )


def _opened(data: DataConfig) -> FileSamples:
    samples = open_samples(data, "train", 0)
    assert isinstance(samples, FileSamples)
    return samples


def _config() -> AugmentConfig:
    return AugmentConfig(crop_size=[CROP, CROP], scale=list(SCALE), canary=0)


def _arms(claim: str, samples: FileSamples, root: Path) -> dict[str, measuring.Arm]:
    torchvision = Torchvision(CROP, SCALE)
    files = [(pair.image, pair.mask) for pair in samples.pairs]
    if claim == "C2b":
        return {
            "segpipe": _building(samples, root),
            "torchvision": _recipe(torchvision, files, NUM),
        }
    recipes: dict[str, Recipe] = {
        "torchvision": torchvision,
        "torchvision, uint8": Torchvision(CROP, SCALE, raw=True),
        "torchvision, uint8, no color": Torchvision(CROP, SCALE, raw=True, color=False),
        "mmseg": Mmseg(CROP, SCALE),
        "pidnet": Pidnet(CROP, SCALE),
    }
    own: dict[str, measuring.Arm] = {"segpipe": _own(samples)}
    if claim in ("C2", "C3"):
        own = {"segpipe": _own(_packed(samples, root / "pack"))}
    return own | {
        name: _recipe(recipe, files, PART) for name, recipe in recipes.items()
    }


def _packed(samples: FileSamples, folder: Path) -> FileSamples:
    """The samples with a pack that is built, and whose samples this process has checked."""
    root = str(Path(samples.pairs[0].image).parents[2])
    packed = _opened(DataConfig(name="folder", root=root, pack=str(folder)))
    for _ in range(2):
        for index in range(len(packed)):
            packed.read(index)
    return packed


def _turns(part: int) -> Iterator[list[int]]:
    """Indices of the samples of each call: all in turn."""
    first = 0
    while True:
        yield [(first + number) % NUM for number in range(part)]
        first += part


def _own(samples: FileSamples) -> measuring.Arm:
    augmenter, turns, epoch = Augmenter(_config()), _turns(PART), iter(range(10**9))
    image, target = (
        np.empty((CROP, CROP, 3), np.uint8),
        np.empty((CROP, CROP), np.uint8),
    )

    def call() -> None:
        for index in next(turns):
            key = sample_key(0, next(epoch), index, "augment")
            image[:], target[:] = augmenter(
                *samples.read(index), key
            )  # as a worker writes into its batch

    return call


def _recipe(
    recipe: Recipe, files: Sequence[tuple[str, str]], part: int
) -> measuring.Arm:
    turns = _turns(part)

    def call() -> None:
        for index in next(turns):
            recipe(*files[index])

    return call


def _building(samples: FileSamples, root: Path) -> measuring.Arm:
    """One epoch, in which a pack in a new folder is built."""
    folders, augmenter = iter(range(10**9)), Augmenter(_config())
    data = DataConfig(name="folder", root=str(Path(samples.pairs[0].image).parents[2]))

    def call() -> None:
        fresh = _opened(replace(data, pack=str(root / f"pack{next(folders)}")))
        for index in range(NUM):
            augmenter(*fresh.read(index), sample_key(0, 0, index, "augment"))

    return call


def _delivered(samples: FileSamples, closing: ExitStack) -> Iterator[Any]:
    return closing.enter_context(
        contextlib.closing(
            train_batches(
                samples,
                Augmenter(_config()),
                Order(0, NUM, 1, BATCH),
                shards=range(1),
                steps=range(10**6),
                workers=WORKERS,
                start_method="fork",
                prefetch=PREFETCH,
                pin_memory=False,
            )
        )
    )


class _Files(Dataset[Any]):
    def __init__(self, recipe: Recipe, files: Sequence[tuple[str, str]]) -> None:
        self.recipe, self.files = recipe, files

    def __getitem__(self, index: int) -> Any:
        return self.recipe(*self.files[index])


def _alone(worker: int) -> None:
    """Other seeds in each worker, and one thread, as in segpipe's."""
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    random.seed(worker)


def _delivery(
    samples: FileSamples, packed: FileSamples, repeats: int
) -> dict[str, list[float]]:
    """Seconds of TIMED batches, after as many as can have been made ahead."""
    files = [(pair.image, pair.mask) for pair in samples.pairs]
    order = (index % NUM for index in range(10**9))
    with ExitStack() as stack:
        streams = {
            "segpipe": _delivered(packed, stack),
            "torchvision": iter(
                DataLoader(
                    _Files(Torchvision(CROP, SCALE), files),
                    batch_sampler=iter(
                        lambda: [next(order) for _ in range(BATCH)], None
                    ),
                    num_workers=WORKERS,
                    prefetch_factor=PREFETCH,
                    worker_init_fn=_alone,
                )
            ),
        }

        def take(name: str, num: int) -> None:
            for _ in range(num):
                batch: Any = next(streams[name])
                labels = batch.target if name == "segpipe" else batch[-1]
                labels.sum()  # the batch is used

        arms = {name: partial(take, name, TIMED) for name in streams}
        found = measuring.interleaved(
            arms,
            repeats=repeats,
            prepare=lambda name: take(name, WORKERS * PREFETCH + 1),
        )
        del streams["torchvision"]
    return found


@contextmanager
def _compared(found: dict[str, float]) -> Iterator[None]:
    """While it lasts, each step of the augmentation is compared with the same step in float64."""
    resample, color = augment.ScaleCrop._resample, augment.ColorMatrix.apply

    def seen_resample(
        self: Any,
        array: Any,
        fill: Any,
        how: int,
        *,
        source: Any,
        place: Any,
        **more: Any,
    ) -> Any:
        made = resample(self, array, fill, how, source=source, place=place, **more)
        part = np.asarray(array[source], np.float64)
        size = tuple(span.stop - span.start for span in place)
        rows, columns = (
            np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
            for new, old in zip(size, part.shape[:2], strict=True)
        )
        if array.ndim == 3:
            expected = _linear(
                _linear(part, rows).transpose(1, 0, 2), columns
            ).transpose(1, 0, 2)
            found["image_levels"] = max(
                found["image_levels"], float(np.abs(made[place] - expected).max())
            )
        else:
            nearest = [
                np.minimum(
                    np.floor((np.arange(new) + 0.5) * old / new), old - 1
                ).astype(int)
                for new, old in zip(size, part.shape, strict=True)
            ]
            found["labels_differ"] += int((made[place] != part[np.ix_(*nearest)]).sum())
        outside = np.ones(made.shape[:2], bool)
        outside[place] = False
        found["labels_differ" if array.ndim == 2 else "image_levels"] += int(
            (made[outside] != fill).sum()
        )
        return made

    def seen_color(self: Any, img: Any, matrix: Any, **more: Any) -> Any:
        made = color(self, img, matrix, **more)
        expected = np.clip(
            img.astype(np.float64) @ matrix[:, :3].T + matrix[:, 3], 0, 255
        )
        found["colour_levels"] = max(
            found["colour_levels"], float(np.abs(made - expected).max())
        )
        return made

    augment.ScaleCrop._resample, augment.ColorMatrix.apply = seen_resample, seen_color  # type: ignore[method-assign]
    try:
        yield
    finally:
        augment.ScaleCrop._resample, augment.ColorMatrix.apply = resample, color  # type: ignore[method-assign]


def _linear(array: Any, places: Any) -> Any:
    """Rows of `array` between its rows at `places`."""
    low = np.floor(places).astype(int)
    high, share = np.minimum(low + 1, len(array) - 1), (places - low)[:, None, None]
    return array[low] * (1 - share) + array[high] * share


def _quality(samples: FileSamples) -> dict[str, float]:
    """Largest difference of a grey level in the resize and in the color, and labels that differ, over 8 samples."""
    found = {"image_levels": 0.0, "colour_levels": 0.0, "labels_differ": 0}
    augmenter = Augmenter(_config())
    with _compared(found):
        for index in range(min(8, NUM)):
            augmenter(*samples.decode(index), sample_key(1, 0, index, "augment"))
    return found
