"""Makes the table of docs/export.md: how far every file of every network is from eager torch, and how fast it is.

    python benchmarks/export_table.py [--steps 200] [--networks NAME...] [--frames FOLDER] [--page docs/export.md]

The networks are trained for a few steps on synthetic scenes, which shows conversions and not segmentation. Each is then
exported twice: for scenes of 192x384 pixels, and for the photographs in FOLDER, if there are any, at their own size.
Nothing is published; the gates judge, and the table is written between its two marks in the page. Rows of networks that
are not asked for stay as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import interleaved, machine
from segpipe.cli.main import main as segpipe
from segpipe.data.samples import open_samples
from segpipe.export.artifact.manifest import describe
from segpipe.export.dataset import gather
from segpipe.export.gates.comparison import (
    LIMITS,
    Candidate,
    Check,
    as_trained,
    compare,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.graph.formats import FORMATS, convert
from segpipe.export.graph.network import DeployModel, run_eager
from segpipe.export.verify_report import ExportReport
from segpipe.models import MODELS
from segpipe.native import one_thread
from segpipe.train.checkpoint import TrainedNetwork, load_network

SIZE = (192, 384)
KINDS = [("onnx", "fp32"), ("onnx", "fp16"), ("torchscript", "fp32")]
MARKS = ("<!-- table: benchmarks/export_table.py -->", "<!-- end of table -->")
ROUNDS = 7


def trained_for(name: str, steps: int, root: Path) -> TrainedNetwork:
    """A network after `steps` updates on synthetic scenes."""
    size = f"[{SIZE[0]},{SIZE[1]}]"
    settings = {
        "model": name, "data": "synthetic", "data.size": size, "data.num_train": 64, "data.num_val": 16,
        "data.workers": 0, "augment.crop_size": size, "augment.check": "false", "train.steps": steps,
        "train.progress": "false", "compute.device": "cpu", "compute.shards": 1, "compute.threads": 1,
        "export.enabled": "false", "run.root": root, "run.name": name,
    }  # fmt: skip
    code = segpipe(["train", *[f"{key}={value}" for key, value in settings.items()]])
    assert code == 0, code
    return load_network(root / name, "last")


def rows(trained: TrainedNetwork, checks: Sequence[Check]) -> list[dict[str, Any]]:
    """One row per file."""
    size = (checks[0].image.shape[0], checks[0].image.shape[1])
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        model = DeployModel(trained)
        result = ExportReport(Path(scratch), describe(trained, model, size))
        subjects = convert(result, model, Path(scratch), KINDS, [])
        eager = run_eager(model)
        candidates = []
        for subject in subjects:
            assert not subject.problems(), subject.problems()
            kind = FORMATS[subject.format]
            candidates.append(
                Candidate(
                    kind.open(subject.probe, model.profile),
                    kind.open(subject.path, model.profile),
                )
            )
        sigma = compare(as_trained(eager, trained.preprocess), candidates, checks)
        image = checks[0].image
        plain = DeployModel(trained)
        arms = {"eager": lambda: _eager(plain, image)}
        for subject, candidate in zip(subjects, candidates, strict=True):
            arms[subject.path.name] = lambda run=candidate.shipped: run(image)
        seconds = interleaved(arms, repeats=ROUNDS)
    medians = {
        name: float(np.median(values)) * 1000 for name, values in seconds.items()
    }
    return [
        _row(trained, subject, candidate, sigma, medians, size)
        for subject, candidate in zip(subjects, candidates, strict=True)
    ]


def _eager(model: Any, image: np.ndarray) -> None:
    import torch

    with torch.no_grad():
        model(torch.from_numpy(image)[None])


def _row(
    trained: TrainedNetwork,
    subject: Any,
    candidate: Candidate,
    sigma: Any,
    medians: Any,
    size: Any,
) -> Any:
    limits, found = LIMITS[subject.precision], candidate.comparisons
    gates = [
        gate_logits(found, sigma, limits),
        gate_mask(found, sigma, limits),
        gate_preprocessing(found, limits),
    ]
    p50 = medians[subject.path.name]
    return {
        "network": trained.config.model.name,
        "steps": str(trained.step),
        "file": subject.path.name,
        "images": f"{len(found)} of {size[0]}x{size[1]}",
        "max error, sigma": f"{gates[0].figures['max_sigma']:.1e}",
        "equal pixels": f"{100 * gates[1].figures['agreement']:.4f} %",
        "unexplained": str(gates[1].figures["unexplained_pixels"]),
        "preprocessing": f"{gates[2].figures['max_difference']:.0e}",
        "gates": "passed" if all(gate.passed for gate in gates) else "FAILED",
        "p50, ms": f"{p50:.1f}",
        "eager / file": f"{medians['eager'] / p50:.2f}",
    }


def photographs(folder: Path | None) -> list[Check]:
    """Every PNG of the folder, RGB."""
    paths = sorted(folder.glob("*.png")) if folder else []
    return [
        Check(path.stem, np.ascontiguousarray(cv2.imread(str(path))[..., ::-1]))
        for path in paths
    ]


def main(arguments: Sequence[str]) -> None:
    """Writes the table into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=MODELS,
        default=["fast_scnn", "ddrnet23_slim", "pidnet_s"],
    )
    parser.add_argument("--frames", type=Path)
    parser.add_argument(
        "--page",
        type=Path,
        default=Path(__file__).resolve().parents[1] / "docs" / "export.md",
    )
    given = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for name in given.networks:
            trained = trained_for(name, given.steps, Path(root))
            samples = open_samples(trained.config.data, "val", 0)
            found += rows(trained, gather(samples, trained.config).checks)
            real = photographs(given.frames)
            found += rows(trained, real) if real else []
            print(name, "done", flush=True)
    here = machine()
    note = (
        f"{here['cpu']}, {here['cores']} cores, load average {os.getloadavg()[2]:.1f}, one thread, torch "
        f"{here['torch']}. p50 of {ROUNDS} runs in turns. Images of 1024x2048 are photographs, the "
        "others scenes and made images."
    )
    head = f"| {' | '.join(found[0])} |\n|{'---|' * len(found[0])}\n"
    before, _, rest = given.page.read_text().partition(MARKS[0])
    old, _, after = rest.partition(MARKS[1])
    kept = [
        line
        for line in old.splitlines()
        if line.split("|")[1:2] and _name(line) in set(MODELS) - set(given.networks)
    ]
    lines = [*kept, *(f"| {' | '.join(row.values())} |" for row in found)]
    table = head + "".join(
        f"{line}\n"
        for line in sorted(lines, key=lambda line: list(MODELS).index(_name(line)))
    )
    given.page.write_text(f"{before}{MARKS[0]}\n{note}\n\n{table}{MARKS[1]}{after}")


def _name(line: str) -> str:
    return line.split("|")[1].strip()


if __name__ == "__main__":
    main(sys.argv[1:])
