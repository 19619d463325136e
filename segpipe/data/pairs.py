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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from segpipe.data.catalog import PUBLISHED, published
from segpipe.data.folders import SUFFIXES, FolderLayout, locate, missing, undivided
from segpipe.errors import DataError, listed
from segpipe.files import files_below

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

IMAGE_ENDINGS = ("", "_leftImg8bit", "_image", "_img", "_rgb", "_sat")
MASK_ENDINGS = (
    "_mask", "_masks", "_label", "_labels", "_gt", "_seg", "_segmentation", "_annotation", "_L", "_labelIds",
    "_gtFine_labelIds", "_gtCoarse_labelIds", "_gtFine_labelTrainIds", "-mask", "-label",
)  # fmt: skip
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif", ".webp")  # no mask, if there is another
# What lies beside pictures and is none.
COMPANIONS = (
    "", ".json", ".xml", ".txt", ".csv", ".md", ".yaml", ".yml", ".html", ".pdf", ".log", ".ini", ".db", ".mat",
    ".py", ".zip", ".tar", ".gz", ".color", ".part",
)  # fmt: skip
MOST_LEFT_OUT = 0.05  # of the files of a folder that may be of unknown formats
SETTLED_NS = 50_000_000  # see facts.py


class Pair(NamedTuple):
    """Files of one sample."""

    name: str
    image: str
    mask: str


@dataclass
class Scan:
    """What the folders and lists of a split hold."""

    pairs: list[Pair] = field(default_factory=list)  # sorted by name
    # A message for every file that is not part of a pair.
    faults: list[str] = field(default_factory=list)
    # A message for each folder with files that are not read.
    left_out: list[str] = field(default_factory=list)
    # Last change of each folder and list that was read.
    times: dict[str, int] = field(default_factory=dict)


_scans: dict[tuple[str, FolderLayout], Scan] = {}


def scan(data: DataConfig, split: str) -> tuple[list[Pair], list[str]]:
    """Pairs of a split, sorted by name, and a message for every file that is not part of a pair."""
    found = _scan(_layout(data, split), split)
    return found.pairs, found.faults


def left_out(data: DataConfig, split: str) -> list[str]:
    """A message for each folder of a split with files that are not read as pictures, but few enough to go on."""
    return _scan(_layout(data, split), split).left_out


def scan_undivided(data: DataConfig) -> tuple[list[Pair], list[str]]:
    """All pairs of a folder data set that has no splits yet, and messages as those of `scan`."""
    found = _scan(undivided(Path(data.root), data.images, data.masks), "all")
    return found.pairs, found.faults


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


def _scan(layout: FolderLayout | str, split: str) -> Scan:
    """The scan of a layout: the last one, as long as no folder or list has changed since."""
    if isinstance(layout, str):  # why there is none
        return Scan(faults=[layout])
    known = _scans.get((split, layout))
    if known and all(_changed(path) == then for path, then in known.times.items()):
        return known
    found = Scan()
    if layout.table:
        _pair_by_table(layout.images, layout.table, found)
    else:
        _pair_by_name(layout, split, found)
    found.pairs.sort()
    if time.time_ns() - max(found.times.values(), default=0) > SETTLED_NS:
        _scans[split, layout] = found
    return found


