"""`segpipe check-augment`: whether augmentation is a pure function of sample and key, also in real loader processes."""

from __future__ import annotations

from rich.table import Table

from segpipe.data.augment import Augmenter
from segpipe.data.samples import CachedSamples, open_samples
from segpipe.determinism import flags
from segpipe.errors import ImpureAugmentError
from segpipe.checks import purity
from segpipe.checks.layouts import LAYOUTS, RANKS, check_diversity, check_layouts
from segpipe.checks.probes import Finding
from segpipe.run.console import CONSOLE, progress
from segpipe.settings.check import check
from segpipe.settings.compose import compose
from segpipe.settings.config import Config


def main(overrides: list[str]) -> int:
    """Exit code."""
    config = compose(overrides)
    check(config, world_size=1)
    flags.apply(config.compute.threads, config.compute.mode)
    passed, findings = examine(config)
    table = Table("transform", "probes passed", "verdict")
    for transform, probes in passed.items():
        failed = [probe for probe, fine in probes.items() if not fine]
        verdict = f"[red]impure: {', '.join(failed)}[/]" if failed else "[green]pure[/]"
        table.add_row(
            transform, f"{len(probes) - len(failed)} of {len(probes)}", verdict
        )
    CONSOLE.print(table)
    for finding in findings:
        CONSOLE.print(str(finding), markup=False)
    CONSOLE.print(
        f"{len(passed) - 1} transforms and the pipeline, crop {config.augment.crop_size}, {len(LAYOUTS)} layouts of "
        f"workers, {RANKS} ranks x 2 workers: {'impure' if findings else 'pure'}"
    )
    return ImpureAugmentError.exit_code if findings else 0


def examine(config: Config) -> tuple[dict[str, dict[str, bool]], list[Finding]]:
    """Whether each probe passed, by transform, and all findings."""
    samples = CachedSamples(open_samples(config.data, "train", config.seed), 256)
    augmenter = Augmenter(config.augment)
    passed: dict[str, dict[str, bool]] = {}
    with progress(
        "", len(purity.NAMES) * (len(augmenter.parts()) + 1) + len(LAYOUTS) + 1
    ) as show:

        def note(transform: str, probe: str, finding: Finding | None) -> None:
            passed.setdefault(transform, {})[probe] = finding is None
            show(sum(map(len, passed.values())), what=f"{transform}, {probe}")

        findings = purity.check(augmenter, samples, report=note)
        findings += check_layouts(
            augmenter,
            samples,
            LAYOUTS,
            report=lambda layout, one: note(augmenter.name, layout, one),
        )
        uniform = check_diversity(augmenter, samples, ranks=RANKS)
        note(augmenter.name, "diversity", next(iter(uniform), None))
    return passed, findings + uniform
