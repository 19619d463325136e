"""Copies a run to object storage after each checkpoint, and restores it on an empty machine.

    MIRROR=s3://bucket/runs segpipe train ... run.name=NAME track.name=mirror:Mirror
    MIRROR=s3://bucket/runs python mirror.py NAME [runs]     # then the same command with run.exists=resume

A plug-in: copy this file to the folder in which you run the command. The URL may be of any file system that fsspec
supports (pip install s3fs, gcsfs or adlfs), which finds its own credentials.

A copy is what a SIGKILL would have left: last.pt first, then the files that extend beyond it. Each file is an object
named by its SHA-256; manifest.json, written after all of them, lists the objects of a copy. So an interrupted copy
leaves the previous one intact.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

FIRST, MANIFEST = "last.pt", "manifest.json"
TRIES, WAIT_S = (
    3,
    5.0,
)  # attempts at a copy and seconds between them; after that, the next checkpoint tries again
NOT_COPIED = ("run.lock",)


class Mirror:
    """A tracker that copies the folder of a run to $MIRROR/NAME whenever its last.pt has changed."""

    def on_start(self, config: Any, step: int) -> None:
        url = os.environ.get("MIRROR")
        if not url:
            raise ValueError("set MIRROR to a URL, such as s3://bucket/runs")
        self.folder = Path(config.run_dir)
        self.store, self.root = opened(url, self.folder.name)
        self.copied = 0  # modification time of last.pt, in ns

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        last = self.folder / FIRST
        now = last.stat().st_mtime_ns if last.exists() else 0
        if now != self.copied and self._copy():
            self.copied = now

    def on_end(self, result: dict[str, Any]) -> None:
        self._copy()

    def _copy(self) -> bool:
        """Copy the folder; returns whether it succeeded. A file system error must not end later copies."""
        for attempt in range(TRIES):
            try:
                copy(self.folder, self.store, self.root)
                return True
            except Exception as error:  # each file system has its own errors
                told = f"{self.root} was not written: {type(error).__name__}: {error}"
                print(told, file=sys.stderr)
                if attempt + 1 < TRIES:
                    time.sleep(WAIT_S)
        return False


def opened(url: str, name: str) -> tuple[Any, str]:
    """The file system of a URL, and the path of the run NAME in it."""
    store, root = fsspec.url_to_fs(url)
    return store, f"{root.rstrip('/')}/{name}"


def copy(folder: Path, store: Any, root: str) -> None:
    """Write missing objects, then the manifest; remove objects that it does not list."""
    store.makedirs(f"{root}/objects", exist_ok=True)
    store.invalidate_cache()
    there = {Path(path).name for path in store.find(f"{root}/objects")}
    names: dict[str, str] = {}
    paths = [path for path in folder.rglob("*") if wanted(path)]
    for path in sorted(paths, key=lambda path: (path.name != FIRST, path)):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # replaced or removed meanwhile
            continue
        digest = hashlib.sha256(content).hexdigest()
        names[path.relative_to(folder).as_posix()] = digest
        if digest not in there:
            store.pipe_file(f"{root}/objects/{digest}", content)
    store.pipe_file(f"{root}/{MANIFEST}", json.dumps(names).encode())
    for digest in there - set(names.values()):
        store.rm_file(f"{root}/objects/{digest}")


def wanted(path: Path) -> bool:
    """Whether to copy a file: not the lock of this machine, nor a file that is being written."""
    return (
        path.is_file() and path.name not in NOT_COPIED and not path.name.startswith(".")
    )


def restore(store: Any, root: str, folder: Path) -> int:
    """Restore the copied folder, completely or not at all; returns the number of files.

    Raises FileExistsError when the folder exists, and ValueError for an object whose bytes do not match its name.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists. Remove it, or restore into another.")
    names = json.loads(store.cat_file(f"{root}/{MANIFEST}"))
    aside = folder.with_name(f".{folder.name}.restored")
    shutil.rmtree(aside, ignore_errors=True)
    for name, digest in names.items():
        path = (aside / name).resolve()
        if not path.is_relative_to(aside.resolve()):
            raise ValueError(f"{root}/{MANIFEST}: {name} leads outside the run.")
        content = store.cat_file(f"{root}/objects/{digest}")
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{root}/objects/{digest} has altered bytes: {name}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    aside.replace(folder)
    return len(names)


def main(arguments: list[str], told: Callable[[str], object] = print) -> int:
    url = os.environ.get("MIRROR")
    if not url or not 1 <= len(arguments) <= 2:
        told("usage: MIRROR=URL python mirror.py NAME [FOLDER OF RUNS]")
        return 2
    name, *where = arguments
    folder = Path(where[0] if where else "runs", name)
    try:
        number = restore(*opened(url, name), folder)
    except (ImportError, OSError, ValueError) as error:
        told(f"{type(error).__name__}: {error}")
        return 2
    told(f"{folder}: {number} files. Continue with run.exists=resume.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
