"""`segpipe doctor`: all problems of a data set in one pass, or the content of its splits if there are none."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from segpipe.data.overlap import check_overlap
from segpipe.data.problems import problems
from segpipe.data.samples import Samples, class_pixels, image_files, image_sizes, one_by_one, open_samples
from segpipe.errors import DataError
from segpipe.settings.check import check
from segpipe.settings.compose import compose
from segpipe.settings.groups import DataConfig

CONSOLE = Console(highlight=False, soft_wrap=True)


def find_problems(data: DataConfig, splits: list[str]) -> int:
    """Number of problems; prints each one as it is found."""
    found = 0
    with Progress(console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as bar:
        task = bar.add_task("checking files", total=None)
        for problem in problems(
            data, splits, progress=lambda done, total: bar.update(task, completed=done, total=total)
        ):
            found += 1
            CONSOLE.print(problem, markup=False)
    return found


def by_set(opened: dict[str, Samples]) -> dict[str, Samples]:
    """The splits, and in place of one that is a mixture its data sets, with the classes of the shared table."""
    found: dict[str, Samples] = {}
    for split, samples in opened.items():
        sets = one_by_one(samples)
        found |= {f"{split}: {name}": one for name, one in sets.items()} if sets else {split: samples}
    return found


def contents(opened: dict[str, Samples]) -> Table:
    """Share of each class in the labelled pixels of each split."""
    classes = next(iter(opened.values())).classes
    counts = [class_pixels(samples) for samples in opened.values()]
    table = Table("id", "class", *(f"{split}, % of pixels" for split in opened), title=f"classes of {classes.name}")
    for train, name in enumerate(classes.names):
        colour = "#{:02x}{:02x}{:02x}".format(*classes.palette[train])
        shares = [f"{100 * count[train] / count.sum():.2f}" if count[train] else "[red]absent[/]" for count in counts]
        table.add_row(str(train), f"[{colour}]■[/] {name}", *shares)
    return table


def main(overrides: list[str]) -> int:
    """Exit code."""
    config = compose(overrides)
    check(config, world_size=1)
    splits = list(dict.fromkeys(["train", config.data.split]))
    if found := find_problems(config.data, splits):
        CONSOLE.print(f"{found} problem{'s' * (found > 1)} in {config.data.root or 'data.mix'}")
        return DataError.exit_code
    opened = {split: open_samples(config.data, split, config.seed) for split in splits}
    if len(opened) > 1 and not config.data.allow_overlap:
        check_overlap(image_files(opened["train"]), image_files(opened[config.data.split]), config.data.split)
    for split, samples in by_set(opened).items():
        sizes = [f"{height}x{width} ({times})" for (height, width), times in image_sizes(samples).most_common(8)]
        CONSOLE.print(f"{split}: {len(samples)} images of {', '.join(sizes)}")
    CONSOLE.print(contents(by_set(opened)))
    return 0
