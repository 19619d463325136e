"""A finished folder into its place: whole and on the disk, or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from segpipe.errors import ConfigError
from segpipe.files import sha256
from segpipe.runtime.artifact import MANIFEST, SUMS


def beside(out_dir: Path, suffix: str) -> Path:
    """Path next to `out_dir`, on the same file system, so that a rename is one step."""
    return out_dir.with_name(f"{out_dir.name}.{suffix}")


@contextlib.contextmanager
def writing(out_dir: Path) -> Iterator[None]:
    """Raises ConfigError for what the system says against writing to `out_dir`: no folder, no right, no space."""
    try:
        yield
    except OSError as error:
        told = error.strerror or str(error)
        raise ConfigError(f"export.dir = {out_dir} cannot be written ({told}). Choose another folder.") from error


def check_place(out_dir: Path) -> None:
    """Raises ConfigError when `out_dir` cannot be written, or holds what no export would be allowed to replace."""
    with writing(out_dir):
        nearest = next(path for path in out_dir.absolute().parents if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        is_export = not out_dir.exists() or (out_dir / MANIFEST).is_file()
        is_foreign = not is_export and (out_dir.is_file() or any(out_dir.iterdir()))
    if is_foreign:
        raise ConfigError(f"export.dir = {out_dir} holds other files, and an export replaces it. Choose a new folder.")


def write_sums(folder: Path) -> None:
    """Writes SHA256SUMS of all files below `folder`, as `sha256sum --check` reads it."""
    names = sorted({path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {SUMS})
    (folder / SUMS).write_text("".join(f"{sha256(folder / name)}  {name}\n" for name in names))


def wrong_sums(folder: Path) -> list[str]:
    """What is wrong with the files below `folder` according to SHA256SUMS: altered, missing or not listed ones."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return [f"{SUMS} cannot be read ({error})"]
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {SUMS}
    found = [f"{name} is missing" for name in sorted(listed.keys() - there)]
    found += [f"{name} is not in {SUMS}" for name in sorted(there - listed.keys())]
    altered = [name for name in sorted(there & listed.keys()) if sha256(folder / name) != listed[name]]
    return found + [f"{name} was altered: its sha256 is not that of {SUMS}" for name in altered]


def put_in_place(folder: Path, out_dir: Path) -> None:
    """Renames `folder` to `out_dir`; an earlier export is out of the way for two renames at most."""
    for path in (*folder.rglob("*"), folder):
        _to_disk(path)
    old = beside(out_dir, "old")
    try:
        if out_dir.exists():
            os.rename(out_dir, old)
        os.rename(folder, out_dir)
    except BaseException:
        recover(out_dir)
        raise
    _to_disk(out_dir.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(out_dir: Path) -> None:
    """Puts back an export that a crash between the two renames of `put_in_place` left aside."""
    old = beside(out_dir, "old")
    if old.exists() and not out_dir.exists():
        os.rename(old, out_dir)
    shutil.rmtree(old, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Without it a power cut can leave the new name in place and the content not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
