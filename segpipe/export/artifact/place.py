"""The exported folder on disk: checksums, and publishing it in one rename."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from segpipe.errors import ConfigError, listed
from segpipe.files import file_sha256, sync
from segpipe.runtime.artifact import SUMS, ArtifactError, read_file, read_sums


def beside(out_dir: Path, suffix: str) -> Path:
    """Sibling path of `out_dir`, on the same file system, so that a rename is atomic."""
    return out_dir.with_name(f"{out_dir.name}.{suffix}")


@contextlib.contextmanager
def writing(out_dir: Path) -> Iterator[None]:
    """Turns an OSError while writing to `out_dir` into ConfigError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"export.dir = {out_dir} cannot be written ({reason}). Choose another folder."
        ) from error


def check_place(out_dir: Path) -> None:
    """Raises ConfigError when `out_dir` cannot be written, or holds files that no export wrote."""
    with writing(out_dir):
        sums = out_dir / SUMS
        own = sums.read_text(errors="replace") if sums.is_file() else ""
        # No export: it may be somebody's home, which takes minutes to walk.
        entries = os.scandir(out_dir) if out_dir.exists() else ()
        # Nor are empty folders files.
        top = {each.name for each in entries if not each.is_dir() or os.listdir(each)}
        found = _files(out_dir) if own else top
        others = [name for name in found if f"  {name}\n" not in own]
        if others:
            raise ConfigError(
                f"export.dir = {out_dir} holds other files ({listed(sorted(others))}), and an export replaces it. "
                "Choose a new folder, or move them."
            )
        nearest = next(path for path in out_dir.absolute().parents if path.exists())
        tempfile.TemporaryFile(dir=nearest).close()


def write_sums(folder: Path) -> None:
    """Writes SHA256SUMS of all files below `folder`, in the format of `sha256sum --check`."""
    lines = [
        f"{file_sha256(folder / name)}  {name}\n" for name in sorted(_files(folder))
    ]
    (folder / SUMS).write_text("".join(lines))


def sums_line(folder: Path) -> str:
    """A line with the digest of SHA256SUMS, which covers every file: folders with the same digest are equal."""
    return f"{SUMS} has sha256 {file_sha256(folder / SUMS)}"


def sums_problems(folder: Path) -> list[str]:
    """Differences between the files below `folder` and SHA256SUMS: missing, unlisted and altered files."""
    try:
        sums = read_sums(folder)
    except ArtifactError as error:
        return [str(error)]
    unlisted = sorted(_files(folder) - sums.keys())
    problems = [f"{name} is not in {SUMS}" for name in unlisted]
    for name in sorted(sums):
        try:
            read_file(folder, name, sums)
        except ArtifactError as error:
            problems.append(str(error))
    return problems


def _files(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in files} - {SUMS}


def put_in_place(folder: Path, out_dir: Path) -> None:
    """Renames `folder` to `out_dir`, replacing an earlier export; an error restores the earlier one."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
    old = beside(out_dir, "replaced")
    try:
        if out_dir.exists():
            os.rename(out_dir, old)
        os.rename(folder, out_dir)
    except BaseException:
        recover(out_dir)
        raise
    sync(out_dir.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(out_dir: Path) -> None:
    """Restores the earlier export after a crash between the two renames of `put_in_place`."""
    old = beside(out_dir, "replaced")
    if old.exists() and not out_dir.exists():
        os.rename(old, out_dir)
    shutil.rmtree(old, ignore_errors=True)
