"""The end of a run on rank 0: results on the terminal, the report page, then the export.

torch is imported inside the functions: the command imports this module before it sets the environment of the processes.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.run.console import iou_table, never_predicted, sequence_table
from segpipe.run.report import ReportData, page_data, predictor, write_report
from segpipe.run.tracking import FILE_NAME, read_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from segpipe.train.training import Run
    from segpipe.train.validate import Validation

EVALUATE = (
    Path(__file__).resolve().parents[2] / "scripts" / "evaluate.py"
)  # in a checkout


def finish(
    run: Run, found: Validation, result: dict[str, Any], console: Console
) -> None:
    """Print the results and write the report, then export. Raises ExportMismatch if an exported file differs.

    The export comes last, so that a refused one hides nothing of the finished training.
    """
    from segpipe.train.scores import flattering

    shares = found.total.sum(1).double() / found.total.sum().clamp_min(1)
    console.print(iou_table(result, shares.tolist()))
    if len(result["sequences"]) > 1:
        console.print(sequence_table(result["sequences"]))
    for note in filter(
        None, (flattering(result["sequences"]), never_predicted(result))
    ):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    page = write_report(run.folder / "report.html", _page(run, found, result))
    held_out = run.config.data.hold_out
    images = (
        f"images of {held_out}, held out"
        if held_out
        else f"{run.config.data.split} images"
    )
    for line in (
        f"mIoU {100 * result['miou']:.2f} % on {len(run.val_samples)} {images}",
        f"run {run.folder}  (open {page.name}; curves in {FILE_NAME})",
        f"next {_next_command(run.folder)}",
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if run.config.export.enabled:
        _export(run, console)


def _next_command(folder: Path) -> str:
    """Command that evaluates the checkpoint, ready to paste: as segpipe was started here, and without placeholders."""
    started = Path(sys.argv[0])
    if started.name == "segpipe":
        program = (
            "segpipe" if shutil.which("segpipe") == str(started) else _relative(started)
        )
        return shlex.join([program, "evaluate", f"run={folder}"])
    script = (
        [_relative(EVALUATE)] if EVALUATE.is_file() else ["-m", "segpipe", "evaluate"]
    )
    return shlex.join([_relative(Path(sys.executable)), *script, f"run={folder}"])


def _relative(path: Path) -> str:
    """Path from the working directory, if it is below. Links stay: a virtual environment's interpreter is one."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _page(run: Run, found: Validation, result: dict[str, Any]) -> ReportData:
    from segpipe.models.preprocess import Preprocess
    from segpipe.train.validate import predict

    device = run.group.device
    seer = predictor(
        partial(predict, run.state.ema.model, Preprocess().to(device)), device
    )
    history = read_metrics(run.folder / FILE_NAME)
    return page_data(
        run.config,
        run.val_samples,
        found,
        {**result, "device": str(device)},
        seer,
        history,
    )


def _export(run: Run, console: Console) -> None:
    """Export the checkpoint that was just written, in the same way as the export command."""
    from segpipe.export.artifact.verify_report import table
    from segpipe.export.dataset import Spread
    from segpipe.export.publish import export_checkpoint
    from segpipe.train.checkpoint import load_network

    started = time.perf_counter()
    formats, images = (
        " and ".join(run.config.export.formats),
        run.config.export.quality_images,
    )
    console.print(
        f"exporting to {formats} and comparing the files with the trained network on up to {images} images "
        f"(export=off leaves this out) ...",
        highlight=False,
        soft_wrap=True,
    )
    trained = load_network(run.folder, "last")
    training = Spread(run.train_samples)
    done = export_checkpoint(
        run.folder,
        "last",
        trained,
        run.config,
        validation=run.val_samples,
        training=training,
    )
    console.print(table(done))
    seconds = time.perf_counter() - started
    console.print(
        f"{done.line('EXPORT')} ({seconds:.0f} s)",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
