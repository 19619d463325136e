"""A pack: the decoded samples of a data set, each in a file that reading processes map into memory.

    FOLDER/KEY    a page with a PackEntry in JSON, the image (H, W, 3), the target (H, W), uint8 in memory order

A file is written to a temporary name and then renamed, so any number of processes may read and write, or be killed.

Before a process delivers an entry for the first time, it checks size and times of both source files (and their
SHA-256 if those differ), and a SHA-256 of the entry and its pixels. An entry that fails is reported by name, read from
the source files, and packed again. At each start, problems.py compares some samples with their files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from segpipe.data import Sample, Uint8
from segpipe.data.facts import FORMAT, State, state_of
from segpipe.errors import DataError
from segpipe.files import file_sha256

if TYPE_CHECKING:
    from segpipe.data.pairs import Pair

AUTO = ".segpipe-pack"  # below data.root; readers of a data set skip hidden folders
# Samples checked once and kept mapped; others are checked at each read. A process may have 65,530 maps.
MOST_MAPS = 40_000
PAGE_BYTES = 4096  # an entry takes about 400
# The pack is read-only or was removed: samples are read from their files.
GIVE_UP = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


class PackEntry(NamedTuple):
    """Header of a file of a pack."""

    key: str
    height: int
    width: int
    states: list[State]  # image and mask when they were packed
    sha256: list[str]  # image and mask


class Pack:
    """The pack in `folder`; small to pickle."""

    def __init__(self, folder: str, table: str) -> None:
        """`table`: the class table that, with the files, determines targets. Raises DataError if mkdir fails."""
        self.folder = os.path.abspath(folder)
        self.table = table
        self._ready: dict[str, Sample] = {}  # samples whose files stay mapped
        self._use: dict[str, str] = {}  # result of the first read of each key
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"data.pack: {self.folder} cannot be created: {error.strerror}. Set "
                "data.pack=FOLDER to a writable folder, or data.pack=off."
            ) from None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_ready": {}, "_use": {}}

    def read(self, pair: Pair, decode: Callable[[], Sample]) -> Sample:
        """The sample, as read-only mapped memory if it is packed; otherwise from `decode`, and then packed."""
        key = self._key(pair)
        if key in self._ready:
            return self._ready[key]

        content = self._mapped(key)
        if content is not None:
            try:
                sample = self._checked(key, pair, content)
            except ValueError as fault:
                again = "Reading it from its files and packing it again."
                print(f"{fault}. {again}", file=sys.stderr)
            else:
                self._use.setdefault(key, "intact")
                if len(self._ready) < MOST_MAPS:
                    self._ready[key] = sample
                return sample

        before = _states(pair)
        sample = decode()
        digests = [file_sha256(path) for path in pair[1:]]
        if _states(pair) == before:
            height, width = sample[1].shape
            entry = PackEntry(key, height, width, before, digests)
            if self._write(entry, b"".join(part.tobytes() for part in sample)):
                self._use[key] = "added" if content is None else "replaced"
        return sample

    def holds(self, pair: Pair) -> bool:
        """Whether the pack has a file for this pair."""
        return os.path.exists(os.path.join(self.folder, self._key(pair)))

    def use(self) -> Counter[str]:
        """Number of samples that this process found "intact", or "replaced" or "added"."""
        return Counter(self._use.values())

    def _key(self, pair: Pair) -> str:
        """Key of a pair, from paths relative to the pack, so that a data set can be moved with its pack."""
        paths = [os.path.relpath(path, self.folder) for path in pair[1:]]
        text = "\0".join([FORMAT, self.table, *paths])
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _mapped(self, key: str) -> Uint8 | None:
        """All bytes of a file; None if it is missing or unreadable."""
        try:
            return np.asarray(np.memmap(os.path.join(self.folder, key), mode="r"))
        except OSError:
            return None
        except ValueError:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)

    def _checked(self, key: str, pair: Pair, content: Uint8) -> Sample:
        """The sample in a file of the pack. Raises ValueError if it must not be used."""
        damaged = ValueError(f"{self.folder}: {pair.name} is damaged")
        pixels = content[PAGE_BYTES:]
        try:
            digest, text = json.loads(content[:PAGE_BYTES].tobytes())
            entry = PackEntry(*json.loads(text))
        except (TypeError, ValueError):
            raise damaged from None
        if digest != _digest(text, pixels):
            raise damaged
        if entry.key != key:
            raise ValueError(f"{self.folder}: {pair.name} holds a different sample")

        facts = zip(pair[1:], _states(pair), entry.states, entry.sha256, strict=True)
        for path, now, then, packed in facts:
            if now != then and (now[0] != then[0] or file_sha256(path) != packed):
                raise ValueError(f"{path} has changed since it was packed")

        size = entry.height, entry.width
        image, target = np.split(pixels, [3 * entry.height * entry.width])
        return image.reshape(*size, 3), target.reshape(size)

    def _write(self, entry: PackEntry, pixels: bytes) -> bool:
        """Write a sample; returns False if the pack is read-only or gone."""
        text = json.dumps(entry)
        page = json.dumps([_digest(text, pixels), text]).encode()
        path = os.path.join(self.folder, entry.key)
        aside = f"{path}.{token_hex(8)}.tmp"
        try:
            with open(aside, "wb") as file:
                file.write(page.ljust(PAGE_BYTES))
                file.write(pixels)
            os.replace(aside, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(aside)
            if error.errno in GIVE_UP:
                return False
            raise DataError(
                f"{self.folder} has no room for {len(pixels) / 2**20:.1f} MiB more: {error.strerror}. Free some space, "
                "set data.pack=FOLDER to a larger disk, or data.pack=off."
            ) from None

        return True


def _digest(text: str, pixels: Any) -> str:
    """SHA-256 of an entry's text and pixels together."""
    digest = hashlib.sha256(text.encode())
    digest.update(pixels)
    return digest.hexdigest()


def _states(pair: Pair) -> list[State]:
    """Current states of image and mask."""
    return [state_of(path) for path in pair[1:]]