def _changed(path: str) -> int:
    """Time of the last change; 0 where there is no file or folder."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _pair_by_name(layout: FolderLayout, split: str, found: Scan) -> None:
    for folder in (layout.images, layout.masks):
        if not folder.is_dir():
            found.faults.append(missing(folder))
            return
    images = _pictures(layout.images, (), found)
    masks = images
    if layout.masks != layout.images:
        masks = _pictures(layout.masks, LOSSY, found)
    endings = _endings(layout, images, masks)
    if isinstance(endings, str):
        found.faults.append(endings)
        return
    of_image, of_mask = endings
    if layout.masks == layout.images and of_mask:
        names = [name for name in images if not name.endswith(of_mask)]
        images = {name: images[name] for name in names}
    images, masks = _without(images, of_image), _without(masks, of_mask)
    chosen = images.keys() | masks.keys()
    if layout.sequences:
        chosen = {stem for stem in chosen if stem.split("/")[0] in layout.sequences}
    if layout.listing:
        chosen = _listed(layout.listing, images, of_image, found)
    images = {stem: images[stem] for stem in sorted(chosen & images.keys())}
    masks = {stem: masks[stem] for stem in sorted(chosen & masks.keys())}
    for stem, path in images.items():
        if stem in masks:
            found.pairs.append(Pair(f"{stem}{of_image}", path, masks[stem]))
    _report_single(layout, images, masks, of_mask, found)
    if not found.pairs and not found.faults:
        where = layout.listing or layout.images
        found.faults.append(
            f"{where} is empty: split {split} has no pair of image and mask."
        )


def _report_single(
    layout: FolderLayout,
    images: dict[str, str],
    masks: dict[str, str],
    of_mask: str,
    found: Scan,
) -> None:
    """Add a fault for each image without a mask, and for each mask without an image."""
    if images and not masks:
        found.faults.append(
            f"{layout.masks} holds no masks of the {len(images)} images. Labels of "
            "another format: `segpipe import --help`."
        )
        return
    for stem, path in images.items():
        if stem not in masks:
            found.faults.append(
                f"{path} has no mask {layout.masks / stem}{of_mask}.png."
            )
    for stem, path in masks.items():
        if stem not in images:
            found.faults.append(f"{path} has no image in {layout.images}.")


def _pictures(folder: Path, inferior: tuple[str, ...], found: Scan) -> dict[str, str]:
    """Pictures below `folder` by their relative path without suffix.

    A file with a suffix in `inferior` counts only if it is the only one of its stem.
    """
    pictures: dict[str, str] = {}
    others: list[str] = []
    folders: list[str] = []
    start = len(str(folder)) + 1
    for path in sorted(map(str, files_below(folder, folders))):
        stem, suffix = os.path.splitext(path[start:])
        suffix = suffix.lower()
        if os.path.basename(stem).startswith("."):
            continue
        if not path.isascii() and not _is_text(path):
            found.faults.append(
                f"{folder}/{path[start:]!a} has a name that is not UTF-8. Rename it, "
                "with convmv for instance."
            )
        elif suffix not in SUFFIXES:
            if suffix not in COMPANIONS:
                others.append(path)
        else:
            other = pictures.setdefault(_composed(stem), path)
            if other != path and other.lower().endswith(inferior or "/"):
                pictures[_composed(stem)] = path
            elif other != path and not suffix.endswith(inferior or "/"):
                found.faults.append(
                    f"{other} and {path} have the same stem. Remove one of them."
                )
    found.times |= {path: _changed(path) for path in folders}
    if others:
        kinds = Counter(os.path.splitext(path)[1].lower() for path in others)
        counts = [f"{count} {suffix}" for suffix, count in kinds.most_common()]
        message = (
            f"{folder} holds {len(others)} files that are not read, beside "
            f"{len(pictures)} pictures: {listed(counts)} (the first: {others[0]!r}). "
            "Convert the pictures among them, and move the rest away."
        )
        many = len(others) > MOST_LEFT_OUT * (len(pictures) + len(others))
        (found.faults if many else found.left_out).append(message)
    return pictures


def _is_text(path: str) -> bool:
    """Whether a name can be written to UTF-8 files, such as inputs.json and the report."""
    try:
        return bool(path.encode())
    except UnicodeEncodeError:
        return False


def _composed(name: str) -> str:
    """A name with letters such as ü as one character: macOS and archives made there write two."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


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
        for stem in _without(dict.fromkeys(images, ""), of_image):
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
    return {
        stem.removesuffix(ending): path
        for stem, path in paths.items()
        if stem.endswith(ending)
    }


def _listed(
    listing: Path, images: dict[str, str], ending: str, found: Scan
) -> set[str]:
    """Stems in a split file, whose lines are stems or paths of images, with any suffix."""
    known = {f"{stem}{ending}": stem for stem in images}
    known |= {stem: stem for stem in images}
    for stem, path in images.items():
        known[_composed(os.path.splitext(os.path.normpath(path))[0])] = stem
    stems: Counter[str] = Counter()
    for text in _text(listing, found).splitlines():
        line = _composed(text.strip())
        if not line:
            continue
        bare = os.path.splitext(line)[0]
        path = os.path.normpath(listing.parent / bare)
        stem = known.get(line) or known.get(bare) or known.get(path, "")
        stems[stem or line] += 1
        if not stem:
            found.faults.append(
                f"{listing} lists {line:.200}, but images has no such stem."
            )
    for stem, times in stems.items():
        if times > 1:
            found.faults.append(f"{listing} lists {stem} {times} times.")
    return set(stems)


def _pair_by_table(root: Path, table: Path, found: Scan) -> None:
    """Pairs of a CSV file with the columns image and mask, whose paths are relative to `root`."""
    text = _text(table, found)
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
    names: Counter[str] = Counter()
    folders: set[str] = set()
    for number, row in enumerate(rows, 1):
        if (named and number == 1) or not any(cell.strip() for cell in row):
            continue
        if len(row) <= max(columns) or (not named and len(row) != 2):
            found.faults.append(
                f"{table}, line {number}: {len(row)} columns, but image and mask were "
                "needed. Add a header."
            )
            continue
        image, mask = (row[column].strip() for column in columns)
        name = Path(image).with_suffix("").as_posix()
        names[name] += 1
        pair = Pair(name, str(root / image), str(root / mask))
        absent = [path for path in pair[1:] if not os.path.isfile(path)]
        for path in absent:
            found.faults.append(f"{table}, line {number}: {path} does not exist.")
        if not absent:
            found.pairs.append(pair)
            folders |= {os.path.dirname(path) for path in pair[1:]}
    for name, times in names.items():
        if times > 1:
            found.faults.append(f"{table} has {name} {times} times.")
    if not names and not found.faults:
        found.faults.append(f"{table} is empty: it has no pair of image and mask.")
    found.times |= {path: _changed(path) for path in folders}


def _text(path: Path, found: Scan) -> str:
    """Text of a list or table. Raises DataError for one that is not UTF-8."""
    found.times[str(path)] = _changed(str(path))
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}). Save it as UTF-8 (in PowerShell: "
            "-Encoding utf8)."
        ) from None
