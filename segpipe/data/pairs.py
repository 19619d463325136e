"""Which files of a split belong together, without opening any image.

An image belongs to the mask with the same path except for the suffix. If no mask has the
path of an image, the masks may have one of MASK_ENDINGS behind it, and the images one of
IMAGE_ENDINGS: the endings that make most pairs are taken, for all files alike; masks with
another ending are other drawings of the same images and are left alone.
"""

from __future__ import annotations

import csv
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from segpipe.data.catalog import PUBLISHED, published
from segpipe.data.folders import SUFFIXES, FolderLayout, locate, missing, undivided
from segpipe.errors import DataError, did_you_mean, listed
from segpipe.files import files_below

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

IMAGE_ENDINGS = ("", "_leftImg8bit", "_image", "_img", "_rgb", "_sat")
MASK_ENDINGS = (
    "_mask", "_masks", "_label", "_labels", "_gt", "_seg", "_segmentation", "_annotation", "_L", "_labelIds",
    "_gtFine_labelIds", "_gtCoarse_labelIds", "_gtFine_labelTrainIds", "-mask", "-label",
)  # fmt: skip
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif", ".webp")  # no mask, if there is another
# Pictures that would be missed without a word.
UNREAD = (".heic", ".heif", ".gif", ".jp2", ".avif", ".exr", ".hdr", ".jxl", ".npy", ".npz")  # fmt: skip
DRAWINGS = {".json": "labelme or coco", ".xml": "cvat", ".txt": "coco"}
# What lies beside pictures and is none.
COMPANIONS = (
    *DRAWINGS, "", ".csv", ".md", ".yaml", ".yml", ".html", ".pdf", ".log", ".ini", ".db", ".mat", ".py", ".zip",
    ".tar", ".gz", ".color", ".part",
)  # fmt: skip
MOST_LEFT_OUT = 0.05  # of the files of a folder that may be of unknown formats
HINTS = 20  # lines that get a suggestion, which takes a comparison with every image
SETTLED_NS = 50_000_000  # see facts.py


class Pair(NamedTuple):
    """Files of one sample."""

    name: str
    image: str
    mask: str


class Scan(NamedTuple):
    """Pairs of a split, sorted by name, and what was found on the way."""

    pairs: tuple[Pair, ...]
    faults: tuple[str, ...]  # a message for every file that is not part of a pair
    left_out: tuple[str, ...]  # a message for each folder with files that are not read
    times: dict[str, int]  # of each folder and list that was read: its last change


_scans: dict[tuple[str, FolderLayout], Scan] = {}


