"""`segpipe import`: labels of another format as a folder data set."""  # noqa: N999

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from segpipe.data.importers import IMPORTERS
from segpipe.data.importers.imported import (
    INCOMPLETE,
    ImportPlan,
    mask_path,
    write_import,
)
from segpipe.errors import ConfigError, DataError
from segpipe.run.console import CONSOLE, progress


def main(given: dict[str, Any]) -> int:
    """Exit code; `given` are the values of the command's keys."""
    source, out, name = Path(given["source"]), Path(given["out"]), given["format"]
    if not source.exists():
        raise ConfigError(
            f"source = {source} does not exist. Set source to the folder of the labels."
        )
    try:
        plan = IMPORTERS[name](source, given["names"], given["background"])
    except (*INCOMPLETE, OSError, RecursionError) as error:
        raise DataError(
            f"{source} is not a complete {name} export ({error!r}). Export it again."
        ) from error
    origin = {
        "format": name,
        "source": str(source.resolve()),
        "background": given["background"],
    }
    with progress("writing masks") as show:
        try:
            faults = write_import(
                plan, out, origin, copy=given["copy"], skip=given["skip"], progress=show
            )
        except OSError as error:  # a full disk, say
            raise DataError(
                f"out = {out} cannot be written: {error}. The same command continues."
            ) from error
    return report(plan, out, faults, given["lines"], skip=given["skip"])


def report(
    plan: ImportPlan, out: Path, faults: list[str], lines: int, *, skip: bool
) -> int:
    """Print what was imported, and what not; returns the exit code."""
    for fault in faults[: lines or None]:
        CONSOLE.print(fault, markup=False)
    if len(faults) > lines > 0:
        CONSOLE.print(f"... and {len(faults) - lines} more; lines=0 prints all")
    if not (out / "classes.yaml").is_file():
        left = (
            "no image is left without them"
            if skip
            else "or set skip=true to leave them out"
        )
        CONSOLE.print(
            f"{len(faults)} problem{'s' * (len(faults) > 1)}: {out} has no classes.yaml yet. Correct them and repeat "
            f"the command, which keeps what is written; {left}."
        )
        return DataError.exit_code
    written = [entry for entry in plan.entries if mask_path(out, entry).is_file()]
    counts = Counter(entry.split or "no split" for entry in written)
    sizes = ", ".join(f"{split}: {count}" for split, count in counts.items())
    left_out = f"; left out: the {len(faults)} above" if faults else ""
    CONSOLE.print(
        f"{out}: {len(plan.names)} classes ({', '.join(plan.names[:30])}); images: {sizes}{left_out}"
    )
    if "no split" in counts:
        CONSOLE.print(f"Next: segpipe split data.root={out}", markup=False)
    CONSOLE.print(f"Then: segpipe doctor data=folder data.root={out}", markup=False)
    return 0
