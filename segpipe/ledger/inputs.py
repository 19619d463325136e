"""Records what a run is made from before its first step: every file of its data set and every source of segpipe.

`inputs.json` holds size and SHA-256 of each file, and the SHA-256 of the pixel counts from which class weights are
made. Hashing reads all files once (CamVid, 125 MB: 0.4 s), little beside a training that reads them a hundred times.
`data.hash=false` turns it off for data behind a slow network, and a run without a ledger has no use for it: then only
sizes are recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import segpipe
from segpipe import plugins
from segpipe.data import frequency
from segpipe.data.mix import DataPart, all_parts
from segpipe.data.pairs import pairing, scan
from segpipe.data.plugin_samples import open_plugin
from segpipe.data.readers import threaded
from segpipe.errors import DataError, listed
from segpipe.files import sha256, write_atomically
from segpipe.ledger.results import changes, read_inputs
from segpipe.ledger.rows import FOLDER, INPUTS
from segpipe.settings.config import Config
from segpipe.settings.groups import DataConfig

Hashes = dict[str, str]  # path -> SHA-256
Sizes = dict[str, int | None]  # path -> bytes; None: of no file that is there yet
Read = Callable[[], str]  # reads a sample; its SHA-256
STATS = 256  # files that a thread asks for their sizes at once
SOURCES = Path(segpipe.__file__).parent
SOURCE_SUFFIXES = (".py", ".c", ".json", ".j2")


def combined(hashes: Mapping[str, str]) -> str:
    """One SHA-256 for many files: of their lines as `sha256sum` writes them, sorted by path."""
    lines = "".join(f"{value}  {path}\n" for path, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def record(
    config: Config, splits: Iterable[str], *, fresh: bool = False, ledger: bool = True
) -> None:
    """Write inputs.json into the run folder; when a resumed run already has it, compare the data with it.

    `fresh`: the run starts at step 0. What an attempt that ended before its first checkpoint has recorded is deleted,
    with its ledger: data and code may be others now. Without `ledger`, contents are not hashed.

    Raises DataError naming the first file that changed since the run was started.
    """
    path, hashed = config.run_dir / INPUTS, config.data.hash and ledger
    if fresh:
        for left in (path, *(config.run_dir / FOLDER).glob("rank*")):
            left.unlink(missing_ok=True)
    if not path.is_file():
        text = json.dumps(_content(config, splits, hashed=hashed), indent=1)
        write_atomically(path, f"{text}\n".encode())
        return
    before = read_inputs(path)
    changed = changed_files(before["data"], config.data, splits, contents=hashed)
    if "pixels" in before and before["pixels"] != _pixel_counts(config):
        changed.append(f"{config.run_dir / frequency.FILE_NAME} was altered")
    if changed:
        raise DataError(
            f"data.root = {config.data.root}: {changed[0]} since the run {config.run_dir} was started "
            f"({len(changed)} changes). Restore the data, or start another run with another run.name."
        )


def _content(config: Config, splits: Iterable[str], *, hashed: bool) -> dict[str, Any]:
    data, model = config.data, config.model
    files = data_hashes(data, splits) if hashed else {}
    sources = source_hashes()
    content: dict[str, Any] = {
        "data": {
            "name": data.name,
            "hashed": hashed,
            "sha256": combined(files),
            "files": files,
            "sizes": data_sizes(data, splits),
        },
        "code": {
            "segpipe": segpipe.__version__,
            "sha256": combined(sources),
            "files": sources,
        },
    }
    if model.weights:
        content["weights"] = {"file": model.weights, "sha256": model.weights_sha256}
    if own := plugins.sources(config.import_paths):
        content["plugins"] = {"sha256": combined(own), "files": own}
    if pixels := _pixel_counts(config):
        content["pixels"] = pixels
    return content


def _pixel_counts(config: Config) -> str:
    """SHA-256 of the counts from which class weights and repeats are made; empty where there are none."""
    counts = frequency.load(config.run_dir / frequency.FILE_NAME)
    if counts is None:
        return ""
    return hashlib.sha256(
        counts.pixels.tobytes() + counts.indices.tobytes()
    ).hexdigest()


def changed_files(
    recorded: Mapping[str, Any],
    data: DataConfig,
    splits: Iterable[str],
    *,
    contents: bool = True,
) -> list[str]:
    """What changed in the data set since it was recorded: names and sizes, then contents where they were hashed.

    Raises DataError when images and masks are not paired.
    """
    splits = tuple(splits)
    sizes, hashes = recorded.get("sizes"), recorded["files"]
    changed = _resized(sizes, data_sizes(data, splits)) if sizes else []
    if not changed and contents and hashes:
        changed = changes(hashes, data_hashes(data, splits))
    return changed


def data_hashes(data: DataConfig, splits: Iterable[str]) -> Hashes:
    """SHA-256 of the class table and the files of splits, by path below `data.root`; empty for synthetic data.

    Of a mixture, by data.mix[n] and the path below the root of that entry; of samples of a user's class that names no
    files, of what it reads. Raises DataError when images and masks are not paired.
    """
    found = _inputs(data, splits)
    contents = {
        name: source() for name, source in found.items() if not isinstance(source, Path)
    }
    paths = {name: source for name, source in found.items() if isinstance(source, Path)}
    return dict(sorted({**_hashed(paths), **contents}.items()))


def data_sizes(data: DataConfig, splits: Iterable[str]) -> Sizes:
    """Sizes of what `data_hashes` reads, by the same names. Raises DataError when images and masks are not paired."""
    found = sorted(_inputs(data, splits).items())
    parts = [found[first : first + STATS] for first in range(0, len(found), STATS)]
    return {name: size for sizes in threaded(_sizes, parts) for name, size in sizes}


def _resized(before: Sizes, now: Sizes) -> list[str]:
    """Changed names and sizes; a size that is not known is not compared."""
    known = dict(now)
    for name in before.keys() & now.keys():
        if None in (before[name], now[name]):
            known[name] = before[name]
    return changes(before, known)


def changed_since(run: Path, trained: DataConfig, data: DataConfig) -> str:
    """Which files of `data.split` changed since the run recorded them: sizes, and contents with `data.hash`; or "".

    run: its folder or a checkpoint in it, trained with the settings `trained`. Of a split or a data set that the run
    did not read, only the files that it has recorded all the same are compared.
    """
    path = (run if run.is_dir() else run.parent) / INPUTS
    recorded = read_inputs(path)["data"] if path.is_file() else {"files": {}}
    hashes, sizes = recorded["files"], recorded.get("sizes") or {}
    if not (names := hashes.keys() | sizes.keys()):
        return ""
    splits = {"train", data.split} if data.hold_out else {data.split}
    now = data_sizes(data, splits)
    known = names & now.keys()
    if (
        data.split in ("train", trained.split)
        and data.name == trained.name
        and (known or data.root == trained.root)
    ):
        known = now.keys() | _missing(
            names - now.keys(), data, {"train", trained.split} - splits
        )
    changed = _resized(_only(sizes, known), _only(now, known)) if sizes else []
    if not changed and data.hash and hashes:
        changed = changes(_only(hashes, known), _only(data_hashes(data, splits), known))
    return (
        f"the labelled images changed since the run: {listed(changed, 3)}"
        if changed
        else ""
    )


def _missing(names: set[str], data: DataConfig, others: set[str]) -> set[str]:
    """Those of the names that no file of the `others`, the run's other splits, has; none if these are not here."""
    try:
        return names - _inputs(data, others).keys()
    except DataError:
        return set()


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in values if name in names}


