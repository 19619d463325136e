"""Augmentation is a pure function of sample and key: all transforms of both pipelines, beside an unkeyed control."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks import measure as measuring
from segpipe.checks import purity
from segpipe.data.augment import Augmenter
from segpipe.data.data_set import CachedSamples
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.settings.compose import compose
from segpipe.settings.config import check

PIPELINES = ("standard", "robust")
SMOKE = {"PIPELINES": ("standard",)}
Row = dict[str, Any]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """What the probes find of both pipelines, and of the control: albumentations' own random state in both."""
    changes = (
        ["data=camvid", f"data.root={given.camvid.resolve()}"] if given.camvid else []
    )
    rows = []
    for name in PIPELINES:
        for keyed in (True, False):
            found = examined([f"augment={name}", *changes], keyed=keyed)
            rows.append({"pipeline": name, **found})
            Console(stderr=True).print(rows[-1], soft_wrap=True)
    return {
        "what": f"{len(purity.ADVICE)} probes, {'CamVid' if changes else 'synthetic'}",
        "machine": measuring.machine(),
        "rows": rows,
        "passed": passed(rows),
    }


def examined(changes: Sequence[str], *, keyed: bool) -> Row:
    """Of one pipeline: its transforms, and what the check found."""
    config = compose([*changes, f"augment.keyed={str(keyed).lower()}"])
    check(config, world_size=1)
    flags.apply(config.compute.threads, config.compute.mode)
    samples = CachedSamples(open_samples(config.data, "train", config.seed), 256)
    augmenter = Augmenter(config.augment)
    checked = [*(part.name for part in augmenter.parts()), augmenter.name]
    findings = purity.check(augmenter, samples)
    return {
        "keyed": keyed,
        "checked": checked,
        "failed": [f"{finding.transform}: {finding.probe}" for finding in findings],
    }


def passed(rows: Sequence[Row]) -> bool:
    """Whether what is keyed is pure, and what is not is found out."""
    pure = [row for row in rows if row["keyed"]]
    control = [row for row in rows if not row["keyed"]]
    sound = all(row["checked"] and not row["failed"] for row in pure)
    return bool(pure and control) and sound and all(row["failed"] for row in control)
