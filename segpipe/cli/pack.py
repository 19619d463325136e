"""`segpipe pack`: decodes a data set once, so that training maps its samples instead of decoding their files."""

from __future__ import annotations

from dataclasses import replace

from segpipe.data.dataset import DataSet
from segpipe.data.readers import threaded
from segpipe.data.samples import open_samples
from segpipe.errors import ConfigError
from segpipe.run.console import CONSOLE, progress
from segpipe.settings.check import check
from segpipe.settings.compose import compose


def main(overrides: list[str]) -> int:
    """Exit code."""
    config = compose(overrides)
    if config.data.pack == "off":
        config = replace(config, data=replace(config.data, pack="auto"))
    check(config, world_size=1)
    found = [
        part.samples
        for split in dict.fromkeys(("train", config.data.split))
        for part in open_samples(config.data, split, config.seed).parts()
        if part.samples.packs()
    ]
    if not found:
        raise ConfigError(
            "data.mix has no data set in files: there is nothing to pack."
        )
    work = [(samples, index) for samples in found for index in range(len(samples))]
    with progress("packing", len(work)) as show:
        for done, _ in enumerate(threaded(_read, work), 1):
            show(done)
    packs = [pack for samples in found for pack in samples.packs()]
    for folder in dict.fromkeys(pack.folder for pack in packs):
        uses = [pack.use() for pack in packs if pack.folder == folder]
        intact, replaced, added = map(sum, zip(*uses, strict=True))
        CONSOLE.print(
            f"{folder}: {intact} samples intact, {replaced} replaced, {added} added",
            markup=False,
        )
    return 0


def _read(place: tuple[DataSet, int]) -> None:
    samples, index = place
    samples.read(index)
