"""Which images and videos a command is about, and the names of what it writes for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from segpipe.data.folders import SUFFIXES as IMAGES
from segpipe.errors import ConfigError, DataError, listed
from segpipe.files import files_below

VIDEOS = (
    ".mp4",
    ".m4v",
    ".mov",
    ".avi",
    ".mkv",
    ".webm",
    ".mpg",
    ".mpeg",
    ".mjpeg",
    ".ts",
    ".wmv",
)


class Input(NamedTuple):
    """An image or a video."""

    path: Path
    place: str  # relative to the folder that was given, with suffix
    name: str  # of its outputs, without their suffix: `place` without suffix, unless two sources share that

    @property
    def is_video(self) -> bool:
        """Whether its suffix is that of a video."""
        return self.path.suffix.lower() in VIDEOS


def find(
    given: str, out: Path, say: Callable[[str], None] = lambda text: None
) -> list[Input]:
    """Images and videos of a file, a folder with all below it, or a glob pattern; sorted by place.

    Hidden files, files below `out`, and in folders and patterns all files with other suffixes are left out; `say` is
    told of the last. Raises
    DataError when nothing is found, ConfigError when the sources lie in `out`.
    """
    root, paths = _paths(given)
    inside, above = out.resolve(), root.resolve()
    if inside in (above, *above.parents):
        raise ConfigError(
            f"out = {out} is the folder of source = {given}, or lies above it, so results and sources would be mixed. "
            f"Choose a folder of its own, such as out={out / 'predictions'}."
        )
    places, others = {}, Counter[str]()
    for path in paths:
        if path.name.startswith(".") or inside in path.resolve().parents:
            continue
        if _is_known(path):
            places[path.relative_to(root).as_posix()] = path
        else:
            others[path.suffix or "no suffix"] += 1
    if not places:
        known = " ".join((*IMAGES, *VIDEOS))
        raise DataError(
            f"source = {given} holds no image and no video. Files with these suffixes are read: {known}."
        )
    if others:
        counts = [f"{times} {suffix}" for suffix, times in others.most_common()]
        say(f"files of other types were left out: {listed(counts)}.")
    ordered = sorted(places)
    return [
        Input(places[place], place, name)
        for place, name in zip(ordered, names(ordered), strict=True)
    ]


def _paths(given: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files."""
    path = Path(given)
    if path.is_dir():
        return path, list(files_below(path))
    if path.exists():
        if not _is_known(path):
            raise DataError(
                f"source = {given}: the suffix {path.suffix or '(none)'} is not one of an image or a video."
            )
        return path.parent, [path]
    if has_magic(given):
        found = [Path(name) for name in glob(given, recursive=True)]
        files = [
            file
            for each in found
            for file in (files_below(each) if each.is_dir() else [each])
        ]
        return _fixed(path), files
    raise DataError(
        f"source = {given} does not exist. Give a file, a folder, or a pattern in quotes: source='a/*.jpg'."
    )


def _is_known(path: Path) -> bool:
    return path.suffix.lower() in (*IMAGES, *VIDEOS) and not path.name.startswith(".")


def _fixed(pattern: Path) -> Path:
    """The folders of a pattern up to the first one with a wildcard."""
    parts = pattern.parts[:-1]
    magic = (place for place, part in enumerate(parts) if has_magic(part))
    return Path(*parts[: next(magic, len(parts))])


def names(places: Sequence[str]) -> list[str]:
    """A distinct name for each place: without its suffix, but with it where another one would have the same name."""
    found = [str(PurePosixPath(place).with_suffix("")) for place in places]
    while shared := {name for name, count in Counter(found).items() if count > 1}:
        found = [
            place if name in shared else name
            for place, name in zip(places, found, strict=True)
        ]
    return found
