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
    """Exit code."""
    config = compose(overrides)
    check(config, world_size=1)
    flags.apply(config.compute.threads, config.compute.mode)
    samples = CachedSamples(open_samples(config.data, "train", config.seed), 256)
    augmenter = Augmenter(config.augment)
    names = [*(part.name for part in augmenter.parts()), augmenter.name]
    checked: list[str] = []
    with progress("starting processes", len(names)) as show:

        def report(name: str) -> None:
            checked.append(name)
            show(len(checked), what=name)

        findings = purity.check(augmenter, samples, report=report)
    impure = {finding.transform: finding.probe for finding in findings}
    table = Table("transform", "verdict")
    for name in names:
        failed = impure.get(name)
        table.add_row(name, f"[red]impure: {failed}[/]" if failed else "[green]pure[/]")
    CONSOLE.print(table)
    for finding in findings:
        CONSOLE.print(str(finding), markup=False)
    CONSOLE.print(
        f"{len(names) - 1} transforms and the pipeline, crop {config.augment.crop_size}, {len(purity.ADVICE)} probes: "
        f"{'impure' if findings else 'pure'}"
    )
    return ImpureAugmentError.exit_code if findings else 0
