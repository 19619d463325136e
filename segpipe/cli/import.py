"""`segpipe import`: labels of another format as a folder data set."""  # noqa: N999

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from segpipe.cli import doctor, split
from segpipe.datasets.importers import IMPORTERS
from segpipe.datasets.importers.exported import BACKGROUND, INCOMPLETE
from segpipe.datasets.importers.written import mask_path, write_import
from segpipe.errors import ConfigError, DataError
from segpipe.run.console import CONSOLE, progress

DIVISION = {"by": "sequence", "pattern": "", "seed": 0, "replace": True}


def main(given: dict[str, Any]) -> int:
    """Exit code; `given` are the values of the command's keys."""
    source, out, name = Path(given["source"]), Path(given["out"]), given["format"]
    if not source.exists():
        raise ConfigError(
            f"source = {source} does not exist. Set source to the folder of the labels."
        )
    try:
        export = IMPORTERS[name](source, given["names"])
    except (*INCOMPLETE, OSError) as error:
        raise DataError(
            f"{source} is not a complete {name} export ({error!r}). Export it again."
        ) from error
    divided = sorted({item.split for item in export.items} - {""})
    if given["val"] and divided:
        raise ConfigError(
            f"val = {given['val']}, but {source} has the splits {', '.join(divided)}. Leave val out."
        )
    ignored = list(given["ignore"])
    if given["background"] == "ignore":
        ignored.append(BACKGROUND)
    names, ids = export.classes(given["names"], ignored)
    origin = {
        "format": name,
        "source": str(source.resolve()),
        "names": given["names"],
        "ignored": ignored,
    }
    with progress("writing masks") as show:
        try:
            faults = write_import(
                export,
                names,
                ids,
                out,
                origin,
                copy=given["copy"],
                skip=given["skip"],
                progress=show,
            )
        except OSError as error:  # a full disk, say
            raise DataError(
                f"out = {out} cannot be written: {error}. The same command continues."
            ) from error
    doctor.print_problems(faults, given["lines"])
    if not (out / "classes.yaml").is_file():
        left = "or set skip=true to leave them out"
        if given["skip"]:
            left = "no image is left without them"
        CONSOLE.print(
            f"{len(faults)} problem{'s' * (len(faults) > 1)}: {out} has no classes.yaml yet. Correct them and repeat "
            f"the command; {left}."
        )
        return DataError.exit_code
    written = [item for item in export.items if mask_path(out, item).is_file()]
    counts = Counter(item.split or "no split" for item in written)
    sizes = ", ".join(f"{split}: {count}" for split, count in counts.items())
    left_out = f"; left out: the {len(faults)} above" if faults else ""
    CONSOLE.print(
        f"{out}: {len(names)} classes ({', '.join(names[:30])}); images: {sizes}{left_out}"
    )
    if given["val"]:
        split.main({"data.root": str(out), "val": given["val"], **DIVISION})
    elif "no split" in counts:
        CONSOLE.print(f"Next: segpipe split data.root={out}", markup=False)
    CONSOLE.print(f"Then: segpipe doctor data=folder data.root={out}", markup=False)
    return 0
