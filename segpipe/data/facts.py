"""What is known of the files of a data set, so that each is read once, whatever the number of checks.

A fact holds as long as size and times of its file stay the same. Facts are kept in
FOLDER/.segpipe-cache/facts, or in the user's cache if the folder cannot be written, so
that the next start reads what changed. A fault is never kept: its file is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import PIL

from segpipe.data.readers import (
    Header,
    MaskValues,
    read_header,
    read_image,
    read_mask,
    values_of,
)
from segpipe.errors import CheckpointError
from segpipe.files import write_atomically

CACHE = ".segpipe-cache/facts"  # no reader of a data set looks into hidden folders
# Raise the number when a reader returns something else; so may new decoders.
FORMAT = f"1 {cv2.__version__} {PIL.__version__}"
# A file that changes twice within a tick of the clock (4 ms, on some file systems 10)
# has the same times: what was read of it within this time is not kept.
SETTLED_NS = 50_000_000
State = tuple[int, int, int]  # size, time of change of the content and of the inode


class Known(NamedTuple):
    """What was read of a file in this state."""

    state: State
    header: Header | None = None
    decodes: bool = False  # all of it
    values: MaskValues | None = None


class Facts:
    """Facts of the files below one folder. Pickled as its path."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.edges = False  # whether masks are also asked what lies along their edges
        self._files: dict[str, Known] | None = None
        self._learned: dict[str, Known] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return facts_of, (self.root,)

    def header(self, path: str) -> Header:
        """Header of a picture file. Raises DataError for a damaged one."""
        known = self._known(path)
        header = known.header
        if header is None:
            header = read_header(path)
            self._learn(path, known._replace(header=header))
        return header

    def values(self, path: str) -> MaskValues:
        """What a mask file holds. Raises DataError for a damaged file."""
        known = self._known(path)
        values = known.values
        if values is None or (self.edges and values.between is None):
            mask = read_mask(path)
            values = values_of(mask, edges=self.edges)
            self._learn(path, known._replace(header=mask.header, values=values))
        return values

    def check_image(self, path: str) -> bool:
        """Whether the image had to be decoded to know that it can be. Raises DataError for a damaged one."""
        known = self._known(path).decodes
        if not known:
            read_image(path)
        return not known

    def decodes(self, path: str) -> None:
        """Note that all of an image can be decoded."""
        self._learn(path, self._known(path)._replace(decodes=True))

    def keep(self) -> None:
        """Write what was learned; of a folder that cannot be written, nothing is kept."""
        if not self._learned:
            return
        # Other processes may have written meanwhile.
        self._files = self._load() | (self._files or {}) | self._learned
        text = json.dumps([FORMAT, self._files], separators=(",", ":")).encode()
        for path in self._places():
            with suppress(OSError, CheckpointError):
                if path.name == "facts" and not os.stat(self.root).st_mode & 0o222:
                    continue  # read-only, though an administrator could write
                write_atomically(path, text)
                self._learned = {}
                return

    def _known(self, path: str) -> Known:
        if self._files is None:
            self._files = self._load()
        try:
            now = os.stat(path)
        except OSError:  # the reader says what is wrong
            return Known((-1, 0, 0))
        state = (now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        key = self._key(path)
        known = self._learned.get(key) or self._files.get(key)
        return known if known and known.state == state else Known(state)

    def _learn(self, path: str, known: Known) -> None:
        if time.time_ns() - max(known.state[1:]) > SETTLED_NS:
            self._learned[self._key(path)] = known

    def _key(self, path: str) -> str:
        """Below the folder, so that a data set can be moved with its facts."""
        return path.removeprefix(f"{self.root}/")

    def _places(self) -> Iterator[Path]:
        yield Path(self.root) / CACHE
        with suppress(RuntimeError):  # no home
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            name = hashlib.sha256(os.path.abspath(self.root).encode()).hexdigest()
            yield folder / "segpipe" / f"facts-{name[:16]}"

    def _load(self) -> dict[str, Known]:
        """The facts that were kept; none if there is no file, or it is torn or of another format."""
        for path in self._places():
            with suppress(OSError, ValueError):
                written_as, files = json.loads(path.read_bytes())
                if written_as == FORMAT:
                    return {key: _known(*row) for key, row in files.items()}
        return {}


@cache
def facts_of(root: str) -> Facts:
    """The facts of a folder: one object for all splits and all checks of a process."""
    return Facts(root)


def _known(
    state: list[int], header: list[Any] | None, decodes: bool, values: list[Any] | None
) -> Known:
    return Known(
        (state[0], state[1], state[2]),
        None if header is None else Header(*header),
        decodes,
        None if values is None else MaskValues.of_json(values),
    )
