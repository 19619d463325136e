"""`segpipe pack`: decodes a data set once, so that training maps its samples instead of decoding their files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from segpipe.data.data_set import DataSet
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
        if part.samples.file_pairs()
    ]
    if not found:
        raise ConfigError(
            "data.mix has no data set in files: there is nothing to pack."
        )
    work = [(samples, index) for samples in found for index in range(len(samples))]
    with progress("packing", len(work)) as show:
        for done, _ in enumerate(threaded(_read, work), 1):
            show(done)
    use = sum((samples.pack_use() for samples in found), Counter[tuple[str, str]]())
    for folder in dict.fromkeys(folder for folder, _ in use):
        CONSOLE.print(
            f"{folder}: {use[folder, 'intact']} samples intact, "
            f"{use[folder, 'replaced']} replaced, {use[folder, 'added']} added",
            markup=False,
        )
    return 0


def _read(place: tuple[DataSet, int]) -> None:
    samples, index = place
    samples.read(index)
