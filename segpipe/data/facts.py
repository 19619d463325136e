"""What is known of the files of a data set, so that each is read once, whatever the number of checks.

A fact holds as long as size and times of its file stay the same. Facts are kept in
FOLDER/.segpipe-cache/facts, or in the user's cache if the folder cannot be written, so
that the next start reads what changed. A fault is never kept: its file is read again.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import PIL

from segpipe.data.readers import (
    Check,
    Header,
    MaskValues,
    State,
    anything,
    image_of,
    mask_of,
    read_file,
    read_header,
    state_of,
    values_of,
)
from segpipe.errors import CheckpointError
from segpipe.files import read_json, sha256_of, write_atomically

CACHE = ".segpipe-cache/facts"  # no reader of a data set looks into hidden folders
# Raise the number when a reader returns something else; so may new decoders.
FORMAT = f"4 {cv2.__version__} {PIL.__version__}"
# A file that changes twice within a tick of the clock (4 ms, on some file systems 10)
# has the same times: what was read of it within this time is not kept.
SETTLED_NS = 50_000_000


class Known(NamedTuple):
    """What was read of a file in this state."""

    state: State
    header: Header
    # Empty: only the header was read, else all of it, and it can be decoded.
    sha256: str = ""
    values: MaskValues = MaskValues("", [], True)  # of a mask


class Facts:
    """Facts of the files below one folder. Pickled as its path."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._news = False

    def __reduce__(self) -> tuple[Any, ...]:
        return facts_of, (self.root,)

    @cached_property
    def _files(self) -> dict[str, Known]:
        """What was read of each file, now or at an earlier start, by its path from the folder."""
        return self._kept()

    def header(self, path: str) -> Header:
        """Header of a picture file. Raises DataError for a damaged one."""
        known = self._known(path) or self._learn(
            path, Known(state_of(path), read_header(path))
        )
        return known.header

    def whole(self, path: str, check: Check = anything, *, mask: bool) -> Known:
        """What is known of an image or mask file that was decoded. Raises DataError for a damaged one.

        `check` may refuse its header before it is decoded.
        """
        known = self._known(path)
        if known and known.sha256 and (known.values.kind or not mask):
            check(known.header)
            return known

        state, content = state_of(path), read_file(path)
        digest = sha256_of(content)
        if mask:
            found = mask_of(content, path, check)
            known = Known(state, found.header, digest, values_of(found))
        else:
            header, _ = image_of(content, path, check)
            known = Known(state, header, digest)
        return self._learn(path, known)

    def hashes(self, paths: Iterable[str]) -> dict[str, str]:
        """SHA-256 of those files of which all was read, as they were then."""
        return {
            path: known.sha256
            for path in paths
            if (known := self._known(path)) and known.sha256
        }

    def forget(self, path: str) -> None:
        """Drop what was learned of a file."""
        self._files.pop(self.below(path), None)

    def keep(self) -> None:
        """Write what was learned; of a folder that cannot be written, nothing is kept."""
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
        """What is known of the file as it is now."""
        known = self._files.get(self.below(path))
        return known if known and known.state == state_of(path) else None

    def _learn(self, path: str, known: Known) -> Known:
        if time.time_ns() - max(known.state[1:]) > SETTLED_NS:
            self._files[self.below(path)] = known
            self._news = True
        return known

    def below(self, path: str) -> str:
        """The path from the folder.

        What is kept by it stays true where a data set is moved.
        """
        folder = f"{self.root.rstrip('/')}/"
        below = path.removeprefix(folder)  # relpath takes 20 times as long
        return below if below != path else os.path.relpath(path, folder)

    def _places(self) -> Iterator[Path]:
        yield Path(self.root) / CACHE
        with suppress(RuntimeError):  # no home
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            name = sha256_of(os.path.abspath(self.root).encode())
            yield folder / "segpipe" / f"facts-{name[:16]}"

    def _kept(self) -> dict[str, Known]:
        """The facts that were kept; none if there is no file, or it is torn or of another format."""
        for path in self._places():
            with suppress(OSError, ValueError):
                written_as, files = read_json(path)
                if written_as == FORMAT:
                    return {
                        path: Known(
                            state,
                            Header(*header),
                            digest,
                            MaskValues(*values),
                        )
                        for path, (state, header, digest, values) in files.items()
                    }
        return {}


@cache
def facts_of(root: str) -> Facts:
    """The facts of a folder: one object for all splits and all checks of a process."""
    return Facts(root)
