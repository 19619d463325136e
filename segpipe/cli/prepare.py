"""`segpipe prepare`: what to download of a published data set, and whether it is all there. Downloads nothing."""

from __future__ import annotations

from pathlib import Path

from segpipe.data.catalog import PUBLISHED, PublishedSet, published
from segpipe.data.folders import missing
from segpipe.data.pairs import scan
from segpipe.errors import ConfigError, DataError
from segpipe.run.console import CONSOLE
from segpipe.settings.compose import compose
from segpipe.settings.groups import DataConfig

SHOWN = 5  # problems of a split


def main(overrides: list[str]) -> int:
    """Exit code."""
    data = compose(overrides).data
    if data.name not in PUBLISHED:
        raise ConfigError(
            f"data = {data.name} is not a published data set: those are {', '.join(PUBLISHED)}. For files of your own, "
            "see segpipe doctor and docs/data.md."
        )
    entry = published(data.name)
    CONSOLE.print("\n".join(instructions(data.name, entry)), markup=False)
    if not data.root:
        CONSOLE.print(
            f"Then: segpipe prepare data={data.name} data.root=FOLDER", markup=False
        )
        return 0
    if not Path(data.root).is_dir():
        CONSOLE.print(missing(Path(data.root)), markup=False)
        return DataError.exit_code
    whole = [_is_whole(data, split, number) for split, number in entry.splits.items()]
    if not whole[0] or not whole[1]:
        return DataError.exit_code
    CONSOLE.print(
        f"Then: segpipe doctor data={data.name} data.root={data.root}", markup=False
    )
    return 0


def instructions(name: str, entry: PublishedSet) -> list[str]:
    """What to download, and where it belongs, line by line."""
    classes, layout = entry.table.classes, entry.layout
    places = [layout.listing or layout.table, layout.images, *layout.masks[:1]]
    if layout.table:
        places.append("and the files that it lists")
    lines = [
        f"{name}: {entry.title}",
        f"  page       {entry.page}",
        f"  download   {', '.join(entry.downloads)}",
        f"  data.root  {entry.root}:",
        *(f"               {place}" for place in places if place),
        f"  classes    {classes.num_classes}: {', '.join(classes.names[:8])}{', ...' * (classes.num_classes > 8)}",
        f"  source     {entry.source}",
    ]
    if layout.folders:
        lines.insert(
            -2,
            f"             SPLIT is {', '.join(f'{v} for {k}' for k, v in layout.folders.items())}",
        )
    return [*lines, f"  note       {entry.note}"] if entry.note else lines


def _is_whole(data: DataConfig, split: str, number: int) -> bool:
    """Whether a split has all of its pairs; prints how many, and what is missing."""
    pairs, faults = scan(data, split)
    of = f" of {number}" if number else ""
    CONSOLE.print(f"{split}: {len(pairs)}{of} images with masks", markup=False)
    for fault in faults[:SHOWN]:
        CONSOLE.print(f"  {fault}", markup=False)
    if len(faults) > SHOWN:
        CONSOLE.print(
            f"  ... and {len(faults) - SHOWN} more: segpipe doctor data={data.name} lists them.",
            markup=False,
        )
    return not faults and len(pairs) >= number
