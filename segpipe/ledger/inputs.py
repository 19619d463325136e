"""Records the inputs of a run before its first step: every file of its data set and every source file of segpipe.

`inputs.json` holds size and SHA-256 of each file. Hashing reads all files once (CamVid, 125 MB: 0.4 s), which is little
compared with training, which reads them a hundred times. Turn it off with `data.hash=false` for data behind a slow
network. A run without a ledger does not need it. In both cases only sizes are recorded.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from platform import node
from types import MappingProxyType
from typing import Any

import segpipe
from segpipe.data.data_set import DataSet, Input
from segpipe.data.readers import threaded
from segpipe.data.samples import main_set, open_samples
from segpipe.errors import DataError, listed
from segpipe.files import (
    file_sha256,
    sha256_below,
    sha256_of,
    to_json,
    write_atomically,
)
from segpipe.ledger.reader import changes, read_inputs
from segpipe.ledger.rows import FOLDER, INPUTS
from segpipe.settings.config import Config
from segpipe.settings.groups import DataConfig

Hashes = dict[str, str]  # path -> SHA-256
Sizes = dict[str, int | None]  # path -> bytes; None: no file, or not there yet
SOURCES = Path(segpipe.__file__).parent
SOURCE_SUFFIXES = (".py", ".c", ".json", ".j2", ".yaml")


def combined(hashes: Mapping[str, str]) -> str:
    """One SHA-256 for many files: that of their `sha256sum` lines, sorted by path."""
    lines = "".join(f"{value}  {path}\n" for path, value in sorted(hashes.items()))
    return sha256_of(lines.encode())


def record(
    config: Config, sets: Sequence[DataSet], *, fresh: bool = False, ledger: bool = True
) -> None:
    """Write inputs.json into the run folder; if a resumed run already has it, compare the data `sets` with it.

    `fresh`: the run starts at step 0. The inputs.json and ledger of an attempt that ended before its first checkpoint
    are deleted: data and code may have changed. Without `ledger`, contents are not hashed.

    Raises DataError naming the first file that changed since the run was started.
    """
    run = config.run_dir
    path = run / INPUTS
    if fresh:
        for left in (path, *(run / FOLDER).glob("rank*")):
            left.unlink(missing_ok=True)
    found = inputs_of(sets)
    # Hashes from the checks of this start, or of an earlier one, if the files have not changed since.
    known: Hashes | None = {} if config.data.hash and ledger else None
    if known is not None:
        for part in chain.from_iterable(one.file_sets() for one in sets):
            known |= part.facts.hashes(map(str, part.inputs().values()))
    if path.is_file():
        if changed := changed_inputs(read_inputs(path)["data"], found, known):
            raise DataError(
                f"data.root = {config.data.root} on {node()}: {changed[0]} since the run {run} was started "
                f"({len(changed)} changes). Restore the data, or start another run with another run.name."
            )
        return
    files = {} if known is None else hashes_of(found, known)
    sources = source_hashes()
    content = {
        "data": {
            "name": config.data.name,
            "hashed": known is not None,
            "sha256": combined(files),
            "files": files,
            "sizes": sizes_of(found),
        },
        "code": {
            "segpipe": segpipe.__version__,
            "sha256": combined(sources),
            "files": sources,
        },
    }
    write_atomically(path, to_json(content))


def changed_since(run: Path, trained: DataConfig, data: DataConfig) -> str:
    """Which files of `data.split` changed since the run: size, and content with `data.hash`; empty if none did.

    run: its folder or a checkpoint in it, trained with the settings `trained`. If the run did not read this split or
    data set, only the files that it happened to record are compared.
    """
    recorded = _recorded(run)
    hashes, sizes = recorded["files"], recorded["sizes"]
    if not (names := hashes.keys() | sizes.keys()):
        return ""
    now = inputs_of([open_samples(data, data.split, 0, packed=False)])
    data, trained = main_set(data), main_set(trained)
    moved = data.root != trained.root
    # Another data set may have the same class table or lists.
    others = (".yaml", ".txt", ".csv") * moved
    known = {name for name in names & now.keys() if not name.endswith(others)}
    same_set = data.name == trained.name and (known or not moved)
    if same_set and data.split in ("train", trained.split):
        root = Path(data.root)
        # A folder that does not exist here does not count as a change.
        there = {name for name in names if (root / name).parent.is_dir()}
        known = {*now, *(name for name in there if not (root / name).exists())}
    of_run = {"sizes": _only(sizes, known), "files": _only(hashes, known)}
    changed = changed_inputs(of_run, _only(now, known), {} if data.hash else None)
    told = f"the labelled images changed since the run: {listed(changed, 3)}"
    return told if changed else ""


def were_read(run: Path, samples: DataSet) -> bool:
    """Whether the run (a folder, or a checkpoint in it) read files with these names and sizes."""
    return not sizes_of(samples.inputs()).items() - _recorded(run)["sizes"].items()


def _recorded(run: Path) -> dict[str, Any]:
    """The data entry of a run's inputs.json; `run` is a folder, or a checkpoint in it."""
    path = (run if run.is_dir() else run.parent) / INPUTS
    return read_inputs(path)["data"] if path.is_file() else {"files": {}, "sizes": {}}


def changed_inputs(
    recorded: Mapping[str, Any],
    found: Mapping[str, Input],
    known: Mapping[str, str] | None = MappingProxyType({}),
) -> list[str]:
    """Phrases on changed names and sizes or, if there are none, contents; unknown sizes are not compared.

    `known`: as for `hashes_of`; None: contents are not compared.
    """
    before, hashes = recorded["sizes"], recorded["files"]
    if before:
        now = sizes_of(found)
        for name in before.keys() & now.keys():
            if None in (before[name], now[name]):
                now[name] = before[name]
        if changed := changes(before, now):
            return changed
    if not hashes or known is None:
        return []
    return changes(hashes, hashes_of(found, known))


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in values if name in names}


def inputs_of(sets: Iterable[DataSet]) -> dict[str, Input]:
    """Inputs of data sets, sorted by name."""
    found: dict[str, Input] = {}
    for one in sets:
        found |= one.inputs()
    return dict(sorted(found.items()))


def sizes_of(found: Mapping[str, Input]) -> Sizes:
    """Bytes of each file by name; None for samples, and for a file that a user's class fetches later."""
    sizes: Sizes = dict.fromkeys(found)
    for name, source in found.items():
        if isinstance(source, str):
            with suppress(OSError):
                sizes[name] = os.stat(source).st_size
    return sizes


def hashes_of(
    found: Mapping[str, Input], known: Mapping[str, str] = MappingProxyType({})
) -> Hashes:
    """SHA-256 of each input by name. Files whose path is not `known` are hashed by threads, samples one by one."""
    paths = [
        source
        for source in found.values()
        if isinstance(source, str) and source not in known
    ]
    try:
        hashes = {
            **known,
            **dict(zip(paths, threaded(file_sha256, paths), strict=True)),
        }
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read for inputs.json: {error.strerror}. Restore it, or correct files(index) "
            "of your class; if that fetches files later, set data.hash=false."
        ) from error
    return {
        name: hashes[source] if isinstance(source, str) else source()
        for name, source in found.items()
    }


def source_hashes() -> Hashes:
    """SHA-256 of every source file of segpipe by path, including C files, schemas and templates."""
    return sha256_below(SOURCES, SOURCE_SUFFIXES)
