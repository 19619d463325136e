"""Which files of a split belong together, without opening any image.

An image belongs to the mask with the same path except for the suffix. If no mask has the path of an image, the masks
may have one of MASK_ENDINGS behind it, and the images one of IMAGE_ENDINGS: the endings that make most pairs are taken,
for all files alike; masks with another ending are other drawings of the same images and are left alone.
"""

from __future__ import annotations

import csv
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from segpipe.data.catalog import PUBLISHED, published
from segpipe.data.folders import SUFFIXES, FolderLayout, locate, missing, undivided
from segpipe.errors import DataError, did_you_mean
from segpipe.files import files_below

if TYPE_CHECKING:
    from segpipe.settings.groups import DataConfig

IMAGE_ENDINGS = ("", "_leftImg8bit", "_image", "_img", "_rgb", "_sat")
MASK_ENDINGS = (
    "_mask", "_masks", "_label", "_labels", "_gt", "_seg", "_segmentation", "_annotation", "_L", "_labelIds",
    "_gtFine_labelIds", "_gtCoarse_labelIds", "_gtFine_labelTrainIds", "-mask", "-label",
)  # fmt: skip
HINTS = 20  # lines that get a suggestion, which takes a comparison with every image
UNREAD = (
    ".heic",
    ".heif",
    ".gif",
    ".jp2",
    ".avif",
    ".npy",
    ".npz",
)  # pictures that would be missed without a word
DRAWINGS = {".json": "labelme or coco", ".xml": "cvat", ".txt": "coco"}


class Pair(NamedTuple):
    """Files of one sample."""

    name: str
    image: str
    mask: str


def scan(data: DataConfig, split: str) -> tuple[list[Pair], list[str]]:
    """Pairs of a split, sorted by name, and a message for every file that is not part of a pair."""
    layout = _layout(data, split)
    if isinstance(layout, str):
        return [], [layout]
    if layout.table:
        return _pairs_of_table(Path(data.root), layout.table)
    return _pairs_of_folders(layout, split)


def _layout(data: DataConfig, split: str) -> FolderLayout | str:
    if data.name not in PUBLISHED or data.images or data.masks:
        return locate(Path(data.root), split, data.images, data.masks)
    layout = published(data.name).layout.of(Path(data.root), split)
    hint = f" `segpipe prepare data={data.name}` says where it comes from."
    return f"{layout}{hint}" if isinstance(layout, str) else layout


def scan_undivided(data: DataConfig) -> tuple[list[Pair], list[str]]:
    """All pairs of a folder data set that has no splits yet, and messages as those of `scan`."""
    layout = undivided(Path(data.root), data.images, data.masks)
    return (
        ([], [layout]) if isinstance(layout, str) else _pairs_of_folders(layout, "all")
    )


def pairing(data: DataConfig, split: str) -> Path | None:
    """The file that says which images belong to a split, or which mask to which image, if the folders do not."""
    layout = _layout(data, split)
    return layout.table or layout.listing if isinstance(layout, FolderLayout) else None


def _pairs_of_folders(layout: FolderLayout, split: str) -> tuple[list[Pair], list[str]]:
    for folder in (layout.images, layout.masks):
        if not folder.is_dir():
            return [], [missing(folder)]
    images, faults = _stems(layout.images, ("",))
    masks, mask_faults = _stems(layout.masks, (".jpg", ".jpeg", ".webp"))
    faults += mask_faults
    endings = _endings(layout, images, masks)
    if isinstance(endings, str):
        return [], [*faults, endings]
    images, masks = _without(
        images, masks, endings, together=layout.images == layout.masks
    )
    if layout.sequences:
        images, masks = (
            {
                stem: path
                for stem, path in paths.items()
                if stem.partition("/")[0] in layout.sequences
            }
            for paths in (images, masks)
        )
    if layout.listing:
        wanted, list_faults = _listed(layout.listing, images, endings[0])
        faults += list_faults
        images, masks = (
            {stem: paths[stem] for stem in wanted if stem in paths}
            for paths in (images, masks)
        )
    paired = images.keys() & masks.keys()
    if images and not masks:
        found = f"{layout.masks} holds no masks of the {len(images)} images of split {split}."
        return [], [*faults, f"{found}{_hint(layout.masks)}"]
    faults += [
        f"{images[stem]} has no mask {layout.masks / stem}{endings[1]}.png."
        for stem in sorted(images.keys() - paired)
    ]
    faults += [
        f"{masks[stem]} has no image in {layout.images}."
        for stem in sorted(masks.keys() - paired)
    ]
    pairs = sorted(
        Pair(f"{stem}{endings[0]}", images[stem], masks[stem]) for stem in paired
    )
    if not pairs:
        where = layout.listing or layout.images
        faults.append(f"{where} is empty: split {split} has no pair of image and mask.")
    return pairs, faults


