"""Running hashes of a ledger file: what was written stays what it is, or the place where it changed is found.

Beside `ledger/rank00.bin` lies `rank00.seal`: a line for each time the file was brought to the disk (every checkpoint,
and the end), with the SHA-256 of the file up to there and the number of bytes. The last hash stands for the whole file;
the lines before it say between which two checkpoints a change lies. Checksums inside the rows find damage; the hashes
find rows that were replaced together with their checksums, and rows cut off at the end.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".seal"
CHUNK = 1 << 22


class Seal(NamedTuple):
    """SHA-256 of the first `size` bytes of a file."""

    sha256: str
    size: int


class RunningHash:
    """SHA-256 of a file that only grows, kept while it is written."""

    def __init__(self, path: Path) -> None:
        """Of `path` as it is now; nothing when it does not exist."""
        self._seals, self._hash, self._size = path.with_suffix(SUFFIX), hashlib.sha256(), 0
        if path.exists():
            with path.open("rb") as file:
                while content := file.read(CHUNK):
                    self.add(content)
        self._written = -1  # size at the last seal

    def add(self, content: bytes) -> None:
        """Go on by what was appended to the file."""
        self._hash.update(content)
        self._size += len(content)

    def seal(self) -> None:
        """Append the hash of the file as it is now to the seals, on the disk. Raises OSError."""
        if self._size == self._written:
            return
        torn = self._seals.exists() and not self._seals.read_bytes().endswith(b"\n")
        line = f"{self._hash.hexdigest()}  {self._size}\n"
        with self._seals.open("a") as file:
            file.write(f"\n{line}" if torn else line)
            file.flush()
            os.fsync(file.fileno())
        self._written = self._size


def read_seals(path: Path) -> list[Seal]:
    """Seals of the ledger file `path`, oldest first; a line that a crash left torn is passed over."""
    seals = path.with_suffix(SUFFIX)
    parts = [line.split() for line in seals.read_text(errors="replace").splitlines()] if seals.is_file() else []
    return [Seal(part[0], int(part[1])) for part in parts if len(part) == 2 and part[1].isdecimal()]


def first_broken(path: Path, seals: list[Seal]) -> tuple[int, int] | None:
    """Bytes (from, to) of `path` between which it is not what it was when it was sealed; None where it is.

    What follows the last seal is not covered: a crash may have ended the run there.
    """
    running, place = hashlib.sha256(), 0
    with path.open("rb") as file:
        for seal in sorted(seals, key=lambda each: each.size):
            before = place
            while place < seal.size and (content := file.read(min(CHUNK, seal.size - place))):
                running.update(content)
                place += len(content)
            if running.hexdigest() != seal.sha256:
                return before, seal.size
    return None
