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
from segpipe.run.report import PAGE, page_data, run_predictor, write_report
from segpipe.run.tracking import FILE_NAME, read_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from segpipe.train.training import Run
    from segpipe.train.validate import Validation

# In a checkout.
EVALUATE = Path(__file__).resolve().parents[2] / "scripts" / "evaluate.py"


def finish(
    run: Run, found: Validation, result: dict[str, Any], console: Console
) -> None:
    """Print the results and write the report, then export. Raises ExportMismatch if an exported file differs.

    The export comes last, so that a refused one hides nothing of the finished training.
    """
    from segpipe.train.scores import flattering

    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    shares = found.total.sum(1).double() / found.total.sum().clamp_min(1)
    console.print(iou_table(result, shares.tolist()))
    if len(result["sequences"]) > 1:
        console.print(sequence_table(result["sequences"]))
    for note in (flattering(result["sequences"]), never_predicted(result)):
        if note:
            say(note)
    config = run.config
    write_report(
        run.folder / PAGE,
        page_data(
            config,
            run.val_samples,
            found,
            {**result, "device": str(run.group.device)},
            run_predictor(run),
            read_metrics(run.folder / FILE_NAME),
        ),
    )
    images = f"{config.data.split} images"
    if config.data.hold_out:
        images = f"images of {config.data.hold_out}, held out"
    say(f"mIoU {100 * result['miou']:.2f} % on {len(run.val_samples)} {images}")
    say(f"run {run.folder}  (open {PAGE}; curves in {FILE_NAME})")
    say(f"next {_next_command(run.folder)}")
    if config.export.enabled:
        _export(run, console)


def _next_command(folder: Path) -> str:
    """Command that evaluates the checkpoint, ready to paste: as segpipe was started here, and without placeholders."""
    started = Path(sys.argv[0])
    if started.name == "segpipe":
        is_on_path = shutil.which("segpipe") == str(started)
        words = ["segpipe" if is_on_path else _relative(started), "evaluate"]
    elif EVALUATE.is_file():
        words = [_relative(Path(sys.executable)), _relative(EVALUATE)]
    else:
        words = [_relative(Path(sys.executable)), "-m", "segpipe", "evaluate"]
    return shlex.join([*words, f"run={folder}"])


def _relative(path: Path) -> str:
    """Path from the working directory, if it is below. Links stay: a virtual environment's interpreter is one."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _export(run: Run, console: Console) -> None:
    """Export the checkpoint that was just written, in the same way as the export command."""
    from segpipe.export.dataset import Spread
    from segpipe.export.publish import export_checkpoint
    from segpipe.train.checkpoint import load_network

    started = time.perf_counter()
    settings = run.config.export
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    say(
        f"exporting to {' and '.join(settings.formats)} and comparing the files with "
        f"the trained network on up to {settings.quality_images} images (export=off "
        f"leaves this out) ..."
    )
    done = export_checkpoint(
        run.folder,
        "last",
        load_network(run.folder, "last"),
        run.config,
        validation=run.val_samples,
        training=Spread(run.train_samples),
    )
    console.print(done.table())
    say(f"{done.line('EXPORT')} ({time.perf_counter() - started:.0f} s)")
