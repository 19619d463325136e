"""A pack: the decoded samples of a data set in one file, mapped into memory by every process that reads them.

    FOLDER/pixels   of each sample its image (H, W, 3), then its target (H, W), both uint8 as they lie in memory; in
                    place of the image its file, if data.pack_images=file
    FOLDER/index    a line per sample: a checksum of the line, and a JSON list in the order of PackEntry

Both files only grow. A writer reserves space under a lock, writes the pixels, and adds the line last: a process that
is killed leaves a hole in `pixels` or an unfinished line, which nobody reads. Any number of processes may read and
write at once. Of lines with one key the last one counts.

Before a process delivers an entry for the first time, it compares size and times of both source files (and their
SHA-256 if those differ), and a SHA-256 of the pixels and both source files. What does not agree is read from the source
files, reported by name, and packed again. At each start, problems.py compares some samples with their files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.data_set import Sample, Target
from segpipe.errors import DataError
from segpipe.files import sha256

if TYPE_CHECKING:
    from segpipe.data.catalog import MaskTable
    from segpipe.data.pairs import Pair
    from segpipe.settings.groups import DataConfig

AUTO = ".segpipe-pack"  # below data.root; no reader of a data set looks into hidden folders
# Raise the number when a reader returns other pixels; a decoder may change with OpenCV.
FORMAT = f"3 {cv2.__version__}"
PAGE_BYTES = 4096
# The pack is read-only, or somebody removed it: samples are read from their files.
GIVE_UP = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
Bytes = NDArray[np.uint8]  # (n,)


class PackUse(NamedTuple):
    """Of the samples that a process has read first from a pack, or written to it."""

    intact: int
    replaced: int  # changed or damaged
    added: int


class FileState(NamedTuple):
    """A source file when it was packed."""

    size: int
    time_ns: int
    change_ns: int  # of the inode: cp -p, touch and archives set the time above, nothing sets this one
    sha256: str


class PackEntry(NamedTuple):
    """A line of the index."""

    key: str
    place: int  # of its first byte in the file of pixels
    height: int
    width: int
    file_bytes: int  # of the file of the image; 0: pixels
    sha256: str  # of the key, both source files and the bytes there
    image: FileState
    mask: FileState


class Pack:
    """The pack in `folder`. Small to pickle; a process opens files and map itself, also after a fork."""

    def __init__(self, folder: str, table: str, images: str = "raw") -> None:
        """`table`: what, beside the files, decides about their targets. Raises DataError if there can be no folder."""
        self._images = images
        self.folder = os.path.abspath(folder)
        self.table = table
        self._opened: dict[int, _Opened] = {}  # by process
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"data.pack: {self.folder} cannot be made: {error.strerror}. Set "
                "data.pack=FOLDER to one that can be written, or data.pack=off."
            ) from None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": {}}

    def read(self, pair: Pair, decode: Callable[..., Sample]) -> Sample:
        """The sample; read-only memory of the map if it is packed. Otherwise that of `decode`, which is then packed.

        `decode()` reads both files, `decode(content, target)` neither: the content of the
        image's file is given.
        """
        opened = self._own()
        key = self._key(pair)
        entry = opened.find(key)
        if entry is not None:
            parts = opened.parts(entry)
            if opened.trusted.get(key) != entry or parts is None:
                where = f"{self.folder}: {pair.name}"
                fault = _changed(pair, entry) or _damaged(parts, entry, where)
                if fault:
                    print(
                        f"{fault}. It is read from its files and packed again.",
                        file=sys.stderr,
                    )
                    opened.trusted.pop(key, None)
                    parts = None
            if parts is not None:
                opened.trusted[key] = entry
                image, target = parts
                if entry.file_bytes:
                    return decode(image.tobytes(), target)
                return image.reshape(entry.height, entry.width, 3), target
        before = _times(pair)
        sample = decode()
        states = [
            FileState(*times, sha256(Path(path)))
            for times, path in zip(before, pair[1:], strict=True)
        ]
        content = sample[0].tobytes()
        file = Path(pair.image).read_bytes() if self._images == "file" else b""
        if _times(pair) == before:
            self._add(opened, entry, key, sample, file or content, states)
        return sample

    def find(self, pairs: Sequence[Pair]) -> list[int]:
        """Indices of the pairs that are packed."""
        opened = self._own()
        return [
            index for index, pair in enumerate(pairs) if opened.find(self._key(pair))
        ]

    def use(self) -> PackUse:
        """Of this process."""
        opened = self._own()
        return PackUse(len(opened.trusted), len(opened.replaced), len(opened.added))

    def _key(self, pair: Pair) -> str:
        """Of the files by their paths from this folder, so that a data set can be moved with the pack inside it."""
        paths = [os.path.relpath(path, self.folder) for path in pair[1:]]
        text = "\0".join([FORMAT, self._images, self.table, *paths])
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _own(self) -> _Opened:
        """What this process has opened; files inherited through a fork are left to the parent."""
        process = os.getpid()
        if process not in self._opened:
            # Of several threads, one wins.
            self._opened.setdefault(process, _Opened(self.folder))
        return self._opened[process]

    def _add(
        self,
        opened: _Opened,
        known: PackEntry | None,
        key: str,
        sample: Sample,
        image: bytes,
        states: Sequence[FileState],
    ) -> None:
        """Write a sample, unless another process has done so since `known` was found; not if read-only or gone."""
        content = image + sample[1].tobytes()
        height, width = sample[1].shape
        file_bytes = len(image) if self._images == "file" else 0
        try:
            with _locked(self.folder), self._pixels("ab") as pixels:
                if opened.find(key, news=True) != known:
                    return
                end = os.fstat(pixels.fileno()).st_size
                place = -(-end // PAGE_BYTES) * PAGE_BYTES
                os.ftruncate(pixels.fileno(), place + len(content))
            with self._pixels("r+b") as pixels:
                pixels.seek(place)
                pixels.write(content)
            entry = PackEntry(
                key, place, height, width, file_bytes, "", states[0], states[1]
            )
            entry = entry._replace(sha256=_digest(entry, [memoryview(content)]))
            with _locked(self.folder) as index:
                if opened.find(key, news=True) == known:
                    end = index.tell()
                    torn = end and os.pread(index.fileno(), 1, end - 1) != b"\n"
                    index.write(b"\n" * bool(torn) + _line(entry))
            (opened.added if known is None else opened.replaced).add(key)
        except OSError as error:
            if error.errno in GIVE_UP:
                return
            raise DataError(
                f"{self.folder} cannot take {len(content) / 2**20:.1f} MiB more: "
                f"{error.strerror}. Free some space, set data.pack=FOLDER to a larger "
                "disk, or data.pack=off."
            ) from None

    def _pixels(self, mode: str) -> Any:
        return open(os.path.join(self.folder, "pixels"), mode)


def open_pack(data: DataConfig, table: MaskTable) -> Pack | None:
    """The pack of this data set, made if there is none; None without `data.pack`."""
    if data.pack == "off":
        return None
    folder = f"{data.root}/{AUTO}" if data.pack == "auto" else data.pack
    ids, colors = sorted(table.classes.train_ids.items()), sorted(table.colors.items())
    meaning = (ids, table.kind, colors, table.exif)
    return Pack(folder, repr(meaning), data.pack_images)


class _Opened:
    """Index and map of a pack in one process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.trusted: dict[str, PackEntry] = {}
        self.added: set[str] = set()
        self.replaced: set[str] = set()
        self._entries: dict[str, PackEntry] = {}
        self._file, self._read_to = 0, 0
        self._map: Bytes | None = None

    def find(self, key: str, *, news: bool = False) -> PackEntry | None:
        """The entry of this key; reads what was added to the index if there is none yet, or if `news`."""
        if news or key not in self._entries:
            self._read_on()
        return self._entries.get(key)

    def _read_on(self) -> None:
        start = self._read_to  # two threads may read the same lines
        text = b""
        # OSError: none yet, or of another user: `_add` says what is wrong with it.
        with (
            suppress(OSError),
            open(os.path.join(self.folder, "index"), "rb") as index,
        ):
            state = os.fstat(index.fileno())
            if state.st_size < start or state.st_ino != self._file:
                # Somebody has removed the pack.
                start, self._file, self._map = 0, state.st_ino, None
                self._entries.clear()
                self.trusted.clear()
            if state.st_size > start:
                index.seek(start)
                text = index.read()
            whole = text[: text.rfind(b"\n") + 1]
            for entry in map(_entry, whole.splitlines()):
                if entry is not None:
                    self._entries[entry.key] = entry
            self._read_to = start + len(whole)

    def parts(self, entry: PackEntry) -> tuple[Bytes, Target] | None:
        """Bytes of the image or its file, and target (H, W), read-only in the map; None if the file is too short."""
        area = entry.height * entry.width
        middle = entry.place + (entry.file_bytes or 3 * area)
        end = middle + area
        if self._map is None or end > len(self._map):
            try:
                with open(os.path.join(self.folder, "pixels"), "rb") as pixels:
                    if os.fstat(pixels.fileno()).st_size < end:
                        return None
                    content = mmap.mmap(pixels.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError:
                return None
            self._map = np.frombuffer(content, np.uint8)
        target = self._map[middle:end].reshape(entry.height, entry.width)
        return self._map[entry.place : middle], target


@contextmanager
def _locked(folder: str) -> Iterator[BinaryIO]:
    """The index, opened for appending, while no other process or thread has it; a killed one holds no lock."""
    with open(os.path.join(folder, "index"), "a+b") as index:
        fcntl.flock(index, fcntl.LOCK_EX)
        index.seek(0, os.SEEK_END)
        yield index


def _line(entry: PackEntry) -> bytes:
    text = json.dumps(entry, separators=(",", ":"))
    return f"{_checksum(text)} {text}\n".encode()


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _entry(line: bytes) -> PackEntry | None:
    """None for a line that is damaged, or in another format."""
    checksum, _, text = line.decode("latin-1").partition(" ")
    if checksum != _checksum(text):
        return None
    try:
        key, place, height, width, file_bytes, digest, image, mask = json.loads(text)
        states = FileState(*image), FileState(*mask)
        return PackEntry(key, place, height, width, file_bytes, digest, *states)
    except (TypeError, ValueError):
        return None


def _digest(entry: PackEntry, parts: Sequence[Any]) -> str:
    """Binds the bytes of an entry to its files: an entry that was copied to another key does not agree."""
    digest = hashlib.sha256()
    for text in (entry.key, entry.image.sha256, entry.mask.sha256):
        digest.update(text.encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _times(pair: Pair) -> list[tuple[int, int, int]]:
    """Size and times of change of image and mask, as in FileState."""
    try:
        states = [os.stat(path) for path in pair[1:]]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None
    return [(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]


def _changed(pair: Pair, entry: PackEntry) -> str:
    """A message if a source file is not the one that was packed."""
    states = (entry.image, entry.mask)
    for path, now, packed in zip(pair[1:], _times(pair), states, strict=True):
        if now == packed[:3]:
            continue
        if now[0] != packed.size or sha256(Path(path)) != packed.sha256:
            return f"{path} was changed after it was packed"
    return ""


def _damaged(parts: tuple[Bytes, Target] | None, entry: PackEntry, where: str) -> str:
    """A message if the pixels are not those that were packed."""
    if parts is None:
        return f"{where} is truncated"
    return "" if _digest(entry, parts) == entry.sha256 else f"{where} is damaged"
