"""`segpipe pack`: decodes a data set once, so that training maps its samples instead of decoding their files."""

from __future__ import annotations

from dataclasses import replace

from segpipe.data.readers import threaded
from segpipe.data.samples import FileSamples, file_samples, open_samples
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
    splits = [
        open_samples(config.data, split, config.seed)
        for split in dict.fromkeys(("train", config.data.split))
    ]
    found = [one for samples in splits for one in file_samples(samples)]
    if not found:
        raise ConfigError(
            "data.mix has no data set in files: there is nothing to pack."
        )
    work = [(one, index) for one in found for index in range(len(one))]
    with progress("packing", len(work)) as show:
        for done, _ in enumerate(threaded(_read, work), 1):
            show(done)
    for folder in dict.fromkeys(one.pack.folder for one in found if one.pack):
        intact, replaced, added = map(
            sum,
            zip(
                *(
                    one.pack.use()
                    for one in found
                    if one.pack and one.pack.folder == folder
                ),
                strict=True,
            ),
        )
        CONSOLE.print(
            f"{folder}: {intact} samples intact, {replaced} replaced, {added} added",
            markup=False,
        )
    return 0


def _read(place: tuple[FileSamples, int]) -> None:
    samples, index = place
    samples.read(index)
