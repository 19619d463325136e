"""Augmentation is a pure function of sample and key: all transforms, all layouts of workers, 16 ranks of 2 workers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks import measure as measuring
from segpipe.data.augment import Augmenter
from segpipe.data.samples import CachedSamples, open_samples
from segpipe.determinism import flags
from segpipe.checks import purity
from segpipe.checks.layouts import (
    LAYOUTS,
    RANKS,
    Layout,
    check_diversity,
    check_layouts,
)
from segpipe.checks.probes import Finding
from segpipe.settings.check import check
from segpipe.settings.compose import compose

PIPELINES = ("standard", "robust")
ROW = dict[str, Any]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """What the probes find of both pipelines, and of the control: albumentations' own random state in both."""
    changes = (
        ["data=camvid", f"data.root={given.camvid.resolve()}"] if given.camvid else []
    )
    rows = []
    for name in PIPELINES:
        for keyed in (True, False):
            rows.append(
                {
                    "pipeline": name,
                    "keyed": keyed,
                    **examined([f"augment={name}", *changes], keyed=keyed),
                }
            )
            Console(stderr=True).print(rows[-1], soft_wrap=True)
    return {
        "what": f"{len(LAYOUTS)} layouts of workers, {RANKS} ranks x 2 workers, {'CamVid' if changes else 'synthetic'}",
        "machine": measuring.machine(),
        "rows": rows,
        "passed": passed(rows),
    }


def examined(
    changes: Sequence[str],
    *,
    keyed: bool,
    layouts: Sequence[Layout] = LAYOUTS,
    ranks: int = RANKS,
) -> ROW:
    """Of one pipeline: how many probes were asked, which transforms failed which, and how each layout compared."""
    config = compose([*changes, f"augment.keyed={str(keyed).lower()}"])
    check(config, world_size=1)
    flags.apply(config.compute.threads, config.compute.mode)
    samples = CachedSamples(open_samples(config.data, "train", config.seed), 256)
    augmenter, asked, states = Augmenter(config.augment), [], {}

    def compared(layout: str, finding: Finding | None) -> None:
        states[layout] = "differs" if finding else "same bytes"

    probed = purity.check(
        augmenter,
        samples,
        report=lambda transform, probe, finding: asked.append(transform),
    )
    check_layouts(augmenter, samples, layouts, report=compared)
    repeated = check_diversity(augmenter, samples, ranks=ranks)
    return {
        "transforms": [part.name for part in augmenter.parts()],
        "probes": len(asked),
        "failed": [f"{finding.transform}: {finding.probe}" for finding in probed],
        "layouts": states,
        "diversity": repeated[0].detail if repeated else "distinct",
    }


def passed(rows: Sequence[ROW]) -> bool:
    """Whether what is keyed is pure everywhere, and what is not is found out in every layout and on the ranks."""
    pure = [row for row in rows if row["keyed"]]
    control = [row for row in rows if not row["keyed"]]
    sound = all(
        row["probes"] > 0
        and not row["failed"]
        and set(row["layouts"].values()) == {"same bytes"}
        and row["diversity"] == "distinct"
        for row in pure
    )
    seen = all(
        set(row["layouts"].values()) == {"differs"} and row["diversity"] != "distinct"
        for row in control
    )
    return bool(pure and control) and sound and seen