def _stems(folder: Path, inferior: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Pictures below `folder` by their relative path without suffix, and a message for every two that share it.

    A file with a suffix in `inferior`, or in a format that is not read, counts only if it is the only one of its stem.
    """
    found: dict[str, list[Path]] = {}
    faults: list[str] = []
    for path in sorted(files_below(folder)):
        relative = path.relative_to(folder)
        if not _is_text(relative):
            faults.append(
                f"{folder}/{str(relative)!a} has a name that is not UTF-8. Rename it, with convmv for instance."
            )
        elif path.suffix.lower() in (*SUFFIXES, *UNREAD) and not any(
            part.startswith(".") for part in relative.parts
        ):
            found.setdefault(_composed(relative.with_suffix("").as_posix()), []).append(
                path
            )
    chosen: dict[str, str] = {}
    for stem, paths in found.items():
        for worse in (UNREAD, inferior):
            paths = [
                path for path in paths if path.suffix.lower() not in worse
            ] or paths
        faults += [
            f"{paths[0]} and {path} have the same stem. Remove one of them."
            for path in paths[1:]
        ]
        if paths[0].suffix.lower() in UNREAD:
            faults.append(
                f"{paths[0]} is of a format that is not read. Convert it to PNG or JPEG."
            )
        chosen[stem] = str(paths[0])
    return chosen, faults


def _is_text(path: Path) -> bool:
    """Whether a name can be written to UTF-8 files, such as inputs.json and the report."""
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def _composed(name: str) -> str:
    """A name with letters such as ü as one character: macOS and archives made there write two."""
    return unicodedata.normalize("NFC", name)


def _endings(
    layout: FolderLayout, images: Iterable[str], masks: Iterable[str]
) -> tuple[str, str] | str:
    """What ends the stems of images and masks, or a message if two endings fit equally well."""
    stems, names = set(masks), list(images)
    of_images = IMAGE_ENDINGS if layout.image_ending is None else (layout.image_ending,)
    of_masks = (
        ("", *MASK_ENDINGS) if layout.mask_ending is None else (layout.mask_ending,)
    )
    plain = (of_images[0], of_masks[0])
    if len(of_images) == len(of_masks) == 1 or any(
        name in stems for name in names if plain == ("", "")
    ):
        return plain
    counts = {
        (of_image, of_mask): sum(
            name.endswith(of_image) and _swapped(name, of_image, of_mask) in stems
            for name in names
        )
        for of_image in of_images
        for of_mask in of_masks
    }
    best = max(counts.values())
    fits = [endings for endings, count in counts.items() if count == best]
    if best and len(fits) > 1:
        ways = " and ".join(f"*{ending}" for _, ending in fits)
        return f"{layout.masks} has the masks {ways} for its images. Choose with data.masks=FOLDER/SPLIT/*{fits[0][1]}."
    return fits[0] if best else plain


def _swapped(name: str, old: str, new: str) -> str:
    return f"{name[: len(name) - len(old)]}{new}"


def _without(
    images: dict[str, str],
    masks: dict[str, str],
    endings: tuple[str, str],
    *,
    together: bool,
) -> tuple[dict[str, str], dict[str, str]]:
    """Images and masks by what is before the endings; files without them are left out."""
    of_image, of_mask = endings
    if together and of_mask:
        images = {
            stem: path for stem, path in images.items() if not stem.endswith(of_mask)
        }
    kept = {
        _swapped(stem, of_mask, ""): path
        for stem, path in masks.items()
        if stem.endswith(of_mask)
    }
    return {
        _swapped(stem, of_image, ""): path
        for stem, path in images.items()
        if stem.endswith(of_image)
    }, kept


def _listed(
    listing: Path, images: dict[str, str], ending: str
) -> tuple[list[str], list[str]]:
    """Stems in a split file, and a message for every wrong line; a line is a stem or the path of an image."""
    known = {f"{stem}{ending}": stem for stem in images} | {
        stem: stem for stem in images
    }
    by_path = {_composed(os.path.normpath(path)): stem for stem, path in images.items()}
    named = {
        _without_suffix(path): path for path in by_path
    }  # as people mean them, in letters of any case
    lines = [
        _composed(line.strip()) for line in _text(listing).splitlines() if line.strip()
    ]
    faults: list[str] = []
    stems = []
    for line in lines:
        stem = known.get(line) or known.get(str(Path(line).with_suffix("").as_posix()))
        stem = stem or by_path.get(_composed(os.path.normpath(listing.parent / line)))
        if stem is None:
            path = named.get(_without_suffix(listing.parent / line))
            hint = did_you_mean(line, known) if len(faults) < HINTS and not path else ""
            found = (
                f"the file is named {Path(path).name}. Write it so."
                if path
                else f"images has no such stem.{hint}"
            )
            faults.append(f"{listing} lists {line:.200}, but {found}")
        stems.append(stem or line)
    return stems, [
        f"{listing} lists {stem} {times} times."
        for stem, times in Counter(stems).items()
        if times > 1
    ] + faults


def _without_suffix(path: str | Path) -> str:
    return os.path.splitext(os.path.normpath(path))[0].lower()


def _pairs_of_table(root: Path, table: Path) -> tuple[list[Pair], list[str]]:
    """Pairs of a CSV file with the columns image and mask, whose paths are relative to `root`."""
    text = _text(table)
    first = text.partition("\n")[0]
    separators = ",;\t" if table.suffix == ".csv" else " "
    try:
        rows = list(
            csv.reader(text.splitlines(), delimiter=max(separators, key=first.count))
        )
    except csv.Error as error:
        raise DataError(
            f"{table} is no table of image and mask: {error}. Write a row for each pair."
        ) from None
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    named = "image" in header and "mask" in header
    image, mask = (header.index("image"), header.index("mask")) if named else (0, 1)
    pairs, faults = [], []
    for number, row in enumerate(rows, 1):
        if (named and number == 1) or not any(cell.strip() for cell in row):
            continue
        if len(row) <= max(image, mask) or (not named and len(row) != 2):
            faults.append(
                f"{table}, line {number}: {len(row)} columns, but image and mask were needed. Add a header."
            )
            continue
        paths = [root / row[column].strip() for column in (image, mask)]
        faults += [
            f"{table}, line {number}: {path} does not exist."
            for path in paths
            if not path.is_file()
        ]
        pairs.append(
            Pair(
                Path(row[image].strip()).with_suffix("").as_posix(),
                str(paths[0]),
                str(paths[1]),
            )
        )
    for name, times in Counter(pair.name for pair in pairs).items():
        if times > 1:
            faults.append(f"{table} has {name} {times} times.")
    if not pairs and not faults:
        faults.append(f"{table} is empty: it has no pair of image and mask.")
    return sorted(
        pair
        for pair in pairs
        if Path(pair.image).is_file() and Path(pair.mask).is_file()
    ), faults


def _text(path: Path) -> str:
    """Text of a list or table. Raises DataError for one that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error}). Save it as UTF-8 (in PowerShell: -Encoding utf8)."
        ) from None


def _hint(folder: Path) -> str:
    """What to do about a folder of masks that holds drawings instead."""
    suffixes = Counter(
        path.suffix.lower()
        for path in files_below(folder)
        if path.suffix.lower() in DRAWINGS
    )
    if not suffixes:
        return ""
    (suffix, count), *_ = suffixes.most_common(1)
    return (
        f" {folder} holds {count} {suffix} files, which are shapes and not masks: see `segpipe import --help` "
        f"({DRAWINGS[suffix]})."
    )


def check_sizes(pair: Pair, image: Sequence[int], mask: Sequence[int]) -> None:
    """Raise DataError unless image and mask have the same (height, width)."""
    if tuple(image) != tuple(mask):
        raise DataError(
            f"{pair.image} is {image[0]}x{image[1]}, but its mask {pair.mask} is {mask[0]}x{mask[1]} (height x width). "
            "Take the mask of this image; do not resize one of them blindly.",
            cause=f"sizes {tuple(image)} and {tuple(mask)}",
            where=pair.mask,
        )