def _sizes(found: Sequence[tuple[str, Path | Read]]) -> list[tuple[str, int | None]]:
    return [(name, _size(source)) for name, source in found]


def _size(source: Path | Read) -> int | None:
    try:
        return os.stat(source).st_size if isinstance(source, Path) else None
    except OSError:  # of a user's class that fetches its files later
        return None


def _inputs(data: DataConfig, splits: Iterable[str]) -> dict[str, Path | Read]:
    """By name below `data.root`, each file, or what reads a sample of a user's class that names none."""
    found: dict[str, Path | Read] = {}
    for part in all_parts(data, splits):
        prefix = f"{part.key}{'/' * bool(part.key)}"
        read = _plugin_inputs(part) if plugins.is_path(part.data.name) else _paths(part)
        found |= {f"{prefix}{name}": source for name, source in read.items()}
    return found


def _paths(part: DataPart) -> Mapping[str, Path | Read]:
    """The files of one data set by their path below its root."""
    data = part.data
    if data.name == "synthetic":
        return {}
    paths = set(_files(data, part.split))
    if data.classes or data.name == "folder":
        paths.add(data.classes or str(Path(data.root) / "classes.yaml"))
    paths |= {str(table)} if (table := pairing(data, part.split)) else set()
    below = f"{Path(data.root)}/"  # relpath takes 20 times as long
    return {
        path[len(below) :]
        if path.startswith(below)
        else Path(os.path.relpath(path, data.root)).as_posix(): Path(path)
        for path in paths
    }


def _plugin_inputs(part: DataPart) -> dict[str, Path | Read]:
    """The files that the samples of a user's class name, and what reads a sample where it names none."""
    samples, root = open_plugin(part.data, part.split), part.data.root or "."
    found: dict[str, Path | Read] = {}
    for index in range(len(samples)):
        files = samples.files(index)
        found |= {Path(os.path.relpath(path, root)).as_posix(): path for path in files}
        if not files:
            found[f"{part.split}/{samples.name(index)}"] = partial(
                samples.sha256, index
            )
    return found


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
    return dict(
        zip(names, threaded(sha256, (paths[name] for name in names)), strict=True)
    )
