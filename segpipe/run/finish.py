"""What rank 0 does when a run is trained: the table, the report, the export, and three lines to go on from."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from segpipe.models.preprocess import Preprocess
from segpipe.run.console import iou_table
from segpipe.run.report import Overlay, ReportData, pick_extremes, write_report
from segpipe.run.tracking import FILE_NAME, read_metrics
from segpipe.train.checkpoint import load_network
from segpipe.train.engine import Run
from segpipe.train.metrics import miou
from segpipe.train.validate import Validation, predict

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def finish(run: Run, found: Validation, result: dict[str, Any], console: Console) -> None:
    """Print and write what came out of the run. Raises ExportMismatch when an exported file computes something else.

    The report is written before the export, so that a refused export does not cost it.
    """
    shares = found.total.sum(1).double() / found.total.sum().clamp_min(1)
    console.print(iou_table(result, shares.tolist()))
    page = write_report(run.folder, report_data(run, found, result))
    if run.config.export.enabled:
        _export(run, console)
    console.print(f"mIoU {100 * result['miou']:.2f} % on {len(run.val_samples)} {run.config.data.split} images")
    console.print(f"run {run.folder}  (open {page.name}; curves in {FILE_NAME})", highlight=False, soft_wrap=True)
    console.print(f"next {_next_command(run.folder)}", highlight=False, soft_wrap=True, markup=False)


def _next_command(folder: Path) -> str:
    """Judges the checkpoint once more. Runs as it is: by this interpreter, with nothing to be filled in."""
    return shlex.join([_typed(Path(sys.executable)), _typed(SCRIPTS / "evaluate.py"), f"run={folder}"])


def _typed(path: Path) -> str:
    """As one would type it here. Links stay: the interpreter of a virtual environment is one."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def report_data(run: Run, found: Validation, result: dict[str, Any]) -> ReportData:
    """Inputs of the report page, with the best and the worst validation images predicted once more."""
    from segpipe.settings.config import to_mapping

    classes = run.val_samples.classes
    scores = [(index, miou(counts)) for index, counts in found.per_image.items()]
    best, worst = pick_extremes(scores)
    by_index = dict(scores)
    return ReportData(
        config=to_mapping(run.config),
        result={
            **result,
            "wall_time_s": result["train_seconds"],
            "images_per_s": result["images_per_second"],
            "device": str(run.group.device),
        },
        confusion=found.total.numpy(),
        names=classes.names,
        palette=classes.palette,
        history=read_metrics(run.folder / FILE_NAME),
        best=[_overlay(run, index, by_index[index]) for index in best],
        worst=[_overlay(run, index, by_index[index]) for index in worst],
        versions={name: str(value) for name, value in result["versions"].items()},
    )


def _overlay(run: Run, index: int, score: float) -> Overlay:
    image, target = run.val_samples.read(index)
    device = run.group.device
    batch = torch.from_numpy(image).unsqueeze(0).to(device)
    pred = predict(run.state.ema.model, Preprocess().to(device), batch)[0].cpu().numpy()
    return Overlay(run.val_samples.name(index), score, image, target, pred)


def _export(run: Run, console: Console) -> None:
    """Export the checkpoint that was just written, through the same door as scripts/export.py."""
    from segpipe.export.artifact.verify_report import table
    from segpipe.export.dataset import spread
    from segpipe.export.publish import export_checkpoint

    started = time.perf_counter()
    console.print("exporting, and comparing the files with the trained network ...", highlight=False)
    trained = load_network(run.folder, "last")
    training = spread(run.train_samples)
    done = export_checkpoint(run.folder, "last", trained, run.config, validation=run.val_samples, training=training)
    console.print(table(done))
    seconds = time.perf_counter() - started
    console.print(f"{done.line('EXPORT')} ({seconds:.0f} s)", highlight=False, soft_wrap=True, markup=False)
