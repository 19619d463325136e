"""`segpipe check-augment`: whether augmentation is a pure function of sample and key."""

from __future__ import annotations

from rich.table import Table

from segpipe.checks import purity
from segpipe.data.augment import Augmenter
from segpipe.data.samples import CachedSamples, open_samples
from segpipe.determinism import flags
from segpipe.errors import ImpureAugmentError
from segpipe.run.console import CONSOLE, progress
from segpipe.settings.check import check
from segpipe.settings.compose import compose


def main(overrides: list[str]) -> int:
    """Exit code: that of an impure augmentation if a probe fails.

    Prints a table of the transforms, then what was found and what to do.
    """
    config = compose(overrides)
    check(config, world_size=1)
    flags.apply(config.compute.threads, config.compute.mode)
    samples = CachedSamples(open_samples(config.data, "train", config.seed), 256)
    augmenter = Augmenter(config.augment)

    # Processes do the work; the bar moves whenever they have observed a transform.
    names = [*(part.name for part in augmenter.parts()), augmenter.name]
    checked: list[str] = []
    with progress("starting processes", len(names)) as show:

        def report(name: str) -> None:
            """A transform is done."""
            checked.append(name)
            show(len(checked), what=name)

        findings = purity.check(augmenter, samples, report=report)

    CONSOLE.print(_table(names, findings))
    for finding in findings:
        CONSOLE.print(str(finding), markup=False)
    verdict = "impure" if findings else "pure"
    CONSOLE.print(
        f"{len(names) - 1} transforms and the pipeline, crop {config.augment.crop_size}, "
        f"{len(purity.ADVICE)} probes: {verdict}"
    )
    return ImpureAugmentError.exit_code if findings else 0


def _table(names: list[str], findings: list[purity.Finding]) -> Table:
    """One row for each transform, with the probe that it fails."""
    failed = {finding.transform: finding.probe for finding in findings}
    table = Table("transform", "verdict")
    for name in names:
        if name in failed:
            table.add_row(name, f"[red]impure: {failed[name]}[/]")
        else:
            table.add_row(name, "[green]pure[/]")
    return table
