"""Facts about the files of a data set, kept so that all checks together read each file only once.

A fact is valid as long as size and times of its file do not change. Facts are stored in
FOLDER/.segpipe-cache/facts, or in the user's cache if the folder is not writable, so
that the next start reads only changed files. Faults are never stored: such files are read again.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import PIL

from segpipe.data.readers import (
    Check,
    Header,
    anything,
    image_of,
    read_file,
    read_header,
)
from segpipe.errors import CheckpointError
from segpipe.files import read_json, sha256_of, write_atomically

CACHE = ".segpipe-cache/facts"  # readers of a data set skip hidden folders
# Format of facts and packs. Raise the number when a reader's result changes; new decoders may change it too.
FORMAT = f"7 {cv2.__version__} {PIL.__version__}"
# A file that changes twice within a clock tick (4 ms, on some file systems 10) keeps its
# times, so facts about a file that changed more recently than this are not stored.
SETTLED_NS = 50_000_000

# Size, and modification times of content and inode: cp -p, touch and archives set the first
# time, nothing sets the second.
State = list[int]


def state_of(path: str) -> State:
    """Current state of a file."""
    try:
        now = os.stat(path)
    except OSError:  # the reader reports what is wrong
        return [-1, 0, 0]
    return [now.st_size, now.st_mtime_ns, now.st_ctime_ns]


class Known(NamedTuple):
    """Facts about a file in this state."""

    state: State
    header: Header
    # Empty: only the header was read. Otherwise the whole file was read and can be decoded.
    sha256: str = ""
    # Of a mask: `MaskTable.key` for which its pixels were counted, and these counts, as `counts_of`.
    table: str = ""
    content: list[int] = []  # noqa: RUF012


class Facts:
    """Facts of the files below one folder. Pickled as its path."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._news = False

    def __reduce__(self) -> tuple[Any, ...]:
        return facts_of, (self.root,)

    @cached_property
    def _files(self) -> dict[str, Known]:
        """Facts about each file, from this or an earlier start, by path relative to the folder."""
        return self._kept()

    def header(self, path: str) -> Header:
        """Header of an image file. Raises DataError for a damaged one."""
        known = self._known(path) or self._learn(
            path, Known(state_of(path), read_header(path))
        )
        return known.header

    def whole(
        self,
        path: str,
        check: Check = anything,
        key: str = "",
        read: Callable[..., tuple[Header, Any]] = image_of,
    ) -> Known:
        """Facts about an image; decodes the file if they are not known.

        For a mask, `read` also counts the pixels of its classes, and `key` is the `MaskTable.key` for which they are
        counted. `check` may refuse the file by its header before it is decoded. Raises DataError for a damaged file,
        and what `read` raises.
        """
        known = self._known(path)
        if known and known.sha256 and key in ("", known.table):
            check(known.header)
            return known

        state, content = state_of(path), read_file(path)
        header, counts = read(content, path, check)
        known = Known(state, header, sha256_of(content), key, counts if key else [])
        return self._learn(path, known)

    def hashes(self, paths: Iterable[str]) -> dict[str, str]:
        """SHA-256 of the unchanged files that were read completely."""
        return {
            path: known.sha256
            for path in paths
            if (known := self._known(path)) and known.sha256
        }

    def forget(self, path: str) -> None:
        """Drop the facts about a file."""
        self._files.pop(self._below(path), None)

    def keep(self) -> None:
        """Store new facts, if a cache folder is writable."""
        if not self._news:
            return
        # Other processes may have written meanwhile.
        files = self._kept() | self._files
        text = json.dumps([FORMAT, files], separators=(",", ":")).encode()
        for path in self._places():
            with suppress(OSError, CheckpointError):
                if path.name == "facts" and not os.stat(self.root).st_mode & 0o222:
                    continue  # read-only, though an administrator could write
                write_atomically(path, text)
                self._news = False
                return

    def _known(self, path: str) -> Known | None:
        """Facts about the file in its current state."""
        known = self._files.get(self._below(path))
        return known if known and known.state == state_of(path) else None

    def _learn(self, path: str, known: Known) -> Known:
        if time.time_ns() - max(known.state[1:]) > SETTLED_NS:
            self._files[self._below(path)] = known
            self._news = True
        return known

    def named(self, paths: Iterable[str]) -> dict[str, str]:
        """The paths by their paths below the folder: facts stored by these stay valid if the data set is moved."""
        return {self._below(path): path for path in paths}

    def _below(self, path: str) -> str:
        folder = f"{self.root.rstrip('/')}/"
        below = path.removeprefix(folder)  # relpath is 20 times slower
        return below if below != path else os.path.relpath(path, folder)

    def _places(self) -> Iterator[Path]:
        yield Path(self.root) / CACHE
        with suppress(RuntimeError):  # no home
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            name = sha256_of(os.path.abspath(self.root).encode())
            yield folder / "segpipe" / f"facts-{name[:16]}"

    def _kept(self) -> dict[str, Known]:
        """The stored facts; none if the file is missing, damaged or has another format."""
        for path in self._places():
            with suppress(OSError, ValueError):
                written_as, files = read_json(path)
                if written_as == FORMAT:
                    return {
                        path: Known(state, Header(*header), *whole)
                        for path, (state, header, *whole) in files.items()
                    }
        return {}


@cache
def facts_of(root: str) -> Facts:
    """The facts of a folder: one object per process, for all splits and checks."""
    return Facts(root)
