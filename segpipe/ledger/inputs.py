"""Records what a run is made from before its first step: every file of its data set and every source of segpipe.

`inputs.json` holds a SHA-256 for each file, and the ledger's header the SHA-256 of `inputs.json`. Hashing reads all
files once (CamVid, 125 MB: 0.4 s), little beside a training that reads them a hundred times. `data.hash=false` turns
it off for data behind a slow network.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import segpipe
from segpipe import plugins
from segpipe.data.mix import DataPart, all_parts
from segpipe.data.pairs import pairing, scan
from segpipe.data.readers import threaded
from segpipe.data.samples import open_plugin
from segpipe.errors import DataError
from segpipe.files import sha256, write_atomically
from segpipe.ledger.results import changes, read_inputs
from segpipe.ledger.rows import FOLDER, INPUTS
from segpipe.settings.config import Config
from segpipe.settings.groups import DataConfig

Hashes = dict[str, str]  # path -> SHA-256
SOURCES = Path(segpipe.__file__).parent
SOURCE_SUFFIXES = (".py", ".c", ".json", ".j2")


def combined(hashes: Mapping[str, str]) -> str:
    """One SHA-256 for many files: of their lines as `sha256sum` writes them, sorted by path."""
    lines = "".join(f"{value}  {path}\n" for path, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def record(config: Config, splits: Iterable[str], *, fresh: bool = False) -> None:
    """Write inputs.json into the run folder; when a resumed run already has it, compare the data with it.

    `fresh`: the run starts at step 0. What an attempt that ended before its first checkpoint has recorded is deleted,
    with its ledger: data and code may be others now.

    Raises DataError naming the first file that changed since the run was started.
    """
    path = config.run_dir / INPUTS
    for left in (path, *(config.run_dir / FOLDER).glob("rank*")) if fresh else ():
        left.unlink(missing_ok=True)
    if not path.is_file():
        write_atomically(path, (json.dumps(_content(config, splits), indent=1) + "\n").encode())
        return
    files = read_inputs(path)["data"]["files"]
    changed = changes(files, data_hashes(config.data, splits)) if files and config.data.hash else []
    if changed:
        raise DataError(
            f"data.root = {config.data.root}: {changed[0]} since the run {config.run_dir} was started "
            f"({len(changed)} changes). Restore the data, or start another run with another run.name."
        )


def _content(config: Config, splits: Iterable[str]) -> dict[str, Any]:
    files, sources = data_hashes(config.data, splits) if config.data.hash else {}, source_hashes()
    model = config.model
    weights = {"weights": {"file": model.weights, "sha256": model.weights_sha256}} if model.weights else {}
    own = plugins.sources(config.import_paths)
    return {
        **weights,
        "data": {"name": config.data.name, "hashed": config.data.hash, "sha256": combined(files), "files": files},
        "code": {"segpipe": segpipe.__version__, "sha256": combined(sources), "files": sources},
        **({"plugins": {"sha256": combined(own), "files": own}} if own else {}),
    }


def data_hashes(data: DataConfig, splits: Iterable[str]) -> Hashes:
    """SHA-256 of the class table and the files of splits, by path below `data.root`; empty for synthetic data.

    Of a mixture, by data.mix[n] and the path below the root of that entry; of samples of a user's class that names no
    files, of what it reads. Raises DataError when images and masks are not paired.
    """
    paths: dict[str, Path] = {}
    contents: Hashes = {}
    for part in all_parts(data, splits):
        prefix = f"{part.key}{'/' * bool(part.key)}"
        files, read = _plugin_inputs(part) if plugins.is_path(part.data.name) else (_paths(part), {})
        paths |= {f"{prefix}{name}": path for name, path in files.items()}
        contents |= {f"{prefix}{name}": value for name, value in read.items()}
    return dict(sorted({**_hashed(paths), **contents}.items()))


def _paths(part: DataPart) -> dict[str, Path]:
    """The files of one data set by their path below its root."""
    data = part.data
    if data.name == "synthetic":
        return {}
    paths = set(_files(data, part.split))
    if data.classes or data.name == "folder":
        paths.add(data.classes or str(Path(data.root) / "classes.yaml"))
    paths |= {str(table)} if (table := pairing(data, part.split)) else set()
    return {Path(os.path.relpath(path, data.root)).as_posix(): Path(path) for path in paths}


def _plugin_inputs(part: DataPart) -> tuple[dict[str, Path], Hashes]:
    """The files that the samples of a user's class name, and SHA-256 of what it reads where it names none."""
    samples, root = open_plugin(part.data, part.split), part.data.root or "."
    paths: dict[str, Path] = {}
    contents: Hashes = {}
    for index in range(len(samples)):
        files = samples.files(index)
        paths |= {Path(os.path.relpath(path, root)).as_posix(): path for path in files}
        if not files:
            contents[f"{part.split}/{samples.name(index)}"] = samples.content(index)
    return paths, contents


def _files(data: DataConfig, split: str) -> Iterable[str]:
    pairs, faults = scan(data, split)
    if faults:
        raise DataError(faults[0])
    return (path for pair in pairs for path in (pair.image, pair.mask))


def source_hashes() -> Hashes:
    """SHA-256 of every source file of segpipe by path, digest.c, schemas and templates included."""
    paths = [path for path in SOURCES.rglob("*") if path.suffix in SOURCE_SUFFIXES]
    return _hashed({path.relative_to(SOURCES).as_posix(): path for path in paths})


def _hashed(paths: Mapping[str, Path]) -> Hashes:
    """By name, sorted; hashing releases the GIL."""
    names = sorted(paths)
    return dict(zip(names, threaded(sha256, (paths[name] for name in names)), strict=True))