class _Notes:
    """What a scan finds beside pairs."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.left_out: list[str] = []
        self.read: list[str] = []  # folders and lists


def scan(data: DataConfig, split: str) -> tuple[list[Pair], list[str]]:
    """Pairs of a split, sorted by name, and a message for every file that is not part of a pair."""
    layout = _layout(data, split)
    if isinstance(layout, str):
        return [], [layout]
    found = _scan(layout, split)
    return list(found.pairs), list(found.faults)


def left_out(data: DataConfig, split: str) -> list[str]:
    """A message for each folder of a split with files that are not read as pictures, but few enough to go on."""
    layout = _layout(data, split)
    return [] if isinstance(layout, str) else list(_scan(layout, split).left_out)


def scan_undivided(data: DataConfig) -> tuple[list[Pair], list[str]]:
    """All pairs of a folder data set that has no splits yet, and messages as those of `scan`."""
    layout = undivided(Path(data.root), data.images, data.masks)
    if isinstance(layout, str):
        return [], [layout]
    found = _scan(layout, "all")
    return list(found.pairs), list(found.faults)


def pairing(data: DataConfig, split: str) -> Path | None:
    """The file that says which images belong to a split, or which mask to which image, if the folders do not."""
    layout = _layout(data, split)
    return None if isinstance(layout, str) else layout.table or layout.listing


def _layout(data: DataConfig, split: str) -> FolderLayout | str:
    root = Path(data.root)
    if data.name not in PUBLISHED or data.images or data.masks:
        return locate(root, split, data.images, data.masks)
    layout = published(data.name).layout.of(root, split)
    if isinstance(layout, str):
        return f"{layout} `segpipe prepare data={data.name}` says where it comes from."
    return layout


def _scan(layout: FolderLayout, split: str) -> Scan:
    """The scan of a layout: the last one, as long as no folder or list has changed since."""
    known = _scans.get((split, layout))
    if known and _times(known.times) == known.times:
        return known
    notes = _Notes()
    if layout.table:
        pairs = _pairs_of_table(layout.images, layout.table, notes)
    else:
        pairs = _pairs_of_folders(layout, split, notes)
    faults = tuple(notes.faults)
    found = Scan(tuple(pairs), faults, tuple(notes.left_out), _times(notes.read))
    if time.time_ns() - max(found.times.values(), default=0) > SETTLED_NS:
        _scans[split, layout] = found
    return found


def _times(paths: Iterable[str]) -> dict[str, int]:
    """The last change of each path; 0 where there is none."""
    times = {}
    for path in paths:
        try:
            times[path] = os.stat(path).st_mtime_ns
        except OSError:
            times[path] = 0
    return times


def _pairs_of_folders(layout: FolderLayout, split: str, notes: _Notes) -> list[Pair]:
    for folder in (layout.images, layout.masks):
        if not folder.is_dir():
            notes.faults.append(missing(folder))
            return []
    images = _stems(layout.images, (), notes)
    masks = images
    if layout.masks != layout.images:
        masks = _stems(layout.masks, LOSSY, notes)
    endings = _endings(layout, images, masks)
    if isinstance(endings, str):
        notes.faults.append(endings)
        return []
    of_image, of_mask = endings
    if layout.masks == layout.images and of_mask:
        images = {
            stem: path for stem, path in images.items() if not stem.endswith(of_mask)
        }
    images, masks = _without(images, of_image), _without(masks, of_mask)
    if layout.sequences:
        images, masks = _within(images, layout), _within(masks, layout)
    if layout.listing:
        stems = _listed(layout.listing, images, of_image, notes)
        images = {stem: images[stem] for stem in stems if stem in images}
        masks = {stem: masks[stem] for stem in stems if stem in masks}
    if images and not masks:
        notes.faults.append(
            f"{layout.masks} holds no masks of the {len(images)} images of split "
            f"{split}.{_drawings(layout.masks)}"
        )
        return []
    for stem in sorted(images.keys() - masks.keys()):
        notes.faults.append(
            f"{images[stem]} has no mask {layout.masks / stem}{of_mask}.png."
        )
    for stem in sorted(masks.keys() - images.keys()):
        notes.faults.append(f"{masks[stem]} has no image in {layout.images}.")
    paired = images.keys() & masks.keys()
    if not paired:
        where = layout.listing or layout.images
        notes.faults.append(
            f"{where} is empty: split {split} has no pair of image and mask."
        )
    return sorted(
        Pair(f"{stem}{of_image}", images[stem], masks[stem]) for stem in paired
    )


def _stems(folder: Path, inferior: tuple[str, ...], notes: _Notes) -> dict[str, str]:
    """Pictures below `folder` by their relative path without suffix.

    A file with a suffix in `inferior`, or in a format that is not read, counts only if it
    is the only one of its stem.
    """
    candidates: dict[str, list[str]] = {}
    others: list[str] = []
    folders: list[str] = []
    start = len(str(folder)) + 1
    for path in sorted(map(str, files_below(folder, folders))):
        stem, suffix = os.path.splitext(path[start:])
        suffix = suffix.lower()
        if os.path.basename(stem).startswith("."):
            continue
        if not _is_text(path):
            notes.faults.append(
                f"{folder}/{path[start:]!a} has a name that is not UTF-8. Rename it, "
                "with convmv for instance."
            )
        elif suffix in SUFFIXES or suffix in UNREAD:
            candidates.setdefault(_composed(stem), []).append(path)
        elif suffix.strip() in SUFFIXES:
            notes.faults.append(f"{path!r} ends with a space. Rename it.")
        elif suffix not in COMPANIONS:
            others.append(path)
    notes.read += folders
    chosen = {
        stem: paths[0] if len(paths) == 1 else _chosen(paths, inferior, notes)
        for stem, paths in candidates.items()
    }
    for path in chosen.values():
        if path.lower().endswith(UNREAD):
            notes.faults.append(
                f"{path} is of a format that is not read. Convert it to PNG or JPEG."
            )
    if others:
        kinds = Counter(os.path.splitext(path)[1].lower() for path in others)
        counts = [f"{count} {suffix}" for suffix, count in kinds.most_common()]
        message = (
            f"{folder} holds {len(others)} files that are not read, beside "
            f"{len(chosen)} pictures: {listed(counts)} (the first: {others[0]}). "
            "Convert the pictures among them, and move the rest away."
        )
        many = len(others) > MOST_LEFT_OUT * (len(chosen) + len(others))
        (notes.faults if many else notes.left_out).append(message)
    return chosen


def _chosen(paths: list[str], inferior: tuple[str, ...], notes: _Notes) -> str:
    """The one of several pictures with one stem that counts."""
    for worse in (UNREAD, inferior):
        better = [path for path in paths if not path.lower().endswith(worse)]
        paths = better or paths
    for path in paths[1:]:
        notes.faults.append(
            f"{paths[0]} and {path} have the same stem. Remove one of them."
        )
    return paths[0]


def _is_text(path: str) -> bool:
    """Whether a name can be written to UTF-8 files, such as inputs.json and the report."""
    try:
        return bool(path.encode())
    except UnicodeEncodeError:
        return False


def _composed(name: str) -> str:
    """A name with letters such as ü as one character: macOS and archives made there write two."""
    return unicodedata.normalize("NFC", name)


def _endings(
    layout: FolderLayout, images: Iterable[str], masks: Iterable[str]
) -> tuple[str, str] | str:
    """What ends the stems of images and masks, or a message if two endings fit equally well."""
    of_images: tuple[str, ...] = IMAGE_ENDINGS
    of_masks: tuple[str, ...] = ("", *MASK_ENDINGS)
    if layout.image_ending is not None:
        of_images = (layout.image_ending,)
    if layout.mask_ending is not None:
        of_masks = (layout.mask_ending,)
    first = (of_images[0], of_masks[0])
    stems = set(masks)
    if len(of_images) == len(of_masks) == 1:
        return first
    if first == ("", "") and not stems.isdisjoint(images):
        return first
    counts: Counter[tuple[str, str]] = Counter()
    for of_image in of_images:
        for name in images:
            if name.endswith(of_image):
                stem = name.removesuffix(of_image)
                for of_mask in of_masks:
                    counts[of_image, of_mask] += f"{stem}{of_mask}" in stems
    best = max(counts.values(), default=0)
    if not best:
        return first
    fits = [endings for endings, count in counts.items() if count == best]
    if len(fits) > 1:
        ways = " and ".join(f"*{ending}" for _, ending in fits)
        return (
            f"{layout.masks} has the masks {ways} for its images. Choose with "
            f"data.masks=FOLDER/SPLIT/*{fits[0][1]}."
        )
    return fits[0]


def _without(paths: dict[str, str], ending: str) -> dict[str, str]:
    """Files by what is before the ending; those that do not have it are left out."""
    if not ending:
        return paths
    return {
        stem.removesuffix(ending): path
        for stem, path in paths.items()
        if stem.endswith(ending)
    }


def _within(paths: dict[str, str], layout: FolderLayout) -> dict[str, str]:
    """The files in the subfolders of the split."""
    return {
        stem: path
        for stem, path in paths.items()
        if stem.partition("/")[0] in layout.sequences
    }


def _listed(
    listing: Path, images: dict[str, str], ending: str, notes: _Notes
) -> list[str]:
    """Stems in a split file, whose lines are stems or paths of images."""
    known = {f"{stem}{ending}": stem for stem in images}
    known |= {stem: stem for stem in images}
    by_path = {_composed(os.path.normpath(path)): stem for stem, path in images.items()}
    # As people mean them, in letters of any case.
    named = {_without_suffix(path): path for path in by_path}
    faults: list[str] = []
    stems: list[str] = []
    for text in _text(listing, notes).splitlines():
        line = _composed(text.strip())
        if not line:
            continue
        path = _composed(os.path.normpath(listing.parent / line))
        stem = known.get(line) or known.get(Path(line).with_suffix("").as_posix())
        stem = stem or by_path.get(path)
        stems.append(stem or line)
        if stem is None:
            other = named.get(_without_suffix(path))
            if other:
                fault = f"the file is named {Path(other).name}. Write it so."
            else:
                hint = did_you_mean(line, known) if len(faults) < HINTS else ""
                fault = f"images has no such stem.{hint}"
            faults.append(f"{listing} lists {line:.200}, but {fault}")
    for stem, times in Counter(stems).items():
        if times > 1:
            notes.faults.append(f"{listing} lists {stem} {times} times.")
    notes.faults += faults
    return stems


def _without_suffix(path: str) -> str:
    return os.path.splitext(path)[0].lower()


def _pairs_of_table(root: Path, table: Path, notes: _Notes) -> list[Pair]:
    """Pairs of a CSV file with the columns image and mask, whose paths are relative to `root`."""
    text = _text(table, notes)
    first = text.partition("\n")[0]
    separators = ",;\t" if table.suffix == ".csv" else " "
    separator = max(separators, key=first.count)
    try:
        rows = list(csv.reader(text.splitlines(), delimiter=separator))
    except csv.Error as error:
        raise DataError(
            f"{table} is no table of image and mask: {error}. Write a row for each pair."
        ) from None
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    named = "image" in header and "mask" in header
    columns = (header.index("image"), header.index("mask")) if named else (0, 1)
    pairs: list[Pair] = []
    names: Counter[str] = Counter()
    faults: list[str] = []
    for number, row in enumerate(rows, 1):
        if (named and number == 1) or not any(cell.strip() for cell in row):
            continue
        if len(row) <= max(columns) or (not named and len(row) != 2):
            faults.append(
                f"{table}, line {number}: {len(row)} columns, but image and mask were "
                "needed. Add a header."
            )
            continue
        image, mask = (row[column].strip() for column in columns)
        pair = Pair(
            Path(image).with_suffix("").as_posix(), str(root / image), str(root / mask)
        )
        names[pair.name] += 1
        absent = [path for path in pair[1:] if not os.path.isfile(path)]
        faults += [f"{table}, line {number}: {path} does not exist." for path in absent]
        if not absent:
            pairs.append(pair)
    for name, times in names.items():
        if times > 1:
            faults.append(f"{table} has {name} {times} times.")
    if not names and not faults:
        faults.append(f"{table} is empty: it has no pair of image and mask.")
    notes.faults += faults
    notes.read += {os.path.dirname(path) for pair in pairs for path in pair[1:]}
    return sorted(pairs)


def _text(path: Path, notes: _Notes) -> str:
    """Text of a list or table. Raises DataError for one that is not UTF-8."""
    notes.read.append(str(path))
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}). Save it as UTF-8 (in PowerShell: "
            "-Encoding utf8)."
        ) from None


def _drawings(folder: Path) -> str:
    """What to do about a folder of masks that holds drawings instead."""
    suffixes = Counter(path.suffix.lower() for path in files_below(folder))
    for suffix, count in suffixes.most_common():
        if suffix in DRAWINGS:
            return (
                f" {folder} holds {count} {suffix} files, which are shapes and not "
                f"masks: see `segpipe import --help` ({DRAWINGS[suffix]})."
            )
    return ""
