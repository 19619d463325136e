"""A pack: the decoded samples of a data set in one file, mapped into memory by every process that reads them.

    FOLDER/pixels   of each sample its image (H, W, 3), then its target (H, W), both uint8 as they lie in memory; in
                    place of the image its file, if data.pack_images=file
    FOLDER/index    a line per sample: a checksum of the line, and a JSON list in the order of PackEntry

Both files only grow. A writer reserves space under a lock, writes the pixels, and adds the line last: a process that
is killed leaves a hole in `pixels` or an unfinished line, which nobody reads. Any number of processes may read and
write at once. Of lines with one key the last one counts.

Nothing in a pack is trusted: before a process delivers an entry of it for the first time, it compares size and times
of both source files (and their SHA-256 if those differ), and the SHA-256 of the pixels. What does not agree is read
from the source files, reported by name, and packed again. So a pack never changes a bit of what is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.errors import DataError
from segpipe.files import sha256

if TYPE_CHECKING:
    from segpipe.data.catalog import MaskTable
    from segpipe.data.pairs import Pair
    from segpipe.settings.groups import DataConfig

AUTO = ".segpipe-pack"  # below data.root; no reader of a data set looks into hidden folders
FORMAT = f"2 {cv2.__version__}"  # raise the number when a reader returns other pixels; a decoder may change with OpenCV
PAGE_BYTES = 4096
Image = NDArray[np.uint8]  # (H, W, 3)
Target = NDArray[np.uint8]  # (H, W)
Sample = tuple[Image, Target]


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
    sha256: str  # of its bytes there
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
                f"data.pack: {self.folder} cannot be made: {error.strerror}. Set data.pack=FOLDER to one that can be "
                f"written, or data.pack=off."
            ) from None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": {}}

    def read(self, pair: Pair, decode: Callable[..., Sample]) -> Sample:
        """The sample; read-only memory of the map if it is packed. Otherwise that of `decode`, which is then packed.

        `decode()` reads both files, `decode(content, target)` neither: the content of the image's file is given.
        """
        opened = self._own()
        key = self._key(pair)
        entry = opened.find(key)
        if entry is not None:
            found = opened.parts(entry)
            if opened.trusted.get(key) == entry and found is not None:
                return _sample(entry, *found, decode)
            fault = _changed(pair, entry) or _damaged(
                found, entry, f"{self.folder}: {pair.name}"
            )
            if fault is None:
                assert found is not None
                opened.trusted[key] = entry
                return _sample(entry, *found, decode)
            print(
                f"{fault}. It is read from its files and packed again.", file=sys.stderr
            )
            opened.trusted.pop(key, None)
        before = _times(pair)
        sample = decode()
        image, mask = (
            FileState(*times, sha256(Path(path)))
            for times, path in zip(before, pair[1:], strict=True)
        )
        file = Path(pair.image).read_bytes() if self._images == "file" else b""
        if _times(pair) == before:
            self._add(opened, entry, key, sample, file, image, mask)
        return sample

    def use(self) -> PackUse:
        """Of this process."""
        opened = self._own()
        return PackUse(len(opened.trusted), len(opened.replaced), len(opened.added))

    def _key(self, pair: Pair) -> str:
        """Of the files by their paths from this folder, so that a data set can be moved with the pack inside it."""
        paths = [os.path.relpath(path, self.folder) for path in pair[1:]]
        return hashlib.blake2b(
            "\0".join([FORMAT, self._images, self.table, *paths]).encode(),
            digest_size=12,
        ).hexdigest()

    def _own(self) -> _Opened:
        """What this process has opened; files inherited through a fork are left to the parent."""
        process = os.getpid()
        if process not in self._opened:
            self._opened.setdefault(
                process, _Opened(self.folder)
            )  # of several threads, one wins
        return self._opened[process]

    def _add(
        self,
        opened: _Opened,
        known: PackEntry | None,
        key: str,
        sample: Sample,
        file: bytes,
        image: FileState,
        mask: FileState,
    ) -> None:
        """Write a sample, unless another process has done so since `known` was found; not if read-only or gone."""
        pixels_of_image, target = (
            np.ascontiguousarray(part).data.cast("B") for part in sample
        )
        whole = [memoryview(file) if file else pixels_of_image, target]
        try:
            with (
                _locked(self.folder),
                open(os.path.join(self.folder, "pixels"), "ab") as pixels,
            ):
                if opened.find(key, news=True) != known:
                    return
                place = -(-os.fstat(pixels.fileno()).st_size // PAGE_BYTES) * PAGE_BYTES
                os.ftruncate(pixels.fileno(), place + sum(map(len, whole)))
            digest = hashlib.sha256()
            with open(
                os.path.join(self.folder, "pixels"), "r+b", buffering=0
            ) as pixels:
                pixels.seek(place)
                for part in whole:
                    digest.update(part)
                    while part:
                        part = part[pixels.write(part) :]
            height, width = sample[1].shape
            entry = PackEntry(
                key, place, height, width, len(file), digest.hexdigest(), image, mask
            )
            with _locked(self.folder) as index:
                if opened.find(key, news=True) == known:
                    torn = (
                        index.tell()
                        and os.pread(index.fileno(), 1, index.tell() - 1) != b"\n"
                    )
                    index.write(b"\n" * bool(torn) + _line(entry))
            (opened.added if known is None else opened.replaced).add(key)
        except OSError as error:
            if error.errno in (
                errno.EACCES,
                errno.EPERM,
                errno.EROFS,
                errno.ENOENT,
            ):  # ENOENT: somebody removed it
                return
            raise DataError(
                f"{self.folder} cannot take {sum(map(len, whole)) / 2**20:.1f} MiB more: {error.strerror}. Free some "
                f"space, set data.pack=FOLDER to a larger disk, or data.pack=off."
            ) from None


def open_pack(data: DataConfig, table: MaskTable) -> Pack | None:
    """The pack of this data set, made if there is none; None without `data.pack`."""
    if data.pack == "off":
        return None
    folder = f"{data.root}/{AUTO}" if data.pack == "auto" else data.pack
    meaning = (
        sorted(table.classes.train_ids.items()),
        table.kind,
        sorted(table.colors.items()),
        table.exif,
    )
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
        self._map: NDArray[np.uint8] | None = None

    def find(self, key: str, *, news: bool = False) -> PackEntry | None:
        """The entry of this key; reads what was added to the index if there is none yet, or if `news`."""
        if news or key not in self._entries:
            self._read_on()
        return self._entries.get(key)

    def _read_on(self) -> None:
        start = self._read_to  # two threads may read the same lines
        try:
            with open(os.path.join(self.folder, "index"), "rb") as index:
                state = os.fstat(index.fileno())
                size = state.st_size
                if (
                    size < start or state.st_ino != self._file
                ):  # somebody has removed the pack
                    start, self._file, self._map = 0, state.st_ino, None
                    self._entries.clear()
                    self.trusted.clear()
                index.seek(start)
                text = index.read() if size > start else b""
        except (
            OSError
        ):  # none yet, or of another user: `_add` says what is wrong with it
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._entries |= {
            entry.key: entry
            for entry in map(_entry, whole.splitlines())
            if entry is not None
        }
        self._read_to = start + len(whole)

    def parts(self, entry: PackEntry) -> tuple[NDArray[np.uint8], Target] | None:
        """Bytes of the image or its file, and target (H, W), read-only in the map; None if the file is too short."""
        area = entry.height * entry.width
        middle = entry.place + (entry.file_bytes or 3 * area)
        if self._map is None or middle + area > len(self._map):
            try:
                with open(os.path.join(self.folder, "pixels"), "rb") as pixels:
                    if os.fstat(pixels.fileno()).st_size < middle + area:
                        return None
                    self._map = np.frombuffer(
                        mmap.mmap(pixels.fileno(), 0, access=mmap.ACCESS_READ), np.uint8
                    )
            except OSError:
                return None
        return self._map[entry.place : middle], self._map[middle:][:area].reshape(
            entry.height, entry.width
        )


def _sample(
    entry: PackEntry,
    image: NDArray[np.uint8],
    target: Target,
    decode: Callable[..., Sample],
) -> Sample:
    if entry.file_bytes:
        return decode(image.tobytes(), target)
    return image.reshape(entry.height, entry.width, 3), target


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
        return PackEntry(
            key,
            place,
            height,
            width,
            file_bytes,
            digest,
            FileState(*image),
            FileState(*mask),
        )
    except (TypeError, ValueError):
        return None


def _times(pair: Pair) -> list[tuple[int, int, int]]:
    """Size and times of change of image and mask, as in FileState."""
    try:
        states = [os.stat(path) for path in pair[1:]]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None
    return [(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]


def _changed(pair: Pair, entry: PackEntry) -> str | None:
    """A message if a source file is not the one that was packed."""
    for path, now, packed in zip(pair[1:], _times(pair), entry[-2:], strict=True):
        if now != packed[:3] and (
            now[0] != packed.size or sha256(Path(path)) != packed.sha256
        ):
            return f"{path} was changed after it was packed"
    return None


def _damaged(
    found: tuple[NDArray[np.uint8], Target] | None, entry: PackEntry, where: str
) -> str | None:
    """A message if the pixels are not those that were packed."""
    if found is None:
        return f"{where} is truncated"
    digest = hashlib.sha256(found[0].data)
    digest.update(found[1].data)
    return None if digest.hexdigest() == entry.sha256 else f"{where} is damaged"
