"""Where the images and masks of a split lie below the root of a `folder` data set, without opening any of them.

With I for images (or another of IMAGE_FOLDERS) and M for masks (or another of MASK_FOLDERS), the first of these that
exists is taken:

    I/SPLIT/ with M/SPLIT/     a folder per split
    SPLIT/I/ with SPLIT/M/     the same the other way round
    SPLIT.csv                  a row for each pair
    I/ with M/ and SPLIT.txt   a list for each split

Where there is neither I nor M, images and masks may lie in one folder, SPLIT/ or the root: see pairs.py.

`data.images` and `data.masks` name other folders, as FOLDER/SPLIT or FOLDER/SPLIT/*ENDING.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "JPEGImages", "leftImg8bit")
MASK_FOLDERS = (
    "masks",
    "mask",
    "labels",
    "label",
    "annotations",
    "annotation",
    "annots",
    "gt",
    "gtFine",
    "SegmentationClass",
)
SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".bmp",
    ".tif",
    ".tiff",
    ".webp",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
)
SPLITS = (
    "train",
    "val",
    "test",
    "training",
    "valid",
    "validation",
    "testing",
    "trainval",
    "train_val",
    "dev",
)
SPLIT = "SPLIT"  # stands for the name of the split in data.images and data.masks


class FolderLayout(NamedTuple):
    """Where the files of a split are: in two folders, all of them or those on a list; or in a table of pairs."""

    images: Path
    masks: Path
    image_ending: str | None = (
        None  # what ends the stems of the images; None: found by pairs.py
    )
    mask_ending: str | None = None
    listing: Path | None = None  # SPLIT.txt
    table: Path | None = None  # SPLIT.csv, or pairs of paths with a space between them
    sequences: tuple[str, ...] = ()  # the subfolders that count; none: all


class SetLayout(NamedTuple):
    """Where the files of a published data set are, in the form of data.images and data.masks."""

    images: str = ""
    masks: Sequence[str] = ()  # of each release, the newest first
    folders: Mapping[str, str] = MappingProxyType(
        {}
    )  # what stands for SPLIT, if it is not the split's name
    sequences: Mapping[str, list[str]] = MappingProxyType(
        {}
    )  # the subfolders that belong to each split
    listing: str = ""  # the stems of a split
    table: str = ""  # the pairs of a split

    def of(self, root: Path, split: str) -> FolderLayout | str:
        """FolderLayout of a split, or a message why there is none."""
        named = self.folders.get(split, split)
        path = root / (self.listing or self.table).replace(SPLIT, named)
        if (self.listing or self.table) and not path.is_file():
            return f"{path} does not exist, which lists the files of split {split}."
        if self.table:
            return FolderLayout(root, root, table=path)
        if self.sequences and split not in self.sequences:
            return f"data.split = {split} is not one of {', '.join(self.sequences)}."
        images, image_ending = _place(root, self.images, named)
        places = [_place(root, masks, named) for masks in self.masks]
        masks, mask_ending = next(
            (place for place in places if place[0].is_dir()), places[0]
        )
        listing = path if self.listing else None
        sequences = tuple(self.sequences.get(split, ()))
        return FolderLayout(
            images, masks, image_ending, mask_ending, listing, sequences=sequences
        )


def locate(
    root: Path, split: str, images: str = "", masks: str = ""
) -> FolderLayout | str:
    """FolderLayout of a split, or a message why there is none; `images` and `masks` are those of the settings."""
    listing, table = root / f"{split}.txt", root / f"{split}.csv"
    if images or masks:
        behind = f"/{SPLIT}" if SPLIT in images + masks else ""
        image_place = _place(root, images or f"images{behind}", split)
        mask_place = _place(root, masks or f"masks{behind}", split)
        if not behind and not listing.is_file():
            return no_split(root, split)
        return FolderLayout(
            image_place[0],
            mask_place[0],
            image_place[1],
            mask_place[1],
            None if behind else listing,
        )
    inner, outer = _synonyms(root), _synonyms(root / split)
    if isinstance(inner, str):
        return FolderLayout(root, root, table=table) if table.is_file() else inner
    if (inner.images / split).is_dir():
        return FolderLayout(inner.images / split, inner.masks / split)
    if (root / split).is_dir() and not isinstance(outer, str) and outer.images.is_dir():
        return outer
    if table.is_file() and listing.is_file():
        return f"{table} and {listing} both list split {split}. Remove one of them."
    if table.is_file():
        return FolderLayout(root, root, table=table)
    if listing.is_file():
        return inner._replace(listing=listing)
    if (
        inner.images.is_dir()
        and inner.masks.is_dir()
        and not _divided(inner.images, split)
    ):
        return no_split(root, split)
    return FolderLayout(inner.images / split, inner.masks / split)


def undivided(root: Path, images: str = "", masks: str = "") -> FolderLayout | str:
    """Layout of all files of a data set whose folders no split divides, or a message why there is none."""
    for divided in (root / "images" / "train", root / "train" / "images"):
        if divided.is_dir() and not (images and masks):
            return (
                f"{divided} exists, so {root} is divided into splits already. To divide one of its folders again, name "
                "it here and in every other command: data.images=images/train data.masks=masks/train."
            )
    if not (images or masks):
        return _synonyms(root)
    (images_at, image_ending), (masks_at, mask_ending) = (
        _place(root, value or kind, "")
        for value, kind in ((images, "images"), (masks, "masks"))
    )
    return FolderLayout(images_at, masks_at, image_ending, mask_ending)


def no_split(root: Path, split: str) -> str:
    """Message for images and masks that no list or folder divides."""
    lists = split_lists(root)
    fix = (
        f"The lists that exist are {', '.join(lists)}: set the split to one of them, or write {split}.txt."
        if lists
        else f"`segpipe split data.root={root}` writes train.txt and val.txt."
    )
    return (
        f"{root} has images and masks, but nothing says which belong to split {split}: there is no folder, no "
        f"{split}.txt and no {split}.csv. {fix}"
    )


def split_lists(root: Path) -> list[str]:
    """Names of the files below `root` that may list a split."""
    return sorted(
        path.name
        for path in root.glob("*")
        if path.stem in SPLITS and path.suffix in (".txt", ".csv")
    )


def _divided(folder: Path, split: str) -> bool:
    """Whether a folder is named like a split; others, a folder per drive say, divide nothing."""
    names = [path.name.lower() for path in folder.iterdir() if path.is_dir()]
    return any(name in SPLITS for name in names) or bool(near(split, names))


def _place(root: Path, pattern: str, split: str) -> tuple[Path, str | None]:
    """Folder and ending of stems that a setting names."""
    folder, star, ending = pattern.replace(SPLIT, split).partition("*")
    for suffix in SUFFIXES:
        ending = ending.removesuffix(suffix)
    return root / folder, ending if star else None


def _synonyms(root: Path) -> FolderLayout | str:
    """Folders of images and masks below `root`, or a message if one of them has two candidates."""
    found = []
    for kind, names in (("images", IMAGE_FOLDERS), ("masks", MASK_FOLDERS)):
        present = [name for name in names if (root / name).is_dir()]
        if present[:1] != [kind] and len(present) > 1:
            return (
                f"{root} has {' and '.join(present)}, and each may hold the {kind}. Set data.{kind}={present[0]} or "
                f"another, with /{SPLIT} behind it if there is a folder per split."
            )
        found.append(root / (present or [kind])[0])
    if not found[0].is_dir() and not found[1].is_dir() and _has_pictures(root):
        return FolderLayout(root, root)
    return FolderLayout(found[0], found[1])


def _has_pictures(folder: Path) -> bool:
    paths = folder.iterdir() if folder.is_dir() else ()
    return any(path.suffix.lower() in SUFFIXES for path in paths)


def missing(folder: Path) -> str:
    """Message about a folder that does not exist, with the nearest one that does."""
    parent, absent = folder, folder
    while not parent.is_dir():
        parent, absent = parent.parent, parent
    siblings = sorted(path.name for path in parent.iterdir() if path.is_dir())
    other = near(absent.name, siblings)
    hint = (
        f"Nearest: {parent / other}"
        if other
        else f"{parent}/ holds {', '.join(siblings[:8]) or 'no folders'}"
    )
    return f"{absent} does not exist. {hint}. Set data.root and the split to existing folders."


def near(name: str, choices: Iterable[str], least: float = 0.6) -> str:
    """The choice most similar to `name`; empty if none is by `least`, of 1."""
    return next(iter(get_close_matches(name, list(choices), n=1, cutoff=least)), "")
